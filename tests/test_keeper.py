"""The keeper with a stand-in for the server, which can be killed, made to hang, or made to die at once. The real one is
kept alive in test_soak."""

import errno
import os
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkmoe import keeper
from sparkmoe.client import Client
from sparkmoe.engine import Engine
from sparkmoe.errors import EngineError, MachineError
from sparkmoe.gates import free_port
from sparkmoe.keeper import Keeper, api_key, gives_token, notify, patience, pause_s, prune, rotate, tail
from sparkmoe.machine import Machine
from sparkmoe.processes import records
from sparkmoe.recipe import Command, Recipe
from sparkmoe.sample import RequestFailed

pytestmark = pytest.mark.usefixtures("own_home")

# The fake server on the port and with the key that it is given; while the file `hang` exists its health is 503, and
# with a file `die` it ends as soon as it has started.
STAND_IN = textwrap.dedent(
    """
    import json, os, sys, threading
    sys.path.insert(0, sys.argv[1])
    import fake_server as fake
    folder, port, config = sys.argv[2], int(sys.argv[3]), json.load(open(sys.argv[4]))
    real, answer = fake.ThreadingHTTPServer, fake._Handler.do_GET
    fake.ThreadingHTTPServer = lambda _, handler: real(("127.0.0.1", port), handler)
    def get(self):
        if os.path.exists(folder + "/hang"):
            self._plain("no token", 503)
        else:
            answer(self)
    fake._Handler.do_GET = get
    if os.path.exists(folder + "/die"):
        sys.exit("RuntimeError: on purpose")
    fake.FakeServer(api_key=config["api-key"])
    print("The server is fired up and ready to roll!", flush=True)
    threading.Event().wait()
    """
)


class Done(Exception):
    """Ends a keeper in a test, as an interrupt would."""


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch, miniature: Path, tmp_path: Path) -> Callable[[], Engine]:
    def command(self: Recipe, machine: Machine, *, port: int, config: Path | None = None, **_: object) -> Command:
        words = (str(Path(__file__).parent), str(tmp_path), str(port), str(config))
        return Command((sys.executable, "-c", STAND_IN, *words), {})

    monkeypatch.setattr(Recipe, "command", command)
    monkeypatch.setattr(keeper, "_LOOK_S", 0.1)
    port, here = free_port(), Machine.named("cpu")
    return lambda: Engine("baseline", here, miniature, port=port, api_key="k" * 20, grace_s=5.0, show=False)


