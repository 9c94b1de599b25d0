"""Measure recipes against each other: arms × boots × requests, in an order that does not favour anybody.

Two boots of the same recipe differ, by up to 20 % where kernels are tuned while the server starts, and a machine drifts
during an afternoon. So no arm is measured in one piece: every round boots each arm once, in a seeded random order, and
within a round all arms answer the same prompts in the same order. What comes out is a number per arm and *boot*.

A sample is taken only from a server that has settled (warm-up with the measured sampling until nothing compiles any
more and two answers took the same time), with an empty prefix cache. Still something can go wrong during a request, and
then the time is true but means something else. Such a sample is kept, with the reasons, and left out of every figure: a
kernel compiled in its window, cached tokens, an error, an answer of another length than ordered, a step faster than the
memory could deliver its bytes (so some clock or count is wrong), a GPU stuck at half its clock, memory running out.

Everything is written as soon as it is known. A run that was killed goes on where it stopped: call `bench` again with
the same arguments and it measures what is missing.
"""

from __future__ import annotations

import json
import logging
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from sparkmoe.checkpoint import resolve
from sparkmoe.client import Client, RequestFailed, Sample
from sparkmoe.conditions import clocks
from sparkmoe.engine import Engine
from sparkmoe.errors import DataError, EngineError, MachineError, StoreError
from sparkmoe.judge import LogTail, compile_lines, levels, machine_alarms, reasons_spoiled, spoiled_by
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run, jsonable, write_atomic
from sparkmoe.workload import Prompt, Workload

__all__ = ["Progress", "Server", "bench", "levels", "show", "spoiled_by"]

T = TypeVar("T")
log = logging.getLogger(__name__)

AGREE = 0.10  # two warm-up answers agree if their times per token differ by no more
MAX_WARMUPS = 12
_FATAL = ("refused", "died", "stalled")  # nothing more can be measured on this server


class Server(Protocol):
    """What `bench` needs of an engine that has been started."""

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
class Progress:
    """Where a bench is. `left_s` is the estimated time left, None until something was measured in this process."""

    done: int
    total: int
    arm: str
    boot: int
    doing: str
    left_s: float | None = None


@dataclass(frozen=True)
class Wave:
    """Requests that are sent at the same moment: (number within the boot, prompt) each."""

    index: int
    requests: tuple[tuple[int, Prompt], ...]


def bench(
    run: Run,
    arms: Sequence[Recipe | str],
    workload: Workload,
    *,
    machine: Machine,
    model: Path | str | None = None,
    boots: int = 3,
    repeats: int = 1,
    concurrency: Sequence[int] = (1,),
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout_s: float = 300.0,
    floor_ms: Mapping[str, float] | None = None,
    check: Check | None = None,
    boot_with: BootWith | None = None,
    running: Engine | None = None,
) -> Iterator[Progress]:
    """Measure every arm in `boots` boots, each prompt `repeats` times at each level of `concurrency`, into `run`.

    `sampling` is passed to `Client.generate` (greedy if not given). `floor_ms` is, per arm, the least time that a
    decode step can take here (`step_ms` of `roofline.predict` at the nominal bandwidth). In every boot
    `check(server, warm_up_samples)` runs before anything is measured, and may raise, as `NotEngaged`. `running` is a
    server of one of the arms that was started to make the prompts with: that arm comes first in the first round, with
    this server as its boot, so that a model is loaded once less; it is ended with it. Yields a `Progress` before each
    boot and warm-up and after each wave of requests.

    Raises, before the first boot: RecipeError, MachineError, DataError or StoreError for arms, concurrency or prompts
    that do not fit, or a run begun with others. Later: EngineError when a server dies; what was measured stays.
    """
    recipes = {r.name: r for r in (Recipe.named(arm) if isinstance(arm, str) else arm for arm in arms)}
    sampling = {"temperature": 0.0} | dict(sampling or {})
    if len(recipes) < max(1, len(arms)):
        raise DataError(f"a bench needs arms with different names; found {len(arms)}, {len(recipes)} different")
    _refuse_impossible(recipes.values(), workload, machine, boots, repeats, concurrency)
    plan = {"arms": recipes, "boots": boots, "repeats": repeats, "concurrency": list(concurrency), "seed": seed}
    folder = resolve(model, machine) if boot_with is None else Path(model or "another server's model")
    commands = {name: recipe.command(machine, model=folder, port=0).shell() for name, recipe in recipes.items()}
    conditions = {"machine": machine, "model": folder, "commands": commands, "seeds": {"bench": seed}}
    _same_plan(run, plan | {"sampling": sampling, "prompt_hash": workload.sha256}, conditions, workload)

    def boot_engine(recipe: Recipe) -> AbstractContextManager[Server]:
        return Engine(recipe, machine, model, log_dir=run.folder("logs"), show=False)

    def start(recipe: Recipe) -> AbstractContextManager[Server]:
        up = running is not None and running.recipe == recipe and running.running()
        return running if up and running is not None else (boot_with or boot_engine)(recipe)

    done, todo, total = run.done(), [], 0
    for boot in range(boots):
        waves = _waves(workload, boot, repeats, concurrency, seed)
        order = _shuffled(recipes, seed, "arms", boot)
        for arm in sorted(order, key=lambda arm: boot > 0 or running is None or running.recipe.name != arm):
            total += sum(len(w.requests) for w in waves)
            if missing := [w for w in waves if any((arm, boot, n) not in done for n, _ in w.requests)]:
                todo.append((boot, arm, missing))
    pace = _Pace([(arm, sum(len(w.requests) for w in waves)) for _, arm, waves in todo])
    for boot, arm, waves in todo:
        floor = (floor_ms or {}).get(arm)
        one = _Boot(run, recipes[arm], boot, done, machine, sampling, timeout_s, floor, check, start)
        for doing in one.measure(waves, pace):
            yield Progress(len(done), total, arm, boot, doing, pace.left_s())
    run.update(clocks_after=clocks())


