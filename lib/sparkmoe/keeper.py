"""Keep one recipe served for a month: notice that it died or hangs, start it again, and leave when asked to.

A server that runs for weeks meets what a measurement never does: a request that kills the scheduler, a hung driver, a
neighbour who takes the memory, a disk that fills with logs. So the `Keeper` owns one server after another on the same
port with the same key. Every second it looks whether the processes live; every 15 s it asks for a token, since a port
that listens proves nothing. (SGLang's `/health_generate` generates one when idle and, when busy, waits for the next
token of any request: a full queue is not taken for a hang.) A dead or hung server is replaced at once, one that dies
again soon only after a pause that doubles. A server that never answered is an error, not something to repeat.

Its memory watchdog is the supervisor beside every server. Under systemd (`env/spark/sparkmoe.service`) the unit counts
as started when the first token has come, and is restarted if the keeper itself falls silent.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sparkmoe.engine import Engine
from sparkmoe.errors import EngineError, MachineError
from sparkmoe.gates import free_port
from sparkmoe.machine import Machine
from sparkmoe.processes import end_group, new_api_key
from sparkmoe.recipe import Recipe
from sparkmoe.serverlog import likely_cause

STABLE_S = 60.0  # a server that lived so long starts the count of failures anew
MAX_PAUSE_S = 60.0
_LOOK_S = 1.0
_TAIL_BYTES = 1 << 16


class Keeper:
    """Serves until interrupted. `boot` makes an engine that is not started, each time with the same port and key.

    `patience_s` is how long no token may come before the server counts as hung: a prefill of 262,144 tokens takes
    minutes on a Spark. `tries` starts in a row may fail. Logs are rotated at `log_bytes`; those of the last
    `logs_kept` servers are kept. `say` is told what happens, one line each.
    """

    def __init__(
        self,
        boot: Callable[[], Engine],
        say: Callable[[str], None],
        *,
        probe_every_s: float = 15.0,
        patience_s: float = 300.0,
        tries: int = 8,
        log_bytes: int = 64 << 20,
        logs_kept: int = 10,
    ) -> None:
        self.boot, self.say = boot, say
        self.probe_every_s, self.patience_s, self.tries = probe_every_s, patience_s, tries
        self.log_bytes, self.logs_kept = log_bytes, logs_kept
        self.restarts = 0

    def run(self, on_ready: Callable[[Engine], None] = lambda engine: None) -> NoReturn:
        """Serve; `on_ready` is called with every server that answers. Ends by an exception: the interrupt's, or
        SparkmoeError where the first server does not start or `tries` in a row do not."""
        failed, served = 0, False
        while True:
            engine = self.boot()
            patience(engine.deadline_s)
            try:
                engine.start()
            except (EngineError, MachineError) as error:
                failed += 1
                if not served or failed >= self.tries:
                    raise
                self.say(f"start {failed} of {self.tries} failed: {error}")
                self._pause(failed)
                continue
            served, begun = True, time.monotonic()
            try:
                patience(0.0)
                notify(f"READY=1\nSTATUS={engine.recipe.name} at {engine.url}")
                prune(engine.log_path, self.logs_kept)
                on_ready(engine)
                why = self._watch(engine)
            finally:
                patience(engine.grace_s)
                engine.stop()  # after an interrupt: drains requests for the engine's grace
            self.restarts += 1
            failed = 0 if time.monotonic() - begun >= STABLE_S else failed + 1
            waits = f" after {pause_s(failed):g} s, for it dies again and again" if pause_s(failed) else ""
            self.say(f"the server ended ({why}); restart {self.restarts}{waits}")
            if failed >= self.tries:
                raise EngineError(f"the server of recipe {engine.recipe.name} died {failed} times in a row: {why}")
            self._pause(failed)

    def _pause(self, failed: int) -> None:
        end = time.monotonic() + pause_s(failed)
        while time.monotonic() < end:
            notify("WATCHDOG=1")
            time.sleep(min(_LOOK_S, max(0.0, end - time.monotonic())))

    def _watch(self, engine: Engine) -> str:
        """Stay until the server is dead or hung; returns why."""
        last_token = last_probe = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            notify("WATCHDOG=1")
            if not engine.running():
                return likely_cause(tail(engine.log_path)) or "no known cause in its log"
            rotate(engine.log_path, self.log_bytes)
            now = time.monotonic()
            if now - last_probe < self.probe_every_s:
                continue
            if gives_token(engine.url):
                last_token = time.monotonic()
            elif engine.running() and time.monotonic() - last_token >= self.patience_s:
                with contextlib.suppress(EngineError):
                    end_group(engine.pid, grace_s=0.0)  # what hangs does not drain
                return f"no token for {time.monotonic() - last_token:.0f} s"
            last_probe = time.monotonic()


def pause_s(failed: int) -> float:
    """Seconds before the next start after `failed` failures in a row: none after the first, then 1, 2, 4, … 60."""
    return min(MAX_PAUSE_S, 2.0 ** (failed - 2)) if failed > 1 else 0.0


def keep(
    recipe: Recipe, machine: str, model: Path | None, say: Callable[[str], None], on_ready: Callable[[Engine], None],
    *, patience_s: float, **served: Any,
) -> NoReturn:  # fmt: skip
    """`Keeper.run` on one port with one key. Keywords as for `Engine`; a port and a key that are None are chosen."""
    here = Machine.named(machine)
    served |= {"port": served["port"] or free_port(served["host"]), "api_key": served["api_key"] or new_api_key()}
    if served["host"] not in ("127.0.0.1", "localhost", "::1"):
        say(f"{served['host']} is open to the network without encryption; env/spark/README.md shows a reverse proxy")
    boot = partial(Engine, recipe, here, model, show=sys.stderr.isatty(), **served)
    Keeper(boot, say, patience_s=patience_s).run(on_ready)


def once(
    recipe: Recipe, machine: str, model: Path | None, on_ready: Callable[[Engine], None], **served: Any
) -> NoReturn:
    """Serve until an interrupt. Raises EngineError where the server ends by itself, which it does only in trouble."""
    with Engine(recipe, machine, model, **served) as engine:
        on_ready(engine)
        engine.wait()


def gives_token(url: str, timeout_s: float = 25.0) -> bool:
    """Whether a token came from the server within SGLang's 20 s."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
    try:
        connection.request("GET", "/health_generate")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def api_key(file: Path) -> str:
    """The key in a file that its owner alone may read; a random one is put there where the file does not exist.

    Raises MachineError for a file that others can read, or a key that no HTTP header or option parser would take.
    """
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
            new.write(new_api_key() + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise MachineError(f"cannot write a new API key to {file} ({error.strerror})") from None
    try:
        key, mode = file.read_text().strip(), file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"cannot read the API key in {file} ({error})") from None
    if mode & 0o077:
        raise MachineError(f"the API key in {file} can be read by others; chmod 600 {file}")
    if len(key) < 16 or key.startswith("-") or not key.isascii() or not key.isprintable() or " " in key:
        raise MachineError(f"{file} holds no usable API key: 16 or more printable characters, none of them a space")
    return key


