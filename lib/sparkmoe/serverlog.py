"""Reading a server's log: how far is it, and why did it die?

A server that loads for six minutes says where it is in its log and nowhere else, and one that died leaves its reason
there, usually not in the last line: the last lines are the echo of one process noticing that another has gone. Both
questions are answered here by pure functions on text, so that every known failure is a fixture in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

STAGES = ("start", "load", "memory", "graphs", "warm-up", "ready")
_MARKS = (  # first match wins; a draft model loads after the target, so a stage may come twice
    ("ready", re.compile(r"fired up and ready to roll")),
    ("warm-up", re.compile(r"Application startup complete|Uvicorn running on")),
    ("graphs", re.compile(r"Capture .* begin|Capturing batches")),
    ("memory", re.compile(r"KV Cache is allocated|Mamba Cache is allocated|Memory pool end")),
    ("load", re.compile(r"Load weight begin|loading .*shards|Loading .*shards")),
)
_PERCENT = re.compile(r"(\d{1,3})% Completed|(\d{1,3})%\|")
_NOISE = re.compile(r"UserWarning|warnings\.warn|^\s*$|INFO: |kill_process_tree|it/s\]")


@dataclass(frozen=True)
class Progress:
    """Where a starting server is: one of `STAGES`, and its share of that stage where the log tells it."""

    stage: str = "start"
    percent: int | None = None

    @property
    def index(self) -> int:
        return STAGES.index(self.stage)


def progress(lines: Iterable[str], before: Progress = Progress()) -> Progress:
    """The furthest stage that `lines` (in order) reach, beginning at `before`."""
    here = before
    for line in lines:
        stage = next((name for name, mark in _MARKS if mark.search(line)), None)
        if stage is None or STAGES.index(stage) < here.index:
            continue
        found = _PERCENT.findall(line)
        here = Progress(stage, int(next(filter(None, found[-1]))) if found else None)
    return here


_SPENT = {
    "load": re.compile(r"Load weight end\. elapsed=([\d.]+) s"),
    "graphs": re.compile(r"Capture .* end\. .*?elapsed=([\d.]+) s"),
    "compile": re.compile(r"took ([\d.]+) s to compile after serving started"),
}


def seconds_spent(lines: Iterable[str]) -> dict[str, float]:
    """Seconds that a server spent on weights ("load"), CUDA graphs ("graphs") and, once it served, on compiling kernels
    ("compile"), target and draft together; what it compiled before that is in the other two."""
    spent = dict.fromkeys(_SPENT, 0.0)
    for line in lines:
        for what, mark in _SPENT.items():
            if found := mark.search(line):
                spent[what] += float(found[1])
    return spent


# (pattern, what it means, what to do). First match in the table wins: from the particular to the general.
_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (r"sparkmoe: stopped: (?P<why>.+)", "sparkmoe stopped it: {why}"),
        (r"(?P<why>sparkmoe plugin: .+)", "{why}"),
        (r"(?P<why>hook .+ does not fit.*)", "{why}"),
        (r"Platform plugin '(?P<why>\w+)' is installed but activate\(\) returned None",
         "SGLang refused the platform {why}; check SGLANG_PLATFORM and SGLANG_PLUGINS"),
        (r"rmapiLockAcquire", "the NVIDIA driver is wedged (rmapiLockAcquire); power-cycle the machine, then use "
         "mem_fraction 0.68 or less and build kernels before loading"),
        (r"address already in use|Errno 98", "its port was taken while it loaded; choose another one"),
        (r"ptxas fatal|ptxas.*(not defined for option 'gpu-name'|Unsupported)|no kernel image is available",
         "a kernel was built for another GPU: ptxas or the binary does not know this compute capability"),
        (r"cudafe\+\+.*(died|Killed)|ninja: build stopped|Killed.*nvcc|Error building extension",
         "building a kernel failed, usually for want of memory; build kernels before loading, with fewer jobs"),
        (r"flashinfer.*version.*(mismatch|does not match)|cubin.*version",
         "flashinfer and its cubin package have different versions; install the lock again"),
        (r"CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation",
         "the GPU ran out of memory; lower mem_fraction or stop what else uses it"),
        (r"Not enough memory|No available memory for the KV|mem.fraction.static.*too small",
         "no memory was left for the KV cache after the weights; raise mem_fraction or shorten the context"),
        (r"MemoryError|Cannot allocate memory|DefaultCPUAllocator: (can't|not enough)",
         "the machine ran out of memory"),
        (r"shapes cannot be multiplied",
         "two weight matrices do not fit; does a draft share an FP8 head without its scales?"),
        (r"triton\.compiler\.errors\.\w+",
         "a Triton kernel did not compile: SGLang did not write it for these model dimensions or this GPU"),
        (r"exit(ed with)? code:? ?-9\b|signal 9|SIGKILL",
         "it was killed (signal 9), usually by the kernel for want of memory"),
        (r"(?P<why>SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer)",
         "a weight file is damaged ({why})"),
        (r"error: (?P<why>unrecognized arguments: .+|argument .+)", "SGLang does not take its arguments: {why}"),
        (r"Model architectures? (?P<why>\[.+?\]|\S+).*not supported", "SGLang has no model class for {why}"),
        (r"No space left on device", "the disk or /dev/shm is full"),
        (r"CUDA driver version is insufficient|Found no NVIDIA driver", "the NVIDIA driver is too old or missing"),
        (r"watchdog timeout", "a forward pass took longer than SGLang's watchdog allows"),
        (r"(ModuleNotFoundError|ImportError): (?P<why>.+)", "a Python package is missing or does not fit: {why}"),
        (r"^(?P<why>(?:\w+\.)*\w*(?:Error|Exception)\b: .+)", "{why}"),
        (r"^(?P<why>(?:\w+\.)*\w*Error)$", "{why}"),
    )
)  # fmt: skip


_CHILD_RAISED = " hit an exception: Traceback"
_OWN_END = "sparkmoe: server ended"


def likely_cause(lines: Iterable[str]) -> str | None:
    """The most telling known reason in a log's last lines, as one clause; None if nothing known is there."""
    text = list(lines)
    if any(_CHILD_RAISED in line for line in text):  # then the server kills itself, and its exit code tells nothing
        text = [line for line in text if _OWN_END not in line]
    for pattern, meaning in _CAUSES:
        for line in reversed(text):
            if found := pattern.search(re.sub(r"^\[[^\]]*\d\d:\d\d:\d\d[^\]]*\] ", "", line.strip())):
                return meaning.format(**found.groupdict())
    return None


def last_words(lines: Iterable[str], count: int = 6, width: int = 200) -> list[str]:
    """The last lines that say something: warnings, progress bars and access-log lines left out, cut to `width`."""
    kept = [line.rstrip()[:width] for line in lines if not _NOISE.search(line)]
    return kept[-count:]
