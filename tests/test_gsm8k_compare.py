"""Two arms on the same questions: the published arithmetic, the control, and what must not be compared."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparkmoe.errors import DataError
from sparkmoe.gsm8k_compare import PUBLISHED, compare, flips_html, totals
from sparkmoe.gsm8k_run import Record
from sparkmoe.paired import PairedTable, difference, mcnemar_p, non_inferiority
from sparkmoe.sample import Sample, accept_length, accepted


def record(index: int, status: Any = "right", tokens: int = 100, tpot_ms: float = 20.0, **fields: Any) -> Record:
    """A question answered in `tokens` tokens, `tpot_ms` apart, the first after 100 ms; one accepted draft a step."""
    times = (100.0, 100.0 + tpot_ms * (tokens - 1))
    sample = Sample(
        prompt_hash=f"p{index}",
        started_unix_s=0.0,
        text=f"#### {index}",
        reasoning="<thought>",
        completion_tokens=tokens,
        ttft_ms=times[0],
        tpot_ms=tpot_ms,
        latency_ms=times[1],
        chunk_times_ms=times,
        chunk_tokens=(1, tokens - 1),
        finish_reason="stop",
        **fields.pop("sample", {}),
    )
    return Record(
        arm=fields.pop("arm", "a"),
        boot=0,
        request=index,
        problem=f"key{index}",
        question=f"Is {index} < {index + 1}?",
        reference=str(index),
        status=status,
        correct=status == "right",
        extracted=str(index),
        rule="####",
        attempt=1,
        seed=index,
        concurrency=fields.pop("concurrency", 1),
        spoiled=(),
        sample=sample,
    )


def test_the_published_comparison_is_reproduced_from_its_counts() -> None:
    table = PUBLISHED.table
    assert table.n == 1319
    assert (table.both + table.only_base, table.both + table.only_new) == (1278, 1277)
    assert mcnemar_p(table) == 1.0
    change = difference(table)
    assert change.estimate * 100 == pytest.approx(-0.0758, abs=1e-4)
    assert (change.low * 100, change.high * 100) == (pytest.approx(-0.85, abs=0.02), pytest.approx(0.70, abs=0.02))
    assert non_inferiority(table, 0.01).shown
    assert pytest.approx(1.425, abs=5e-4) == PUBLISHED.rate_gain
    assert pytest.approx(1.071, abs=5e-4) == PUBLISHED.length_ratio
    assert pytest.approx(1.33, abs=2e-3) == PUBLISHED.time_gain


def test_the_same_counts_come_out_of_answers_like_the_published_ones() -> None:
    """Records made to the published counts, tokens and rates go through the whole comparison."""
    cells = (
        [("right", "right")] * 1264 + [("right", "wrong")] * 14 + [("wrong", "right")] * 13 + [("wrong", "wrong")] * 28
    )
    arms = []
    for arm, tokens, tok_s in ((0, 748_286, 37.81), (1, 801_260, 53.89)):
        lengths = np.full(1319, tokens // 1319)
        lengths[: tokens - lengths.sum()] += 1
        arms.append([record(i, cells[i][arm], int(n), 1e3 / tok_s) for i, n in enumerate(lengths)])
    found = compare(*arms)
    assert found.table == PUBLISHED.table
    made = totals(found)
    assert (made.base_tokens, made.new_tokens) == (748_286, 801_260)
    assert made.base_tok_s == pytest.approx(37.81)
    assert made.time_gain == pytest.approx(PUBLISHED.time_gain)
    by_name = {measure.name: measure for measure in found.measures}
    assert 1 / by_name["total decode time"].ratio.estimate == pytest.approx(PUBLISHED.time_gain, rel=1e-3)
    assert by_name["decode rate"].ratio.estimate == pytest.approx(PUBLISHED.rate_gain)
    assert by_name["mean latency"].base.estimate == pytest.approx(100 + 566.3 * 1e3 / 37.81, rel=1e-3)
    assert len(found.flips) == 27


def test_an_arm_against_itself_shows_no_difference() -> None:
    rng = np.random.default_rng(0)
    arm = [record(i, "wrong" if i % 10 == 0 else "right", int(rng.integers(50, 500))) for i in range(60)]
    found = compare(arm, [replace(r, arm="again") for r in arm])
    assert found.table == PairedTable(54, 0, 0, 6)
    assert (found.p_value, found.difference.estimate, found.flips) == (1.0, 0.0, [])
    assert found.length.total.estimate == 1.0
    assert all((m.ratio.low, m.ratio.estimate, m.ratio.high) == (1.0, 1.0, 1.0) for m in found.measures)
    assert flips_html(found) == "<p>No question flipped.</p>"


def test_intervals_hold_the_truth_of_a_known_speedup() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(50, 500, size=(2, 200))
    base = [record(i, tokens=int(lengths[0, i]), tpot_ms=25 * rng.lognormal(0, 0.05)) for i in range(200)]
    new = [record(i, tokens=int(lengths[1, i]), tpot_ms=10 * rng.lognormal(0, 0.05)) for i in range(200)]
    found = compare(base, new)
    assert [m.name for m in found.measures] == [
        "decode rate", "total decode time", "mean latency", "P50 latency", "P95 latency"
    ]  # fmt: skip
    rate = found.measures[0].ratio
    assert rate.low < 2.5 < rate.high
    assert rate.high - rate.low < 0.1
    latency = {m.name: m for m in found.measures}
    assert latency["P50 latency"].base.estimate < latency["P95 latency"].base.estimate
    assert all(m.ratio.low < m.ratio.estimate < m.ratio.high for m in found.measures)
    assert "one boot an arm" in rate.note


def test_questions_missing_or_failed_in_one_arm_are_left_out_and_truncated_ones_are_not() -> None:
    base = [record(i) for i in range(6)]
    new = [record(0, "failed"), record(1, "truncated"), *(record(i) for i in range(2, 5)), record(9)]
    found = compare(base, new)
    assert [r.request for r in found.base] == [1, 2, 3, 4]
    assert found.left_out == 3
    assert found.table == PairedTable(3, 1, 0, 0)
    assert found.verdict()["truncated"] == "0 → 1"


@pytest.mark.parametrize("change", ["prompt", "seed"])
def test_another_prompt_or_seed_is_refused(change: str) -> None:
    arm = [record(i) for i in range(4)]
    other = list(arm)
    if change == "seed":
        other[2] = replace(arm[2], seed=99)
    else:
        other[2] = replace(arm[2], sample=replace(arm[2].sample, prompt_hash="other"))
    with pytest.raises(
        DataError, match="1 questions, the first of them number 2, were asked with another prompt or seed"
    ):
        compare(arm, other)


def test_arms_without_shared_questions_are_refused() -> None:
    with pytest.raises(DataError, match="at least 2: found 1, with 2 answered in the base and 1 in the new arm"):
        compare([record(0), record(1)], [record(1)])


def test_times_are_only_given_for_one_question_at_a_time() -> None:
    base, new = [record(i) for i in range(5)], [record(i, concurrency=4) for i in range(5)]
    assert compare(base, new).measures == ()
    with pytest.raises(DataError, match="both arms must ask one question at a time"):
        totals(compare(base, new))


def test_the_verdict_is_one_row_and_says_what_is_not_ruled_out() -> None:
    base, new = [record(i) for i in range(100)], [record(i, "wrong" if i < 2 else "right", 110) for i in range(100)]
    assert compare(base, new).verdict() == {
        "questions": "100",
        "right": "100 → 98",
        "truncated": "0 → 0",
        "flips": "2 lost, 0 won",
        "McNemar p": "0.5",
        "difference (points)": "-2.00 [-5.27, 1.35]",
        "a loss of 1 point": "not ruled out (p = 0.72)",
        "output tokens": "× 1.100 [1.100, 1.100]",
    }


def test_accept_length_weighs_steps_and_needs_drafts_in_both_arms() -> None:
    def drafted(i: int, *histogram: int) -> Record:
        return record(i, sample={"accept_histogram": histogram})

    arm = [drafted(0, 10, 0, 0), drafted(1, 10, 10, 0, 20)]
    measure = compare(arm, arm).measures[-1]
    assert (measure.name, measure.base.estimate) == ("accept length", (10 + 10 + 20 + 80) / 50)
    assert compare(arm, [record(0), record(1)]).measures[-1].name == "P95 latency"
    assert list(compare(arm, arm).by_question()["new_accept_length"]) == [1.0, 110 / 40]


def test_accepted_drafts_are_added_up_over_answers() -> None:
    histograms = [(4, 2, 0, 1), (1, 0, 3), None]
    assert accepted(histograms) == [5, 2, 3, 1]
    assert accept_length(histograms) == 1 + (2 + 2 * 3 + 3) / 11
    assert np.isnan(accept_length(histograms[2:]))


def test_flipped_questions_can_be_browsed_side_by_side() -> None:
    base = [record(0), record(1), record(2, "wrong")]
    new = [record(0), record(1, "wrong"), record(2)]
    found = compare(base, new)
    assert [(b.request, b.correct, n.correct) for b, n in found.flips] == [(1, True, False), (2, False, True)]
    page = flips_html(found)
    assert page.count("<td") == 4
    assert "Is 1 &lt; 2?" in page
    assert "&lt;thought&gt;" in page
    assert not re.search(r"<thought>", page)