def rotate(log: Path, max_bytes: int, keep: int = 3) -> bool:
    """Where a log is larger than `max_bytes`: copy it to `.1` (older ones move up) and empty it in place, because its
    writer holds it open for appending. Lines written between the two steps are lost."""
    older = [log, *(log.with_name(f"{log.name}.{n}") for n in range(1, keep + 1))]
    try:
        if log.stat().st_size <= max_bytes:
            return False
        for source, target in zip(older[-2:0:-1], older[:1:-1], strict=True):
            if source.exists():
                os.replace(source, target)
        shutil.copyfile(log, older[1])
        older[1].chmod(0o600)
        os.truncate(log, 0)
        return True
    except OSError:  # a full disk: the log itself is what can go
        with contextlib.suppress(OSError):
            older[1].unlink(missing_ok=True)
            os.truncate(log, 0)
        return False


def prune(log: Path, keep: int) -> None:
    """Of the logs of this recipe and port, whose names begin with the time, leave the last `keep` servers'."""
    same = log.name.split("-", 2)[2]
    for old in sorted(log.parent.glob(f"*-{same}"))[:-keep]:
        for file in log.parent.glob(f"{old.stem}.*"):
            file.unlink(missing_ok=True)


def tail(log: Path) -> list[str]:
    """The last lines of a log, also just after it was rotated."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def patience(seconds: float) -> None:
    """Ask systemd's watchdog to bear with a silence of so long, and two minutes more."""
    if os.environ.get("WATCHDOG_USEC"):
        notify(f"WATCHDOG_USEC={int((seconds + 120) * 1e6)}\nWATCHDOG=1")


def notify(state: str) -> None:
    """Tell systemd, where it listens (`NOTIFY_SOCKET`)."""
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out, contextlib.suppress(OSError):
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.sendall(state.encode())
