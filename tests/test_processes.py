"""Supervisors and groups, with small processes in place of a server. Real servers: test_engine, test_notebooks_run."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lifetimes import until
from sparkmoe import processes
from sparkmoe.errors import MachineError
from sparkmoe.processes import Identity, Record, end_all, end_group, group, loading_lock, new_api_key, records, servers

# A tree of three: a leader, a child, and a grandchild whose parent has gone. "stubborn" ignores SIGTERM.
TREE = textwrap.dedent(
    """
    import signal, subprocess, sys, time
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    subprocess.run([sys.executable, "-c", orphan])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("up", flush=True)
    if "crash" in sys.argv:
        print("ValueError: on purpose", flush=True)
        sys.exit(3)
    time.sleep(60)
    """
)


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path))
    monkeypatch.delenv(processes.OWNER_ENV, raising=False)
    yield tmp_path
    end_all()


def make_record(*words: str, floor_bytes: int = 0, grace_s: float = 5.0) -> Record:
    log = servers() / "test.log"
    record = Record(
        fingerprint="0123456789ab", recipe={"name": "fake"}, profile="cpu", model="/models/fake", host="127.0.0.1",
        port=1, api_key="secret", log_path=str(log), evidence_path="", argv=[sys.executable, "-c", TREE, *words],
        grace_s=grace_s, floor_bytes=floor_bytes,
    )  # fmt: skip
    record.write()
    return record


def supervise(record: Record) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-m", "sparkmoe.supervisor", str(record.path)], start_new_session=True)
    until(lambda: Path(record.log_path).exists() and "up" in Path(record.log_path).read_text())
    return child


def leader(record: Record) -> int:
    server = record.refresh().server
    assert server is not None
    return server[0]


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_group_is_found_whole_and_ended_politely() -> None:
    child = subprocess.Popen([sys.executable, "-c", TREE], start_new_session=True, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert len(group(child.pid)) == 3
    assert end_group(child.pid, grace_s=0.3)
    assert group(child.pid) == []
    assert child.wait() == -signal.SIGTERM


def test_a_stubborn_group_is_killed_and_no_other() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    argv = [sys.executable, "-c", TREE, "stubborn"]
    child = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    begun = time.monotonic()
    assert end_group(child.pid, grace_s=0.5)
    assert 0.5 <= time.monotonic() - begun < 5.0
    assert child.wait() == -signal.SIGKILL
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_server_ends_with_its_last_owner(owner: subprocess.Popen[bytes]) -> None:
    record = make_record()
    record.sign_in(Identity.of(owner.pid))
    record.sign_in(Identity.of(os.getpid()))
    supervisor = supervise(record)
    pid = leader(record)
    owner.kill()  # not waited for: a zombie owns nothing
    until(lambda: record.owners() == [Identity.of(os.getpid())])
    time.sleep(0.8)
    assert len(group(pid)) == 3
    next(record.owners_path.iterdir()).unlink()
    supervisor.wait(timeout=10)
    assert group(pid) == []
    assert not list(servers().glob("0123*"))
    assert "stopped: its last owner is gone" in Path(record.log_path).read_text()


def test_a_killed_supervisor_takes_the_leader_along_and_the_rest_is_cleaned_up() -> None:
    record = make_record()
    record.sign_in(Identity.of(os.getpid()))
    supervisor = supervise(record)
    pid = leader(record)
    supervisor.kill()
    supervisor.wait()
    until(lambda: pid not in {p.pid for p in group(pid)})
    assert group(pid), "the children of a dead leader are still there"
    assert records() == []
    assert group(pid) == []
    assert not record.path.exists()


def test_what_a_crashed_server_leaves_is_ended_and_its_status_passed_on() -> None:
    record = make_record("crash")
    record.sign_in(Identity.of(os.getpid()))
    supervisor = supervise(record)
    assert supervisor.wait(timeout=10) == 3
    assert not record.path.exists()
    assert "exit code 3" in Path(record.log_path).read_text()
    strays = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == record.argv]
    assert strays == []


def test_the_memory_floor_ends_a_server() -> None:
    record = make_record(floor_bytes=psutil.virtual_memory().total * 2)
    record.sign_in(Identity.of(os.getpid()))
    supervisor = supervise(record)
    supervisor.wait(timeout=10)
    assert "stopped: available memory fell to" in Path(record.log_path).read_text()


def test_end_all_ends_what_belongs_to_one_owner_alone(owner: subprocess.Popen[bytes]) -> None:
    record = make_record()
    me, other = Identity.of(os.getpid()), Identity.of(owner.pid)
    record.sign_in(me)
    record.sign_in(other)
    supervisor = supervise(record)
    assert end_all(me) == []
    assert [r.fingerprint for r in end_all()] == [record.fingerprint]
    assert supervisor.wait(timeout=5) == 128 + signal.SIGTERM


def test_a_reused_pid_is_nobody() -> None:
    me = Identity.of(os.getpid())
    assert me.alive()
    assert not Identity(me.pid, me.started_s - 60).alive()
    record = make_record()
    record.server = record.supervisor = (me.pid, me.started_s - 60)
    assert not record.supervised()
    record.write()
    assert records() == []  # and this process, which has the pid, still runs


def test_the_owner_is_the_run_while_it_lives(monkeypatch: pytest.MonkeyPatch, owner: subprocess.Popen[bytes]) -> None:
    run = Identity.of(owner.pid)
    monkeypatch.setenv(processes.OWNER_ENV, str(run))
    assert Identity.owner() == run
    owner.kill()
    owner.wait()
    assert Identity.owner().pid == os.getpid()


def test_records_are_private_and_damaged_ones_removed() -> None:
    record = make_record()
    assert stat.S_IMODE(record.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(servers().stat().st_mode) == 0o700
    assert json.loads(record.path.read_text())["api_key"] == "secret"
    record.path.write_text("{")
    assert records() == []
    assert not record.path.exists()


def test_an_unwritable_home_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path / "file"))
    with pytest.raises(MachineError, match=r"cannot write .*set SPARKMOE_HOME"):
        servers()
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path))


def test_one_server_loads_at_a_time() -> None:
    code = "from sparkmoe.processes import loading_lock\nwith loading_lock(): print('in', flush=True)"
    with loading_lock():
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
    assert child.communicate(timeout=10)[0] == b"in\n"


def test_an_api_key_is_never_taken_for_an_option() -> None:
    """SGLang reads the key from a file and puts it on a command line, where "-x…" is an option: 1 start in 64 died."""
    keys = {new_api_key() for _ in range(500)}
    assert len(keys) == 500
    assert all(len(key) == 48 and set(key) <= set("0123456789abcdef") for key in keys)
