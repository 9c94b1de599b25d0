"""Would a run work here? Asked of the machine before it is asked of the user's patience.

Each check says what it looked at, what it found, what it expected and what to do, and is a function from facts to one
`Finding`, so that machines which are not at hand can be examined in the tests. A failed finding is one that would make
a run fail; a warning costs speed or accuracy of a measurement.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import psutil

from sparkmoe import checkpoint as checkpoints
from sparkmoe.errors import SparkmoeError
from sparkmoe.findings import Finding
from sparkmoe.gates import free_port, memory_need, propose_fraction
from sparkmoe.machine import GIB, Machine, available_bytes, home
from sparkmoe.processes import records, servers
from sparkmoe.recipe import RECIPES, Recipe

SGLANG = "0.5.23"
_DISK_BYTES = 2 * GIB


def examine(machine: Machine, recipe: Recipe | None = None, *, results: Path = Path("results")) -> list[Finding]:
    """All findings about a machine, in the table's order. `recipe` (default: baseline) is what a run would start."""
    recipe = recipe or RECIPES["baseline"]
    findings = [_machine(machine), *_versions(machine), *_environment(os.environ, machine)]
    findings += [_writable("state", servers), _folder("results", results), _disk(home())]
    findings += [*_model(machine, recipe), *_servers(), _port(), *_shared_memory(Path("/dev/shm")), *_recipes(machine)]
    return findings + (_spark(machine) if machine.profile == "spark" else [])


def _spark(machine: Machine) -> list[Finding]:
    """What is particular to a DGX Spark. Away from one (`--machine spark` on a laptop) there is nothing to ask."""
    if Machine.detect().compute_capability != (12, 1):
        return [Finding("DGX Spark", "ok", "not this machine: its driver, clocks and kernels were not looked at")]
    from sparkmoe import preflight, spark_facts

    try:
        config = checkpoints.inspect(checkpoints.resolve(None, machine)).config
    except SparkmoeError:
        config = None
    running = records()
    mine = frozenset(p.pid for record in running for p in record.members())
    return preflight.examine(spark_facts.collect(config, load=not running), mine=mine)


def _machine(machine: Machine) -> Finding:
    return Finding("machine", "ok", machine.describe())


def _versions(machine: Machine) -> Iterator[Finding]:
    found = machine.version("sglang")
    state: Literal["ok", "fail"] = "ok" if found == SGLANG else "fail"
    yield Finding(
        "sglang", state, found or "not installed", SGLANG, "install the lock: make run" if found != SGLANG else ""
    )
    names = ("python", "torch", "transformers", "triton", "flashinfer-python", "humming-kernels")
    have = [f"{n} {v}" for n in names if (v := machine.version(n))]
    missing = [n for n in ("torch", "transformers") if not machine.version(n)]
    yield Finding(
        "packages", "fail" if missing else "ok", ", ".join(have), "", f"missing: {missing}" if missing else ""
    )


