"""Own one SGLang server: start it, prove that it answers, share it, end it.

"Started" means that a token came back. A port that listens proves nothing, and SGLang's `/health` says 200 while every
request hangs. So `Engine.start` watches the log for progress, and then asks for a few tokens itself, all within the
machine profile's deadline.

Before anything is loaded everything cheap is checked: the recipe against the machine and the model, the model's files,
the port, and memory, with the sum shown. What is found late costs minutes, on a DGX Spark at times a power cycle.

Two ways to use it. `with Engine(recipe) as engine:` boots a fresh server and ends it with the block: a boot is the unit
of repetition of a measurement. `Engine.attach(recipe)` takes an equal server that already runs, or starts one, and
leaves it running for the next cell or notebook; it first ends this owner's servers of other recipes, because an idle
neighbour spoils a measurement and two models rarely fit. Nothing outlives its owners (`processes`, `supervisor`):
in JupyterLab that is the kernel, under `sparkmoe run` and `sparkmoe serve` the command. A server that shall survive
kernel restarts is started with `sparkmoe serve` in a terminal; notebooks attach to it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import psutil

from sparkmoe import checkpoint as checkpoints
from sparkmoe.errors import EngineError, MachineError
from sparkmoe.gates import FLOOR_BYTES, check_memory, check_port, free_port, server_environment
from sparkmoe.machine import GIB, Machine, available_bytes
from sparkmoe.processes import Identity, Record, loading_lock, new_api_key, records, servers, write_private
from sparkmoe.recipe import Recipe
from sparkmoe.serverlog import STAGES, Progress, last_words, likely_cause, progress

if TYPE_CHECKING:
    from sparkmoe.client import Client

logger = logging.getLogger(__name__)
_POLL_S = 0.1


class Engine:
    """One server for one recipe. `with` starts and ends it; attributes hold once it is started.

    `grace_s` is the time between SIGTERM and SIGKILL (default: the machine profile's); one that serves others' requests
    needs some to drain them. `api_key` is the key to serve with (default: a new random one).

    `url`, `api_key`, `pid` (of the server's process group), `log_path`, `evidence_path` (written by the plugin from
    inside the server), `checkpoint`, and `ready_s`, the seconds from launch to the first token.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        machine: Machine | str = "auto",
        model: Path | str | None = None,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        log_dir: Path | str | None = None,
        deadline_s: float | None = None,
        grace_s: float | None = None,
        api_key: str | None = None,
        show: bool = True,
    ) -> None:
        self.recipe = Recipe.named(recipe) if isinstance(recipe, str) else recipe
        self.machine = Machine.named(machine) if isinstance(machine, str) else machine
        self.recipe.require(self.machine)
        self.model = checkpoints.resolve(model, self.machine)
        self.port, self.host, self._given_key = port, host, api_key
        self.deadline_s = deadline_s or self.machine.start_deadline_s
        self.grace_s = self.machine.stop_grace_s if grace_s is None else grace_s
        self.show = show
        self.ready_s: float | None = None
        self._log_dir = Path(log_dir) if log_dir else None
        self._record: Record | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._shared = False

    # What a started engine is

    @property
    def record(self) -> Record:
        if self._record is None:
            raise EngineError(f"the server of recipe {self.recipe.name} is not started")
        return self._record

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def api_key(self) -> str:
        return self.record.api_key

    @property
    def pid(self) -> int:
        """Leader of the server's process group."""
        server = self.record.refresh().server
        if server is None:
            raise EngineError("the server has no process yet")
        return server[0]

    @property
    def log_path(self) -> Path:
        return Path(self.record.log_path)

    @property
    def evidence_path(self) -> Path:
        return Path(self.record.evidence_path)

    def client(self, *, timeout_s: float = 300.0) -> Client:
        from sparkmoe.client import Client

        return Client(self.url, self.api_key, timeout_s=timeout_s)

    def running(self) -> bool:
        """Whether the server's process group and its supervisor are there. Says nothing about answers."""
        if self._record is None:
            return False
        self._record = self._record.refresh()
        return self._record.path.exists() and self._record.supervised() and bool(self._record.members())

    def memory_bytes(self) -> int:
        """Memory of the whole process group, shared pages counted once (PSS)."""
        total = 0
        for process in self.record.refresh().members():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    # Start

    def __enter__(self) -> Self:
        if not self.running():
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._shared:
            self.stop()

    def start(self, on_progress: Callable[[Progress], None] | None = None) -> Self:
        """Boot a server and return once it has generated a token.

        `on_progress` is called with every step that the log tells; without it a tqdm bar is shown (`show=False`: none).
        Raises RecipeError, ModelError, MachineError before anything is loaded, EngineError after that; in either case
        nothing is left running.
        """
        self._boot(on_progress)
        return self

    @classmethod
    def attach(cls, recipe: Recipe | str, machine: Machine | str = "auto", model: Path | str | None = None,
               **options: Any) -> Self:  # fmt: skip
        """A running server of an equal recipe on the same model, or a new one. It stays after the `with` block.

        Options as for `Engine`. Servers of other recipes that belong to this owner alone are ended first.
        """
        engine = cls(recipe, machine, model, **options)
        seen = checkpoints.inspect(engine.model)
        engine.recipe.require(engine.machine, seen)
        wanted, me = engine.recipe.fingerprint(engine.machine, seen), Identity.owner()
        engine._shared = True
        with loading_lock():
            for record in records():
                if record.fingerprint == wanted and record.ready and engine.port in (None, record.port):
                    record.sign_in(me)
                    engine._record = record
                    try:
                        engine._prove(30.0)
                    except EngineError as error:
                        if record.owners() != [me]:
                            raise EngineError(
                                f"the {engine.recipe.name} server at {record.url}, which others use too, does not "
                                f"answer ({error}); `sparkmoe stop` ends it"
                            ) from None
                        logger.warning("my %s server does not answer, ending it: %s", engine.recipe.name, error)
                        record.end()
                        continue
                    return engine
            engine._record = None
            for record in records():
                if record.owners() == [me]:
                    record.end()
            engine._boot(None, locked=True)
        return engine

    def _boot(self, on_progress: Callable[[Progress], None] | None, *, locked: bool = False) -> None:
        if self.running():
            raise EngineError(f"this engine already runs at {self.url}")
        seen = checkpoints.inspect(self.model)
        self.recipe.require(self.machine, seen)
        port = free_port(self.host) if self.port is None else check_port(self.port, self.host)
        with _nothing() if locked else loading_lock():
            for orphan in [r for r in records() if not r.owners()]:
                orphan.end()  # its supervisor is at it; wait until the memory is free
            check_memory(self.recipe, self.machine, seen, records())
            self._launch(seen, port)
            try:
                with _shown(on_progress, self.show, self.recipe.name) as report:
                    self._wait(report)
            except BaseException:
                self.stop()
                raise

    def _launch(self, seen: checkpoints.Checkpoint, port: int) -> None:
        fingerprint = self.recipe.fingerprint(self.machine, seen)
        logs = self._log_dir or Path(os.environ.get("SPARKMOE_LOG_DIR") or servers() / "logs")
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"cannot write logs to {logs} ({error.strerror})") from None
        label = re.sub(r"[^\w.+=-]+", "_", self.recipe.name)[:48]
        now, again = time.strftime("%Y%m%d-%H%M%S"), itertools.chain([""], (f".{n}" for n in itertools.count(2)))
        stems = (f"{now}{more}-{label}-{port}" for more in again)  # one server's "ready" is not the next one's
        stem = next(stem for stem in stems if not (logs / f"{stem}.log").exists())
        log, evidence = logs / f"{stem}.log", logs / f"{stem}.evidence.json"
        where: dict[str, Any] = {"model": self.model, "port": port, "host": self.host, "evidence": evidence}
        record = Record(
            fingerprint=fingerprint, recipe=asdict(self.recipe), profile=self.machine.profile, model=str(self.model),
            host=self.host, port=port, api_key=self._given_key or new_api_key(), log_path=str(log),
            evidence_path=str(evidence), argv=[], grace_s=self.grace_s,
            floor_bytes=FLOOR_BYTES[self.machine.profile],
        )  # fmt: skip
        command = self.recipe.command(self.machine, **where, config=record.config_path)
        record.argv = list(command.argv)
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600))  # SGLang logs its arguments, key included
        write_private(record.config_path, json.dumps({"api-key": record.api_key}))  # JSON is YAML
        record.sign_in(Identity.owner())
        record.write()
        self._record = record
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "sparkmoe.supervisor", str(record.path)],
            env=server_environment(os.environ) | command.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _wait(self, report: Callable[[Progress], None]) -> None:
        begun = time.monotonic()
        here, rest = Progress(), ""
        with self.log_path.open(encoding="utf-8", errors="replace") as log:
            while here.stage != "ready":
                dead = self._supervisor is not None and self._supervisor.poll() is not None
                *lines, rest = (rest + log.read()).replace("\r", "\n").split("\n")
                now = progress(lines, here)
                if now != here:
                    here = now
                    report(here)
                if dead:
                    raise self._died(here)
                if time.monotonic() - begun > self.deadline_s:
                    raise self._silent(f"stage “{here.stage}”")
                time.sleep(_POLL_S)
        try:
            self._prove(self.deadline_s - (time.monotonic() - begun))
        except EngineError as error:
            time.sleep(2 * _POLL_S)
            dead = self._supervisor is not None and self._supervisor.poll() is not None
            raise (self._died(here) if dead else self._silent(str(error))) from None
        self.ready_s = time.monotonic() - begun
        record = self.record.refresh()
        record.ready = True
        record.write()
        self._record = record

    def _prove(self, timeout_s: float) -> None:
        """A real token, or EngineError: the client raises on an answer without one."""
        self.client(timeout_s=max(timeout_s, 1.0)).generate("1 + 1 =", max_new_tokens=4, ignore_eos=True)

    def _died(self, here: Progress) -> EngineError:
        lines = self._log_lines()
        cause = likely_cause(lines)
        heard = "".join(f"\n  | {line}" for line in last_words(lines))
        known = f"; likely cause: {cause}" if cause else ""
        return EngineError(
            f"the server of recipe {self.recipe.name} died at stage “{here.stage}”{known}. "
            f"Log: {self.log_path}. Its last words:{heard or ' none'}"
        )

    def _silent(self, why: str) -> EngineError:
        lines = self._log_lines()
        heard = "".join(f"\n  | {line}" for line in last_words(lines, 3))
        return EngineError(
            f"the server of recipe {self.recipe.name} is alive but gave no token within {self.deadline_s:.0f} s "
            f"({why}); it was stopped. Log: {self.log_path}. Its last words:{heard or ' none'}"
        )

    def _log_lines(self, tail_bytes: int = 65536) -> list[str]:
        raw = self.log_path.read_bytes()[-tail_bytes:]
        return raw.decode(errors="replace").replace("\r", "\n").splitlines()

    def wait(self) -> NoReturn:
        """Block until the server ends. Raises EngineError, since it ends by itself only in trouble."""
        while self.running():
            time.sleep(1.0)
        cause = likely_cause(self._log_lines())
        self.stop()  # its supervisor may still be at it, and the record with it
        raise EngineError(f"the server of recipe {self.recipe.name} ended{f': {cause}' if cause else ''}")

    # Stop

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL of its process group. Returns when it and its memory are gone."""
        if self._record is None:
            return
        record = self._record.refresh()
        before = available_bytes()
        held = self.memory_bytes() if record.server else 0
        if self._supervisor is not None:
            self._supervisor.terminate()  # also where it has not yet put itself on record
        record.end()
        if self._supervisor is not None:
            self._supervisor.wait(timeout=30.0)
            self._supervisor = None
        self._record = None
        if left := record.members():
            raise EngineError(f"{len(left)} processes of the server survived SIGKILL: {[p.pid for p in left]}")
        if held > GIB // 2 and not _until(lambda: available_bytes() >= before + held // 2, 10.0):
            logger.warning("the server is gone, but %.1f GiB of its memory have not come back", held / GIB)


@contextmanager
def _shown(
    on_progress: Callable[[Progress], None] | None, show: bool, name: str
) -> Iterator[Callable[[Progress], None]]:
    if on_progress is not None or not show:
        yield on_progress or (lambda _: None)
        return
    from tqdm.auto import tqdm

    layout = "{desc} |{bar}| {elapsed}"
    with tqdm(total=len(STAGES) - 1, desc=f"{name}: start", bar_format=layout, leave=False) as bar:

        def report(now: Progress) -> None:
            percent = f" {now.percent} %" if now.percent is not None else ""
            bar.set_description(f"{name}: {now.stage}{percent}", refresh=False)
            bar.update(now.index - bar.n)
            bar.refresh()

        yield report


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
