import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lifetimes import listening, processes_of
from sparkmoe import gates
from sparkmoe.checkpoint import inspect
from sparkmoe.client import Client
from sparkmoe.engine import Engine
from sparkmoe.errors import EngineError, MachineError, ModelError, RecipeError
from sparkmoe.gates import check_memory, free_port, memory_need, server_environment
from sparkmoe.machine import GIB, Machine
from sparkmoe.processes import group, records
from sparkmoe.recipe import RECIPES, Command, Recipe
from sparkmoe.serverlog import Progress

# Faults that the real server cannot be made to show: it logs what it is told to, then listens, hangs or dies.
pytestmark = pytest.mark.usefixtures("own_home")

FAULTY = textwrap.dedent(
    """
    import socket, sys, time
    port, fault, log = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    print(log, flush=True)
    if fault == "dies":
        sys.exit(1)
    if fault == "hangs":
        time.sleep(600)
    listener = socket.create_server(("127.0.0.1", port))
    print("The server is fired up and ready to roll!", flush=True)
    kept = []
    while True:
        connection, _ = listener.accept()
        kept.append(connection)  # never read, never answered
        if fault == "refuses":
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 500 Internal Server Error\\r\\nContent-Length: 4\\r\\n\\r\\noops")
            connection.close()
    """
)


Faulty = Callable[..., Engine]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, miniature: Path) -> Faulty:
    def make(fault: str, log: str = "", deadline_s: float = 3.0) -> Engine:
        def command(self: Recipe, machine: Machine, *, port: int, **_: object) -> Command:
            return Command((sys.executable, "-c", FAULTY, str(port), fault, log), {})

        monkeypatch.setattr(Recipe, "command", command)
        return Engine("baseline", "cpu", miniature, show=False, deadline_s=deadline_s)

    return make


def assert_nothing_left(engine: Engine, home: Path) -> None:
    assert records() == []
    assert not list((home / "servers").glob("*-*.*"))
    assert processes_of(home) == []
    with pytest.raises(EngineError, match="not started"):
        _ = engine.url


def test_a_server_that_dies_while_loading(faulty: Faulty, own_home: Path) -> None:
    log = "Load weight begin. avail mem=19 GB\nTraceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    engine = faulty("dies", log)
    with pytest.raises(EngineError) as error:
        engine.start()
    text = str(error.value)
    assert "died at stage “load”; likely cause: the GPU ran out of memory" in text
    assert "| torch.OutOfMemoryError: CUDA out of memory" in text
    assert_nothing_left(engine, own_home)
    (kept,) = (own_home / "servers" / "logs").glob("*.log")
    assert str(kept) in text
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("fault", "why"),
    [("silent", "silent for"), ("hangs", "stage “load”"), ("refuses", "500")],
)
def test_a_server_that_is_alive_but_gives_no_token(faulty: Faulty, own_home: Path, fault: str, why: str) -> None:
    engine = faulty(fault, "Load weight begin.")
    with pytest.raises(EngineError, match=rf"alive but gave no token within 3 s \(.*{why}.*it was stopped"):
        engine.start()
    assert_nothing_left(engine, own_home)


