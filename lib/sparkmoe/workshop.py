"""A seat in a workshop: known to work before the speaker begins, and put back in a second when it does not.

Twenty laptops in a room differ in everything but the cookbook. So a seat is checked by doing what the first notebook
will do: cores and memory are counted, and then a real server is started and has to answer, which takes half a minute
and proves more than any list of versions. The notebooks are worked on in a copy: what somebody changes in a seat cannot
damage the checkout, and `reset` lays fresh ones out while keeping the edited ones aside.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sparkmoe.doctor import examine
from sparkmoe.engine import Engine
from sparkmoe.errors import SparkmoeError
from sparkmoe.findings import Finding
from sparkmoe.machine import GIB, Machine, available_bytes, home
from sparkmoe.notebooks_run import folder, select

CORES, FREE_BYTES = 2, 4 * GIB


def seat() -> Path:
    """Where the notebooks of this seat are worked on: `workshop/` under `SPARKMOE_HOME`."""
    return home() / "workshop"


def lay_out(place: Path, *, reset: bool = False) -> list[str]:
    """Copy the notebooks that a seat lacks, and return their names. With `reset` all of them: edited ones are first
    moved to `kept-<time>/` beside them. Raises DataError where there are no notebooks to copy."""
    originals = select([], folder())
    place.mkdir(parents=True, exist_ok=True)
    kept = place / time.strftime("kept-%Y%m%d-%H%M%S")
    for original in originals if reset else []:
        mine = place / original.name
        if mine.is_file() and mine.read_bytes() != original.read_bytes():
            kept.mkdir(exist_ok=True)
            mine.replace(kept / mine.name)
    missing = [original for original in originals if not (place / original.name).exists()]
    for original in missing:
        shutil.copyfile(original, place / original.name)
    return [original.name for original in missing]


def examine_seat(
    machine: Machine, *, results: Path, try_server: Callable[[Machine], Finding] | None = None
) -> list[Finding]:
    """All findings about a seat, the real server last; it is not started where something before it failed."""
    findings = [_cores(machine), _memory(available_bytes()), _jupyter(), *examine(machine, results=results)]
    if not any(finding.state == "fail" for finding in findings):
        findings.append((try_server or answers)(machine))
    return findings


def _cores(machine: Machine) -> Finding:
    enough = machine.cores >= CORES
    advice = "" if enough else "share a seat, or give the virtual machine another core"
    return Finding("seat: cores", "ok" if enough else "fail", str(machine.cores), f"{CORES} or more", advice)


def _memory(available: int) -> Finding:
    enough = available >= FREE_BYTES
    advice = "" if enough else "close the browser's tabs and other programs"
    return Finding("seat: memory", "ok" if enough else "fail", f"{available / GIB:.1f} GiB free", "4 GiB", advice)


def _jupyter() -> Finding:
    missing = [name for name in ("jupyterlab", "ipykernel") if importlib.util.find_spec(name) is None]
    advice = "install the lock: make run" if missing else ""
    return Finding("seat: JupyterLab", "fail" if missing else "ok", ", ".join(missing) or "installed", "", advice)


def answers(machine: Machine) -> Finding:
    """Start a server of the machine's own model, ask it for 16 tokens, end it."""
    begun = time.monotonic()
    try:
        with Engine("baseline", machine, show=False) as engine:
            told = engine.client().generate("What is 12 plus 30?", max_new_tokens=16, ignore_eos=True)
    except SparkmoeError as error:
        return Finding("seat: a server answers", "fail", str(error), "16 tokens", "ask for help, with this line")
    found = f"{told.completion_tokens} tokens after {time.monotonic() - begun:.0f} s, {told.tpot_ms or 0:.1f} ms each"
    return Finding("seat: a server answers", "ok" if told.completion_tokens == 16 else "fail", found, "16 tokens")


def lab_command(place: Path, *, browser: bool = True) -> list[str]:
    """JupyterLab on a seat's first notebook."""
    first = min(path.name for path in place.glob("*.ipynb"))
    argv = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={place}"]
    return [*argv, f"--LabApp.default_url=/lab/tree/{first}", *([] if browser else ["--no-browser"])]
