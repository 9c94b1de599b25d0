"""A run of several notebooks, read back: one chapter a notebook.

The report, the gate and the last notebook ask the same things of a run: which checks held, what did each arm give
against the arm it is compared with, what was not shown. They ask them here, of files alone, so that a run can be read
on another machine and months later. What a notebook has to do for that is in `notebook`.

A gain is a ratio inside one bench: same prompts, arms in turns, same afternoon. Two arms of different notebooks are
never divided by each other, which is also why the ladder comes from the one bench that has most of its rungs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkmoe import gsm8k_run, stats
from sparkmoe.errors import StoreError
from sparkmoe.gsm8k_compare import Comparison, compare
from sparkmoe.machine import Machine
from sparkmoe.notebook import CHECKS_SCHEMA, Check, results_root
from sparkmoe.notebooks_run import RUN_ENV
from sparkmoe.recipe import Recipe
from sparkmoe.results import Record, Run, by_boot
from sparkmoe.results import arms as arms_of
from sparkmoe.sample import accept_length
from sparkmoe.stats import Interval

STORY = (
    "00_preflight", "01_profile_decode", "02_baseline", "03_humming_moe", "04_fp8_lm_head", "05_mtp_nextn", "06_gsm8k",
    "07_beyond", "08_report",
)  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """One arm of one bench, one request at a time. `gain` is TPOT of `reference` ÷ TPOT of the arm, None for the
    reference itself; `ceiling_tok_s` and `predicted_gain` are what the notebook expected."""

    chapter: str
    bench: str
    name: str
    recipe: dict[str, Any]
    reference: str
    boots: int
    samples: int
    spoiled: int
    tpot_ms: Interval
    tok_s: Interval
    gain: Interval | None
    accept_length: float | None
    ceiling_tok_s: float | None
    predicted_gain: float | None

    @property
    def levers(self) -> tuple[str, str, bool]:
        """What is switched on: expert kernels, head, and whether there is a draft."""
        return self.recipe.get("moe", "auto"), self.recipe.get("head", "fp32"), bool(self.recipe.get("draft_steps"))


@dataclass(frozen=True)
class Bench:
    """One run folder with samples: the notebook's own (`name` is empty) or a part of it."""

    name: str
    run: Run

    @cached_property
    def records(self) -> list[Record]:
        return list(self.run.records())

    @property
    def arms(self) -> list[str]:
        """In the order of the bench's plan; a bench measures them in turns."""
        measured, planned = arms_of(self.records), self.run.manifest.get("plan", {}).get("arms", {})
        return sorted(measured, key=[*planned, *measured].index)

    @property
    def graded(self) -> list[str]:
        """Arms that answered problems with a known result."""
        return arms_of([record for record in self.records if record.get("problem") is not None])

    @property
    def reference(self) -> str:
        named = self.run.manifest.get("reference")
        return str(named or ("baseline" if "baseline" in self.arms else self.arms[0]))

    def values(self, arm: str, metric: str) -> list[list[float]]:
        """A metric of the good samples that were asked one at a time, grouped by boot."""
        alone = [record for record in self.records if record.get("concurrency", 1) == 1]
        return by_boot(alone, arm, metric)[0]

    def accept_length(self, arm: str) -> float | None:
        """Tokens a verify step yields over all good samples; None where no draft was at work."""
        good = [r["sample"] for r in self.records if r["arm"] == arm and not r.get("spoiled")]
        length = accept_length(sample.get("accept_histogram") for sample in good)
        return None if math.isnan(length) else length

    def boot_facts(self, arm: str) -> list[dict[str, Any]]:
        """What `bench` wrote about each boot of an arm (bandwidth before and after, seconds to boot)."""
        facts = [json.loads(path.read_text()) for path in sorted((self.run.path / "boots").glob("*.json"))]
        return [fact for fact in facts if fact["arm"] == arm]


