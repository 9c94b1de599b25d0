"""Does speed cost accuracy? Two arms, the same questions, compared one by one.

Two accuracies on 1,319 questions differ by chance by a point or so. What says more is on how many questions exactly one
arm is right. So the comparison starts from the paired table, and "not told apart" is not the end of it: whether the new
arm is shown to lose less than a margin is a question of its own, and on few questions the answer is no.

Speed has a trap too. A lever that makes tokens 1.4 times faster saves less than that if the model now writes more of
them, and speculative decoding or another precision can change how long an answer gets. So the rate of decoding, the
length of the answers and the total time of decoding are given apart; the last follows from the other two.

Intervals of times are over questions. Both arms ran in one boot each, and no resampling of questions can tell how far
the next boot will be off: for that there is `bench`.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

from sparkmoe.errors import DataError
from sparkmoe.gsm8k_run import Record
from sparkmoe.paired import (
    LengthChange,
    NonInferiority,
    PairedTable,
    difference,
    length_change,
    mcnemar_p,
    non_inferiority,
)
from sparkmoe.sample import accept_length
from sparkmoe.stats import RESAMPLES, Floats, Interval

MARGIN = 0.01
_NOTE = "one boot an arm: the interval covers questions only; boots may differ by more"


@dataclass(frozen=True)
class Totals:
    """What a comparison comes down to, and all that is known of a published one: the paired table, output tokens and
    decode rate (tok/s) of both arms."""

    table: PairedTable
    base_tokens: float
    new_tokens: float
    base_tok_s: float
    new_tok_s: float

    @property
    def rate_gain(self) -> float:
        """How many times faster the new arm makes tokens."""
        return self.new_tok_s / self.base_tok_s

    @property
    def length_ratio(self) -> float:
        """Output tokens of new ÷ base."""
        return self.new_tokens / self.base_tokens

    @property
    def time_gain(self) -> float:
        """How many times less time the new arm spends decoding: the gain in rate, less what it talks more."""
        return self.rate_gain / self.length_ratio


# Ling-3.0-flash-fp4 on one DGX Spark, all 1,319 questions, 5-shot, thinking: baseline against all three levers.
PUBLISHED = Totals(PairedTable(1264, 14, 13, 28), 748_286, 801_260, 37.81, 53.89)


@dataclass(frozen=True)
class Measure:
    """One quantity in both arms and new ÷ base, each with its interval over the same questions."""

    name: str
    unit: str
    base: Interval
    new: Interval
    ratio: Interval


@dataclass(frozen=True)
class Comparison:
    """What `compare` found on the questions that both arms answered (`base` and `new`, in the same order).

    `measures` hold times only where both arms asked one question at a time. `left_out` counts questions that one arm
    lacks or failed to answer."""

    base: tuple[Record, ...]
    new: tuple[Record, ...]
    left_out: int
    table: PairedTable
    p_value: float
    difference: Interval
    non_inferiority: NonInferiority
    length: LengthChange
    measures: tuple[Measure, ...]

    @property
    def flips(self) -> list[tuple[Record, Record]]:
        """The questions on which exactly one arm is right."""
        return [(b, n) for b, n in zip(self.base, self.new, strict=True) if b.correct != n.correct]

    def by_question(self) -> pd.DataFrame:
        """One row a question: status, extracted number, output tokens, accept length and times of both arms."""
        columns = ("completion_tokens", "tpot_ms", "latency_ms")
        rows = []
        for b, n in zip(self.base, self.new, strict=True):
            row: dict[str, Any] = {"request": b.request, "question": b.question, "reference": b.reference}
            for arm, record in (("base", b), ("new", n)):
                row |= {f"{arm}_status": record.status, f"{arm}_extracted": record.extracted}
                row |= {f"{arm}_{name}": getattr(record.sample, name) for name in columns}
                row[f"{arm}_accept_length"] = accept_length([record.sample.accept_histogram])
            rows.append(row)
        return pd.DataFrame(rows)

    def verdict(self) -> dict[str, str]:
        """What was found about accuracy and length, as a row of a table: base → new."""
        t, proven = self.table, self.non_inferiority
        cut = [sum(record.status == "truncated" for record in arm) for arm in (self.base, self.new)]
        return {
            "questions": str(t.n),
            "right": f"{t.both + t.only_base} → {t.both + t.only_new}",
            "truncated": f"{cut[0]} → {cut[1]}",
            "flips": f"{t.only_base} lost, {t.only_new} won",
            "McNemar p": f"{self.p_value:.3g}",
            "difference (points)": self.difference.text(2, 100),
            f"a loss of {100 * proven.margin:g} point": f"{'' if proven.shown else 'not '}ruled out "
            f"(p = {proven.p_value:.2g})",
            "output tokens": f"× {self.length.total.text(3)}",
        }


def compare(base: Sequence[Record], new: Sequence[Record], *, margin: float = MARGIN, seed: int = 0) -> Comparison:
    """Compare two arms on the questions that both answered, in the base's order; an arm against itself is the control.

    A truncated answer is one that is not right. DataError where fewer than two questions are shared, or where a
    question was asked with another prompt or seed in the other arm."""
    arms = [{record.problem: record for record in records if record.status != "failed"} for records in (base, new)]
    shared = [key for key in arms[0] if key in arms[1]]
    if len(shared) < 2:
        raise DataError(
            f"two arms are compared on questions that both answered, at least 2: found {len(shared)}, with "
            f"{len(arms[0])} answered in the base and {len(arms[1])} in the new arm"
        )
    b, n = (tuple(arm[key] for key in shared) for arm in arms)
    unlike = [x.request for x, y in zip(b, n, strict=True) if x.sample.prompt_hash != y.sample.prompt_hash]
    unlike += [x.request for x, y in zip(b, n, strict=True) if x.seed != y.seed]
    if unlike:
        raise DataError(
            f"{len(unlike)} questions, the first of them number {unlike[0]}, were asked with another prompt or seed in "
            "the other arm; ask both with the same shots and seed"
        )
    table = PairedTable.of([x.correct for x in b], [x.correct for x in n])
    return Comparison(
        base=b,
        new=n,
        left_out=len({record.problem for record in (*base, *new)}) - len(shared),
        table=table,
        p_value=mcnemar_p(table),
        difference=difference(table),
        non_inferiority=non_inferiority(table, margin),
        length=length_change(_tokens(b), _tokens(n), seed=seed),
        measures=tuple(_measures(b, n, seed)),
    )


def totals(comparison: Comparison) -> Totals:
    """A comparison in the form of a published one. DataError where no decode rate is known: not asked one by one."""
    rate = next((m for m in comparison.measures if m.name == "decode rate"), None)
    if rate is None:
        raise DataError("there is no decode rate: both arms must ask one question at a time, and stream the answers")
    base_tokens, new_tokens = (float(_tokens(arm).sum()) for arm in (comparison.base, comparison.new))
    return Totals(comparison.table, base_tokens, new_tokens, rate.base.estimate, rate.new.estimate)


def flips_html(comparison: Comparison) -> str:
    """The flipped questions as HTML to browse: folded, both answers side by side, the reasoning folded once more."""
    cells = []
    for b, n in comparison.flips:
        answers = "".join(
            f"<td style='vertical-align:top;width:50%;text-align:left;white-space:pre-wrap'><b>{name}: {r.status}, "
            f"{html.escape(r.extracted or 'no number')}, {r.sample.completion_tokens} tokens</b>\n"
            f"{html.escape(r.sample.text)}<details><summary>reasoning</summary>"
            f"{html.escape(r.sample.reasoning or 'none')}</details></td>"
            for name, r in (("base", b), ("new", n))
        )
        cells.append(
            f"<details><summary>{b.request}: {html.escape(b.question)} (right: {html.escape(b.reference)}, by "
            f"{'base' if b.correct else 'new'})</summary><table style='width:100%'><tr>{answers}</tr></table></details>"
        )
    return "\n".join(cells) or "<p>No question flipped.</p>"


def _tokens(records: Sequence[Record]) -> Floats:
    return np.array([record.sample.completion_tokens for record in records], dtype=float)


def _decoding(records: Sequence[Record]) -> tuple[Floats, Floats]:
    """(tokens, seconds) of each answer after its first arrival; no tokens and no time where it came all at once."""
    tokens, seconds = np.zeros(len(records)), np.zeros(len(records))
    for i, sample in enumerate(record.sample for record in records):
        if len(times := sample.chunk_times_ms) > 1:
            tokens[i] = sample.completion_tokens - (sample.chunk_tokens[0] if sample.chunk_tokens else 1)
            seconds[i] = (times[-1] - times[0]) / 1e3
    return tokens, seconds


def _measures(base: Sequence[Record], new: Sequence[Record], seed: int) -> list[Measure]:
    found = []
    (b_tokens, b_s), (n_tokens, n_s) = _decoding(base), _decoding(new)
    if all(record.concurrency == 1 and record.sample.latency_ms for record in (*base, *new)):
        if b_s.sum() > 0 and n_s.sum() > 0:
            found.append(_measure("decode rate", "tok/s", _rate, (b_tokens, b_s), (n_tokens, n_s), seed))
            found.append(_measure("total decode time", "s", _total, (b_s,), (n_s,), seed))
        b_ms, n_ms = (np.array([record.sample.latency_ms for record in arm], dtype=float) for arm in (base, new))
        for name, statistic in (
            ("mean latency", np.mean),
            ("P50 latency", _quantile(0.5)),
            ("P95 latency", _quantile(0.95)),
        ):
            found.append(_measure(name, "ms", statistic, (b_ms,), (n_ms,), seed))
    b_accept, n_accept = (_acceptance(arm) for arm in (base, new))
    if b_accept is not None and n_accept is not None:
        found.append(_measure("accept length", "tokens", _rate, b_accept, n_accept, seed))
    return found


def _acceptance(records: Sequence[Record]) -> tuple[Floats, Floats] | None:
    """(tokens, verify steps) of each answer, or None where no draft was at work."""
    counts = [record.sample.accept_histogram or () for record in records]
    if not all(map(sum, counts)):
        return None
    tokens = [sum((k + 1) * steps for k, steps in enumerate(count)) for count in counts]
    return np.array(tokens, dtype=float), np.array([sum(count) for count in counts], dtype=float)


def _rate(tokens: Floats, seconds: Floats, axis: int = -1) -> Any:
    return tokens.sum(axis) / seconds.sum(axis)


def _total(seconds: Floats, axis: int = -1) -> Any:
    """The sum, kept at its size: resampled questions are as many as there were."""
    return seconds.sum(axis)


def _quantile(p: float) -> Callable[..., Any]:
    return lambda values, axis=-1: np.quantile(values, p, axis=axis)


def _measure(
    name: str,
    unit: str,
    statistic: Callable[..., Any],
    base: tuple[Floats, ...],
    new: tuple[Floats, ...],
    seed: int,
) -> Measure:
    """`statistic` of each arm's columns and the ratio of both, resampling questions together."""

    def ratio(*columns: Floats, axis: int = -1) -> Any:
        return statistic(*columns[len(base) :], axis=axis) / statistic(*columns[: len(base)], axis=axis)

    return Measure(
        name,
        unit,
        _resampled(statistic, base, seed),
        _resampled(statistic, new, seed),
        _resampled(ratio, (*base, *new), seed),
    )


def _resampled(statistic: Callable[..., Any], columns: tuple[Floats, ...], seed: int) -> Interval:
    """Percentile bootstrap over questions; a question keeps its columns together."""
    ends = bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        batch=500,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(
        float(statistic(*columns)),
        float(ends.low),
        float(ends.high),
        0.95,
        "percentile bootstrap",
        len(columns[0]),
        "problem",
        _NOTE,
    )
