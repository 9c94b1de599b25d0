"""Measured beside predicted, from a run's files alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sparkmoe import roofline
from sparkmoe.inventory import Inventory
from sparkmoe.machine import Machine
from sparkmoe.profiling import load_of
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run
from sparkmoe.sample import Sample
from sparkmoe.sglang_plugin.humming_clamp import OFF_ENV


def states(run: Run) -> dict[str, Any]:
    """What is known of each arm so far."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((run.path / "arms").glob("*.json"))}


def calls(run: Run) -> dict[str, dict[str, Any]]:
    """What was found at the beginning of each call of the driver, in their order: machine, bandwidth, commit."""
    found = {path.stem: json.loads(path.read_text()) for path in (run.path / "calls").glob("*.json")}
    return dict(sorted(found.items(), key=lambda call: call[1]["clocks"]["at_unix_s"]))


def call_of(state: Mapping[str, Any], made: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The call that measured an arm, {} where none is on record: by its name, or the latest one before it began."""
    if state.get("call") in made:
        return made[state["call"]]
    begun = state.get("at_unix_s", 0.0)
    return next((call for call in reversed(made.values()) if call["clocks"]["at_unix_s"] <= begun), {})


def recipe_of(state: Mapping[str, Any]) -> Recipe:
    """The recipe that an arm was measured with."""
    fields = dict(state["recipe"])
    fields |= {"extra_args": tuple(fields["extra_args"]), "extra_env": tuple(map(tuple, fields["extra_env"]))}
    return Recipe(**fields)


def bandwidth(run: Run) -> float:
    """GB/s: the median of what the calls measured, which is one number for all arms so that their floors compare."""
    measured = [call["gb_s"] for call in calls(run).values()]
    return float(statistics.median(measured)) if measured else float(run.manifest["gb_s"])


def sound(state: Mapping[str, Any]) -> bool:
    """Whether an arm's recipe was engaged as planned and its logits were finite."""
    return bool(state.get("engaged", True) and state.get("logits_finite", True))


def table(run: Run, recipes: Mapping[str, Recipe], weights: Inventory, machine: Machine) -> list[dict[str, Any]]:
    """Measured beside predicted: a row for each arm, context, output and accept length. Times in ms per token.

    `floor_ms` is bytes ÷ `bandwidth`; `predicted_ms` adds what the first plain arm of the same MoE backend in `recipes`
    spends beyond its floor at that context (one with the clamp in force), also where several GPUs share the bytes, as
    if they never waited for each other; `gain` is the first plain arm's time ÷ this one's, measured and predicted.
    """
    found, gb_s = states(run), bandwidth(run)
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for record in run.records():
        state = found.get(record["arm"], {})
        if not record["spoiled"] and state.get("booted") == record["booted"]:
            key = (record["arm"], record["context"], record["output"], record["accept"])
            groups.setdefault(key, []).append(Sample.from_json(record["sample"]))
    medians = {key: statistics.median(times) for key, samples in groups.items() if (times := _times(samples))}
    plain: dict[tuple[int, int], float] = {}
    of_backend: dict[tuple[str, int, int], float] = {}
    for name, recipe in recipes.items():
        clamped = (OFF_ENV, "0") not in recipe.extra_env
        if clamped and not recipe.draft_steps and recipe.head == "bf16" and recipe.tp == 1:
            for (arm, context, output, _), measured in medians.items():
                if arm == name:
                    plain.setdefault((context, output), measured)
                    of_backend.setdefault((recipe.moe, context, output), measured)
    result: list[dict[str, Any]] = []
    for (arm, context, output, asked), measured in medians.items():
        samples, recipe = groups[arm, context, output, asked], recipes[arm]
        steps = sum(s.spec_verify_ct or 0 for s in samples)
        length = max(1.0, sum(s.completion_tokens for s in samples) / steps) if steps else 1.0
        load = load_of(recipe, machine, context + output // 2)
        whole = roofline.step_bytes(weights, load)
        read = roofline.split(whole, recipe.tp).total
        row = {
            "arm": arm,
            "sound": sound(found[arm]),
            "context": context,
            "output": output,
            "asked": asked,
            "accept_length": length,
        }
        times = _times(samples)
        row |= {"samples": len(times), "tpot_ms": measured, "least_ms": min(times), "most_ms": max(times)}
        row |= {"step_ms": measured * length, "bytes": read, "gb_s": read / measured / length / 1e6}
        row["floor_ms"] = read / gb_s / 1e6 / length
        reference, same = plain.get((context, output)), of_backend.get((recipe.moe, context, output))
        if reference is not None and same is not None:
            base = load_of(recipe.with_(draft_steps=0, head="bf16", hot_vocab=None, draft_head="shared"),
                           machine, context + output // 2)  # fmt: skip
            spent = roofline.overhead(weights, gb_s, same, base)
            made = roofline.predict(weights, gb_s, load, accept_length=length, overhead_ms=spent)
            predicted = made.tpot_ms - (whole.total - read) / gb_s / 1e6 / length
            row |= {"predicted_ms": predicted, "residual_ms": measured - predicted}
            row |= {"gain": reference / measured, "predicted_gain": reference / predicted}
        result.append(row)
    return result


def _times(samples: Sequence[Sample]) -> list[float]:
    return [sample.tpot_ms for sample in samples if sample.tpot_ms]
