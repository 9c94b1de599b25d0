"""One boot of one arm: start the server, let it settle, take the samples that are missing, write down what was seen.

`bench` decides which boots there are and in which order. A server has settled when nothing compiles any more and two
warm-up answers in a row took the same time. What spoils a sample is `judge`'s business.
"""

from __future__ import annotations

import logging
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from sparkmoe.client import Client, RequestFailed, Sample
from sparkmoe.conditions import clocks
from sparkmoe.errors import EngineError
from sparkmoe.judge import LogTail, compile_lines, machine_alarms, reasons_spoiled
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run, write_atomic
from sparkmoe.workload import Prompt

log = logging.getLogger(__name__)

AGREE = 0.10  # two warm-up answers agree if their times per token differ by no more
MAX_WARMUPS = 12
_FATAL = ("refused", "died", "stalled")  # nothing more can be measured on this server


class Server(Protocol):
    """What a boot needs of an engine that has been started."""

    @property
    def url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def log_path(self) -> Path: ...
    @property
    def evidence_path(self) -> Path: ...


BootWith = Callable[[Recipe], AbstractContextManager[Server]]
Check = Callable[[Server, list[Sample]], object]


@dataclass(frozen=True)
class Wave:
    """Requests that are sent at the same moment: (number within the boot, prompt) each."""

    index: int
    requests: tuple[tuple[int, Prompt], ...]


@dataclass
class Boot:
    """One boot of one arm. Its own facts go to `boots/`, what the plugin saw to `evidence/`."""

    run: Run
    recipe: Recipe
    boot: int
    done: set[tuple[str, int, int]]
    machine: Machine
    sampling: Mapping[str, Any]
    timeout_s: float
    floor_ms: float | None
    check: Check | None
    start: BootWith

    def measure(self, waves: Sequence[Wave], pace: Pace) -> Iterator[str]:
        """Boot, warm up, measure what is missing; yields what it does."""
        yield "boot"
        arm, begun = self.recipe.name, time.monotonic()
        self.label = re.sub(r"[^\w.=,()-]", "_", f"{arm}-{self.boot}-{time.time():.0f}")
        facts: dict[str, Any] = {"arm": arm, "boot": self.boot, "clocks_before": clocks(), "warm_ups": {}}
        facts["bandwidth_before_gb_s"] = self.machine.probe_bandwidth()
        with self.start(self.recipe) as server:
            facts |= {"boot_s": time.monotonic() - begun, "log": server.log_path}
            client, tail = Client(server.url, server.api_key, timeout_s=self.timeout_s), LogTail(server.log_path)
            level = 0
            for wave in waves:
                if len(wave.requests) != level:
                    first, level = level == 0, len(wave.requests)
                    yield f"warm-up at concurrency {level}"
                    samples, facts["warm_ups"][level] = self._warm_up(client, tail, wave)
                    if first and self.check is not None:
                        self.check(server, samples)
                    if first and server.evidence_path.is_file():
                        write_atomic(self.run.path / f"evidence/{self.label}.json", server.evidence_path.read_bytes())
                    if first:
                        pace.booted(time.monotonic() - begun)
                    self.run.write_json(f"boots/{self.label}.json", facts)
                wave_begun = time.monotonic()
                failure = self._take(wave, client, tail)
                pace.took(arm, level, time.monotonic() - wave_begun)
                if failure is not None:
                    raise EngineError(
                        f"arm {arm}, boot {self.boot}: {failure}. {len(self.done)} samples are kept in "
                        f"{self.run.path}; start the bench again to go on. Log: {server.log_path}"
                    )
                yield "measure"
        facts |= {"bandwidth_after_gb_s": self.machine.probe_bandwidth(), "clocks_after": clocks()}
        self.run.write_json(f"boots/{self.label}.json", facts)

    def _warm_up(self, client: Client, tail: LogTail, wave: Wave) -> tuple[list[Sample], dict[str, Any]]:
        """Repeat a wave until nothing compiles and two in a row took the same time; gives up after `MAX_WARMUPS`."""
        times: list[float] = []
        compiled: list[int] = []
        samples: list[Sample] = []
        settled = False
        while not settled and len(times) < MAX_WARMUPS:
            client.flush_cache()
            tail.new()
            outcomes, wave_s = self._send(wave, client)
            for outcome in outcomes:
                if isinstance(outcome, RequestFailed):
                    raise outcome
                samples.append(outcome)
            times.append(_token_ms(samples[-len(wave.requests) :], wave_s))
            compiled.append(len(compile_lines(tail.new())))
            settled = len(times) > 1 and not compiled[-1] and abs(times[-1] - times[-2]) <= AGREE * min(times[-2:])
        if not settled:
            log.warning("no two warm-up answers agreed within %.0f %%: %s ms a token", 100 * AGREE, times)
        return samples, {"settled": settled, "tpot_ms": times, "compile_lines": compiled}

    def _take(self, wave: Wave, client: Client, tail: LogTail) -> RequestFailed | None:
        """Send a wave and record what is not recorded yet. Returns the failure that makes the server useless."""
        try:
            client.flush_cache()
        except RequestFailed as error:
            return error
        tail.new()
        swapped_in = psutil.swap_memory().sin
        outcomes, wave_s = self._send(wave, client)
        alarms = machine_alarms(self.machine, swapped_in, gpus=self.recipe.tp)
        lines, fatal = tail.new(), None
        for (number, prompt), outcome in zip(wave.requests, outcomes, strict=True):
            failed = outcome if isinstance(outcome, RequestFailed) else None
            sample = outcome.sample if isinstance(outcome, RequestFailed) else outcome
            if failed and failed.kind in _FATAL:
                fatal = failed
            key = (self.recipe.name, self.boot, number)
            if key in self.done or sample is None or (failed and failed.kind == "refused"):
                continue  # a wave that was cut short is sent again as a whole; a refused request measured nothing
            record = dict(zip(("arm", "boot", "request"), key, strict=True)) | {"booted": self.label}
            record |= {"wave": wave.index, "wave_s": wave_s, "concurrency": len(wave.requests)}
            record |= {"prompt": prompt.id, "kind": prompt.kind, "log": lines[-200:]}
            spoiled = reasons_spoiled(sample, prompt, lines, self.floor_ms) + alarms
            self.run.append(record | {"spoiled": spoiled, "sample": sample.to_json()})
            self.done.add(key)
        return fatal

    def _send(self, wave: Wave, client: Client) -> tuple[list[Sample | RequestFailed], float]:
        """All requests of a wave at once, and the seconds until the last answer was in. Parsing begins only then, so
        that no thread disturbs another."""

        def ask(request: tuple[int, Prompt]) -> Callable[[], Sample]:
            prompt = request[1]
            ordered = {"max_new_tokens": prompt.max_new_tokens, "ignore_eos": prompt.ignore_eos}
            return client.start_generate(prompt.token_ids, **ordered, **self.sampling)

        begun = time.monotonic()
        if len(wave.requests) == 1:
            waiting = [ask(wave.requests[0])]
        else:
            with ThreadPoolExecutor(len(wave.requests)) as pool:
                waiting = list(pool.map(ask, wave.requests))
        wave_s = time.monotonic() - begun
        outcomes: list[Sample | RequestFailed] = []
        for parse in waiting:
            try:
                outcomes.append(parse())
            except RequestFailed as error:
                outcomes.append(error)
        return outcomes, wave_s


