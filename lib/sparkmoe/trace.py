"""Read a torch profiler trace of any size, and find the decode steps in it.

A profile of a few hundred steps is a JSON file of gigabytes, because it names every operator, launch and kernel with
a dozen arguments each. Loading it whole takes ten times its size in memory. Here it is parsed as a stream and only
what the questions need is kept, in columns: name, kind, thread, start, duration, and the correlation number that ties
a kernel to the call that launched it.

Where does a step begin? SGLang opens a span around every forward pass while a profiler runs (`step[DECODE bs=1]`,
`step[VERIFY bs=1]`, `step[DRAFT bs=1]`, `step[EXTEND …]`). A step is the time from one target pass to the next, so
that drafting, sampling and the scheduler's own work are in it; a step with a prefill inside is left out. A trace
without spans is cut at the launches of its largest CUDA graph. A kernel belongs to the step that launched it, not to
the one in whose time it happens to run.

The stock trace does not say which part of the model an operator works for. While profiling, the plugin therefore opens
a scope per part around the modules it knows: `sparkmoe::kda`, `sparkmoe::experts`, …, and `sparkmoe::draft::kda` inside
the draft model (`scope_name`). Scopes may nest; the innermost counts.
"""

from __future__ import annotations

import gzip
import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import ijson
import numpy as np
from numpy.typing import NDArray

from sparkmoe.errors import DataError

KINDS = ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
SCOPE = "sparkmoe::"
GRAPH_LAUNCH = re.compile(r"cu(da)?GraphLaunch")
_TARGET = re.compile(r"step\[(DECODE|VERIFY)\b")
_PREFILL = re.compile(r"step\[(EXTEND|MIXED|SPLIT_PREFILL)\b")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def scope_name(part: str, *, draft: bool = False) -> str:
    """The profiler scope of a part of the model: `sparkmoe::kda`, `sparkmoe::draft::draft_input`, …"""
    return SCOPE + ("draft::" if draft else "") + part.replace(" ", "_")


def scope_part(name: str) -> str | None:
    """The inverse: `draft kda` for `sparkmoe::draft::kda`; None for a span that is no scope of ours."""
    if not name.startswith(SCOPE):
        return None
    return name.removeprefix(SCOPE).replace("draft::", "draft ").replace("_", " ")


@dataclass(frozen=True)
class Trace:
    """The complete events of a trace in columns, sorted by start. Times in µs as the profiler counts them."""

    path: str
    names: tuple[str, ...]
    name: Ints
    kind: Ints
    thread: Ints
    start_us: Floats
    duration_us: Floats
    correlation: Ints

    def __len__(self) -> int:
        return self.name.size

    @cached_property
    def end_us(self) -> Floats:
        return self.start_us + self.duration_us

    def of(self, *kinds: str) -> Ints:
        """Indices of the events of these kinds, by start."""
        return np.flatnonzero(np.isin(self.kind, [KINDS.index(k) for k in kinds]))

    def named(self, pattern: re.Pattern[str], *kinds: str) -> Ints:
        """Indices of the events of these kinds whose name matches from its beginning."""
        wanted = [i for i, name in enumerate(self.names) if pattern.match(name)]
        events = self.of(*kinds)
        return events[np.isin(self.name[events], wanted)]

    @cached_property
    def on_gpu(self) -> bool:
        """Whether the work ran as GPU kernels (otherwise the CPU operators are the work)."""
        return bool(self.of("kernel").size)

    @cached_property
    def work(self) -> Ints:
        """Indices of what did the work: GPU kernels and copies, or operators that no other operator contains."""
        if self.on_gpu:
            return self.of(*GPU_KINDS)
        ops = self.of("cpu_op")
        outer = np.zeros(ops.size, dtype=bool)
        for thread in np.unique(self.thread[ops]):
            here = np.flatnonzero(self.thread[ops] == thread)
            # Sorted by start, and by length where starts are equal: an operator is inside one that has not ended yet.
            ends = np.maximum.accumulate(self.end_us[ops[here]])
            outer[here] = np.concatenate(([True], self.start_us[ops[here[1:]]] >= ends[:-1]))
        return ops[outer]

    @cached_property
    def launched_by(self) -> Ints:
        """For each of `work` the event that caused it: its launch call on a GPU (−1 if unknown), itself on a CPU."""
        if not self.on_gpu:
            return self.work
        calls = self.of(*LAUNCH_KINDS)
        calls = calls[np.argsort(self.correlation[calls], kind="stable")]
        if not calls.size:
            return np.full(self.work.size, -1)
        at = np.searchsorted(self.correlation[calls], self.correlation[self.work])
        found = calls[np.minimum(at, calls.size - 1)]
        return np.where(self.correlation[found] == self.correlation[self.work], found, -1)


def read(path: Path | str) -> Trace:
    """Read a `.json` or `.json.gz` trace as a stream: about 30 bytes are kept per event.

    Raises DataError for a file that is missing, not a trace, without events, or cut off in the middle.
    """
    file = Path(path)
    try:
        with _open(file) as stream:
            trace = _columns(str(file), _events(stream, file))
    except FileNotFoundError:
        raise DataError(f"There is no trace at {file}. SGLang writes one when a profile is stopped.") from None
    if not len(trace):
        raise DataError(f"{file} holds no operator, launch or kernel: was the profiler started with activities?")
    return trace


def _open(file: Path) -> IO[bytes]:
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
    return cast(IO[bytes], gzip.open(file, "rb") if packed else file.open("rb"))