def show(progress: Iterable[Progress]) -> None:
    """Run a bench to its end behind a progress bar that tells arm, boot and time left."""
    from tqdm.auto import tqdm

    with tqdm(bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} {elapsed}{postfix}") as bar:
        for now in progress:
            bar.total, bar.n = now.total, now.done
            bar.set_description(f"{now.arm}, boot {now.boot}: {now.doing}", refresh=False)
            bar.set_postfix_str("" if now.left_s is None else f"about {now.left_s / 60:.0f} min left", refresh=True)


@dataclass
class _Boot:
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

    def measure(self, waves: Sequence[Wave], pace: _Pace) -> Iterator[str]:
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
        lines, alarms, fatal = tail.new(), machine_alarms(self.machine, swapped_in), None
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


def _waves(workload: Workload, boot: int, repeats: int, concurrency: Sequence[int], seed: int) -> list[Wave]:
    """The requests of one boot, the same for every arm. Each prompt comes at least `repeats` times at each level; the
    last wave of a repeat is filled up with prompts from its beginning."""
    waves: list[Wave] = []
    number = 0
    for level in concurrency:
        for repeat in range(repeats):
            prompts = _shuffled(list(workload), seed, "prompts", boot, level, repeat)
            prompts += prompts[: -len(prompts) % level]
            for first in range(0, len(prompts), level):
                members = prompts[first : first + level]
                waves.append(Wave(len(waves), tuple(enumerate(members, number))))
                number += level
    return waves


def _shuffled(items: Iterable[T], *seeds: Any) -> list[T]:
    listed = list(items)
    random.Random(repr(seeds)).shuffle(listed)
    return listed


def _refuse_impossible(
    recipes: Iterable[Recipe], workload: Workload, machine: Machine, boots: int, repeats: int, levels: Sequence[int]
) -> None:
    if min(boots, repeats, len(levels), *levels) < 1 or len(set(levels)) < len(levels):
        raise DataError(f"boots={boots}, repeats={repeats}, concurrency={[*levels]}: at least 1 each, no level twice")
    most = max(levels)
    if most > machine.max_concurrency:
        raise MachineError(f"concurrency {most} is beyond {machine.max_concurrency}, the limit of this machine")
    if most > len(workload):
        raise DataError(f"concurrency {most} needs as many different prompts; the workload has {len(workload)}")
    for recipe in recipes:
        recipe.require(machine)


def _same_plan(run: Run, plan: Mapping[str, Any], conditions: Mapping[str, Any], workload: Workload) -> None:
    """Write plan, conditions and prompts into a new run; refuse to go on with a run begun with another plan."""
    wanted = json.loads(json.dumps(jsonable(plan)))
    begun = run.manifest.get("plan")
    if begun is None:
        Workload.write(workload, run.path / "prompts.jsonl")
        run.update(plan=wanted, prompt_hash=workload.sha256, **conditions)
    elif begun != wanted:
        differing = [key for key in wanted if begun.get(key) != wanted[key]]
        raise StoreError(f"{run.path} was begun with another {', '.join(differing)}; start a new run for these")
    else:
        Workload.load(run.path / "prompts.jsonl", workload.sha256)


class _Pace:
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
