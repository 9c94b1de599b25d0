"""What H200s gave at Ling-3.0-flash's full shape, as tables that notebooks show beside their own.

The run (`RECORD`) is of random weights that route as real ones do, and of simulated accept lengths
(tests/gpu/README.md). So it says what a step costs and why, and about answers only what the trained miniature gave in
its FP4 form. The kernels' distances from float64 (`LIMITS`) are of single layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkmoe import recorded
from sparkmoe.errors import DataError
from sparkmoe.recorded import Recorded

RECORD, LIMITS = "full-shape-h200", "levers-h200"
OUTPUT_TOKENS = 128  # the other length of the run gives the same to 3 per cent, under FlashInfer to 10

_BUSY, _STEP = "at least one kernel runs", "the whole step"
_RUNNERS = {"humming_indexed": "Humming", "humming_grouped": "Humming, grouped", "marlin_fused": "Marlin"}


def load() -> Recorded:
    """The record of the run."""
    return recorded.load(RECORD)


def rows(*arms: str, contexts: Sequence[int] = (512,), against: str | None = None) -> list[dict[str, str]]:
    """Predicted beside measured, one row per arm, context and accept length, in ms a token; the range is of repeats,
    and a step is of as many tokens as are accepted.

    "Bytes alone" is the roofline's floor; the prediction adds what the plain arm of the same MoE backend spends beyond
    its own. `against` names the arm that gains refer to, at the same accept length if it has a draft; by default
    `humming_bf16`. Raises DataError for an arm without a result.
    """
    found, reference = [_by_name(arm) for arm in arms], against or "humming_bf16"
    drafts = _by_name(reference)[0]["asked"] is not None
    return [
        {
            "on an H200": arm,
            "context": f"{row['context']:,}",
            "accept length": f"{row['accept_length']:.2f}",
            "bytes alone": f"{row['floor_ms']:.2f}",
            "predicted": f"{row['predicted_ms']:.2f}",
            "measured": f"{row['tpot_ms']:.2f} [{row['least_ms']:.2f}, {row['most_ms']:.2f}]",
            "a step": f"{row['step_ms']:.2f}",
            "gain": f"{_gain(row, reference, drafts):.2f} ×",
        }
        for arm, its in zip(arms, found, strict=True)
        for row in its
        if row["context"] in contexts
    ]


def _gain(row: dict[str, Any], reference: str, drafts: bool) -> float:
    return ms_per_token(reference, row["context"], row["asked"] if drafts else None) / float(row["tpot_ms"])


def parts(*arms: str, context: int = 512, least_ms: float = 0.15) -> list[dict[str, str]]:
    """Where one step's time goes: ms of kernels by part, a column per arm; parts below `least_ms` in all are summed.

    Kernels overlap, on two streams and where one begins before the last one ends, so a column adds up to more than the
    time in which at least one ran. What that lacks of the whole step is waiting: for a launch, or for the host. Raises
    DataError for an arm that was not profiled at that context.
    """
    columns: dict[str, dict[str, float]] = {}
    for arm in arms:
        step = load().findings["profiles"].get(arm, {}).get(str(context))
        if step is None:
            raise DataError(f"{RECORD} has no profile of {arm} at context {context}")
        columns[arm] = {part["part"]: part["ms"] for part in step["parts"]}
        columns[arm] |= {_BUSY: step["busy_ms"], _STEP: step["step_ms"]}
    names = list(dict.fromkeys(part for column in columns.values() for part in column))
    small = [name for name in names if all(column.get(name, 0.0) < least_ms for column in columns.values())]
    kept = sorted((name for name in names if name not in small), key=lambda name: -columns[arms[0]].get(name, 0.0))
    shown: list[dict[str, str]] = []
    for name in (*(name for name in kept if name not in (_BUSY, _STEP)), "the rest", _BUSY, _STEP):
        values = {
            arm: sum(column.get(part, 0.0) for part in (small if name == "the rest" else [name]))
            for arm, column in columns.items()
        }
        shown.append({"ms of kernels a step": name} | {arm: f"{ms:.2f}" for arm, ms in values.items()})
    return shown


def limits() -> list[dict[str, str]]:
    """How far one token's result is from three formulas in float64, for each of the experts' runners and each limit,
    relative to the formula: Ling's own, one that clamps before SiLU, one without a clamp. And the time of a layer."""
    shown, found = [], recorded.load(LIMITS).findings
    for case, facts in found.items():
        runner, _, limit = case.partition("_limit_")
        if runner in _RUNNERS and limit:
            took = f"{facts['layer_us_1']:.1f} µs"
            shown.append(_distances(_RUNNERS[runner], limit, facts["tokens_1"], took))
    return [*shown, _distances("Marlin without the hook", "4.0", found["marlin_without_hook"], "not timed")]


