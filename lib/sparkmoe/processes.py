"""Processes and the records that say whose they are.

An SGLang server is a tree of processes with a 60 GB appetite, and the ways to lose it are many: a kernel restarted from
the menu, a terminal closed, a test killed. A child that was still importing when its parent died notices nothing at
all. So a server here is one process group, and a record on disk says which: its pid with the time it began (a pid alone
may be somebody else's by now), its supervisor, port, key and recipe.

A record has owners: processes for which the server exists, each a file named after its pid. A notebook kernel that
starts or attaches to a server signs in; `sparkmoe run` signs in for all of its kernels (`SPARKMOE_OWNER` in their
environment). When the last owner is gone the supervisor ends the group. Nobody has to remember to clean up.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sparkmoe.errors import MachineError
from sparkmoe.machine import home

logger = logging.getLogger(__name__)
OWNER_ENV = "SPARKMOE_OWNER"
_SAME_START_S = 2.0  # two readings of one process's start differ by clock corrections only


@dataclass(frozen=True)
class Identity:
    """One process, once: a pid and when it began (seconds since the epoch)."""

    pid: int
    started_s: float

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Raises psutil.NoSuchProcess."""
        return cls(pid, psutil.Process(pid).create_time())

    @classmethod
    def owner(cls) -> Identity:
        """Whom a server started here belongs to: the living process named in `SPARKMOE_OWNER`, else this one."""
        pid, _, started = os.environ.get(OWNER_ENV, "").partition(":")
        if pid.isdigit() and started:
            named = cls(int(pid), float(started))
            if named.alive():
                return named
        return cls.of(os.getpid())

    def __str__(self) -> str:
        return f"{self.pid}:{self.started_s}"

    def alive(self) -> bool:
        """Whether this very process still runs. A zombie does not."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_s) < _SAME_START_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def new_api_key() -> str:
    """A random key of 192 bits, in hexadecimal: SGLang's parser takes a key that begins with "-" for an option."""
    return secrets.token_hex(24)


@dataclass
class Record:
    """One server on disk: `<servers>/<fingerprint>-<port>.json`, readable by its user only (it holds the API key)."""

    fingerprint: str
    recipe: dict[str, Any]
    profile: str
    model: str
    host: str
    port: int
    api_key: str
    log_path: str
    evidence_path: str
    argv: list[str]
    grace_s: float
    floor_bytes: int = 0
    started_at: float = field(default_factory=time.time)
    ready: bool = False
    server: tuple[int, float] | None = None
    supervisor: tuple[int, float] | None = None

    @property
    def path(self) -> Path:
        return servers() / f"{self.fingerprint}-{self.port}.json"

    @property
    def config_path(self) -> Path:
        return self.path.with_suffix(".yaml")

    @property
    def owners_path(self) -> Path:
        return self.path.with_suffix(".owners")

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host in ('0.0.0.0', '::') else self.host}:{self.port}"

    def write(self) -> None:
        write_private(self.path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record in a file, None if it is gone or damaged."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def refresh(self) -> Record:
        """What the file says now; this record where it is gone."""
        return Record.read(self.path) or self

    def sign_in(self, owner: Identity) -> None:
        self.owners_path.mkdir(mode=0o700, exist_ok=True)
        (self.owners_path / str(owner)).touch()

    def owners(self) -> list[Identity]:
        """The living owners; the files of dead ones are removed."""
        living = []
        for file in sorted(self.owners_path.glob("*:*")):
            pid, _, started = file.name.partition(":")
            owner = Identity(int(pid), float(started))
            if owner.alive():
                living.append(owner)
            else:
                file.unlink(missing_ok=True)
        return living

    def supervised(self) -> bool:
        return self.supervisor is not None and Identity(*self.supervisor).alive()

    def members(self) -> list[psutil.Process]:
        """The living processes of the server's group."""
        if self.server is None:
            return []
        leader = Identity(*self.server)
        found = group(leader.pid)
        # The leader's pid may be another process's by now; what is older than the server is not ours.
        return [p for p in found if _started(p) > leader.started_s - _SAME_START_S]

    def remove(self) -> None:
        for path in (self.path, self.config_path):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.owners_path, ignore_errors=True)

    def end(self, wait_s: float | None = None) -> None:
        """Stop the server: through its supervisor, or directly where that is gone. Returns when the group is empty."""
        current = self.refresh()
        if current.supervisor and current.supervised():
            supervisor = Identity(*current.supervisor)
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGTERM)
            deadline = time.monotonic() + (self.grace_s + 15.0 if wait_s is None else wait_s)
            while supervisor.alive() and time.monotonic() < deadline:
                time.sleep(0.05)
            if supervisor.alive():
                os.kill(supervisor.pid, signal.SIGKILL)
        current = current.refresh()
        if current.members() and current.server:
            end_group(current.server[0], grace_s=0.0)
        self.remove()


def servers() -> Path:
    """Folder of the records. Raises MachineError where it cannot be made or written."""
    folder = home() / "servers"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise MachineError(f"cannot write {folder} ({error.strerror}); set SPARKMOE_HOME to another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise MachineError(f"{folder} is not writable; set SPARKMOE_HOME to a writable folder")
    return folder


def records() -> list[Record]:
    """All servers on record, stale ones cleaned first: a record without a supervisor, and what is left of its group."""
    found = []
    for path in sorted(servers().glob("*.json")):
        record = Record.read(path)
        if record is None:
            path.unlink(missing_ok=True)
        elif record.supervised() or (record.supervisor is None and time.time() - record.started_at < 10.0):
            found.append(record)
        else:
            logger.warning("removing the stale record of a server that is gone: %s", path.name)
            record.end()
    return found


def end_all(owner: Identity | None = None) -> list[Record]:
    """Stop every server on record, or those that belong to `owner` alone. Returns the stopped ones."""
    ended = [r for r in records() if owner is None or r.owners() in ([owner], [])]
    for record in ended:
        record.end()
    return ended


@contextlib.contextmanager
def loading_lock() -> Iterator[None]:
    """Only one server loads at a time: two loads side by side are how a machine runs out of memory."""
    with (servers() / ".loading").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another server is loading; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def group(pgid: int) -> list[psutil.Process]:
    """Living processes (no zombies) of one process group."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def end_group(pgid: int, *, grace_s: float, wait_s: float = 10.0) -> bool:
    """SIGTERM to the leader, who ends its children; once it is gone or `grace_s` is over, SIGKILL to what is left of
    the group and to nothing else. True once the group is empty."""
    if grace_s > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pgid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(p.pid == pgid for p in group(pgid)) and time.monotonic() < deadline:
            time.sleep(0.05)
    deadline = time.monotonic() + wait_s
    while group(pgid) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, signal.SIGKILL)
        time.sleep(0.05)
    return not group(pgid)


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step, readable by its owner only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(partial, path)


def _started(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return 0.0
