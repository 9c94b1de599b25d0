"""Does this sample count? What was seen while it was taken decides.

A time can be true and still mean something else: a kernel was compiled in its window, half the prompt came from the
prefix cache, the answer was shorter than ordered, the GPU hung at half its clock. Such a sample is not thrown away,
because how often that happens is a finding too. It is kept with its reasons, each `kind: what was seen`, and every
figure leaves it out and says how many it left out.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from sparkmoe.client import Sample
from sparkmoe.conditions import clocks
from sparkmoe.machine import GIB, Machine
from sparkmoe.workload import Prompt

_COMPILES = re.compile(r"to compile after serving started|device-loaded after serving started|FlashInfer autotune")
_SWAPPED_BYTES = 16 << 20
# No server makes a step in that time; a client that slept through an answer reads it so.
_UNREAD_MS, _STALL_MS = 0.02, 100.0


def compile_lines(lines: Sequence[str]) -> list[str]:
    """The log lines that say a kernel was compiled, loaded or tuned while the server was serving."""
    return [line.strip() for line in lines if _COMPILES.search(line)]


def reasons_spoiled(sample: Sample, prompt: Prompt, lines: Sequence[str], floor_ms: float | None = None) -> list[str]:
    """Why a sample must not count, as `kind: what was seen`; empty for a good one."""
    reasons = [f"compile: {line}" for line in compile_lines(lines)[:1]]
    if sample.error:
        return [f"error: {sample.error}", *reasons]
    if sample.cached_tokens is None:
        reasons.append("cache: the server did not say how many tokens came from its cache")
    elif sample.cached_tokens:
        reasons.append(f"cache: {sample.cached_tokens} of {sample.prompt_tokens} prompt tokens came from the cache")
    if prompt.ignore_eos and sample.completion_tokens != prompt.max_new_tokens:
        reasons.append(f"length: {sample.completion_tokens} tokens instead of {prompt.max_new_tokens}")
    gaps, waited_ms = sample.gaps_ms, sample.ttft_ms or 0.0
    if len(gaps) > 2 and statistics.median(gaps) < _UNREAD_MS and waited_ms > _STALL_MS:
        reasons.append(f"unread: the answer came in one heap, {len(gaps) + 1} pieces within {sum(gaps):.2f} ms; other "
                       "programs kept this one from reading them as they came")  # fmt: skip
    if floor_ms is not None and sample.tpot_ms is not None:
        step_ms = sample.tpot_ms * (sample.accept_length or 1.0)
        if step_ms < floor_ms:
            reasons.append(f"ceiling: a step of {step_ms:.3f} ms, but its bytes alone take {floor_ms:.3f} ms")
    return reasons


def machine_alarms(machine: Machine, swapped_in_before: int = 0, *, gpus: int = 1) -> list[str]:
    """What is wrong with the machine right now: memory nearly gone, swapping, or a GPU far below its clock.

    Only the first `gpus` of the visible ones are looked at, those that serve: an idle one rests far below its clock.
    """
    alarms, memory = [], psutil.virtual_memory()
    if memory.available < min(0.03 * memory.total, GIB):
        alarms.append(f"memory: only {memory.available / GIB:.2f} GiB available")
    if (swapped := psutil.swap_memory().sin - swapped_in_before) > _SWAPPED_BYTES:
        alarms.append(f"memory: {swapped >> 20} MiB were read back from swap during the request")
    for index, gpu in enumerate(clocks()["gpus"][:gpus] if machine.profile != "cpu" else []):
        now, top = gpu.get("sm_mhz"), gpu.get("sm_max_mhz")
        if now and top and now < 0.5 * top:
            alarms.append(f"clock: GPU {index} at {now} of {top} MHz")
    return alarms


def spoiled_by(records: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How many samples each kind of reason spoiled (a sample may have several)."""
    return Counter(kind for r in records for kind in {reason.split(":")[0] for reason in r["spoiled"]})


class LogTail:
    """Lines that a growing log gained since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            gained = file.read()
        self._offset += len(gained)
        return gained.decode(errors="replace").splitlines()