def _distances(runner: str, limit: str, off: dict[str, float], took: str) -> dict[str, str]:
    asked = {"Ling's formula": "after", "a clamp before SiLU": "before", "no clamp": "none"}
    shown = {f"to {formula}": f"{off[key]:.2%}" for formula, key in asked.items()}
    return {"runner": runner, "limit": limit} | shown | {"a layer's experts, one token": took}


def miniature() -> list[dict[str, str]]:
    """The trained miniature in its FP4 form under Humming, with the plugin's clamp and without, beside the CPU: 500
    problems of each kind, and the accept length of greedy answers to 100."""
    found = load().findings["miniature"]
    with_clamp, without = found["nano_mxfp4"], found["nano_mxfp4_unclamped"]
    cpu = with_clamp["cpu"] | {"accept_length_greedy": with_clamp["cpu"]["accept_length"]["problems_greedy"]}
    named = (("this CPU platform", cpu), ("Humming, clamped", with_clamp), ("Humming, unclamped", without))
    return [
        {
            "nano Ling": name,
            "new numbers, right": f"{each['instances']['accuracy']:.1%}",
            "new combinations, right": f"{each['combinations']['accuracy']:.1%}",
            "accept length, K = 3": f"{each['accept_length_greedy']:.2f}",
        }
        for name, each in named
    ]


def ms_per_token(arm: str, context: int = 512, asked: float | None = None) -> float:
    """The median time per token of an arm, in ms, at a context and a simulated accept length (None: no draft)."""
    return float(_row(arm, context, asked)["tpot_ms"])


def step_ms(arm: str, context: int = 512, asked: float | None = None) -> float:
    """The median time of a step, in ms; arguments as of `ms_per_token`."""
    return float(_row(arm, context, asked)["step_ms"])


def saved(before: str, after: str, asked: float | None = None) -> dict[str, str]:
    """What one arm takes less than another for a token at 512 of context, beside what its bytes promise. With drafts of
    which none is accepted (`asked` = 1.0) a token is a step."""
    (ms, floor), (less_ms, less) = (
        (ms_per_token(arm, 512, asked), floor_ms(arm, 512, asked)) for arm in (before, after)
    )
    return {
        "before": f"{ms:.3f} ms",
        "after": f"{less_ms:.3f} ms",
        "saved": f"{ms - less_ms:.3f} ms",
        "bytes alone": f"{floor - less:.3f} ms",
        "source": load().line(),
    }


def floor_ms(arm: str, context: int = 512, asked: float | None = None) -> float:
    """What the bytes of a token take at the bandwidth of that machine, in ms; arguments as of `ms_per_token`."""
    return float(_row(arm, context, asked)["floor_ms"])


def _row(arm: str, context: int, asked: float | None) -> dict[str, Any]:
    for row in _by_name(arm):
        if row["context"] == context and row["asked"] == asked:
            return row
    raise DataError(f"{RECORD} has no time of {arm} at context {context} and accept length {asked}")


def _by_name(arm: str) -> list[dict[str, Any]]:
    found = [row for row in load().findings["rows"] if row["arm"] == arm and row["output"] == OUTPUT_TOKENS]
    if not found:
        known = dict.fromkeys(row["arm"] for row in load().findings["rows"])
        raise DataError(f"{RECORD} has no result of {arm}; it has {', '.join(known)}")
    return found
