"""Measure recipes against each other: arms × boots × requests, in an order that does not favour anybody.

Two boots of the same recipe differ, by up to 20 % where kernels are tuned while the server starts, and a machine drifts
during an afternoon. So no arm is measured in one piece: every round boots each arm once, in a seeded random order, and
within a round all arms answer the same prompts in the same order. What comes out is a number per arm and *boot*.

A sample is taken only from a server that has settled (`boot`: warm-up until nothing compiles any more and two answers
took the same time), with an empty prefix cache. Still something can go wrong during a request, and then the time is
true but means something else. Such a sample is kept, with the reasons, and left out of every figure: a kernel compiled
in its window, cached tokens, an error, an answer of another length than ordered, a step faster than the memory could
deliver its bytes (so some clock or count is wrong), a GPU stuck at half its clock, memory running out (`judge`).

Everything is written as soon as it is known. A run that was killed goes on where it stopped: call `bench` again with
the same arguments and it measures what is missing.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from sparkmoe.boot import Boot, BootWith, Check, Pace, Server, Wave
from sparkmoe.checkpoint import resolve
from sparkmoe.conditions import clocks
from sparkmoe.engine import Engine
from sparkmoe.errors import DataError, MachineError, StoreError
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run, jsonable
from sparkmoe.workload import Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Where a bench is. `left_s` is the estimated time left, None until something was measured in this process."""

    done: int
    total: int
    arm: str
    boot: int
    doing: str
    left_s: float | None = None


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
    pace = Pace([(arm, sum(len(w.requests) for w in waves)) for _, arm, waves in todo])
    for boot, arm, waves in todo:
        floor = (floor_ms or {}).get(arm)
        one = Boot(run, recipes[arm], boot, done, machine, sampling, timeout_s, floor, check, start)
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


def levels(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per arm and concurrency: throughput in tok/s (a wave's tokens by its time), TTFT and TPOT percentiles.

    `samples` counts the good ones, `spoiled` those left out. A wave with a spoiled sample gives no throughput.
    """
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["arm"], record["concurrency"]), []).append(record)
    rows = []
    for (arm, level), found in groups.items():
        good = [r for r in found if not r["spoiled"]]
        waves: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for r in good:
            waves.setdefault((r["booted"], r["wave"]), []).append(r)
        whole = [w for w in waves.values() if len(w) == level]
        rates = [sum(r["sample"]["completion_tokens"] for r in w) / max(r["wave_s"] for r in w) for w in whole]
        row: dict[str, Any] = {"arm": arm, "concurrency": level, "samples": len(good)}
        row |= {"spoiled": len(found) - len(good), "tok_s": statistics.median(rates) if rates else None}
        for metric in ("ttft_ms", "tpot_ms"):
            values = pd.Series([r["sample"][metric] for r in good], dtype=float)
            row |= {f"{metric}_p{p}": values.quantile(p / 100) for p in (50, 90, 99)}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["arm", "concurrency"], ignore_index=True) if rows else pd.DataFrame()


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
