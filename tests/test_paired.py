"""Two arms on the same problems: known values, and coverage, as for times (`test_stats`)."""

from __future__ import annotations

import numpy as np
import pytest

from sparkmoe import paired
from sparkmoe.errors import DataError

PUBLISHED = paired.PairedTable(both=1264, only_base=14, only_new=13, neither=28)


def covered(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def test_published_table_gives_p_of_one_and_the_published_interval() -> None:
    assert paired.mcnemar_p(PUBLISHED) == 1.0
    interval = paired.difference(PUBLISHED)
    assert interval.estimate == pytest.approx(-1 / 1319)
    assert (100 * interval.low, 100 * interval.high) == pytest.approx((-0.85, 0.70), abs=0.015)
    assert not interval.excludes(0)


def test_mcnemar_is_the_exact_binomial_test() -> None:
    # 2 · P(X ≤ 1), X ~ Binomial(10, ½) = 22/1024
    assert paired.mcnemar_p(paired.PairedTable(50, 9, 1, 40)) == pytest.approx(22 / 1024)


def test_paired_table_counts_problem_by_problem() -> None:
    table = paired.PairedTable.of([1, 1, 0, 0, 1], [1, 0, 1, 0, 1])
    assert table == paired.PairedTable(both=2, only_base=1, only_new=1, neither=1)
    with pytest.raises(DataError, match="same problems"):
        paired.PairedTable.of([1, 0], [1])


@pytest.mark.parametrize(
    ("n", "only_base", "only_new"),
    [
        (1319, 0.0106, 0.0099),
        (1319, 0.02, 0.005),
        (300, 0.02, 0.005),
        (100, 0.1, 0.05),
        (30, 0.1, 0.05),
        (30, 0.3, 0.02),
    ],
)
def test_paired_interval_covers(n: int, only_base: float, only_new: float) -> None:
    rng = np.random.default_rng(1)
    draws = rng.multinomial(n, [0.5, only_base, only_new, 0.5 - only_base - only_new], size=4000)
    truth = only_new - only_base
    hits = [not paired.difference(paired.PairedTable(*map(int, row))).excludes(truth) for row in draws]
    assert 0.94 <= covered(hits) <= 0.985


def test_non_inferiority_agrees_with_its_bound_and_holds_its_error_rate() -> None:
    strict, loose = paired.non_inferiority(PUBLISHED, 0.005), paired.non_inferiority(PUBLISHED, 0.01)
    assert not strict.shown
    assert strict.p_value > 0.05
    assert loose.shown
    assert loose.p_value < 0.05
    assert loose.lower_bound == strict.lower_bound
    # An arm that truly loses the whole margin is declared non-inferior in at most about 5 % of experiments.
    rng = np.random.default_rng(2)
    draws = rng.multinomial(1319, [0.93, 0.025, 0.015, 0.03], size=4000)
    shown = [paired.non_inferiority(paired.PairedTable(*map(int, row)), 0.01).shown for row in draws]
    assert 0.03 <= covered(shown) <= 0.06
    with pytest.raises(DataError, match="one point"):
        paired.non_inferiority(PUBLISHED, 1.0)


def test_minimum_difference_is_found_with_the_promised_power() -> None:
    delta = paired.minimum_difference(1319, 27 / 1319)
    assert 0.008 < delta < 0.015
    only_new = (27 / 1319 + delta) / 2
    rng = np.random.default_rng(3)
    draws = rng.multinomial(1319, [0.9, only_new - delta, only_new, 0.1 - 2 * only_new + delta], size=1500)
    found = [paired.mcnemar_p(paired.PairedTable(*map(int, row))) <= 0.05 for row in draws]
    # The exact test is conservative: its power lies a little under the planned 80 %.
    assert 0.70 <= covered(found) <= 0.83
    assert np.isnan(paired.minimum_difference(20, 0.05))


def test_length_interval_covers_and_the_test_holds_its_rate() -> None:
    rng, hits, false_alarms = np.random.default_rng(11), [], []
    for _ in range(100):
        common = rng.lognormal(6, 0.7, size=250)
        base, new = common * rng.lognormal(0, 0.3, 250), common * rng.lognormal(0, 0.3, 250)
        change = paired.length_change(base, new * 1.07, resamples=500)
        hits.append(not change.total.excludes(1.07))
        false_alarms.append(paired.length_change(base, new, resamples=200).p_value < 0.05)
    assert 0.89 <= covered(hits) <= 0.99
    assert covered(false_alarms) <= 0.11


def test_length_change_sees_a_real_one_and_where_it_lies() -> None:
    rng = np.random.default_rng(12)
    base = rng.lognormal(6, 0.5, size=400)
    longer = paired.length_change(base, base * rng.lognormal(0.07, 0.2, 400))
    assert longer.total.excludes(1)
    assert longer.p_value < 0.01
    assert longer.typical_p_value < 0.01
    assert longer.longer > 0.55
    same = paired.length_change(base, base)
    assert (same.total.estimate, same.p_value, same.typical_p_value) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("base", "new", "message"),
    [([1.0, 2.0], [1.0], "same problems"), ([0.0, 0.0], [1.0, 1.0], "no output token")],
)
def test_length_change_refuses_what_cannot_be_paired(base: list, new: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        paired.length_change(base, new)
