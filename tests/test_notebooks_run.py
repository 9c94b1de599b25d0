"""Executing notebooks: results, failures, and what a killed run, kernel or command leaves behind (nothing)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from lifetimes import listening, processes_of, until
from sparkmoe.errors import DataError
from sparkmoe.notebooks_run import assign, parameters_of, select
from sparkmoe.processes import Record

SPARKMOE = [sys.executable, "-c", "from sparkmoe.cli import main; main()"]


def write(path: Path, *cells: str, parameters: str = "") -> Path:
    made = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})] if parameters else []
    made += [nbformat.v4.new_code_cell(cell) for cell in cells]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), path)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with notebooks/ in it, as a checkout has."""
    (tmp_path / "notebooks").mkdir()
    write(
        tmp_path / "notebooks" / "00_fine.ipynb",
        "print(quick, n, other)",
        parameters="quick: bool = False\nn: int = 1\nother: str = 'x'",
    )
    write(tmp_path / "notebooks" / "01_fails.ipynb", "1 + 1", "raise ValueError('a check failed')")
    write(tmp_path / "notebooks" / "02_baseline.ipynb", "1")
    return tmp_path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SPARKMOE_")}
    return kept | {"SPARKMOE_HOME": str(tmp_path / "home")}


def sparkmoe(place: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SPARKMOE, *words], cwd=place, env=environment, capture_output=True, text=True, timeout=120)


def text_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    return "".join(str(output.get("text", "")) for cell in cells for output in cell.get("outputs", []))


