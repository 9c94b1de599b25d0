"""The LM head in FP8: half the bytes of the last and largest matrix that every token reads.

At batch 1 a decode step reads each weight once, so its time is bytes over bandwidth, and in Ling-3.0-flash the head
alone is 805 of 4,820 MB. Stored as e4m3 with one scale per output channel (a row of the weight, a word of the
vocabulary) it is 402 MB. The activation, one vector per token, is quantized when it arrives, with a scale of its own,
so that the product runs on FP8 tensor cores.

SGLang has an FP8 linear layer but no way to apply it to a head: `Fp8Config` hands out no method for a
`ParallelLMHead`, and answers with silence. So the method is put on the head after the model is built and before its
weights are loaded; the loader then calls it like any other. Two things are ours on purpose. Quantization is done here
and not by SGLang, because SGLang falls back to one scale for the whole tensor where CUTLASS is missing, and because two
shards of a head then hold exactly the numbers of one. And a CPU multiplies FP8 by decoding it: memory halves there too,
but each step pays for the decoding, so the head is not faster on a CPU, and a measurement there says so.

`SGLANG_ENABLE_FP8_LM_HEAD=1` switches it on; `SPARKMOE_FP8_HEAD_SCALE=tensor` takes one scale for the whole weight, an
arm worth measuring on sm_12x, where SGLang's source says that such kernels are faster.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from sparkmoe.sglang_plugin import hooks

logger = logging.getLogger(__name__)

Granularity = Literal["channel", "tensor"]
ENABLE_ENV = "SGLANG_ENABLE_FP8_LM_HEAD"
SCALE_ENV = "SPARKMOE_FP8_HEAD_SCALE"
E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
_TINY = 1e-10  # keeps a row of zeros (vocabulary padding) from dividing by zero
_CHUNK_ROWS = 8192


class Refused(RuntimeError):
    """A lever that cannot be applied to this model or launch. SGLang logs it and ends the server."""

    def __init__(self, message: str) -> None:
        super().__init__(f"sparkmoe plugin: {message}")


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, K] of any float dtype → (e4m3 [R, K], float32 scales [R, 1]), each row scaled by its own largest value."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=_TINY) / E4M3_MAX
    return (wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scales


def quantize_weight(weight: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
    """A head's weight [N, K] → (e4m3 [N, K], float32 scales [1, N] or [1]), some rows at a time to bound the memory."""
    quantized = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    if granularity == "tensor":
        low, high = weight.aminmax()
        scale = torch.maximum(-low, high).float().clamp_(min=_TINY).reshape(1) / E4M3_MAX
        for begin in range(0, len(weight), _CHUNK_ROWS):
            rows = weight[begin : begin + _CHUNK_ROWS].float() / scale
            quantized[begin : begin + _CHUNK_ROWS] = rows.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
        return quantized, scale
    scales = torch.empty(1, len(weight), dtype=torch.float32, device=weight.device)
    for begin in range(0, len(weight), _CHUNK_ROWS):
        rows, row_scales = quantize_rows(weight[begin : begin + _CHUNK_ROWS])
        quantized[begin : begin + _CHUNK_ROWS] = rows
        scales[0, begin : begin + _CHUNK_ROWS] = row_scales[:, 0]
    return quantized, scales


def decode(x: torch.Tensor) -> torch.Tensor:
    """Finite e4m3 values as float32, exactly, some 10 times faster on a CPU than `Tensor.to`.

    e4m3 and IEEE half agree in layout once the exponent is moved: the seven lower bits shifted left by 7 are a half
    that is 2**-8 times the value (exponent biases 7 and 15), subnormals included.
    """
    bits = x.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    return bits.view(torch.float16).float().mul_(256.0)


@dataclass(frozen=True)
class Fp8HeadMethod:
    """SGLang's quant-method interface for a head: quantize after loading, multiply when asked for logits."""

    granularity: Granularity = "channel"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace `layer.weight` [N, K] by e4m3 stored as [N, K] and seen as [K, N], and add `layer.weight_scale`."""
        weight: torch.Tensor = layer.weight
        if weight.dtype == E4M3:
            return
        self.store(layer, *quantize_weight(weight.data, self.granularity))

    def store(self, layer: torch.nn.Module, quantized: torch.Tensor, scales: torch.Tensor) -> None:
        """Put an already quantized weight [N, K] and its scales on a module, with this method."""
        layer.weight = torch.nn.Parameter(quantized.t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        layer.quant_method = self

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [M, N] of activations [M, K]: dtype of `x` on a GPU with channel scales, float32 otherwise."""
        if not x.is_cuda:
            return _on_cpu(layer, x, bias)
        if self.granularity == "tensor":
            return _per_tensor_on_gpu(layer, x, bias)
        from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear

        return apply_fp8_linear(input=x, weight=layer.weight, weight_scale=layer.weight_scale, bias=bias)


