"""What a loaded model really is: MoE runners, clamps, heads and graphs, read from the objects that will be executed.

A flag says what somebody wanted. Between the flag and the kernel stand SGLang's own defaults, fallbacks and
overrides, so nothing here looks at an argument: the runner's class is asked of the layer, its formats of the tensors
and the kernel's metadata, the draft's head is compared with the target's by identity. Everything returned is plain
JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sparkmoe.sglang_plugin import hooks, humming_clamp
from sparkmoe.sglang_plugin.fp8_lm_head import E4M3, Fp8HeadMethod

CPU_NETWORK = "torch_cpu_network"
"""Where the CPU platform hangs the layers that it runs in place of SGLang's."""


def dtype_name(dtype: Any) -> str:
    """`torch.bfloat16` → "bfloat16"; Humming's own dtypes keep their name."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def moe_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of each routed-expert layer: whatever carries a `moe_runner_config` and a quant method."""
    for name, module in model.named_modules():
        if hasattr(module, "moe_runner_config") and hasattr(module, "quant_method"):
            yield name, module


def moe(model: Any) -> list[dict[str, Any]]:
    """One record per routed-expert layer, in order."""
    on_cpu = cpu_experts(model)
    return [moe_layer(name, layer, on_cpu) for name, layer in moe_layers(model)]


def cpu_experts(model: Any) -> dict[int, Any]:
    """The CPU platform's own experts by the address of their weights, which they share with SGLang's layers."""
    network = getattr(getattr(model, "model", None), CPU_NETWORK, None)
    found = [getattr(block.mlp, "experts", None) for block in network.blocks] if network is not None else []
    return {experts.w13.data_ptr(): experts for experts in found if experts is not None}


def moe_layer(name: str, layer: Any, on_cpu: dict[int, Any]) -> dict[str, Any]:
    method, config = layer.quant_method, layer.moe_runner_config
    weights = {key: p for key, p in layer.named_parameters(recurse=False) if key.startswith(("w13_", "w2_"))}
    metas = getattr(layer, "humming_metas", None)
    runner = "native" if weights and not next(iter(weights.values())).is_cuda else _value(layer.runner_backend)
    if metas is not None:
        formats = {
            "weight_dtype": dtype_name(metas["w13"].b_dtype),
            "activation_dtype": dtype_name(metas["w13"].a_dtype),
        }
    else:
        stored = weights.get("w13_weight")
        packed = (
            any("scale" in key for key in weights) and stored is not None and stored.dtype in (torch.int8, torch.uint8)
        )
        weight = "float4e2m1" if packed or runner == "marlin" else dtype_name(getattr(stored, "dtype", None))
        formats = {"weight_dtype": weight, "activation_dtype": _activation_dtype(method, config, stored)}
    limit = humming_clamp.limit_after_silu(config)
    return {
        "name": name,
        "layer": config.layer_id,
        "method": type(method).__name__,
        "runner": runner,
        "gemm_type": sorted(humming_clamp.gemm_types) if runner == "humming" else None,
        **formats,
        "weight_bytes": tensor_bytes(*weights.values()),
        "limit": limit,
        "clamp": clamp_in_force(runner, layer, limit, on_cpu) if limit is not None else None,
        "routed_scaling_factor": config.routed_scaling_factor,
    }


def _value(backend: Any) -> str | None:
    return getattr(backend, "value", backend)


def _activation_dtype(method: Any, config: Any, stored: torch.Tensor | None) -> str:
    if getattr(method, "_use_mxfp8_act_scaling", False):
        return "mxfp8"
    if getattr(method, "_use_sm90_humming", False):
        return dtype_name(E4M3)
    if stored is not None and not stored.is_cuda:
        return dtype_name(stored.dtype)
    return dtype_name(config.params_dtype)