def test_a_killed_server_comes_back_on_its_port_with_its_key(
    boot: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")  # all in one second: a log each all the same
    said: list[str] = []
    pids: list[int] = []

    def ready(engine: Engine) -> None:
        with pytest.raises(RequestFailed, match="401"):
            Client(engine.url, "another key, as long as it").generate("a", max_new_tokens=4)
        assert Client(engine.url, "k" * 20).generate("a", max_new_tokens=4).completion_tokens == 4
        pids.append(engine.pid)
        if len(pids) == 3:
            raise Done
        os.kill(engine.pid, signal.SIGKILL)

    kept = Keeper(boot, said.append)
    with pytest.raises(Done):
        kept.run(ready)
    assert kept.restarts == 2
    assert len(set(pids)) == 3
    assert [line.split("; ")[-1] for line in said] == ["restart 1", "restart 2 after 1 s, for it dies again and again"]


def test_a_server_that_listens_but_gives_no_token_is_replaced(boot: Callable[[], Engine], tmp_path: Path) -> None:
    ready: list[str] = []
    hang = tmp_path / "hang"

    def on_ready(engine: Engine) -> None:
        ready.append(engine.url)
        if len(ready) == 2:
            raise Done
        hang.touch()

    def said(line: str) -> None:
        assert line.startswith("the server ended (no token for")
        hang.unlink()

    with pytest.raises(Done):
        Keeper(boot, said, probe_every_s=0.1, patience_s=0.6).run(on_ready)
    assert ready[0] == ready[1]


def test_one_that_never_answered_is_an_error_at_once(boot: Callable[[], Engine], tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    with pytest.raises(EngineError, match="RuntimeError: on purpose"):
        Keeper(boot, lambda line: pytest.fail(line)).run()
    assert records() == []


def test_one_that_does_not_come_back_is_given_up(boot: Callable[[], Engine], tmp_path: Path) -> None:
    said: list[str] = []

    def ready(engine: Engine) -> None:
        (tmp_path / "die").touch()
        os.kill(engine.pid, signal.SIGKILL)

    with pytest.raises(EngineError, match="died at stage"):
        Keeper(boot, said.append, tries=3).run(ready)
    assert [line.split(":")[0] for line in said[1:]] == ["start 2 of 3 failed"]


def test_a_command_keeps_one_port_and_one_key(boot: Callable[[], Engine], miniature: Path) -> None:
    seen: list[tuple[str, str]] = []
    said: list[str] = []

    def ready(engine: Engine) -> None:
        seen.append((engine.url, engine.api_key))
        if len(seen) == 2:
            raise Done
        os.kill(engine.pid, signal.SIGKILL)

    served = {"port": None, "host": "0.0.0.0", "api_key": None, "grace_s": 5.0}
    with pytest.raises(Done):
        keeper.keep(Recipe("baseline"), "cpu", miniature, said.append, ready, patience_s=5.0, **served)
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == 48
    assert said[0].startswith("0.0.0.0 is open to the network without encryption")
    with pytest.raises(EngineError, match="the server of recipe baseline ended"):
        keeper.once(Recipe("baseline"), "cpu", miniature, lambda engine: os.kill(engine.pid, signal.SIGKILL), **served)
    assert records() == []


def test_an_interrupt_ends_the_server(boot: Callable[[], Engine], own_home: Path) -> None:
    def interrupt(engine: Engine) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Keeper(boot, lambda line: None).run(interrupt)
    assert records() == []


def test_pauses_double_up_to_a_minute() -> None:
    assert [pause_s(n) for n in (0, 1, 2, 3, 4, 8, 9, 50)] == [0.0, 0.0, 1.0, 2.0, 4.0, 60.0, 60.0, 60.0]


def test_a_port_that_only_listens_gives_no_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert not gives_token(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.2)
    assert not gives_token("http://127.0.0.1:1", timeout_s=0.2)


def test_a_key_is_made_once_and_then_read(tmp_path: Path) -> None:
    made = api_key(tmp_path / "key")
    assert len(made) == 48
    assert api_key(tmp_path / "key") == made
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("key", ["", "short", "-begins-with-a-dash", "has a space inside it", "schlüssel-mit-umlaut"])
def test_a_key_that_cannot_work_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(MachineError, match="no usable API key"):
        api_key(tmp_path / "key")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 20)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(MachineError, match="chmod 600"):
        api_key(tmp_path / "key")
    with pytest.raises(MachineError, match="cannot write"):
        api_key(tmp_path / "no" / "folder")


def test_a_log_is_rotated_under_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("ab", buffering=0) as writer:
        for n in range(5):
            writer.write(b"%d" % n * 100)
            assert rotate(log, 50, keep=3)
            assert log.stat().st_size == 0
        writer.write(b"new")
        assert not rotate(log, 50, keep=3)
    assert log.read_text() == "new"
    assert [(tmp_path / f"server.log.{n}").read_text()[0] for n in (1, 2, 3)] == ["4", "3", "2"]
    assert len(list(tmp_path.iterdir())) == 4
    assert tail(log) == ["new"]
    assert tail(tmp_path / "none") == []


def test_on_a_full_disk_the_log_itself_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "server.log"
    log.write_text("x" * 100)

    def full(source: Path, target: Path) -> None:
        target.write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert not rotate(log, 50)
    assert [p.name for p in tmp_path.iterdir()] == ["server.log"]
    assert log.stat().st_size == 0
    assert not rotate(tmp_path / "none", 50)


def test_only_the_last_servers_logs_are_kept(tmp_path: Path) -> None:
    for n in range(6):
        for end in (".log", ".log.1", ".evidence.json"):
            (tmp_path / f"20260101-00000{n}-all_three-30000{end}").touch()
    (tmp_path / "20250101-000000-other-30000.log").touch()
    prune(tmp_path / "20260101-000005-all_three-30000.log", 2)
    assert len(list(tmp_path.glob("*-all_three-*"))) == 6
    assert (tmp_path / "20250101-000000-other-30000.log").exists()


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notify("READY=1")  # nobody listens: nothing happens
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        notify("READY=1\nSTATUS=all_three")
        assert systemd.recv(100) == b"READY=1\nSTATUS=all_three"
        patience(600.0)  # no watchdog is set
        monkeypatch.setenv("WATCHDOG_USEC", "180000000")
        patience(600.0)
        assert systemd.recv(100) == b"WATCHDOG_USEC=720000000\nWATCHDOG=1"
    notify("WATCHDOG=1")  # nobody listens any more
