"""The recorded run of Ling-3.0-flash's full shape on one H200, as tables that notebooks show beside their own.

The run is of random weights that route as real ones do, and of simulated accept lengths (tests/gpu/README.md). So it
says what a step costs and why, and nothing about answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkmoe import recorded
from sparkmoe.errors import DataError
from sparkmoe.recorded import Recorded

RECORD = "full-shape-h200"
OUTPUT_TOKENS = 128  # the other length of the run gives the same to 2.5 per cent

_BUSY = "at least one kernel runs"


def load() -> Recorded:
    """The record of the run."""
    return recorded.load(RECORD)


def rows(*arms: str, contexts: Sequence[int] = (512,), against: str | None = None) -> list[dict[str, str]]:
    """Predicted beside measured, one row per arm, context and accept length, in ms a token; the range is of repeats.

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

    Kernels overlap, on two streams and where one begins before the last one ends, so a column adds up to more than its
    last row, the time in which at least one ran. Raises DataError for an arm that was not profiled at that context.
    """
    columns: dict[str, dict[str, float]] = {}
    for arm in arms:
        step = load().findings["profiles"].get(arm, {}).get(str(context))
        if step is None:
            raise DataError(f"{RECORD} has no profile of {arm} at context {context}")
        columns[arm] = {part["part"]: part["ms"] for part in step["parts"]} | {_BUSY: step["busy_ms"]}
    names = list(dict.fromkeys(part for column in columns.values() for part in column))
    small = [name for name in names if all(column.get(name, 0.0) < least_ms for column in columns.values())]
    kept = sorted((name for name in names if name not in small), key=lambda name: -columns[arms[0]].get(name, 0.0))
    shown: list[dict[str, str]] = []
    for name in (*(name for name in kept if name != _BUSY), "the rest", _BUSY):
        values = {
            arm: sum(column.get(part, 0.0) for part in (small if name == "the rest" else [name]))
            for arm, column in columns.items()
        }
        shown.append({"ms of kernels a step": name} | {arm: f"{ms:.2f}" for arm, ms in values.items()})
    return shown


def ms_per_token(arm: str, context: int = 512, asked: float | None = None) -> float:
    """The median time per token of an arm, in ms, at a context and a simulated accept length (None: no draft)."""
    return float(_row(arm, context, asked)["tpot_ms"])


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
