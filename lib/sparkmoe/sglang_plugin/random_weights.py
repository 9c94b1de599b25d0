"""Random weights that behave like weights, for measuring a shape whose checkpoint is not at hand.

The time of a decode step depends on shapes and formats, not on what was learned, so a GPU without the 66 GB of
Ling-3.0-flash can still be measured. SGLang's `--load-format dummy` is made for that, and is not enough here: it leaves
packed FP4 bytes and e8m0 scales as the allocator left them, sets block scales to 1, and draws everything else within
±0.001. The norms then blow noise up or the activations die, a router that sees equal tokens sends them all to the same
experts, and a step of four tokens reads the experts of one: a figure, but of another model.

With `SPARKMOE_RANDOM_WEIGHTS=seed` the dummy loader fills every parameter by what it is: random e2m1 codes under
power-of-two scales, FP8 under block scales, norms at 1, and matrices of variance 1 / fan-in, so that activations keep
their size. A parameter's values depend on its name and the seed alone: two ranks agree on what they both hold.

Whether routing does spread is looked up, not assumed: the experts of the last prompt of middling length are kept, and
`/server_info` tells how many different ones 1 to 8 neighbouring tokens chose (`internal_states[0].sparkmoe_routing`).
"""

from __future__ import annotations

import math
import os
import zlib
from typing import Any

import torch

from sparkmoe.sglang_plugin import hooks

SEED_ENV = "SPARKMOE_RANDOM_WEIGHTS"
E2M1_RMS = math.sqrt((0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
"""Root mean square of the sixteen e2m1 values, each as likely as the others."""
_JITTER_RMS = math.sqrt((0.25 + 1 + 4) / 3)  # of a scale that is half, one or two times its middle
_FP8_RMS = 64.0  # far from e4m3's 448 as from its subnormals
_STEPS = (1, 2, 3, 4, 5, 8)
_PROMPT = range(256, 2049)

routed: dict[int, torch.Tensor] = {}
"""Layer → experts [tokens, top k] of the last prompt of middling length."""


def initialize(model: torch.nn.Module, low: float = -1e-3, high: float = 1e-3, seed: int = 1234) -> None:
    """In place of SGLang's `initialize_dummy_weights`, whose range and seed it ignores."""
    fill(model, int(os.environ[SEED_ENV]))


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter of a model that is loaded but not yet repacked its random value, in place."""
    for name, parameter in model.named_parameters():
        # On a CPU a generator takes 32 bits of its seed.
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        _fill(name, parameter.data, generator)


def _fill(name: str, p: torch.Tensor, generator: torch.Generator) -> None:
    leaf = name.rsplit(".", 1)[-1]
    if p.dtype in (torch.int8, torch.uint8) and "scale" not in leaf:
        p.view(torch.uint8).random_(0, 256, generator=generator)
    elif leaf in ("w13_weight_scale_inv", "w2_weight_scale_inv") and p.shape[-1] > 1:
        # One scale for 32 weights; e8m0 holds powers of two only.
        middle = round(math.log2(1 / (math.sqrt(32 * p.shape[-1]) * E2M1_RMS * _JITTER_RMS)))
        exponent = torch.randint(-1, 2, p.shape, generator=generator, device=p.device) + middle
        if p.dtype.itemsize == 1:  # e8m0: the exponent itself
            p.view(torch.uint8).copy_(exponent + 127)
        else:
            p.copy_(torch.exp2(exponent.float()))
    elif leaf == "weight_scale_inv":
        p.fill_(1 / (math.sqrt(128 * p.shape[-1]) * _FP8_RMS))
    elif "norm" in name or "scale" in leaf:
        p.fill_(1.0)
    elif leaf == "A_log":
        p.uniform_(0.0, 1.0, generator=generator)
    elif leaf == "dt_bias":
        p.uniform_(-4.0, 0.0, generator=generator)
    elif leaf.endswith("bias"):
        p.zero_()
    elif torch.finfo(p.dtype).bits == 8:
        drawn = torch.empty(p.shape, dtype=torch.bfloat16, device=p.device).normal_(0.0, _FP8_RMS, generator=generator)
        p.copy_(drawn.clamp_(-448.0, 448.0))
    else:
        deviation = 1.0 if "embed" in name else 0.5 if "conv1d" in name else 1 / math.sqrt(p.shape[-1])
        p.normal_(0.0, deviation, generator=generator)


def spread(experts: torch.Tensor) -> dict[str, float]:
    """Mean number of different experts that 1, 2, … neighbouring tokens chose, and that all of them did ("all").

    `experts` is [tokens, top k]; compare with `roofline.expected_distinct`.
    """
    rows = experts.cpu().sort(dim=1).values
    found = {"tokens": float(len(rows)), "all": float(len(rows.unique()))}
    for n in (n for n in _STEPS if n <= len(rows)):
        windows = rows.unfold(0, n, 1).flatten(1).sort(dim=1).values
        found[str(n)] = float((windows.diff(dim=1) != 0).sum(dim=1).float().mean()) + 1
    return found


def _after_select(
    result: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_config: Any,
    *,
    layer_id: int | None = None,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: Any = None,
    dynamic_expert_bias: torch.Tensor | None = None,
    router_logits_partials: torch.Tensor | None = None,
) -> None:
    """A copy on the device, without waiting for it; captured graphs hold fewer tokens and never get here."""
    ids = getattr(result, "topk_ids", None)
    if ids is not None and layer_id is not None and len(ids) in _PROMPT:
        routed[layer_id] = ids.clone()


def _after_state(result: Any, self: Any, recv_req: Any) -> None:
    result.internal_state["sparkmoe_routing"] = {str(layer): spread(ids) for layer, ids in sorted(routed.items())}


HOOKS = (
    hooks.Hook(
        "sglang.srt.model_loader.loader.initialize_dummy_weights",
        initialize,
        hooks.Kind.REPLACE,
        "without it packed FP4 bytes and scales are whatever memory held",
        relies_on=(("sglang.srt.model_loader.loader.DummyModelLoader.load_model", "initialize_dummy_weights"),),
    ),
    hooks.Hook(
        "sglang.srt.layers.moe.topk.select_experts",
        _after_select,
        hooks.Kind.AFTER,
        "without it nobody can tell whether random routing spreads over the experts",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        _after_state,
        hooks.Kind.AFTER,
        "without it the experts that a prompt chose cannot be asked for",
    ),
)


def register() -> None:
    """Register where the environment gives a seed."""
    if SEED_ENV in os.environ:
        hooks.register(HOOKS)
