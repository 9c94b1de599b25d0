import pytest

from sparkmoe import ablation, stats
from sparkmoe.inventory import from_config
from sparkmoe.machine import Machine
from sparkmoe.recipe import RECIPES
from sparkmoe.stats import Interval

LEVERS = {"humming": {"moe": "humming"}, "fp8_head": {"head": "fp8"}, "nextn": {"draft_steps": 3}}
ARMS = ablation.arms(RECIPES["bf16_head"], LEVERS)


class Taken:
    """Gains of arms that took these times."""

    def __init__(self, tpot_ms: dict[str, float]) -> None:
        self.tpot_ms = tpot_ms

    def gain(self, new: str, base: str) -> Interval:
        return stats.ratio([[self.tpot_ms[base] * noise for noise in (0.99, 1.0, 1.01)] for _ in range(3)],
                           [[self.tpot_ms[new] * noise for noise in (0.99, 1.0, 1.01)] for _ in range(3)])  # fmt: skip


def test_every_set_of_levers_is_one_arm_with_its_known_name() -> None:
    assert [arm.name for arm in ARMS.values()] == [
        "bf16_head", "bf16_head_humming", "fp8_head", "bf16_head_nextn",
        "humming_fp8", "bf16_head_humming_nextn", "fp8_head_nextn", "all_three",
    ]  # fmt: skip
    assert ARMS[("humming", "fp8_head", "nextn")] == RECIPES["all_three"]
    assert set(ARMS[("humming", "nextn")].diff(ARMS[("nextn",)])) == {"moe"}


def test_levers_that_multiply_do_not_interact_and_others_do() -> None:
    gains = {"humming": 1.1, "fp8_head": 1.2, "nextn": 2.0}
    tpot_ms = {}
    for chosen, arm in ARMS.items():
        tpot_ms[arm.name] = 30.0 / (1.1 if {"fp8_head", "nextn"} <= set(chosen) else 1.0)
        for lever in chosen:
            tpot_ms[arm.name] /= gains[lever]
    table = ablation.rows(Taken(tpot_ms), ARMS, {"predicted": tpot_ms})
    assert len(table) == 3 * 4 + 3
    found = {(row["lever"], row["beside"]): float(row["measured"].split()[0]) for row in table}
    assert found["humming", "nothing"] == pytest.approx(1.1)
    assert found["humming", "fp8_head and nextn"] == pytest.approx(1.1)
    assert found["fp8_head", "nextn"] == pytest.approx(1.32)
    assert found["humming × nextn", "interaction"] == pytest.approx(1.0)
    assert found["fp8_head × nextn", "interaction"] == pytest.approx(1.1)
    assert [row["measured"].split()[0] for row in table] == [row["predicted"].split()[0] for row in table]


def test_on_a_spark_an_fp8_head_is_worth_more_beside_a_draft() -> None:
    drafting = {arm.name: 2.68 for arm in ARMS.values() if arm.draft_steps}
    weights = from_config("ling-3.0-flash-fp4")
    ms = ablation.predict(weights, 233.0, ARMS.values(), Machine.named("spark"), 512, accept_length=drafting)
    alone, beside = ms["bf16_head"] / ms["fp8_head"], ms["bf16_head_nextn"] / ms["fp8_head_nextn"]
    assert alone == pytest.approx(1.09, abs=0.01)
    assert beside > 1.04 * alone
    assert ms["bf16_head_humming"] == ms["bf16_head"]  # no byte changes
    seen = ms["bf16_head"] + 5.0
    slower = ablation.predict(
        weights, 233.0, ARMS.values(), Machine.named("spark"), 512, accept_length=drafting, plain_ms=seen
    )
    assert slower["bf16_head"] == pytest.approx(seen)
    assert slower["fp8_head"] == pytest.approx(ms["fp8_head"] + 5.0)
