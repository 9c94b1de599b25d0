"""Did anything get worse? Asked of every run in CI, so the answer must not depend on how busy the runner was.

A time alone cannot tell a slow change from a slow machine. Two things can. Arms of one bench ran in turns on the same
machine, so the *ratio* of their times hardly knows how fast it was: that is the metric for every lever. And the memory
bandwidth is probed around every boot, so where the reference itself got slower, what the probe lost is taken off before
it counts; if nothing is left, the row says "slow machine" and does not fail. A machine that loses speed without losing
bandwidth (a core taken away) looks like a slow change, which is the safe side.

A machine whose load changes within minutes spoils ratios too: the arm that was measured in the bad minute looks slow.
But a slow change makes every answer slower by the same factor, while a disturbance scatters them. So where the
quartiles of an arm's times lie further apart than `DISTURBED`, and did not in the baseline, its row is to look at.

Every metric has a limit, what nobody would accept, and a noise floor, what two runs of the same thing differ by. A row
fails where the loss exceeds both and its interval excludes no change. Where an arm had a single boot, the interval
knows nothing of other boots, so the floor is higher: a quick run finds what is broken, a full run what got slower.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkmoe import baseline as baselines
from sparkmoe import paired, stats
from sparkmoe.chapters import Chapter, chapters
from sparkmoe.errors import DataError, StoreError
from sparkmoe.outcome import Outcome, Row, State
from sparkmoe.results import Run, write_atomic
from sparkmoe.stats import Interval

SCHEMA = "sparkmoe.gate/1"
THRESHOLDS = Path(__file__).parent / "gate.toml"
METRICS = ("engagement", "checks", "accept_length", "tpot_ratio", "tpot", "accuracy", "memory", "start")
ENGAGED = " is engaged"
DISTURBED = 2.0
"""Upper ÷ lower quartile of an arm's times. 33 arms measured on two busy cores had up to 1.5; three that were measured
while other programs kept both cores busy had 2.4 and more."""
Numbers = Mapping[str, Any]


@dataclass(frozen=True)
class Limit:
    """Fractions: the loss that fails, and the noise floor below which nothing is a finding, over boots and where an arm
    had only one (default: the same)."""

    limit: float = 0.0
    noise: float = 0.0
    noise_one_boot: float | None = None

    def most(self, *, one_boot: bool = False) -> float:
        """The largest loss that passes."""
        one = self.noise if self.noise_one_boot is None else self.noise_one_boot
        return max(self.limit, one if one_boot else self.noise)


def thresholds(path: Path | str | None = None) -> dict[str, Limit]:
    """Limits by metric from a TOML file (default: the shipped one). Raises DataError that names what does not fit."""
    file = Path(path or THRESHOLDS)
    try:
        content = tomllib.loads(file.read_text())
    except OSError as error:
        raise DataError(f"cannot read the thresholds {file}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{file} is no TOML: {error}") from None
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise StoreError(f"{file} has schema {schema!r}; this version reads {SCHEMA!r}")
    limits = {}
    for name, values in content.items():
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(METRICS)}"
            raise DataError(f"{file}: no metric {name!r}; {hint}")
        wrong = [
            key
            for key, value in (values if isinstance(values, dict) else {name: values}).items()
            if key not in Limit.__dataclass_fields__ or not isinstance(value, (int, float)) or not 0 <= value < 10
        ]
        if wrong:
            raise DataError(f"{file}, [{name}]: {', '.join(wrong)}: only limit, noise, noise_one_boot, each a fraction")
        limits[name] = Limit(**values)
    return limits


def gate(run: Run, baseline: Numbers, limits: Mapping[str, Limit]) -> Outcome:
    """Hold a run against a baseline (`baseline.load`), metric by metric."""
    found = chapters(run)
    now = baselines.summary(run, found)
    other = [key for key in ("machine", "model") if now[key] != baseline[key]]
    lost = 1.0
    if now["bandwidth_gb_s"] and baseline["bandwidth_gb_s"]:
        lost = baseline["bandwidth_gb_s"] / now["bandwidth_gb_s"]
        machine = f"Bandwidth probe: {now['bandwidth_gb_s']:.1f} GB/s, baseline {baseline['bandwidth_gb_s']:.1f} GB/s."
    else:
        machine = "No bandwidth probe in one of the two runs: a slow machine cannot be told apart."
    if other:
        machine += f" Not the same {' and '.join(other)}: only checks and accuracy are compared."
    judge = _Judge(limits, max(1.0, lost), f"another {' and '.join(other)}" if other else "")
    rows = [row for chapter in found for row in judge.chapter(chapter, now, baseline)]
    for name in baseline["notebooks"]:
        if name not in now["notebooks"]:
            rows.append(Row(name, "checks", "the notebook ran", "skip", "no", "yes", "not part of this run"))
    return Outcome(run.id, baseline["run"], machine, [row for row in rows if row.metric in limits])


def write(outcome: Outcome, run: Run) -> None:
    """Leave `gate.md` and `gate.xml` in the run's folder."""
    write_atomic(run.path / "gate.md", outcome.markdown())
    write_atomic(run.path / "gate.xml", outcome.junit())


