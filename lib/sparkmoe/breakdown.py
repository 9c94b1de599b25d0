"""Where does a decode step's time go, and what would make it shorter?

Time is sorted into the same parts as bytes (`inventory.py`), so that each part's bytes ÷ its time can stand beside
the machine's bandwidth. Three sources say which part a kernel works for, in this order: the plugin's scopes, the
kernel's own name, and its place among the others (`placing`). What no rule reaches is listed by name.

The verdict compares floors with time. A step takes at least its bytes ÷ bandwidth (memory) and its operations ÷ peak
(compute). Beyond these it spends time in kernels that are too small to use the machine and in gaps between them
(launch), and waiting for the host to launch anything at all (host). On a CPU host and device are one, so all of that
is host time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from sparkmoe.placing import RULES, UNKNOWN, classify, place_step
from sparkmoe.trace import GRAPH_LAUNCH, LAUNCH_KINDS, Floats, Ints, Steps, Trace, scope_part

EXTRA_BYTES = {"KDA state": "kda", "KV cache": "mla"}  # what a part reads besides its weights


# ----------------------------------------------------------------------------------------------------------------
# attribution


def scopes_at(trace: Trace, threads: Ints, times_us: Floats) -> list[str | None]:
    """The innermost of the plugin's scopes that is open on `threads[i]` at `times_us[i]`."""
    result: list[str | None] = [None] * len(times_us)
    labels = [scope_part(name) for name in trace.names]
    spans = [i for i in trace.of("user_annotation") if labels[trace.name[i]] is not None]
    for thread in {int(trace.thread[i]) for i in spans}:
        mine = [i for i in spans if trace.thread[i] == thread]
        # Moments at which the innermost scope changes; ends come before beginnings at the same time.
        moments = sorted(
            [(float(trace.start_us[i]), 1, i) for i in mine] + [(float(trace.end_us[i]), 0, i) for i in mine]
        )
        opened: dict[int, None] = {}
        changes, inside = [-np.inf], [None]
        for time, starts, i in moments:
            if starts:
                opened[i] = None
            else:
                opened.pop(i, None)
            changes.append(time)
            inside.append(labels[trace.name[next(reversed(opened))]] if opened else None)
        here = np.flatnonzero(threads == thread)
        for k, at in zip(here, np.searchsorted(changes, times_us[here], side="right") - 1, strict=True):
            result[k] = inside[at]
    return result


