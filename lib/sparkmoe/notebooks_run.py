"""Execute notebooks without a browser, and leave nothing behind but their executed copies.

Papermill runs each notebook in a process of its own, because the one that takes the signals has to stay free of it: the
notebook client installs its own handlers and, on Ctrl-C, would only shut its kernel down. Here the run is the parent.
It owns every server its kernels start (`SPARKMOE_OWNER`), so that one server serves several notebooks, and it ends them
all when it ends, whatever ends it. If it is killed outright, papermill gets the signal from the kernel, the notebook's
kernel notices its missing parent, and the servers' supervisors notice their missing owner.

A copy appears under `results/<run>/` only once its notebook has ended, failed ones included, since the failing cell is
what one wants to read.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import difflib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from sparkmoe.errors import DataError
from sparkmoe.processes import OWNER_ENV, Identity, end_all

RUN_ENV = "SPARKMOE_RUN"
# Minutes on two cores, quick and full, for what is said before a run starts.
MINUTES = {
    "00_preflight": (1.5, 1.5),
    "01_profile_decode": (2.0, 20.0),
    "02_baseline": (3.0, 12.0),
    "03_humming_moe": (0.6, 0.6),
    "04_fp8_lm_head": (3.0, 14.0),
    "05_mtp_nextn": (6.0, 25.0),
    "06_gsm8k": (3.0, 7.0),
    "07_beyond": (2.5, 16.0),
    "08_report": (0.2, 0.5),
}
_UNKNOWN_MINUTES = (2.0, 20.0)
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(frozen=True)
class Executed:
    """How one notebook went. `error` is its last error in one line, None if it went through."""

    name: str
    ok: bool
    seconds: float
    output: str
    error: str | None = None


def folder() -> Path:
    """The notebooks of this checkout, or `./notebooks`. Raises DataError if there are none."""
    for place in (Path("notebooks"), Path(__file__).parents[2] / "notebooks"):
        if any(place.glob("*.ipynb")):
            return place
    raise DataError("no notebooks here: expected a folder notebooks/ with *.ipynb in the current folder")


def select(names: Sequence[str], place: Path | None = None) -> list[Path]:
    """Paths for names ("02_baseline", "02", "baseline", or a path), in the order given; all of them for none.

    Raises DataError with near names for an unknown one.
    """
    if not names:
        return sorted((place or folder()).glob("*.ipynb"))
    chosen = []
    for name in names:
        path = Path(name)
        if path.suffix == ".ipynb" and path.is_file():
            chosen.append(path)
            continue
        known = sorted((place or folder()).glob("*.ipynb"))
        short = {key: p for p in known for key in (p.stem, p.stem.partition("_")[0], p.stem.partition("_")[2])}
        if path.stem in short:
            chosen.append(short[path.stem])
            continue
        near = difflib.get_close_matches(path.stem, short, n=3, cutoff=0.5)
        stems = [short[key].stem for key in near] or [p.stem for p in known]
        hint = "did you mean" if near else "known:"
        raise DataError(f"no notebook {name!r}; {hint} {', '.join(dict.fromkeys(stems))}{'?' if near else ''}")
    return chosen


def parameters_of(notebook: Path) -> set[str]:
    """Names assigned in the cell tagged `parameters`. Raises DataError if the file is no notebook.

    Papermill could tell too, but takes seconds to import, and a mistyped name should be answered at once.
    """
    try:
        cells = json.loads(notebook.read_text())["cells"]
        sources = ["".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", [])]
        assigned = [node for source in sources for node in ast.parse(source).body]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError) as error:
        raise DataError(f"{notebook} is no notebook that can be read ({type(error).__name__}: {error})") from None
    plain = {t.id for node in assigned if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    return plain | {n.target.id for n in assigned if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def assign(pairs: Sequence[str], known: set[str]) -> dict[str, Any]:
    """`name=value` strings as typed parameters (values as in YAML). Raises DataError for an unknown name."""
    import yaml

    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name.isidentifier():
            raise DataError(f"-p {pair!r} is not of the form name=value")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2) or sorted(known)
            raise DataError(f"no chosen notebook has a parameter {name!r}; known: {', '.join(near)}")
        values[name] = yaml.safe_load(text)
    return values


def minutes(notebooks: Sequence[Path], quick: bool) -> float:
    """Expected minutes of a run on two cores."""
    return sum(MINUTES.get(n.stem, _UNKNOWN_MINUTES)[0 if quick else 1] for n in notebooks)


def execute(
    notebooks: Sequence[Path],
    out: Path,
    given: dict[str, Any],
    *,
    quick: bool,
    announce: Callable[[str], None] = lambda _: None,
) -> Generator[Executed, None, None]:
    """Execute notebooks in order and yield how each went; `announce` is told when one begins. `out` must exist.

    `quick` reaches the notebooks that have such a parameter. Ends with every server of this process stopped. Raises
    Interrupted (a KeyboardInterrupt) on SIGINT, SIGTERM and SIGHUP, with kernels, servers and half-written copies gone.
    """
    me = Identity.of(os.getpid())
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    environment = os.environ | {
        OWNER_ENV: str(me),
        RUN_ENV: str(out.absolute()),
        "SPARKMOE_LOG_DIR": str(logs.absolute()),
    }
    with signals_raise():
        try:
            for notebook in notebooks:
                announce(f"  {notebook.stem}, about {minutes([notebook], quick):.0f} min …")
                declared = parameters_of(notebook)
                values = {k: v for k, v in ({"quick": quick} | given).items() if k in declared}
                yield _one(notebook, out, logs, values, environment)
        finally:
            with signals_ignored():
                end_all(me)


def _one(notebook: Path, out: Path, logs: Path, values: dict[str, Any], environment: dict[str, str]) -> Executed:
    partial, final, log = out / f".{notebook.name}.partial", out / notebook.name, logs / f"{notebook.stem}.log"
    begun = time.monotonic()
    libc = ctypes.CDLL(None)
    argv = [sys.executable, "-m", "papermill", str(notebook), str(partial), "--no-progress-bar", "--log-output"]
    argv += ["--parameters_yaml", json.dumps(values)] if values else []
    with log.open("wb") as stream:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        try:
            status = child.wait()
        except BaseException:
            with signals_ignored():
                _end_tree(child)
                partial.unlink(missing_ok=True)
            raise
    error = None if status == 0 else last_error(partial, log)
    if partial.is_file():
        partial.replace(final)
    return Executed(notebook.stem, status == 0, round(time.monotonic() - begun, 1), str(final), error)


def last_error(executed: Path, log: Path) -> str:
    """The last error of an executed notebook in one line; of papermill's log where the notebook holds none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        cells = json.loads(executed.read_text())["cells"]
        for cell in reversed(cells):
            for output in cell.get("outputs", []):
                if output["output_type"] == "error":
                    return f"In [{cell['execution_count']}]: {output['ename']}: {output['evalue']}".splitlines()[0]
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "papermill ended without a word"