@dataclass(frozen=True)
class _Judge:
    limits: Mapping[str, Limit]
    lost: float
    void: str

    def chapter(self, chapter: Chapter, now: Numbers, base: Numbers) -> Iterator[Row]:
        name, mine = chapter.name, now["notebooks"][chapter.name]
        for check in chapter.checks:
            if check.required:
                metric = "engagement" if check.what.endswith(ENGAGED) else "checks"
                state: State = "pass" if check.ok else "fail"
                yield Row(name, metric, check.what, state, check.found, check.expected, check.advice)
        if not chapter.finished and not chapter.failed:
            why = chapter.error or "it stopped before"
            yield Row(name, "checks", "the last cell was reached", "fail", "no", "yes", why)
        theirs = base["notebooks"].get(name)
        if theirs is None:
            yield Row(name, "checks", "baseline", "skip", "new", "–", "the baseline has no such notebook")
            return
        made = {check.what for check in chapter.checks}
        for what in theirs["checks"]:
            if what not in made:
                metric = "engagement" if what.endswith(ENGAGED) else "checks"
                yield self._absent(chapter, metric, what)
        for bench, numbers in theirs["benches"].items():
            for arm in numbers["arms"]:
                label = f"{arm} ({bench})" if bench else arm
                if arm not in mine["benches"].get(bench, {"arms": {}})["arms"]:
                    yield self._absent(chapter, "tpot_ratio", label)
                else:
                    yield from self._arm(name, label, arm, mine["benches"][bench], numbers)
        for arm, server in theirs["servers"].items():
            yield from self._server(name, arm, mine["servers"].get(arm, {}), server)

    @staticmethod
    def _absent(chapter: Chapter, metric: str, what: str) -> Row:
        """Gone from a notebook that went through: a failure. From one that ended early: explained by its end."""
        if chapter.finished:
            return Row(chapter.name, metric, what, "fail", "absent", "as in the baseline", "this was dropped")
        return Row(chapter.name, metric, what, "skip", "absent", "as in the baseline", "the notebook ended before it")

    def _arm(self, notebook: str, label: str, arm: str, now: Numbers, base: Numbers) -> Iterator[Row]:
        mine, theirs = now["arms"][arm], base["arms"][arm]
        void = self.void or ("" if now["prompts"] == base["prompts"] else "other prompts")
        if theirs["accept_length"] and mine["accept_length"]:
            change = stats.ratio(theirs["accept_length"], mine["accept_length"])
            pair = [stats.summarize(numbers["accept_length"]).estimate for numbers in (mine, theirs)]
            yield self._row(notebook, "accept_length", label, change, *(f"{x:.2f}" for x in pair), void=void)
        if theirs["tpot_ms"] and mine["tpot_ms"]:
            scattered = _scattered(now, base, arm) or _scattered(now, base, now["reference"])
            if arm == base["reference"] == now["reference"]:
                change = stats.ratio(mine["tpot_ms"], theirs["tpot_ms"])
                pair = [stats.summarize(numbers["tpot_ms"]).estimate for numbers in (mine, theirs)]
                texts = [f"{x:.2f} ms" for x in pair]
                yield self._row(notebook, "tpot", label, change, *texts, void=void, lost=self.lost, scattered=scattered)
            elif base["reference"] == now["reference"]:
                gains = [
                    stats.ratio(b["arms"][b["reference"]]["tpot_ms"], b["arms"][arm]["tpot_ms"]) for b in (now, base)
                ]
                change = _divided(gains[1], gains[0])
                yield self._row(
                    notebook,
                    "tpot_ratio",
                    label,
                    change,
                    *(f"{g.text()} ×" for g in gains),
                    void=void,
                    scattered=scattered,
                )
        shared = [problem for problem in theirs["correct"] if problem in mine["correct"]]
        if shared:
            table = paired.PairedTable.of([theirs["correct"][p] for p in shared], [mine["correct"][p] for p in shared])
            yield self._accuracy(notebook, label, table)

    def _row(
        self, notebook: str, metric: str, what: str, change: Interval, found: str, base: str, *,
        void: str = "", lost: float = 1.0, scattered: str = "",
    ) -> Row:  # fmt: skip
        """`change` is a ratio that grows when things get worse, before what the machine `lost` is taken off."""
        most = self.limits.get(metric, Limit()).most(one_boot=change.unit == "request")
        expected, left = f"{base}, at most {most:.0%} worse", change.estimate / lost
        row = (notebook, metric, what)
        loss = f"{change.estimate - 1:+.1%} [{change.low - 1:+.1%}, {change.high - 1:+.1%}]" if change.known else ""
        shown = f"{found}, {loss or f'{change.estimate - 1:+.1%}'} for the worse"
        if void:
            return Row(*row, "skip", found, expected, f"not compared: {void}")
        if change.estimate <= 1 + most:
            return Row(*row, "pass", found, expected)
        if left <= 1 + most:
            return Row(*row, "look", shown, expected, f"slow machine: its bandwidth lost {lost - 1:.0%} as well")
        if scattered:
            return Row(*row, "look", shown, expected, scattered)
        if change.n > 1 and not (change.known and change.low / lost > 1):
            return Row(*row, "look", shown, expected, "not told apart from no change")
        return Row(*row, "fail", shown, expected)

    def _accuracy(self, notebook: str, what: str, table: paired.PairedTable) -> Row:
        change, most = paired.difference(table), self.limits.get("accuracy", Limit()).most()
        right = table.both + table.only_new, table.both + table.only_base
        found = f"{right[0]} of {table.n}, {change.text(2, 100)} points"
        expected = f"{right[1]} of {table.n}, at most {100 * most:.1f} points fewer"
        row = (notebook, "accuracy", what)
        if change.estimate >= -most:
            return Row(*row, "pass", found, expected)
        if change.high >= 0:
            return Row(*row, "look", found, expected, "not told apart from no change")
        return Row(*row, "fail", found, expected)

    def _server(self, notebook: str, arm: str, mine: Numbers, theirs: Numbers) -> Iterator[Row]:
        for metric, key, scale, unit in (("memory", "memory_bytes", 1e9, "GB"), ("start", "ready_s", 1.0, "s")):
            now, before = mine.get(key), theirs.get(key)
            if now and before:
                change = Interval(now / before, math.nan, math.nan, 0.95, "none", 1, "boot")
                texts = [f"{value / scale:.2f} {unit}" for value in (now, before)]
                lost = self.lost if metric == "start" else 1.0
                yield self._row(notebook, metric, arm, change, *texts, void=self.void, lost=lost)


