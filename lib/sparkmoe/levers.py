"""What should a lever give here, what did it give, and where did the difference go?

The prediction knows two things: bytes ÷ bandwidth, and what the plain arm spends beyond that (its overhead), of which
every pass through the model is charged its share by layers. Nothing is fitted to the arm that is predicted, except the
accept length, which belongs to prompts and draft and not to the machine. So the residual is what this picture leaves
out, and the two dissections say where it is: which part of the model takes longer than it did in the plain arm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sparkmoe import roofline, stats
from sparkmoe.errors import DataError
from sparkmoe.inventory import Inventory
from sparkmoe.profiling import GAPS, Dissection
from sparkmoe.roofline import Load
from sparkmoe.stats import Interval

# Why a part takes longer with a lever on the CPU platform than bytes and passes can say.
CAUSES = {
    "experts": "every token to verify brings experts of its own, two small products each",
    "kda": "verifying solves a small system per head, and accepted tokens are replayed into the state",
    "head": "FP8 values are decoded to FP32 before they are multiplied",
    "drafting": "a draft pass is an attention and an expert layer, a head and bookkeeping, not an average layer",
    GAPS: "the step's own Python, SGLang's bookkeeping and drafting, which plain decoding does not have",
}
_SMALL = 0.03  # of a step: what two requests to one server differ by


@dataclass(frozen=True)
class Lever:
    """One arm. Times in ms per token; `gain` is the reference's time per token ÷ the arm's; `residual_ms` is per step,
    measured − predicted, and `why` explains it in a sentence."""

    arm: str
    accept_length: float
    predicted_ms: float
    predicted_gain: float
    measured_ms: Interval
    gain: Interval
    residual_ms: float
    why: str


def compare(
    weights: Inventory,
    gb_s: float,
    loads: Mapping[str, Load],
    tpot_ms: Mapping[str, Sequence[Sequence[float]]],
    dissected: Mapping[str, Dissection],
    *,
    accept_length: Mapping[str, float] | None = None,
) -> list[Lever]:
    """A row per arm of `loads`, whose first is the plain reference: predicted, measured, and why they differ.

    `tpot_ms` holds the measured times per token, by arm and boot. `accept_length` is the one of those samples, for arms
    that draft. Raises DataError for an arm that was not measured or not dissected, and for a reference that drafts.
    """
    base = next(iter(loads))
    if loads[base].drafts:
        raise DataError(f"the first arm is the reference and must not draft; {base} has {loads[base].drafts} drafts")
    if missing := [arm for arm in loads if not tpot_ms.get(arm) or arm not in dissected]:
        raise DataError(f"arm {missing[0]} was not measured and dissected: there is nothing to compare")
    plain_ms = stats.summarize(tpot_ms[base]).estimate
    overhead_ms = roofline.overhead(weights, gb_s, plain_ms, loads[base])
    rows = []
    for arm, load in loads.items():
        length = (accept_length or {}).get(arm, 1.0)
        made = roofline.predict(weights, gb_s, load, accept_length=length, overhead_ms=overhead_ms)
        measured = stats.summarize(tpot_ms[arm])
        residual = (measured.estimate - made.tpot_ms) * length
        why = _why(dissected[base], dissected[arm], made.overhead_ms - overhead_ms, residual, made.step_ms)
        gain = stats.ratio(tpot_ms[base], tpot_ms[arm])
        rows.append(Lever(arm, length, made.tpot_ms, plain_ms / made.tpot_ms, measured, gain, residual, why))
    return rows


def _why(base: Dissection, arm: Dissection, drafting_ms: float, residual_ms: float, step_ms: float) -> str:
    """One sentence from the parts of both steps; `drafting_ms` is what the prediction allows for drafting."""
    if base is arm:
        return "the reference: its time beyond reading is the overhead of the others' predictions"
    if abs(residual_ms) <= _SMALL * step_ms:
        return f"as predicted within {_SMALL:.0%} of a step"
    before, after = base.parts_ms(), arm.parts_ms()
    grown = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in before | after if "draft " not in part}
    if draft := sum(ms for part, ms in after.items() if part.startswith("draft ")):
        waiting_ms = drafting_ms * before[GAPS] / base.found.step_ms  # the allowance is made of the same mixture
        grown["drafting"] = draft - (drafting_ms - waiting_ms)
        grown[GAPS] -= waiting_ms
    ordered = sorted(grown.items(), key=lambda item: -abs(item[1]))[:3]
    largest = next((part for part, ms in ordered if ms * residual_ms > 0), ordered[0][0])
    listed = ", ".join(f"{part} {ms:+.2f}" for part, ms in ordered)
    if not 0.5 <= sum(ms for _, ms in ordered) / residual_ms <= 2:
        return (
            f"{residual_ms:+.2f} ms a step beside the prediction, but the profiled steps differ otherwise ({listed}): "
            "the machine changed between the arms; repeat it at rest"
        )
    cause = f"; {largest}: {CAUSES[largest]}" if not arm.found.on_gpu and largest in CAUSES else ""
    return f"{residual_ms:+.2f} ms a step beside the prediction ({listed}){cause}"


def from_record(findings: Mapping[str, Mapping[str, Any]]) -> list[Lever]:
    """Rows that were written as JSON (`results.jsonable`) by arm, as in the record `levers-cpu`."""

    def interval(stored: Mapping[str, Any]) -> Interval:
        ends = {end: math.nan if stored[end] is None else stored[end] for end in ("low", "high")}
        return Interval(**{**stored, **ends})

    return [
        Lever(**{**row, "measured_ms": interval(row["measured_ms"]), "gain": interval(row["gain"])})
        for row in findings.values()
    ]


def table(rows: Sequence[Lever], elsewhere: Sequence[Lever] = ()) -> pd.DataFrame:
    """The rows for a reader; of `elsewhere` those whose arm is not in `rows`, marked as recorded."""
    here = {row.arm for row in rows}
    shown = [("here", row) for row in rows] + [("recorded", row) for row in elsewhere if row.arm not in here]
    return pd.DataFrame(
        {
            "arm": row.arm,
            "measured": where,
            "accept length": f"{row.accept_length:.2f}",
            "ms a token": row.measured_ms.text(),
            "predicted gain": f"{row.predicted_gain:.2f}",
            "measured gain": row.gain.text(),
            "why they differ": row.why,
        }
        for where, row in shown
    ).set_index("arm")