def _token_ms(samples: Sequence[Sample], wave_s: float) -> float:
    """What a token took in a warm-up wave: of one request its TPOT. Of several the TPOT hangs on whose prompt was read
    in between, so the whole wave counts, reading included."""
    if len(samples) == 1:
        return samples[0].tpot_ms or samples[0].latency_ms or 0.0
    return 1000 * wave_s * len(samples) / max(1, sum(s.completion_tokens for s in samples))


class Pace:
    """Estimates the time left, from what was measured so far in this process."""

    def __init__(self, boots: Sequence[tuple[str, int]]) -> None:
        self._boots_ahead, self._ahead = len(boots), Counter[str]()
        for arm, requests in boots:
            self._ahead[arm] += requests
        self._request_s: dict[str, list[float]] = {}
        self._boot_s: list[float] = []

    def took(self, arm: str, requests: int, seconds: float) -> None:
        self._ahead[arm] -= requests
        self._request_s.setdefault(arm, []).append(seconds / requests)

    def booted(self, seconds: float) -> None:
        self._boots_ahead -= 1
        self._boot_s.append(seconds)

    def left_s(self) -> float | None:
        known = {arm: statistics.mean(times) for arm, times in self._request_s.items()}
        if not known:
            return None
        typical = statistics.mean(known.values())
        boot_s = statistics.mean(self._boot_s) if self._boot_s else 0.0
        return sum(n * known.get(arm, typical) for arm, n in self._ahead.items()) + boot_s * self._boots_ahead