def test_a_run_leaves_copies_logs_and_one_json_line(place: Path, environment: dict[str, str]) -> None:
    done = sparkmoe(place, environment, "run", "fine", "01_fails", "--full", "-p", "n=7")
    assert done.returncode == 1
    summary = json.loads(done.stdout.splitlines()[-1])
    run = place / summary["run"]
    assert [(n["name"], n["ok"]) for n in summary["notebooks"]] == [("00_fine", True), ("01_fails", False)]
    assert summary["notebooks"][1]["error"] == "In [2]: ValueError: a check failed"
    assert json.loads((run / "run.json").read_text()) == summary
    assert "False 7 x" in text_of(run / "00_fine.ipynb").replace("['", "").replace("\\n']", "")
    assert (run / "01_fails.ipynb").is_file()
    left = {"manifest.json", "run.json", "report.html", "logs", "00_fine.ipynb", "01_fails.ipynb"}
    assert {p.name for p in run.iterdir()} == left
    assert summary["report"] == str(Path(summary["run"]) / "report.html")
    assert "2 notebooks (full), about" in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert text_of(place / "notebooks" / "00_fine.ipynb") == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "02_basline"], "no notebook '02_basline'; did you mean 02_baseline"),
        (["run", "zzz"], "no notebook 'zzz'; known: 00_fine, 01_fails, 02_baseline"),
        (["run", "fine", "-p", "m=1"], "no chosen notebook has a parameter 'm'"),
        (["run", "fine", "-p", "n"], "is not of the form name=value"),
        (["run", "fine", "--results", "notebooks/00_fine.ipynb"], "00_fine.ipynb"),
        (["serve", "all_tree"], "did you mean all_three?"),
        (["serve", "all_three"], "nearest that runs here: fp8_head_nextn (without humming)"),
        (["serve", "baseline", "--model", "nowhere"], "nowhere does not exist"),
        (["serve", "baseline", "--machine", "laptop"], "unknown machine profile 'laptop'"),
    ],
)
def test_bad_input_is_one_line(place: Path, environment: dict[str, str], words: list[str], sentence: str) -> None:
    before = sorted(place.rglob("*"))
    done = sparkmoe(place, environment, *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert sentence in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [p for p in sorted(place.rglob("*")) if "home" not in p.parts] == [
        p for p in before if "home" not in p.parts
    ]


def test_debug_shows_the_traceback(place: Path, environment: dict[str, str]) -> None:
    done = sparkmoe(place, environment, "serve", "all_tree", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("sparkmoe.errors.RecipeError: ")


def test_a_notebook_can_be_named_in_four_ways(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    path = Path("notebooks") / "02_baseline.ipynb"
    assert [p.resolve() for p in select(["02_baseline", "02", "baseline", str(path)])] == [path.resolve()] * 4
    assert [p.stem for p in select([])] == ["00_fine", "01_fails", "02_baseline"]


def test_parameters_are_typed_as_yaml(place: Path) -> None:
    known = parameters_of(place / "notebooks" / "00_fine.ipynb")
    assert known == {"quick", "n", "other"}
    given = assign(["n=2", "quick=true", "other=[1, 2]"], known)
    assert given == {"n": 2, "quick": True, "other": [1, 2]}


def test_a_file_that_is_no_notebook(tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text("{")
    with pytest.raises(DataError, match="no notebook that can be read"):
        parameters_of(tmp_path / "x.ipynb")


def test_an_interrupt_keeps_finished_notebooks_and_says_so(place: Path, environment: dict[str, str]) -> None:
    write(place / "notebooks" / "03_waits.ipynb", "import time; open('waiting', 'w').close(); time.sleep(100)")
    run = subprocess.Popen(
        [*SPARKMOE, "run", "fine", "waits"], cwd=place, env=environment, stderr=subprocess.PIPE, text=True
    )
    until((place / "waiting").exists, 60)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 128 + signal.SIGINT
    assert "interrupted (SIGINT)" in said
    (left,) = (place / "results").iterdir()
    assert json.loads((left / "run.json").read_text())["interrupted"] is True
    assert {p.name for p in left.iterdir()} == {"manifest.json", "run.json", "logs", "00_fine.ipynb"}
    assert processes_of(Path(environment["SPARKMOE_HOME"])) == []


# With a real server

ATTACH = """
from sparkmoe.engine import Engine
engine = Engine.attach("baseline", "cpu", {model!r}, show=False)
import time
time.sleep(300)
"""
Started = Callable[..., tuple[subprocess.Popen[str], Record]]


@pytest.fixture
def started(place: Path, environment: dict[str, str], miniature: Path) -> Iterator[Started]:
    """Start a command whose server is loading (`ready=False`: all its processes are there) or has answered."""
    write(place / "notebooks" / "04_attach.ipynb", ATTACH.format(model=str(miniature)))
    home = Path(environment["SPARKMOE_HOME"])
    commands: list[subprocess.Popen[str]] = []

    def start(*words: str, ready: bool) -> tuple[subprocess.Popen[str], Record]:
        found: list[Record] = []
        command = subprocess.Popen(
            [*SPARKMOE, *words], cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        commands.append(command)

        def arrived() -> bool:
            assert command.poll() is None, command.communicate()
            read = [Record.read(p) for p in (home / "servers").glob("*.json")]
            found[:] = [r for r in read if r is not None and r.server is not None]
            return any((r.ready if ready else len(r.members()) >= 3) for r in found)

        until(arrived, 240)
        return command, found[0]

    yield start
    for command in commands:
        command.kill()
        command.communicate()
    until(lambda: processes_of(home) == [], 30)


def assert_gone(environment: dict[str, str], record: Record, place: Path) -> None:
    home = Path(environment["SPARKMOE_HOME"])
    until(lambda: processes_of(home) == [], 30)
    assert not listening(record.port)
    assert not list((home / "servers").glob("*-*.*"))
    assert not (place / "results").exists() or not list((place / "results").iterdir())


def kernels(command: subprocess.Popen[str]) -> list[psutil.Process]:
    tree = psutil.Process(command.pid).children(recursive=True)
    return [p for p in tree if any("ipykernel_launcher" in word for word in p.cmdline())]


@pytest.mark.server
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(
    started: Started, environment: dict[str, str], place: Path, signum: signal.Signals
) -> None:
    """SIGTERM meets a server that loads, SIGINT (Ctrl-C) one that answers."""
    run, record = started("run", "04_attach", ready=signum == signal.SIGINT)
    run.send_signal(signum)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signum, said
    assert "Traceback" not in said
    assert processes_of(Path(environment["SPARKMOE_HOME"])) == [], "gone when the command returns, not some time later"
    assert_gone(environment, record, place)


@pytest.mark.server
def test_a_killed_run_leaves_no_process(started: Started, environment: dict[str, str], place: Path) -> None:
    """SIGKILL, at the worst moment: the server's children still import and would not notice that their parent died."""
    run, record = started("run", "04_attach", ready=False)
    run.kill()
    run.wait()
    home = Path(environment["SPARKMOE_HOME"])
    until(lambda: processes_of(home) == [], 30)
    assert not listening(record.port)
    assert not list((home / "servers").glob("*-*.*"))


@pytest.mark.server
def test_a_killed_kernel_fails_the_run_and_leaves_nothing(
    started: Started, environment: dict[str, str], place: Path
) -> None:
    run, record = started("run", "04_attach", ready=True)
    (kernel,) = kernels(run)
    kernel.kill()
    out, said = run.communicate(timeout=90)
    assert run.returncode == 1, said
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert "kernel died" in summary["notebooks"][0]["error"].lower()
    assert processes_of(Path(environment["SPARKMOE_HOME"])) == []
    assert not listening(record.port)


KERNEL = """
from jupyter_client import KernelManager
import sys, time
manager = KernelManager(kernel_name="python3")
manager.start_kernel()
client = manager.client(); client.start_channels(); client.wait_for_ready()
client.execute(sys.argv[1])
time.sleep(600)
"""


@pytest.mark.server
def test_a_killed_kernel_of_a_notebook_server_takes_its_server_along(
    environment: dict[str, str], miniature: Path, place: Path
) -> None:
    """As in JupyterLab: nobody but the kernel owns the server, and it is killed while the server loads."""
    home = Path(environment["SPARKMOE_HOME"])
    argv = [sys.executable, "-c", KERNEL, ATTACH.format(model=str(miniature))]
    lab = subprocess.Popen(argv, env=environment, cwd=place, text=True)
    try:
        found: list[Record] = []

        def arrived() -> bool:
            found[:] = [r for p in (home / "servers").glob("*.json") if (r := Record.read(p)) and len(r.members()) >= 3]
            return bool(found)

        until(arrived, 120)
        (kernel,) = kernels(lab)
        kernel.kill()
        until(lambda: [p for p in processes_of(home) if p.pid not in (lab.pid, kernel.pid)] == [], 30)
        assert not listening(found[0].port)
        assert not list((home / "servers").glob("*-*.*"))
    finally:
        lab.kill()
        lab.wait()


@pytest.mark.server
def test_serve_answers_until_it_is_told_to_stop(
    started: Started, environment: dict[str, str], place: Path, miniature: Path
) -> None:
    serve, record = started("serve", "baseline", "--model", str(miniature), ready=True)
    assert serve.stdout is not None
    told = json.loads(serve.stdout.readline())
    assert (told["url"], told["recipe"]) == (record.url, "baseline")
    serve.send_signal(signal.SIGTERM)
    assert serve.wait(timeout=60) == 0
    assert_gone(environment, record, place)
