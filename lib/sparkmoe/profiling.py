"""Take one request's decode steps apart, on the machine at hand.

SGLang can run PyTorch's profiler inside its scheduler and writes what it saw to a file. `record` puts it around one
request, so that nothing but that request's steps is in the trace, and has it stopped by an explicit call, whose answer
comes when the file is complete: no guessing by its size.

A profiler slows down what it watches, on a CPU, where an operator takes a few µs, by a quarter and more. So `dissect`
asks the same question without it as well: counts and shares are the trace's, lengths are those of the step that nobody
watched.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sparkmoe import breakdown, hot_vocab, roofline, trace
from sparkmoe.breakdown import Breakdown, Verdict
from sparkmoe.client import Client
from sparkmoe.errors import DataError
from sparkmoe.inventory import Inventory
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.roofline import Load, StepBytes
from sparkmoe.sample import Sample
from sparkmoe.trace import Steps, Trace

Prompt = str | Sequence[int]
GAPS = "between operators"


def record(
    client: Client, prompt: Prompt, folder: Path | str, *, gpu: bool = False, output_tokens: int = 64
) -> tuple[Trace, Steps]:
    """Profile one greedy request of `output_tokens` tokens: its trace (`Trace.path` is the file) and decode steps.

    `folder` is one that the server, which runs on this machine, may write to. `gpu` records kernels beside operators.
    Of several ranks the first one's trace is read. Raises DataError where no trace was written or it holds no decode
    step, RequestFailed where the server refuses (it profiles already, say) or fails.
    """
    where, name = Path(folder).absolute(), f"decode-{time.time_ns()}"
    client.start_profile(where, name, activities=["CPU", "GPU"] if gpu else ["CPU"])
    try:
        client.generate(prompt, max_new_tokens=output_tokens, ignore_eos=True)
    finally:
        client.stop_profile()
    written = sorted(where.glob(f"{name}*.trace.json.gz"))
    if not written:
        raise DataError(
            f"the server stopped its profiler but left no {name}*.trace.json.gz in {where}: it runs on another "
            "machine, or may not write there"
        )
    seen = trace.read(written[0])
    return seen, trace.steps(seen)


@dataclass(frozen=True)
class Dissection:
    """One recipe's decode step on this machine. Times in ms per step.

    `found` has the lengths of the step without a profiler, `slowdown` is how much longer it was with one, `size` what
    the step reads by the roofline. `samples` are the answers without a profiler, `path` is the trace of one with it.
    """

    path: Path
    found: Breakdown
    samples: tuple[Sample, ...]
    slowdown: float
    size: StepBytes
    verdict: Verdict

    @property
    def tpot_ms(self) -> list[float]:
        """Time per token of each sample."""
        return [sample.tpot_ms or 0.0 for sample in self.samples]

    @property
    def accept_length(self) -> float:
        """Tokens a step yields over all samples, 1 without drafts."""
        steps = sum((s.completion_tokens or 0) / (s.accept_length or 1.0) for s in self.samples)
        return sum(s.completion_tokens or 0 for s in self.samples) / steps

    def table(self) -> pd.DataFrame:
        """One row per part: ms, share, calls, bytes and GB/s."""
        return self.found.table(self.size.by_part())

    def parts_ms(self) -> dict[str, float]:
        """Time by part, and what lies between the operators (or kernels) as `GAPS`."""
        parts = {part: ms for part, (ms, _) in self.found.parts.items()}
        return parts | {GAPS: self.found.host_gap_ms + self.found.launch_gap_ms}


def load_of(recipe: Recipe, machine: Machine, context: int) -> Load:
    """The roofline's load for one request of a recipe. The CPU platform holds 16-bit weights in FP32, its head apart.

    Raises DataError for a hot vocabulary that cannot be read, and for a DSpark draft, whose bytes nobody counted.
    """
    if recipe.draft_model:
        raise DataError(f"the roofline knows the model's own draft, not that of recipe {recipe.name}; measure it")
    hot_tokens = len(hot_vocab.load(recipe.hot_vocab)) if recipe.hot_vocab else None
    on_cpu = machine.profile == "cpu"
    return Load(
        context, head=recipe.head, drafts=recipe.draft_steps, dtype="float32" if on_cpu else "stored",
        cache_bytes=4 if on_cpu else 2, draft_head="fp8" if recipe.draft_head == "fp8" else None, hot_tokens=hot_tokens,
    )  # fmt: skip


def dissect(
    client: Client,
    prompts: Sequence[Prompt],
    folder: Path | str,
    weights: Inventory,
    gb_s: float,
    load: Load,
    *,
    gpu: bool = False,
    output_tokens: int = 64,
    tp: int = 1,
) -> Dissection:
    """Measure a step (the median of one request a prompt, after a first one), profile one, and name what bounds it.

    `gb_s` is the bandwidth as measured here; of `tp` GPUs each reads its share. Errors as in `record`.
    """
    asked = {"max_new_tokens": output_tokens, "ignore_eos": True}
    samples = tuple(client.generate(prompt, **asked) for prompt in (prompts[0], *prompts))[1:]
    step_ms = statistics.median((s.tpot_ms or 0.0) * (s.accept_length or 1.0) for s in samples)
    seen, steps = record(client, prompts[0], folder, gpu=gpu, output_tokens=output_tokens)
    watched = breakdown.break_down(seen, steps)
    found, size = watched.unwatched(step_ms), roofline.split(roofline.step_bytes(weights, load), tp)
    judged = breakdown.verdict(found, size.total, gb_s)
    return Dissection(Path(seen.path), found, samples, watched.step_ms / step_ms, size, judged)