def _on_cpu(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of e4m3 values in float32, decoded some rows of the weight at a time; nothing decoded is kept."""
    rows, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
    wide, weight = decode(rows), layer.weight.t()
    out = torch.empty(len(wide), len(weight), dtype=torch.float32)
    for begin in range(0, len(weight), _CHUNK_ROWS):
        out[:, begin : begin + _CHUNK_ROWS] = wide @ decode(weight[begin : begin + _CHUNK_ROWS]).t()
    out *= scales * layer.weight_scale
    return out if bias is None else out + bias


def _per_tensor_on_gpu(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS takes one scale per operand: the weight's goes in, the tokens' are multiplied afterwards."""
    rows, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
    out = torch._scaled_mm(
        rows, layer.weight, scale_a=torch.ones_like(layer.weight_scale), scale_b=layer.weight_scale,
        out_dtype=torch.float32,
    )  # fmt: skip
    out = out * scales
    return out if bias is None else out + bias


def granularity() -> Granularity:
    """The scale granularity that the environment asks for. Raises Refused for an unknown one."""
    wanted = os.environ.get(SCALE_ENV, "channel")
    if wanted not in get_args(Granularity):
        raise Refused(f"{SCALE_ENV}={wanted!r} is none of {', '.join(get_args(Granularity))}")
    return wanted  # type: ignore[return-value]


def attach(model: Any, *, shards: int = 1) -> None:
    """Give a freshly built model's head the FP8 method; its weights are quantized once they are loaded.

    Raises Refused, with the reason, where the head is tied to the embedding, is quantized already, is asked to be
    FP32, or where the GPU has no FP8. A pipeline rank without a head is left alone.
    """
    from sglang.srt.layers.utils.common import PPMissingLayer
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    name, head = type(model).__name__, getattr(model, "lm_head", None)
    if isinstance(head, PPMissingLayer):
        return
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if tied or not isinstance(head, ParallelLMHead):
        what = f"its lm_head is {type(head).__name__}" if head is not None else "it has no lm_head"
        reason = "its head is tied to the embedding, which must stay as it is for look-ups" if tied else what
        raise Refused(f"the FP8 LM head cannot be applied to {name}: {reason}; unset {ENABLE_ENV}")
    processor = getattr(model, "logits_processor", None)
    if getattr(processor, "use_fp32_lm_head", False):
        raise Refused(
            f"an FP8 head and an FP32 head exclude each other: {ENABLE_ENV}=1 was set together with "
            "--enable-fp32-lm-head (or enable_lm_head_fp32 in config.json), which an FP8 head would ignore; drop one"
        )
    stock = type(getattr(head, "quant_method", None)).__name__
    if stock not in ("UnquantizedEmbeddingMethod", "PackWeightMethod", "NoneType"):
        raise Refused(f"the head of {name} is quantized already ({stock}); unset {ENABLE_ENV}")
    if head.weight.is_cuda and torch.cuda.get_device_capability(head.weight.device) < (8, 9):
        raise Refused(f"{torch.cuda.get_device_name()} has no FP8 tensor cores (compute capability 8.9 or higher)")
    scale = granularity()
    if scale == "tensor" and shards > 1:
        raise Refused(f"{SCALE_ENV}=tensor would give each of {shards} shards another scale; use channel scales")
    head.quant_method = Fp8HeadMethod(scale)
    logger.info("FP8 LM head: %s %s, one scale per %s", name, tuple(head.weight.shape), scale)


def _after_build(model: Any, model_config: Any, load_config: Any, quant_config: Any = None) -> None:
    if getattr(model_config, "is_draft_model", False):
        return
    from sglang.srt.runtime_context import get_parallel

    attach(model, shards=get_parallel().tp_size)


HOOKS = (
    hooks.Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        _after_build,
        hooks.Kind.AFTER,
        f"without it {ENABLE_ENV} changes nothing: SGLang has no FP8 method for an LM head",
    ),
)


def register() -> None:
    """Register where the environment asks for an FP8 head of the target model."""
    if os.environ.get(ENABLE_ENV, "0") == "1":
        hooks.register(HOOKS)
