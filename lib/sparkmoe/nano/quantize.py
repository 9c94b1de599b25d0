"""The two number formats of Ling-3.0-flash-fp4, from and to floating point.

MXFP4 (routed experts): 32 neighbouring weights of a row share one power of two (E8M0, one byte), and each weight is
one of the sixteen E2M1 values ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}, two to a byte with the earlier one in the low bits: 4.25
bits a weight. FP8 (attention, dense and shared feed-forward): E4M3 with one FP32 scale for each 128 × 128 block. Here
that scale is a power of two as well, so that a dequantized weight is exactly a BF16 number, and a checkpoint and its
BF16 copy are the same model.

`round_weight` is quantizing and dequantizing in one, differentiable straight through: training with it lets the
weights find values that survive the rounding.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.model import FP32_NAMES

Form = Literal["mxfp4", "fp8", "bf16", "fp32"]
MX_BLOCK, FP8_BLOCK = 32, 128
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_LEAVES = {
    "q_proj", "k_proj", "v_proj", "f_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj", "dense", "gate_proj", "up_proj", "down_proj", "eh_proj",
}  # fmt: skip


def form(name: str, config: LingConfig) -> Form:
    """How a tensor is stored, by its name in the checkpoint or in the model."""
    if name.endswith(FP32_NAMES):
        return "fp32"
    if ".mlp.experts." in name:
        return "mxfp4"
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "g_proj":  # KDA's output gate is a matrix like the others; MLA's gate is small and stays in BF16
        return "bf16" if config.is_mla(int(name.split(".")[2])) else "fp8"
    return "fp8" if leaf in FP8_LEAVES else "bf16"


def _exponent(amax: Tensor, mantissa: float, shift: int) -> Tensor:
    """The smallest E with amax <= mantissa * 2^shift * 2^E, from the bits of amax and not from a rounded logarithm."""
    m, e = torch.frexp(amax.clamp(min=2.0**-100))
    return e - shift + (m > mantissa).to(e.dtype)


def _power(e: Tensor) -> Tensor:
    """2^e for int32 e in -126…127, exact: written into the exponent bits of an FP32 number."""
    return ((e.to(torch.int32) + 127) << 23).view(torch.float32)


def mxfp4_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """[…, in] -> packed [..., in / 2] int8 and scales […, in / 32] float8_e8m0fnu. `in` must divide by 32."""
    blocks, scale = _mx_blocks(w)
    v = blocks / scale
    grid = torch.tensor(E2M1, device=w.device)
    code = torch.bucketize(_e2m1(v.abs()), grid).to(torch.uint8) + 8 * torch.signbit(v).to(torch.uint8)
    code = code.flatten(-2)
    packed = (code[..., 0::2] | (code[..., 1::2] << 4)).view(torch.int8)
    return packed, scale.squeeze(-1).to(torch.float8_e8m0fnu)


def mxfp4_dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `mxfp4_quantize`: FP32 […, in]."""
    code = packed.view(torch.uint8)
    code = torch.stack([code & 15, code >> 4], -1).flatten(-2).long()
    grid = torch.tensor((*E2M1, *(-x for x in E2M1)), device=packed.device)
    return (grid[code].unflatten(-1, (-1, MX_BLOCK)) * scale.float().unsqueeze(-1)).flatten(-2)


def fp8_quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> float8_e4m3fn [out, in] and FP32 scales [ceil(out / 128), ceil(in / 128)]."""
    blocks, scale = _fp8_blocks(w)
    q = _unblock(blocks / scale, w.shape).to(torch.float8_e4m3fn)
    return q, scale[:, 0, :, 0].contiguous()


def fp8_dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """The inverse of `fp8_quantize`: FP32 [out, in]."""
    full = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return q.float() * full[: q.shape[0], : q.shape[1]]


def round_weight(w: Tensor, how: Form) -> Tensor:
    """The value `w` has after storing it in form `how`; its gradient is that of the identity."""
    if how == "fp32":
        return w
    with torch.no_grad():
        if how == "bf16":
            stored = w.to(torch.bfloat16).float()
        elif how == "mxfp4":
            blocks, scale = _mx_blocks(w)
            v = blocks / scale
            stored = (torch.copysign(_e2m1(v.abs()), v) * scale).flatten(-2)
        else:
            blocks, scale = _fp8_blocks(w)
            stored = _unblock((blocks / scale).to(torch.float8_e4m3fn).float() * scale, w.shape)
        delta = stored - w
    return w + delta


def _mx_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    blocks = w.float().unflatten(-1, (-1, MX_BLOCK))
    e = _exponent(blocks.abs().amax(-1, keepdim=True), 0.75, 3)  # 6 = 0.75 * 2^3: nothing saturates
    return blocks, _power(e)


def _e2m1(a: Tensor) -> Tensor:
    """Round |value| <= 6 to E2M1, ties to even: steps of 0.5 below 2, of 1 below 4, of 2 above."""
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.round(a / step) * step


def _fp8_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    pad = F.pad(w.float(), (0, -w.shape[1] % FP8_BLOCK, 0, -w.shape[0] % FP8_BLOCK))
    blocks = pad.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [n, 128, k, 128]
    e = _exponent(blocks.abs().amax((1, 3), keepdim=True), 0.875, 9)  # 448 = 0.875 * 2^9
    return blocks, _power(e)


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(2).flatten(0, 1)[: shape[0], : shape[1]]