def clamp_in_force(runner: str | None, layer: Any, limit: float, on_cpu: dict[int, Any]) -> float | None:
    """The limit that this layer's runner applies after SiLU, None if it drops it."""
    method = layer.quant_method
    if runner == "humming":
        target = humming_clamp.HUMMING_CORE + ".apply_activation"
        return limit if _hooked_or_not_needed(target) else None
    if runner == "marlin":
        told = method.runner.config.swiglu_limit
        if told is not None and told < 0 and _hooked(humming_clamp.MARLIN_LIMIT):
            return -told
        return limit if not _declared_needed(humming_clamp.MARLIN_LIMIT) else None
    if runner == "flashinfer_mxfp4":
        held = getattr(method, "_swiglu_limit_tensor", None)
        return float(held.max()) if getattr(method, "_use_swiglu_step", False) and held is not None else None
    if runner == "native":
        return getattr(on_cpu.get(layer.w13_weight.data_ptr()), "limit", None)
    return None


def _hooked(target: str) -> bool:
    return any(h.target == target for h in hooks.registered())


def _declared_needed(target: str) -> bool:
    hook = next(h for h in humming_clamp.HOOKS if h.target == target)
    return hooks.status(hook).state is not hooks.State.NOT_NEEDED


def _hooked_or_not_needed(target: str) -> bool:
    return _hooked(target) or not _declared_needed(target)


def head(model: Any) -> dict[str, Any] | None:
    """Format of a model's LM head, None on a pipeline rank without one."""
    module = getattr(model, "lm_head", None)
    weight = getattr(module, "weight", None)
    if weight is None:
        return None
    method, scale = getattr(module, "quant_method", None), getattr(module, "weight_scale", None)
    fp8 = weight.dtype == E4M3
    rows = weight.shape[1] if isinstance(method, Fp8HeadMethod) else weight.shape[0]
    scales = (
        "none" if scale is None else "tensor" if scale.numel() == 1 else "channel" if scale.numel() == rows else "?"
    )
    return {
        "class": type(module).__name__,
        "method": type(method).__name__ if method is not None else None,
        "dtype": dtype_name(weight.dtype),
        "activation_dtype": f"{dtype_name(E4M3)} per token" if fp8 and isinstance(method, Fp8HeadMethod) else None,
        "scales": scales,
        "rows": rows,
        "columns": weight.numel() // rows,
        "bytes": tensor_bytes(weight, scale),
        "fp32_logits": bool(getattr(getattr(model, "logits_processor", None), "use_fp32_lm_head", False)) and not fp8,
    }


def draft_head(draft: Any, target: Any) -> dict[str, Any]:
    """How the draft's head relates to the target's, beside its format."""
    mine, theirs = draft.lm_head, target.lm_head
    shares = mine.weight.untyped_storage().data_ptr() == theirs.weight.untyped_storage().data_ptr()
    own = 0 if shares else tensor_bytes(mine.weight, getattr(mine, "weight_scale", None))
    return {**(head(draft) or {}), "is_target_module": mine is theirs, "shares_weight": shares, "extra_bytes": own}


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage counted once."""
    held = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def graphs(runner: Any, draft_worker: Any = None) -> dict[str, Any]:
    """Which phases run as captured CUDA graphs, and for which batch sizes."""

    def captured(graph_runner: Any) -> list[int]:
        return list(getattr(graph_runner, "capture_bs", None) or ())

    found = {"decode": captured(getattr(runner, "decode_cuda_graph_runner", None))}
    if draft_worker is not None:
        found["draft_decode"] = captured(getattr(draft_worker, "cuda_graph_runner", None))
        found["draft_extend"] = captured(getattr(draft_worker, "cuda_graph_runner_for_draft_extend", None))
    return found


def attention(runner: Any) -> list[str]:
    """The classes that attend over a KV cache: what decodes, then what reads prompts and verifies drafts if that is
    another; [] where they cannot be told."""
    outer = getattr(runner, "attn_backend", None)
    outer = getattr(outer, "primary", outer)  # of two batches that overlap
    full = getattr(outer, "full_attn_backend", outer)  # beside it a hybrid model has one for its recurrent layers
    both = [getattr(full, name, None) for name in ("decode_backend", "prefill_backend")]
    # FlashInfer's backend for attention without a latent has attributes of these names that are strings.
    found = [backend for backend in both if backend is not None and not isinstance(backend, str)] or [full]
    return list(dict.fromkeys(type(backend).__name__ for backend in found if backend is not None))
