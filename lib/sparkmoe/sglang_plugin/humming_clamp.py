"""Ling's SwiGLU limit under Humming and Marlin, which drop it without a word.

Layers 35 to 41 of Ling-3.0-flash clamp their routed experts at 4.0. The model hands that limit to its experts as
`gemm1_clamp_limit`. Humming reads only `swiglu_limit`, whose meaning is another one (clamp before SiLU); Marlin reads
`gemm1_clamp_limit` only beside `gemm1_alpha`, for yet another activation. So with either backend the server runs,
answers, and is a little worse at everything: the same loss cost other engines up to 17 points of HumanEval.

SGLang 0.5.23 needs these hooks. Where a later version mentions the limit more often in the code of a runner than that
version does, it has caught up, and the hooks for that runner step aside.

Humming calls one method between its two matrix products, in every GEMM type but the fused masked one; both are hooked.
Marlin's runner is a custom operator that sees neither layer nor config, but it takes a limit. A negative one never
occurs, so `-L` in the runner's config says "after SiLU" and travels through the operator's own argument, also under
torch.compile and in CUDA graphs, to the function that applies it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import pkgutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sparkmoe.sglang_plugin import hooks

_MOE = "sglang.srt.layers.moe."
OFF_ENV = "SPARKMOE_SWIGLU_CLAMP"
HUMMING_CORE = _MOE + "moe_runner.humming.HummingRunnerCore"
MARLIN_RUNNER = _MOE + "moe_runner.marlin.fused_experts_none_to_marlin"
MARLIN_LIMIT = _MOE + "fused_moe_triton.fused_marlin_moe.swiglu_limit_func"
MARLIN_METHOD = "sglang.srt.layers.quantization.mxfp4_marlin_moe.Mxfp4MarlinMoEMethod"

applied: Counter[float] = Counter()
"""How often each limit was applied by Python in this process; a replayed CUDA graph counts once, at its capture."""
gemm_types: set[str] = set()
"""GEMM types that Humming's runners have used in this process: a runner is built anew for every forward pass."""


def limit_after_silu(config: Any) -> float | None:
    """The limit of a `MoeRunnerConfig` that means Ling's formula, None if the layer has none."""
    limit = getattr(config, "gemm1_clamp_limit", None)
    plain = config.gemm1_alpha is None and config.activation == "silu" and config.is_gated
    return float(limit) if limit is not None and plain else None


def _step(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    from sparkmoe.sglang_plugin.swiglu_step import swiglu_step_into

    applied[limit] += 1
    swiglu_step_into(gate_up, out, limit)


def _humming_activation(original: Callable[..., None], self: Any, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
    gemm_types.update(self.humming_gemm_configs)
    limit = limit_after_silu(self.config)
    if limit is None:
        original(self, inputs, outputs)
    else:
        _step(inputs, outputs, limit)


def _humming_masked(
    original: Callable[..., Any], self: Any, gate_up: torch.Tensor, expert_num_tokens: torch.Tensor, buffers: Any
) -> Any:
    """The masked path may fuse activation and quantization, without a limit; with one, the two are done in turn."""
    if limit_after_silu(self.config) is None:
        return original(self, gate_up, expert_num_tokens, buffers)
    from humming.layer import HummingMethod

    self.apply_activation(inputs=buffers["gate_up_output"], outputs=buffers["activation_output"])
    return HummingMethod.may_quant_input(
        layer=self.layer,
        inputs=buffers["activation_output"],
        quanted_input=buffers.get("quanted_down_input"),
        sublayer_name="w2",
    )


def _marlin_create(original: Callable[..., None], self: Any, layer: torch.nn.Module, moe_runner_config: Any) -> None:
    original(self, layer, moe_runner_config)
    limit = limit_after_silu(moe_runner_config)
    if limit is not None:
        self.runner.config = dataclasses.replace(self.runner.config, swiglu_limit=-limit)


def _marlin_limit(
    original: Callable[..., None], output: torch.Tensor, input: torch.Tensor, swiglu_limit: float = 0.0
) -> None:
    if swiglu_limit < 0:
        _step(input, output, -swiglu_limit)
    else:
        original(output, input, swiglu_limit)


def _reads_limit(target: str, times_in_0_5_23: int) -> Callable[[], bool]:
    def superseded() -> bool:
        return inspect.getsource(pkgutil.resolve_name(target)).count("gemm1_clamp_limit") > times_in_0_5_23

    return superseded


_HUMMING_DOES, _MARLIN_DOES = _reads_limit(HUMMING_CORE, 0), _reads_limit(MARLIN_RUNNER, 1)
HOOKS = (
    hooks.Hook(
        HUMMING_CORE + ".apply_activation",
        _humming_activation,
        hooks.Kind.AROUND,
        "without it Humming drops the routed experts' SwiGLU limit (expert_swiglu_limit_list)",
        superseded=_HUMMING_DOES,
    ),
    hooks.Hook(
        HUMMING_CORE + "._grouped_masked_act_quant",
        _humming_masked,
        hooks.Kind.AROUND,
        "without it Humming's fused masked path drops the routed experts' SwiGLU limit",
        superseded=_HUMMING_DOES,
    ),
    hooks.Hook(
        MARLIN_METHOD + ".create_moe_runner",
        _marlin_create,
        hooks.Kind.AROUND,
        "without it Marlin never sees the routed experts' SwiGLU limit",
        relies_on=((MARLIN_RUNNER, "swiglu_limit"), (MARLIN_RUNNER, "clamp_limit")),
        superseded=_MARLIN_DOES,
    ),
    hooks.Hook(
        MARLIN_LIMIT,
        _marlin_limit,
        hooks.Kind.AROUND,
        "without it Marlin clamps before SiLU, which is another function",
        relies_on=((_MOE + "fused_moe_triton.fused_marlin_moe.fused_marlin_moe", "swiglu_limit_func"),),
        superseded=_MARLIN_DOES,
    ),
)


def register() -> None:
    """Register wherever there is a GPU: neither backend runs without one, and both need it for any recipe of theirs.

    `SPARKMOE_SWIGLU_CLAMP=0` leaves the hooks out, to measure what the limit is worth and what it costs.
    """
    if torch.cuda.is_available() and os.environ.get(OFF_ENV) != "0":
        hooks.register(HOOKS)
