"""Predicted against measured, with steps whose parts are made up so that every residual is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkmoe import levers, roofline
from sparkmoe.breakdown import Breakdown, verdict
from sparkmoe.errors import DataError
from sparkmoe.inventory import from_config
from sparkmoe.profiling import Dissection
from sparkmoe.results import jsonable
from sparkmoe.roofline import Load

LING = from_config("ling-3.0-flash-fp4")
GB_S = 233.0
PLAIN, FP8, NEXTN = Load(head="bf16"), Load(head="fp8"), Load(head="bf16", drafts=3)
LOADS = {"plain": PLAIN, "fp8": FP8, "nextn": NEXTN}


def dissection(parts: dict[str, float], gap_ms: float, load: Load) -> Dissection:
    busy = sum(parts.values())
    named = {part: (ms, 1.0) for part, ms in parts.items()}
    found = Breakdown(9, busy + gap_ms, busy, gap_ms, 0.0, 9.0, False, named, {}, {})
    size = roofline.step_bytes(LING, load)
    return Dissection(Path("t.json"), found, (), 1.2, size, verdict(found, size.total, GB_S))


DISSECTED = {
    "plain": dissection({"kda": 10, "experts": 6, "head": 4}, 10, PLAIN),
    "fp8": dissection({"kda": 10, "experts": 6, "head": 6}, 11, FP8),
    "nextn": dissection({"kda": 10, "experts": 12, "head": 4, "draft mla": 3, "draft head": 2}, 12, NEXTN),
}


def test_the_reference_is_predicted_exactly_and_levers_by_bytes_and_passes() -> None:
    plain, fp8, nextn = levers.compare(
        LING, GB_S, LOADS, {"plain": [[30.0]], "fp8": [[31.0]], "nextn": [[20.0]]}, DISSECTED,
        accept_length={"nextn": 2.5},
    )  # fmt: skip
    overhead = roofline.overhead(LING, GB_S, 30.0, PLAIN)
    assert plain.predicted_ms == pytest.approx(30)
    assert plain.residual_ms == pytest.approx(0)
    saved = (roofline.step_bytes(LING, PLAIN).total - roofline.step_bytes(LING, FP8).total) / GB_S / 1e6
    assert fp8.predicted_ms == pytest.approx(30 - saved)
    assert fp8.residual_ms == pytest.approx(1 + saved)
    assert fp8.gain.estimate == pytest.approx(30 / 31)
    step = roofline.step_bytes(LING, NEXTN).total / GB_S / 1e6 + overhead * (1 + 3 / 42)
    assert nextn.predicted_ms == pytest.approx(step / 2.5)
    assert nextn.residual_ms == pytest.approx(20 * 2.5 - step)


def test_the_residual_is_explained_by_the_parts_that_grew() -> None:
    measured = {"plain": [[30.0]], "fp8": [[31.0]], "nextn": [[26.0]]}
    plain, fp8, nextn = levers.compare(LING, GB_S, LOADS, measured, DISSECTED, accept_length={"nextn": 2.5})
    assert plain.why.startswith("the reference")
    assert "(head +2.00, between operators +1.00" in fp8.why
    assert fp8.why.endswith("head: " + levers.CAUSES["head"])
    assert "(experts +6.00, drafting +" in nextn.why
    assert nextn.why.endswith("experts: " + levers.CAUSES["experts"])


def test_a_small_residual_needs_no_explanation() -> None:
    made = roofline.predict(LING, GB_S, FP8, overhead_ms=roofline.overhead(LING, GB_S, 30.0, PLAIN))
    loads = {"plain": PLAIN, "fp8": FP8}
    rows = levers.compare(LING, GB_S, loads, {"plain": [[30.0]], "fp8": [[made.tpot_ms * 1.02]]}, DISSECTED)
    assert rows[1].why == "as predicted within 3% of a step"


def test_a_residual_that_no_part_shows_is_not_explained_away() -> None:
    measured = {"plain": [[30.0]], "fp8": [[20.0]]}
    rows = levers.compare(LING, GB_S, {"plain": PLAIN, "fp8": FP8}, measured, DISSECTED)
    assert rows[1].residual_ms < -8
    assert "the machine changed between the arms" in rows[1].why


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(DataError, match="the first arm is the reference and must not draft; nextn has 3 drafts"):
        levers.compare(LING, GB_S, {"nextn": NEXTN}, {"nextn": [[1.0]]}, DISSECTED)
    with pytest.raises(DataError, match="arm fp8 was not measured and dissected"):
        levers.compare(LING, GB_S, LOADS, {"plain": [[30.0]]}, DISSECTED)


def test_rows_survive_a_record_and_recorded_arms_are_marked() -> None:
    measured = {"plain": [[30.0]], "fp8": [[31.0, 31.2]], "nextn": [[24.0]]}
    rows = levers.compare(LING, GB_S, LOADS, measured, DISSECTED, accept_length={"nextn": 2.5})
    stored = json.loads(json.dumps(jsonable({row.arm: row for row in rows})))
    back = levers.from_record(stored)
    assert [(r.arm, r.gain.text(), r.why) for r in back] == [(r.arm, r.gain.text(), r.why) for r in rows]
    shown = levers.table(rows[:2], back)
    assert list(shown["measured"].items()) == [("plain", "here"), ("fp8", "here"), ("nextn", "recorded")]
    assert shown.loc["nextn", "accept length"] == "2.50"
