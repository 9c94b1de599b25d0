"""Switch on every set of levers once, and see whether their effects multiply.

Levers are usually judged on a ladder: one after another, each by what it adds to those below. That says nothing about
the order, and an order hides what happens between two levers: a draft makes the head be read K + 1 times, so a smaller
head is worth more beside a draft than alone, and a faster kernel saves less of a step that a draft has made longer. A
full factorial has an arm for each of the 2ⁿ sets. Each lever is then compared with itself, beside every set of others,
and the *interaction* of two levers is one number: the gain of one beside the other ÷ its gain alone. At 1 they
multiply, the ladder's order does not matter, and a lever that was measured alone can be trusted in company.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any, Protocol

from sparkmoe import profiling, roofline, stats
from sparkmoe.inventory import Inventory
from sparkmoe.machine import Machine
from sparkmoe.recipe import RECIPES, Recipe
from sparkmoe.stats import Interval

Set = tuple[str, ...]


class Gains(Protocol):
    """What `rows` needs of `notebook.Measured`."""

    def gain(self, new: str, base: str) -> Interval: ...


def arms(base: Recipe, levers: Mapping[str, Mapping[str, Any]]) -> dict[Set, Recipe]:
    """A recipe for every set of levers, smallest sets first; `levers` gives the fields that each changes in `base`.

    An arm has the name of the known recipe with the same fields, else the base's and the levers'.
    """
    made = {}
    for n in range(len(levers) + 1):
        for chosen in combinations(levers, n):
            fields = {field: value for lever in chosen for field, value in levers[lever].items()}
            arm = base.with_(name="_".join((base.name, *chosen)), **fields)
            made[chosen] = next((known for known in RECIPES.values() if not known.diff(arm)), arm)
    return made


def predict(
    weights: Inventory,
    gb_s: float,
    arms: Iterable[Recipe],
    machine: Machine,
    context: int,
    *,
    accept_length: Mapping[str, float],
    plain_ms: float | None = None,
) -> dict[str, float]:
    """Predicted TPOT in ms by arm, for one user with `context` tokens behind them.

    `accept_length` is by arm, 1 where it names none. `plain_ms` is what the first arm took, which must not draft: what
    it holds beyond reading, every pass of the others holds too. Without it the result is the floor.
    """
    loads = {arm.name: profiling.load_of(arm, machine, context) for arm in arms}
    plain = next(iter(loads.values()))
    overhead_ms = max(0.0, roofline.overhead(weights, gb_s, plain_ms, plain)) if plain_ms else 0.0
    return {
        name: roofline.predict(
            weights, gb_s, load, accept_length=accept_length.get(name, 1.0), overhead_ms=overhead_ms
        ).tpot_ms
        for name, load in loads.items()
    }


def rows(
    measured: Gains, arms: Mapping[Set, Recipe], predicted_ms: Mapping[str, Mapping[str, float]]
) -> list[dict[str, str]]:
    """Table rows: each lever beside each set that it can join, then the interaction of each pair.

    `arms` as from `arms`. `predicted_ms` adds columns: title → predicted TPOT in ms by arm.
    """
    levers = max(arms, key=len)
    name = {frozenset(chosen): arm.name for chosen, arm in arms.items()}

    def row(lever: str, beside: str, found: Interval, more: list[str], less: list[str]) -> dict[str, str]:
        made = {"lever": lever, "beside": beside, "measured": f"{found.text(3)} ×"}
        for title, ms in predicted_ms.items():
            ratio = 1.0
            for new, base in zip(more, less, strict=True):
                ratio *= ms[base] / ms[new]
            made[title] = f"{ratio:.3f} ×"
        return made

    table = []
    for lever in levers:
        for chosen in (chosen for chosen in arms if lever not in chosen):
            base, more = name[frozenset(chosen)], name[frozenset((*chosen, lever))]
            beside = " and ".join(chosen) or "nothing"
            table.append(row(lever, beside, measured.gain(more, base), [more], [base]))
    for a, b in combinations(levers, 2):
        none, one, other, both = (name[frozenset(chosen)] for chosen in ((), (a,), (b,), (a, b)))
        found = stats.interaction(measured.gain(both, other), measured.gain(one, none))
        table.append(row(f"{a} × {b}", "interaction", found, [both, none], [other, one]))
    return table