@dataclass(frozen=True)
class Breakdown:
    """A decode step on average. Times in ms per step.

    `parts` and `unknown` give (ms, calls) per step. `busy_ms` is when at least one kernel ran; the rest of the step is
    `host_gap_ms`, in which the next kernel had not been launched yet, and `launch_gap_ms`, in which it had.
    """

    steps: int
    step_ms: float
    busy_ms: float
    host_gap_ms: float
    launch_gap_ms: float
    calls: float
    on_gpu: bool
    parts: dict[str, tuple[float, float]]
    unknown: dict[str, tuple[float, float]]
    top: dict[str, tuple[float, float]]

    @property
    def named_share(self) -> float:
        """Share of the kernels' time that lies in a named part."""
        total = sum(ms for ms, _ in self.parts.values())
        return 1 - self.parts.get(UNKNOWN, (0.0, 0.0))[0] / total if total else 0.0

    def unwatched(self, step_ms: float) -> Breakdown:
        """The same step at `step_ms`, its length without a profiler.

        On a CPU the profiler slows operators and what lies between them alike, so all is scaled. Kernels on a GPU do
        not notice it: they keep their time, the gaps between launched kernels as much of theirs as there is room for,
        and the host's gap is the rest.
        """
        if self.on_gpu:
            idle = max(step_ms - self.busy_ms, 0.0)
            launching = min(self.launch_gap_ms, idle)
            return replace(self, step_ms=step_ms, launch_gap_ms=launching, host_gap_ms=idle - launching)
        factor = step_ms / self.step_ms

        def scaled(sums: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
            return {key: (factor * ms, calls) for key, (ms, calls) in sums.items()}

        return replace(
            self, step_ms=step_ms, busy_ms=factor * self.busy_ms, host_gap_ms=factor * self.host_gap_ms,
            launch_gap_ms=factor * self.launch_gap_ms, parts=scaled(self.parts), unknown=scaled(self.unknown),
            top=scaled(self.top),
        )  # fmt: skip

    def table(self, bytes_by_part: Mapping[str, float] | None = None) -> pd.DataFrame:
        """One row per part: ms, share of the kernels' time, calls, GB/s where `bytes_by_part` (of a step) has it."""
        read: dict[str, float] = {}
        for part, size in (bytes_by_part or {}).items():
            draft = part.startswith("draft ") and part != "draft input"
            bare = part.removeprefix("draft ") if draft else part
            home = ("draft " if draft else "") + EXTRA_BYTES.get(bare, bare)
            read[home] = read.get(home, 0.0) + size
        total = sum(ms for ms, _ in self.parts.values())
        rows = [
            {"part": part, "ms": ms, "share": ms / total, "calls": calls}
            | {"bytes": read.get(part), "gb_s": read[part] / ms / 1e6 if read.get(part) and ms else None}
            for part, (ms, calls) in sorted(self.parts.items(), key=lambda item: -item[1][0])
        ]
        return pd.DataFrame(rows)


def break_down(trace: Trace, steps: Steps, rules: Sequence[tuple[str, str]] = RULES) -> Breakdown:
    """Sort the work of steady steps into parts, and their idle time into what it waited for."""
    cause = np.where(trace.launched_by >= 0, trace.launched_by, trace.work)
    step = steps.of(trace.start_us[cause])
    keep = step >= 0
    work, cause, step = trace.work[keep], cause[keep], step[keep]
    scoped = scopes_at(trace, trace.thread[cause], trace.start_us[cause])
    labels = {int(n): classify(trace.names[n], rules) for n in np.unique(trace.name[work])}
    parts = [labels[int(n)] for n in trace.name[work]]
    if trace.on_gpu:
        graphs = np.isin(cause, trace.named(GRAPH_LAUNCH, *LAUNCH_KINDS))
        for k in range(len(steps)):
            mine = np.flatnonzero(step == k)  # `work` is sorted by start, so these are in order of execution
            for i, part in zip(mine, place_step([parts[i] for i in mine], cause[mine], graphs[mine]), strict=True):
                parts[i] = part
    parts = [scope or (UNKNOWN if part.isupper() else part) for scope, part in zip(scoped, parts, strict=True)]
    length = trace.duration_us[work] / 1e3 / len(steps)
    begin_us, end_us, launched_us = trace.start_us[work], trace.end_us[work], trace.start_us[cause]
    # A gap is what lies between the latest end so far and the next start; it is the host's up to the next launch.
    before = np.maximum.accumulate(end_us)[:-1] if work.size else np.empty(0)
    same = step[1:] == step[:-1]
    gap = np.maximum(begin_us[1:] - before, 0.0)
    late = np.clip(launched_us[1:] - before, 0.0, gap) if trace.on_gpu else gap
    covered = float((end_us[1:] - np.maximum(begin_us[1:], before)).clip(0).sum())
    busy = (covered + float(end_us[0] - begin_us[0]) if work.size else 0.0) / 1e3 / len(steps)
    period = float((steps.end_us - steps.begin_us).mean()) / 1e3
    launch = float((gap - late)[same].sum()) / 1e3 / len(steps)
    return Breakdown(
        len(steps),
        period,
        busy,
        max(period - busy - launch, 0.0),
        launch,
        work.size / len(steps),
        trace.on_gpu,
        _sums(parts, length, len(steps)),
        _sums([trace.names[n] for n, p in zip(trace.name[work], parts, strict=True) if p == UNKNOWN],
              length[[p == UNKNOWN for p in parts]], len(steps)),
        _sums([trace.names[n] for n in trace.name[work]], length, len(steps)),
    )  # fmt: skip


def _sums(keys: Sequence[str], ms: Floats, steps: int) -> dict[str, tuple[float, float]]:
    """key → (ms, calls) per step, the longest first."""
    frame = pd.DataFrame({"key": keys, "ms": ms}).groupby("key")["ms"].agg(["sum", "count"])
    ordered = frame.sort_values("sum", ascending=False)
    return {str(k): (float(row["sum"]), float(row["count"]) / steps) for k, row in ordered.iterrows()}


# ----------------------------------------------------------------------------------------------------------------
# verdict

Bound = Literal["memory", "compute", "launch", "host"]
HELPS = {
    "memory": "fewer bytes help: an FP8 head, and drafts (NEXTN), whose tokens share one reading of the weights",
    "compute": "fewer operations help: a smaller batch, or lower precision; saving bytes does not",
    "launch": "fewer, larger kernels help: fused kernels, CUDA graphs, drafts (NEXTN) sharing a pass; bytes hardly do",
    "host": "less host work a token helps: CUDA graphs, the overlap scheduler, drafts (NEXTN); bytes do not matter",
}
# On a CPU there is no device that could run ahead of its host.
HELPS_CPU = "fewer and larger operators help, and drafts (NEXTN), whose tokens share a pass; bytes hardly do"


@dataclass(frozen=True)
class Verdict:
    """What bounds a step. `shares` split the step's time into memory, compute, launch and host, and add up to 1."""

    bound: Bound
    shares: dict[Bound, float]
    step_ms: float
    memory_floor_ms: float
    compute_floor_ms: float
    helps: str

    @property
    def sentence(self) -> str:
        """The verdict in words, with its numbers and the levers that can help."""
        split = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares.items() if share >= 0.005)
        return (
            f"{self.bound}-bound: of {self.step_ms:.2f} ms a step, reading its bytes takes at least "
            f"{self.memory_floor_ms:.2f} ms ({split}); {self.helps}."
        )


def verdict(
    found: Breakdown, step_bytes: float, gb_s: float, *, step_operations: float = 0.0, peak_tflops: float | None = None
) -> Verdict:
    """Name what a step is bound by. `step_bytes` from the roofline, `gb_s` as measured; operations only where a peak
    is known.

    The larger of the two floors counts as memory or compute. The kernels' time beyond it and the gaps between
    launched kernels are launch, waiting for the host is host; on a CPU everything beyond the floor is host.
    """
    memory = step_bytes / gb_s / 1e6
    compute = step_operations / peak_tflops / 1e9 if peak_tflops else 0.0
    floor = min(max(memory, compute), found.step_ms)
    kernels = max(found.busy_ms - floor, 0.0)
    launch = kernels + found.launch_gap_ms if found.on_gpu else 0.0
    launch = min(launch, found.step_ms - floor)
    which: Bound = "memory" if memory >= compute else "compute"
    shares: dict[Bound, float] = {which: floor, "launch": launch, "host": found.step_ms - floor - launch}
    shares = {name: ms / found.step_ms for name, ms in shares.items()}
    bound = max(shares, key=lambda name: shares[name])
    helps = HELPS_CPU if bound == "host" and not found.on_gpu else HELPS[bound]
    return Verdict(bound, shares, found.step_ms, memory, compute, helps)