class Chapter:
    """What one notebook left. `executed` is its line in the run's summary, None where it ran by itself."""

    def __init__(self, run: Run, executed: dict[str, Any] | None = None) -> None:
        self.run, self.executed = run, executed
        self.manifest = run.manifest if run.path.exists() else {}  # some notebooks fail before they open a run
        self.name = str(self.manifest.get("notebook", run.id))
        self._checks = self._read_checks()

    def _read_checks(self) -> dict[str, Any]:
        path = self.run.path / "checks.json"
        if not path.is_file():
            return {"finished": False, "checks": [], "not_shown": {}}
        try:
            found = json.loads(path.read_text())
            schema = found["schema"]
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{path} holds no table of checks; run the notebook again.") from None
        if schema != CHECKS_SCHEMA:
            raise StoreError(f"{path} has schema {schema!r}; this version reads {CHECKS_SCHEMA!r}.")
        return {"finished": True, "not_shown": {}} | found

    @property
    def checks(self) -> list[Check]:
        return [Check(**check) for check in self._checks["checks"]]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.required and not check.ok]

    @property
    def finished(self) -> bool:
        """Whether the notebook reached its last cell, the table of checks."""
        return bool(self._checks["finished"])

    @property
    def error(self) -> str | None:
        """Why its execution ended early, in one line."""
        return (self.executed or {}).get("error")

    @property
    def ok(self) -> bool:
        return self.finished and not self.failed and not self.error

    @property
    def not_shown(self) -> dict[str, str]:
        return dict(self._checks["not_shown"])

    @property
    def verdict(self) -> str:
        return str(self.manifest.get("verdict", ""))

    @property
    def benchmark(self) -> str:
        """What its questions are of; empty where it asked none or did not say."""
        return str(self.manifest.get("benchmark", ""))

    @cached_property
    def benches(self) -> list[Bench]:
        """The notebook's run folder and the parts inside it, those that hold samples."""
        parts = sorted(path.parent for path in self.run.path.glob("*/manifest.json"))
        benches = [Bench("", self.run), *(Bench(part.name, Run.open(part)) for part in parts)]
        return [bench for bench in benches if bench.run.samples_path.exists() and bench.records]

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """Plotly figures as JSON, in the order in which the notebook showed them; those of its parts behind them."""
        found: dict[str, dict[str, Any]] = {}
        parts = [(bench.run.path, bench.run.manifest) for bench in self.benches if bench.name]
        for path, manifest in [(self.run.path, self.manifest), *parts]:
            for name in manifest.get("figures", []):
                found[name] = json.loads((path / "figures" / f"{name}.json").read_text())
        return found

    @cached_property
    def verdicts(self) -> list[tuple[str, str, Comparison]]:
        """(base arm, new arm, comparison) where two arms answered the same problems."""
        made = []
        for bench in self.benches:
            if len(graded := bench.graded) > 1:
                base = bench.reference if bench.reference in graded else graded[0]
                answers = {arm: gsm8k_run.read(bench.run, arm) for arm in graded}
                made += [(base, arm, compare(answers[base], answers[arm])) for arm in graded if arm != base]
        return made

    def arms(self) -> list[Arm]:
        """Every arm that was timed one request at a time, in the order of the benches."""
        return [arm for bench in self.benches for arm in self._arms(bench)]

    def _arms(self, bench: Bench) -> list[Arm]:
        manifest, base = bench.run.manifest, bench.values(bench.reference, "tpot_ms")
        recipes = manifest.get("plan", {}).get("arms", {})
        found = []
        for name in bench.arms:
            times = bench.values(name, "tpot_ms")
            if not times:
                continue
            mine = [record for record in bench.records if record["arm"] == name]
            found.append(
                Arm(
                    chapter=self.name,
                    bench=bench.name,
                    name=name,
                    recipe=recipes.get(name, {}),
                    reference=bench.reference,
                    boots=len(times),
                    samples=sum(map(len, times)),
                    spoiled=sum(bool(record.get("spoiled")) for record in mine),
                    tpot_ms=stats.summarize(times),
                    tok_s=stats.summarize([[1000 / ms for ms in boot] for boot in times]),
                    gain=stats.ratio(base, times) if base and name != bench.reference else None,
                    accept_length=bench.accept_length(name),
                    ceiling_tok_s=manifest.get("ceiling_tok_s", {}).get(name),
                    predicted_gain=manifest.get("predicted_gain", {}).get(name),
                )
            )
        return found