def _environment(environ: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    left = sorted(n for n in environ if n.startswith("SGLANG_"))
    if left:
        advice = "sparkmoe does not pass them on; a recipe's extra_env does"
        yield Finding(
            "environment", "warn", ", ".join(f"{n}={environ[n]}" for n in left), "no SGLANG_ variables", advice
        )
    else:
        yield Finding("environment", "ok", "no SGLANG_ variables")
    if machine.profile == "cpu" and machine.cores < 2:
        yield Finding(
            "cores", "warn", str(machine.cores), "2 or more", "timings will be rough: client and server share one"
        )


def _writable(what: str, ask: object) -> Finding:
    try:
        path = ask()  # type: ignore[operator]
    except SparkmoeError as error:
        return Finding(what, "fail", str(error))
    return Finding(what, "ok", str(path))


def _folder(what: str, path: Path) -> Finding:
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if os.access(existing, os.W_OK):
        return Finding(what, "ok", str(path))
    return Finding(what, "fail", f"{existing} is not writable", "a writable folder", "pass another one with --results")


def _disk(path: Path) -> Finding:
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    state: Literal["ok", "warn"] = "ok" if free >= _DISK_BYTES else "warn"
    return Finding(
        "disk",
        state,
        f"{free / GIB:.0f} GiB free",
        f"{_DISK_BYTES / GIB:.0f} GiB",
        "" if state == "ok" else "make room",
    )


def _model(machine: Machine, recipe: Recipe) -> Iterator[Finding]:
    try:
        seen = checkpoints.inspect(checkpoints.resolve(None, machine))
    except SparkmoeError as error:
        yield Finding("model", "fail", str(error))
        return
    context = f"{seen.context_length:,} tokens" if seen.context_length else "unknown context"
    draft = "NEXTN" if seen.draft_layers else "no NEXTN layer"
    yield Finding(
        "model",
        "ok",
        f"{seen.path.name}: {seen.weight_bytes / GIB:.2f} GiB, experts {seen.experts}, {context}, {draft}",
    )
    need, available = sum(memory_need(recipe, machine, seen).values()), available_bytes()
    enough = need <= available
    advice = "" if enough else "close programs, or `sparkmoe stop`"
    found = f"{available / GIB:.1f} GiB available"
    if machine.unified_memory and (fraction := propose_fraction(recipe, machine, seen, available)):
        found += f", mem_fraction {fraction} proposed"
    yield Finding("memory", "ok" if enough else "fail", found, f"{need / GIB:.1f} GiB", advice)


def _servers() -> Iterator[Finding]:
    try:
        mine = records()
    except SparkmoeError:
        return
    known = {p.pid for r in mine for p in r.members()}
    strays = []
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        line = " ".join(process.info["cmdline"] or [process.info["name"] or ""])
        if process.pid not in known and (line.startswith("sglang::") or "sglang.launch_server" in line):
            strays.append(process.pid)
    running = ", ".join(f"{r.recipe['name']} on port {r.port}" for r in mine) or "none"
    yield Finding("servers", "ok", running)
    if strays:
        advice = "they hold memory and cores; if they are yours, end them by pid"
        yield Finding("other SGLang", "warn", f"processes {', '.join(map(str, strays))}", "none", advice)


def _port() -> Finding:
    try:
        return Finding("port", "ok", f"{free_port()} on 127.0.0.1 is free")
    except OSError as error:
        return Finding(
            "port", "fail", f"cannot listen on 127.0.0.1: {error}", "a free port", "check the network sandbox"
        )


def _shared_memory(path: Path) -> Iterator[Finding]:
    if path.is_dir():
        free = shutil.disk_usage(path).free
        advice = "" if free >= GIB // 16 else "in a container: --shm-size 1g"
        yield Finding("/dev/shm", "warn" if advice else "ok", f"{free / GIB:.2f} GiB free", "0.06 GiB", advice)


def _recipes(machine: Machine) -> Iterator[Finding]:
    can = [name for name, recipe in RECIPES.items() if recipe.why_not(machine) is None]
    yield Finding("recipes", "ok" if can else "fail", f"can run: {', '.join(can)}")
    reasons: dict[str, list[str]] = {}
    for name, recipe in RECIPES.items():
        if reason := recipe.why_not(machine):
            reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        yield Finding("", "ok", f"cannot: {', '.join(names)} ({reason})")


def examine_sglang() -> list[Finding]:
    """One finding per hook of the SGLang plugin, and one per variable that would keep SGLang from loading it."""
    from sparkmoe import sglang_plugin
    from sparkmoe.sglang_plugin.hooks import State

    findings = [Finding("plugin", "fail", text) for text in sglang_plugin.blockers()]
    for status in sglang_plugin.report():
        state: Literal["ok", "fail"] = "fail" if status.state is State.MISFIT else "ok"
        found = f"{status.state.value}: {status.hook.reason}" + (f" ({status.detail})" if status.detail else "")
        findings.append(Finding(status.hook.target, state, found))
    return findings