def _events(stream: IO[bytes], file: Path) -> Iterator[dict[str, Any]]:
    seen = 0
    try:
        for event in ijson.items(stream, "traceEvents.item", use_float=True, buf_size=1 << 20):
            seen += 1
            if isinstance(event, dict):
                yield event
    except (ijson.JSONError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        if not seen and isinstance(error, (ijson.JSONError, UnicodeDecodeError)):
            raise DataError(f"{file} is not a profiler trace: {error}.") from None
        raise DataError(
            f"{file} is cut off or damaged after {seen:,} events ({error}). The server was probably stopped while it "
            "wrote the trace; profile fewer steps, and wait until the file stops growing."
        ) from None


def _columns(path: str, events: Iterator[dict[str, Any]]) -> Trace:
    kinds = {kind: i for i, kind in enumerate(KINDS)}
    names: dict[str, int] = {}
    threads: dict[Any, int] = {}
    name, kind, thread, correlation = array("q"), array("b"), array("i"), array("q")
    start, duration = array("d"), array("d")
    for event in events:
        # A scope may have been opened as an operator, which costs the traced program less.
        ours = event.get("name", "").startswith(SCOPE)
        which = kinds.get("user_annotation" if ours else event.get("cat", ""))
        if which is None or event.get("ph") != "X":
            continue
        kind.append(which)
        name.append(names.setdefault(event["name"], len(names)))
        thread.append(threads.setdefault((event.get("pid"), event.get("tid")), len(threads)))
        start.append(float(event["ts"]))
        duration.append(float(event.get("dur", 0.0)))
        correlation.append(event.get("args", {}).get("correlation", -1))
    starts, lengths = np.array(start), np.array(duration)
    order = np.lexsort((-lengths, starts))
    return Trace(
        path,
        tuple(names),
        np.array(name, dtype=np.int64)[order],
        np.array(kind, dtype=np.int64)[order],
        np.array(thread, dtype=np.int64)[order],
        starts[order],
        lengths[order],
        np.array(correlation, dtype=np.int64)[order],
    )


# ------------------------------------------------------------------------------------------------------------- the
# steps


@dataclass(frozen=True)
class Steps:
    """Steady decode steps. `begin_us`, `end_us`: when the host worked on them. `how` says by what they were found."""

    begin_us: Floats
    end_us: Floats
    how: str

    def __len__(self) -> int:
        return self.begin_us.size

    def of(self, times_us: Floats) -> Ints:
        """The step that each time falls into, −1 for none."""
        at = np.searchsorted(self.begin_us, times_us, side="right") - 1
        inside = (at >= 0) & (times_us < self.end_us[np.maximum(at, 0)])
        return np.where(inside, at, -1)


def steps(trace: Trace, *, skip: int = 1) -> Steps:
    """The decode steps of a trace, without the first `skip` (the profiler itself slows them down).

    Raises DataError where there is none, saying what was found instead.
    """
    spans = trace.named(_TARGET, "user_annotation")
    how = "SGLang's step spans"
    begins = trace.start_us[spans]
    if begins.size < 2:
        begins, how = _graph_launches(trace), "launches of the largest CUDA graph"
    prefills = trace.start_us[trace.named(_PREFILL, "user_annotation")]
    begin, end = begins[:-1], begins[1:]
    clean = np.searchsorted(prefills, begin) == np.searchsorted(prefills, end)
    begin, end = begin[clean][skip:], end[clean][skip:]
    if not begin.size:
        seen = sorted({trace.names[i] for i in trace.name[trace.of("user_annotation")]})[:4]
        raise DataError(
            f"{trace.path} holds no decode step: {len(trace):,} events, {begins.size} target passes, none followed by "
            f"another without a prefill between, spans: {', '.join(seen) or 'none'}. Profile while a request decodes."
        )
    return Steps(begin, end, how)


def trim(trace: Trace, found: Steps, path: Path, *, count: int = 4) -> Path:
    """Write the first `count` of the steps as a trace of their own (`.json.gz`): a few hundred kilobytes that can be
    kept beside the figures, and that `read` and `steps(…, skip=0)` take like the whole one."""
    begin, end = found.begin_us[0], found.end_us[:count][-1]
    cause = np.arange(len(trace))
    launched = trace.launched_by >= 0
    cause[trace.work[launched]] = trace.launched_by[launched]
    since = trace.start_us[cause]
    kept = np.flatnonzero((since >= begin) & (since <= end))  # with the span that ends the last step
    columns = zip(trace.name[kept], trace.kind[kept], trace.thread[kept], trace.start_us[kept],
                  trace.duration_us[kept], trace.correlation[kept], strict=True)  # fmt: skip
    events = [
        {"ph": "X", "cat": KINDS[kind], "name": trace.names[name], "pid": 1, "tid": int(thread), "ts": float(start)}
        | {"dur": float(duration)}
        | ({"args": {"correlation": int(correlation)}} if correlation >= 0 else {})
        for name, kind, thread, start, duration, correlation in columns
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))
    return path


def _graph_launches(trace: Trace) -> Floats:
    """When the CUDA graph with the most kernel time was launched, each time."""
    calls = trace.named(GRAPH_LAUNCH, *LAUNCH_KINDS)
    if not calls.size:
        return np.empty(0)
    # A graph is recognised by how many kernels it launches.
    kernels = np.bincount(
        np.searchsorted(calls, trace.launched_by[np.isin(trace.launched_by, calls)]), minlength=calls.size
    )
    work = {int(n): n * int((kernels == n).sum()) for n in np.unique(kernels)}
    return trace.start_us[calls[kernels == max(work, key=lambda n: work[n])]]