def _scattered(now: Numbers, base: Numbers, arm: str) -> str:
    """Why an arm's times say little; "" where they lie together, or lay as far apart in the baseline."""
    spreads = []
    for bench in (now, base):
        boots = [boot for boot in bench["arms"].get(arm, {}).get("tpot_ms", []) if len(boot) > 3]
        ends = [np.percentile(boot, (25, 75)) for boot in boots]
        spreads.append(max((float(high / low) for low, high in ends), default=1.0))
    if spreads[0] <= max(DISTURBED, spreads[1]):
        return ""
    apart = f"{spreads[0]:.1f} × apart, {spreads[1]:.1f} × in the baseline"
    return f"disturbed machine: quartiles of {arm} {apart}; measure again"


def _divided(a: Interval, b: Interval) -> Interval:
    """a ÷ b of two independent ratios, half widths on the logarithm added in quadrature."""
    estimate = a.estimate / b.estimate
    if not (a.known and b.known):
        return Interval(estimate, math.nan, math.nan, a.level, "none", min(a.n, b.n), a.unit)
    half = math.hypot(*(math.log(i.high / i.low) / 2 for i in (a, b)))
    ends = estimate * math.exp(-half), estimate * math.exp(half)
    return Interval(estimate, *ends, a.level, "quadrature on logarithms", min(a.n, b.n), a.unit)