def test_an_interrupt_while_it_loads_leaves_nothing(faulty: Faulty, own_home: Path) -> None:
    engine = faulty("hangs", "Load weight begin.", deadline_s=60.0)

    def interrupt(now: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.start(interrupt)
    assert_nothing_left(engine, own_home)


def test_a_port_in_use_is_said_before_loading(miniature: Path, own_home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = Engine("baseline", "cpu", miniature, port=port, show=False)
        with pytest.raises(MachineError, match=rf"port {port} on 127.0.0.1 is taken by process {os.getpid()} "):
            engine.start()
    assert_nothing_left(engine, own_home)


def test_a_model_or_recipe_that_cannot_run_is_said_before_loading(
    miniature: Path, tmp_path: Path, own_home: Path
) -> None:
    engine = Engine("baseline", "cpu", tmp_path, show=False)
    with pytest.raises(ModelError):
        engine.start()
    with pytest.raises(ModelError):
        Engine.attach("baseline", "cpu", tmp_path)
    assert_nothing_left(engine, own_home)
    for start in (Engine, Engine.attach):
        with pytest.raises(RecipeError, match="cannot run here: Humming"):
            start("all_three", "cpu", miniature)
    assert processes_of(own_home) == []


def test_an_unwritable_log_folder_is_said_before_loading(miniature: Path, own_home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    engine = Engine("baseline", "cpu", miniature, log_dir=tmp_path / "file" / "logs", show=False)
    with pytest.raises(MachineError, match="cannot write logs to"):
        engine.start()
    assert_nothing_left(engine, own_home)


def test_too_little_memory_is_said_with_the_sum(
    monkeypatch: pytest.MonkeyPatch, miniature: Path, own_home: Path
) -> None:
    monkeypatch.setattr(gates, "available_bytes", lambda: GIB)
    engine = Engine("baseline", "cpu", miniature, show=False)
    with pytest.raises(MachineError) as error:
        engine.start()
    assert str(error.value) == (
        "not enough memory for recipe baseline: 3.5 GiB needed (weights in float32 0.1 + server processes 3.2 "
        "+ floor 0.2), 1.0 GiB available"
    )
    monkeypatch.undo()
    monkeypatch.setenv("SPARKMOE_HOME", str(own_home))
    assert_nothing_left(engine, own_home)


def test_the_memory_of_a_spark_is_one_pool(miniature: Path) -> None:
    need = memory_need(RECIPES["all_three"], Machine.named("spark"), inspect(miniature))
    assert need["weights"] == inspect(miniature).weight_bytes  # the whole of a Spark's sum: test_gates
    assert sum(need.values()) == pytest.approx(12.1 * GIB, rel=0.01)
    own = memory_need(RECIPES["draft_fp8_head"], Machine.named("spark"), inspect(miniature))
    assert own["the draft's own head"] == 512 * (256 + 4)


def test_weights_beyond_the_gpu_are_said(miniature: Path) -> None:
    from dataclasses import replace

    seen = replace(inspect(miniature), weight_bytes=200 * GIB)
    with pytest.raises(MachineError, match=r"200.0 GiB, NVIDIA H200 has 139.0 GiB"):
        check_memory(RECIPES["baseline"], Machine.named("hopper"), seen, [])


def test_what_a_shell_holds_does_not_reach_the_server() -> None:
    given = {"PATH": "/bin", "SGLANG_PLATFORM": "other", "SPARKMOE_FP8_HEAD_SCALE": "tensor", "SPARKMOE_HOME": "/h"}
    path = f"{Path(sys.executable).parent}:/bin"  # the lock's ninja comes first
    assert server_environment(given) == {"PATH": path, "SPARKMOE_HOME": "/h", "PYTHONUNBUFFERED": "1"}


def test_a_proxy_is_not_asked_for_the_server_itself() -> None:
    seen = server_environment({"https_proxy": "x", "http_proxy": "http://proxy:3128", "no_proxy": "intranet"})
    assert seen["NO_PROXY"] == seen["no_proxy"] == "intranet,127.0.0.1,localhost"


# With a real server


def cycle(recipe: str, model: Path, home: Path) -> float:
    """One start and stop; returns the seconds until the first token."""
    engine = Engine(recipe, "cpu", model, show=False).start()
    ready_s, port, pid = engine.ready_s, engine.record.port, engine.pid
    assert ready_s is not None
    assert listening(port)
    assert len(group(pid)) >= 3
    available = psutil.virtual_memory().available
    engine.stop()
    assert group(pid) == []
    assert not listening(port)
    assert psutil.virtual_memory().available > available
    assert_nothing_left(engine, home)
    return ready_s


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_starts_and_stops_leave_nothing(miniature: Path, own_home: Path) -> None:
    seconds = [cycle("nextn" if n % 2 else "baseline", miniature, own_home) for n in range(10)]
    sys.stderr.write(f"seconds until the first token: {', '.join(f'{s:.1f}' for s in seconds)}\n")


ATTACH = """
import sys
from sparkmoe.engine import Engine
with Engine.attach("baseline", "cpu", sys.argv[1], show=False) as engine:
    sample = engine.client().generate("2 + 2 =", max_new_tokens=3, ignore_eos=True)
    print(engine.pid, sample.completion_tokens)
"""


@pytest.mark.server
def test_equal_recipes_share_a_server_and_others_replace_it(miniature: Path, own_home: Path) -> None:
    with Engine.attach("baseline", "cpu", miniature, show=False) as first:
        pid, port = first.pid, first.record.port
    assert first.running(), "an attached server stays"
    with Engine.attach("baseline", "cpu", miniature, show=False) as second:
        assert (second.pid, second.api_key) == (pid, first.api_key)
    # Another process attaches too, and leaves without taking the server along.
    out = subprocess.run([sys.executable, "-c", ATTACH, str(miniature)], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(pid), "3"]
    time.sleep(1.2)
    assert first.running()
    # A wrong key is turned away.
    with pytest.raises(EngineError, match="401"):
        Client(first.url, "wrong").generate("hi", max_new_tokens=1)
    # Another recipe: the idle server of the first one is ended before the second one loads.
    other = Engine.attach("nextn", "cpu", miniature, show=False)
    assert group(pid) == []
    assert not listening(port)
    # A server that is killed under its owner's hands is noticed, and its record goes with it.
    pid = other.pid
    os.killpg(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"nextn ended: it was killed \(signal 9\)"):
        other.wait()
    assert group(pid) == []
    assert records() == []


def test_a_free_port_is_free() -> None:
    assert not listening(free_port())