def chapters(run: Run | Path | str, *, root: Path | str = "results") -> list[Chapter]:
    """The chapters of a run by folder or id, in order; of a notebook's own folder, that one. StoreError if none."""
    opened = run if isinstance(run, Run) else Run.open(run, root=root)
    if "notebook" in opened.manifest:
        return [Chapter(opened)]
    summary = opened.path / "run.json"
    executed = json.loads(summary.read_text())["notebooks"] if summary.is_file() else []
    by_name = {line["name"]: line for line in executed}
    names = sorted({path.parent.name for path in opened.path.glob("*/manifest.json")} | set(by_name))
    if not names:
        raise StoreError(f"The run {opened.path} holds no notebook's data: nothing was executed, or it was moved.")
    return [Chapter(Run(opened.path / name), by_name.get(name)) for name in names]


def story(run: str = "") -> list[Chapter]:
    """What the last notebook reports on: a run by folder or id; without one the other notebooks of the run it is part
    of; without any the latest data of every notebook. Its own chapter is left out. StoreError for a missing run."""
    inside, root = os.environ.get(RUN_ENV), results_root()
    root = root.parent if inside else root
    given = run or inside
    others = [c for c in chapters(given, root=root) if c.name != STORY[-1]] if given else []
    return others or [c for c in latest(root) if c.name != STORY[-1]]


def latest(root: Path | str) -> list[Chapter]:
    """Of every notebook the last run under `root` that finished, alone or in a run of several."""
    newest: dict[str, tuple[float, Run]] = {}
    for path in [*Path(root).glob("*/manifest.json"), *Path(root).glob("*/*/manifest.json")]:
        found = Run(path.parent)
        manifest = found.manifest
        name, created = manifest.get("notebook"), float(manifest["created_unix_s"])
        if name and (name not in newest or created > newest[name][0]) and Chapter(found).finished:
            newest[name] = created, found
    return [Chapter(newest[name][1]) for name in sorted(newest)]


def ladder(found: Sequence[Chapter]) -> list[Arm]:
    """The bench with most different sets of levers: the reference, then the fastest arm of each, slowest first; [] if
    none was timed. Of two equal benches the later notebook's counts. Arms that were graded did not take turns."""
    best: dict[tuple[str, str, bool], Arm] = {}
    for chapter in found:
        for bench in (bench for bench in chapter.benches if not bench.graded):
            rungs: dict[tuple[str, str, bool], Arm] = {}
            for arm in chapter._arms(bench):
                if arm.levers not in rungs or arm.tpot_ms.estimate < rungs[arm.levers].tpot_ms.estimate:
                    rungs[arm.levers] = arm
            best = rungs if len(rungs) >= len(best) else best
    return sorted(best.values(), key=lambda arm: (arm.name != arm.reference, -arm.tpot_ms.estimate))


def nearest(found: Sequence[Chapter], recipe: Recipe, machine: Machine) -> Arm | None:
    """The timed arm with the levers of `recipe`, or with those of the nearest one that `machine` can run; of the
    ladder's bench if it is there, else of the last notebook that has one."""
    wanted = recipe.nearest(machine)
    levers = (wanted.moe, wanted.head, bool(wanted.draft_steps))
    arms = [arm for chapter in found for arm in chapter.arms() if arm.levers == levers]
    return next((arm for arm in ladder(found) if arm.levers == levers), arms[-1] if arms else None)


def keep(found: Sequence[Chapter]) -> Arm | None:
    """The arm to put into production: the fastest one whose gain is told apart from none, else the reference."""
    rungs = ladder(found)
    faster = [arm for arm in rungs if arm.gain and arm.gain.estimate > 1 and arm.gain.excludes(1)]
    plain = [arm for arm in rungs if arm.gain is None]
    return min(faster or plain or rungs, key=lambda arm: arm.tpot_ms.estimate, default=None)


def verdicts(found: Sequence[Chapter]) -> list[tuple[Chapter, str, str, Comparison]]:
    """(chapter, base arm, new arm, comparison) of every graded bench with two arms on shared problems."""
    return [(chapter, *verdict) for chapter in found for verdict in chapter.verdicts]
