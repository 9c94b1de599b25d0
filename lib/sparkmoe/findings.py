"""What a check found, and which of many findings to believe first.

A machine in trouble rarely shows one symptom. A scheduler left over from yesterday holds memory, so memory is short, so
the model does not fit, and the port is taken too: four red rows, one cause. The verdict therefore names the finding
that explains the others, by an order that runs from causes to effects: driver, power, leftovers, installation, then
memory, files and speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "fail"]
# From cause to effect: a name in front can explain those behind it. Names that are not listed come last.
_CAUSES_FIRST = (
    "driver answers", "driver wedge", "GPU", "driver", "other SGLang", "GPU processes", "huge pages", "swap",
    "sglang", "packages", "flashinfer", "compiler", "ptxas", "state", "results", "disk", "model", "config",
    "memory total", "memory", "port", "temperature", "clock", "bandwidth", "kernels", "humming bandwidth",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line of the table. A failed one would make a run fail; a warning costs speed, accuracy or patience."""

    what: str
    state: State
    found: str
    expected: str = ""
    advice: str = ""


def verdict(findings: Iterable[Finding]) -> str:
    """One sentence: "healthy", or the likeliest cause of what is wrong with its advice, and what else was found."""
    known = list(findings)
    for state, head in (("fail", "a run would fail"), ("warn", "a run would work, but")):
        rows = sorted((f for f in known if f.state == state), key=_rank)
        if rows:
            first, others = rows[0], [f.what for f in rows[1:]]
            advice = f"; {first.advice}" if first.advice else ""
            also = f" (also: {', '.join(others)})" if others else ""
            return f"{head}: {first.what}: {first.found}{advice}{also}"
    return "healthy"


def _rank(finding: Finding) -> int:
    return _CAUSES_FIRST.index(finding.what) if finding.what in _CAUSES_FIRST else len(_CAUSES_FIRST)