def _end_tree(child: subprocess.Popen[bytes]) -> None:
    """End papermill and its kernel. The kernel leads a session of its own, so it is found as a descendant."""
    try:
        tree = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    child.terminate()
    try:
        child.wait(timeout=3.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for process in tree:
        # Supervisors and servers are no descendants of interest here: `end_all` ends those politely.
        if process.is_running() and "sparkmoe.supervisor" not in _arguments(process) and not _supervised(process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _supervised(process: psutil.Process) -> bool:
    try:
        return any("sparkmoe.supervisor" in _arguments(parent) for parent in process.parents())
    except psutil.Error:
        return False


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    def raise_it(signum: int, _: Any) -> None:
        raise Interrupted(signum)

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, raise_it) for signum in watched}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in watched}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def forget(run: Path, finished: Sequence[Executed]) -> None:
    """After an interruption: an empty run leaves nothing, one with finished notebooks keeps them and says so."""
    if finished:
        (run / "run.json").write_text(
            json.dumps(as_json(run, finished, 0.0) | {"ok": False, "interrupted": True}, indent=1)
        )
    else:
        shutil.rmtree(run, ignore_errors=True)


def as_json(run: Path, results: Sequence[Executed], seconds: float) -> dict[str, Any]:
    """The summary of a run, for its last line and its folder."""
    ok = bool(results) and all(r.ok for r in results)
    return {"run": str(run), "ok": ok, "seconds": round(seconds, 1), "notebooks": [asdict(r) for r in results]}
