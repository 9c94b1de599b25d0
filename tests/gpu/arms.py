"""What a stay on a GPU measures, in the order of its worth: the stay may end after any arm.

Random weights accept no draft, so accept lengths are simulated: the two published ones for three drafts (2.68 on
GSM8K, 3.90 on a synthetic load) and none accepted. For fewer drafts they become what drafts of the same quality would
give, each accepted with one probability. All of them are measured in one boot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkmoe import roofline
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.sglang_plugin.accept_length import SWITCH_ENV
from sparkmoe.sglang_plugin.humming_clamp import OFF_ENV
from sparkmoe.sglang_plugin.random_weights import SEED_ENV

PUBLISHED = (2.68, 3.90)
HOT_ROWS = 32_768
_RANDOM = ("--load-format", "dummy")
_RANDOM_ENV = ((SEED_ENV, "0"), (SWITCH_ENV, "1"), ("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token"))
# The capture of 58 prefill graphs is left out, and DeepGEMM, which compiles every shape for ten minutes.
_GPU = ("--cuda-graph-backend-prefill", "disabled")
_GPU_ENV = (("SGLANG_ENABLE_JIT_DEEPGEMM", "0"), ("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0"))


@dataclass(frozen=True)
class Shape:
    """How much is asked of each boot, in tokens; the second of `outputs` only at the first context."""

    contexts: tuple[int, int]
    outputs: tuple[int, int]
    repeats: int
    profiled_tokens: int
    problems: int
    parallel: int


GPU = Shape((512, 32_768), (128, 512), repeats=3, profiled_tokens=24, problems=500, parallel=16)
DRY = Shape((64, 256), (16, 32), repeats=2, profiled_tokens=12, problems=4, parallel=2)


@dataclass(frozen=True)
class Arm:
    """`profiled`: its step is taken apart. `fails`: checks of engagement that must fail. `nano`: the miniature's real
    weights instead of the full shape, asked for accuracy instead of time."""

    recipe: Recipe
    profiled: bool = False
    fails: tuple[str, ...] = ()
    nano: bool = False

    @property
    def name(self) -> str:
        return self.recipe.name


def accept_lengths(drafts: int, gpus: int = 1) -> tuple[float, ...]:
    """The accept lengths to simulate with so many drafts, the main one first; () without a draft.

    Each rank draws for itself whether a step accepts the whole number below or above the asked mean, and ranks that
    disagree wait for each other for ever: on several GPUs the lengths are whole numbers.
    """
    found = (*(_same_quality(length, drafts) for length in PUBLISHED), 1.0) if drafts else ()
    return found if gpus == 1 else tuple(dict.fromkeys(float(round(length)) for length in found))


def _same_quality(length: float, drafts: int) -> float:
    """What `drafts` drafts give where three give `length`, each being accepted with one probability."""
    low, high = 0.0, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (rate, high) if roofline.accept_length([rate], 3) < length else (low, rate)
    return round(roofline.accept_length([low], drafts), 2)


def arms(machine: Machine, hot: Path) -> list[Arm]:
    """All arms of a machine; `hot` is the token map of the hot-vocabulary arm. A CPU's are for a dry run."""
    if machine.profile == "cpu":
        small = Recipe("bf16_head", head="bf16", max_running_requests=2)
        plain = small.with_(name="bf16_head", extra_args=_RANDOM, extra_env=_RANDOM_ENV)
        return [
            Arm(small.with_(name="nano", draft_steps=3), nano=True),
            Arm(plain),
            Arm(plain.with_(name="all_three", head="fp8", draft_steps=3), profiled=True),
        ]
    nano = Recipe("nano_mxfp4", moe="humming", head="bf16", draft_steps=3, max_running_requests=GPU.parallel,
                  attention="triton", extra_args=_GPU, extra_env=_GPU_ENV)  # fmt: skip
    plain = nano.with_(name="humming_bf16", draft_steps=0, max_running_requests=4,
                       extra_args=(*_RANDOM, *_GPU), extra_env=(*_RANDOM_ENV, *_GPU_ENV))  # fmt: skip
    every = plain.with_(name="all_three", head="fp8", draft_steps=3)
    marlin = plain.with_(name="marlin_bf16", moe="marlin")
    found = [
        Arm(nano, nano=True),
        Arm(
            nano.with_(name="nano_mxfp4_unclamped", extra_env=(*_GPU_ENV, (OFF_ENV, "0"))), nano=True, fails=("clamp",)
        ),
        Arm(plain, profiled=True),
        Arm(plain.with_(name="humming_fp8", head="fp8"), profiled=True),
        Arm(every, profiled=True),
        Arm(marlin, profiled=True),
        Arm(marlin.with_(name="marlin_fp32", head="fp32")),
        Arm(every.with_(name="all_three_k1", draft_steps=1)),
        Arm(every.with_(name="all_three_k2", draft_steps=2)),
        Arm(every.with_(name="all_three_hot", hot_vocab=str(hot))),
        Arm(every.with_(name="draft_fp8_head", head="bf16", draft_head="fp8")),
        Arm(every.with_(name="all_three_flashinfer", attention="flashinfer"), profiled=True),
        Arm(plain.with_(name="humming_bf16_unclamped", extra_env=(*plain.extra_env, (OFF_ENV, "0"))), fails=("clamp",)),
        Arm(marlin.with_(name="marlin_all_three", head="fp8", draft_steps=3)),
    ]
    if machine.gpu_count > 1:
        found.append(Arm(every.with_(name="all_three_tp2", tp=2), profiled=True))
    return found
