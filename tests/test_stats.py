"""Known values, and coverage: an interval that says 95 % must hold the truth about 95 times in 100."""

from __future__ import annotations

import numpy as np
import pytest

from sparkmoe import stats
from sparkmoe.errors import DataError


def covered(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def boots(rng: np.random.Generator, count: int, requests: int, center: float, between: float, within: float) -> list:
    levels = center * np.exp(between * rng.standard_normal(count))
    return [level * np.exp(within * rng.standard_normal(requests)) for level in levels]


@pytest.mark.parametrize(("count", "method"), [(3, "Student's t"), (5, "Student's t"), (12, "studentized bootstrap")])
def test_interval_over_boots_covers(count: int, method: str) -> None:
    rng, hits = np.random.default_rng(4), []
    for _ in range(800):
        interval = stats.summarize(boots(rng, count, 6, 25.0, 0.03, 0.02))
        hits.append(not interval.excludes(25.0 * np.exp(0.03**2 / 2)))
    assert (interval.method, interval.unit, interval.n) == (method, "boot", count)
    assert 0.925 <= covered(hits) <= 0.975


def test_requests_as_units_would_lie_where_boots_do_not() -> None:
    """The reason for the whole design: pooled requests of three boots cover far less than they say."""
    rng, hits = np.random.default_rng(5), []
    for _ in range(150):
        pooled = np.concatenate(boots(rng, 3, 20, 25.0, 0.03, 0.01))
        hits.append(not stats.summarize([pooled], within="mean").excludes(25.0))
    assert covered(hits) < 0.6


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("count_new", "count_base"), [(3, 3), (12, 12)])
def test_ratio_covers(count_new: int, count_base: int, paired: bool) -> None:
    rng, hits = np.random.default_rng(6), []
    for _ in range(600):
        interval = stats.ratio(
            boots(rng, count_new, 5, 20.0, 0.03, 0.02), boots(rng, count_base, 5, 25.0, 0.03, 0.02), paired=paired
        )
        hits.append(not interval.excludes(0.8))
    assert 0.925 <= covered(hits) <= 0.98


def test_pairing_removes_a_drift_that_both_arms_share() -> None:
    rng = np.random.default_rng(7)
    drift = np.array([1.0, 1.1, 1.25, 0.9])
    base = [25 * d * np.exp(0.002 * rng.standard_normal(5)) for d in drift]
    new = [20 * d * np.exp(0.002 * rng.standard_normal(5)) for d in drift]
    paired, plain = stats.ratio(new, base, paired=True), stats.ratio(new, base)
    assert paired.high - paired.low < (plain.high - plain.low) / 10
    assert paired.estimate == pytest.approx(plain.estimate)
    assert not paired.excludes(0.8)
    with pytest.raises(DataError, match="must match: 3 of the new arm, 4 of the base"):
        stats.ratio(new[:3], base, paired=True)


def test_one_boot_says_so() -> None:
    rng = np.random.default_rng(8)
    values = rng.lognormal(3, 0.1, size=40)
    one = stats.summarize([values])
    assert (one.unit, one.method) == ("request", "order statistics")
    assert "this boot only" in one.note
    assert one.low < one.estimate == np.median(values) < one.high
    against = stats.ratio([values], boots(rng, 3, 5, 20.0, 0.01, 0.01))
    assert against.unit == "request"
    assert "one boot in an arm" in against.note
    single = stats.summarize([[25.0]])
    assert not single.known
    assert not single.excludes(0)
    assert single.text() == "25.00"
    assert single.as_dict()["low"] is None


def test_median_of_one_boot_covers() -> None:
    rng, hits = np.random.default_rng(9), []
    for _ in range(800):
        hits.append(not stats.summarize([rng.lognormal(0, 1, size=25)]).excludes(1.0))
    assert 0.94 <= covered(hits) <= 0.985


def test_times_without_spread_give_a_point() -> None:
    interval = stats.summarize([[5.0, 5.0], [5.0], [5.0]])
    assert (interval.low, interval.estimate, interval.high) == (5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("by_boot", "message"),
    [([], "never measured"), ([[1.0], []], "boot 1 holds no value"), ([[1.0, float("nan")]], "not finite")],
)
def test_empty_or_broken_times_are_named(by_boot: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        stats.summarize(by_boot)


def test_ratio_refuses_a_time_of_zero() -> None:
    with pytest.raises(DataError, match="new arm holds a value ≤ 0"):
        stats.ratio([[0.0], [1.0]], [[1.0], [1.0]])


def test_minimum_ratio_is_found_with_the_promised_power() -> None:
    effect = stats.minimum_ratio(4, 0.02)
    rng, found = np.random.default_rng(10), []
    for _ in range(1000):
        found.append(stats.ratio(boots(rng, 4, 1, 1 + effect, 0.02, 0), boots(rng, 4, 1, 1.0, 0.02, 0)).excludes(1.0))
    # Planned for Student's t; Welch's, which is used, gives up a little power at 4 + 4 boots.
    assert 0.72 <= covered(found) <= 0.84
    with pytest.raises(DataError, match="at least 2"):
        stats.minimum_ratio(1, 0.02)


def test_an_interaction_is_a_ratio_of_ratios_with_both_their_errors() -> None:
    rng, hits, false_alarms = np.random.default_rng(13), [], []
    for _ in range(400):
        first, second, third, fourth = ([m * np.exp(rng.normal(0, 0.02, 4))] for m in (12.0, 10.0, 7.0, 7.0 / 1.32))
        alone, together = stats.ratio(first, second), stats.ratio(third, fourth)
        found = stats.interaction(together, alone)
        hits.append(not found.excludes(1.1))
        false_alarms.append(stats.interaction(stats.ratio(third, fourth), stats.ratio(third, fourth)).excludes(1))
    assert found.estimate == pytest.approx(together.estimate / alone.estimate)
    assert (found.unit, found.n) == ("request", 4)
    assert 0.92 <= covered(hits) <= 1.0
    assert not any(false_alarms)
