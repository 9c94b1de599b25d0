"""Small operators of Ling-3.0 for the CPU: norms, rotary embedding, short convolution, SwiGLU.

At batch 1 a decode step of a small model is some hundred tiny operators, and each costs 1–5 µs whatever its size:
the time is the number of operators. So the functions here use the fewest that PyTorch offers: `addcmul` for a product
and a sum, in-place forms on temporaries, complex numbers for the rotation. A Python number as operand costs 2 µs more
than a tensor (PyTorch converts it on every call), so constants are tensors. What can be computed once per forward
pass, or at load, is left to the caller.

All arithmetic is FP32, as in the Triton kernels that these functions stand in for.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def constant(value: float) -> Tensor:
    """`value` as a zero-dimensional FP32 tensor."""
    return torch.tensor(value, dtype=torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis. [..., D] → [..., D], dtype of x."""
    xf = x.float()
    norm = torch.linalg.vector_norm(xf, dim=-1, keepdim=True)
    scale = torch.addcmul(constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    out = (xf * scale).mul_(weight)
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, then times sigmoid(gate): KDA's output norm. x, gate: [..., D], FP32; weight: [D]."""
    return rms_norm(x, weight, eps).mul_(gate.sigmoid())


def l2_normalize(x: Tensor, scale: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) · scale over the last axis, as KDA normalizes queries and keys (eps inside the root)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(constant(eps), norm, norm).rsqrt_().mul_(scale)


def rotary_table(cos_sin: Tensor) -> Tensor:
    """SGLang's table [positions, R] (cosines, then sines) as complex numbers [positions, R / 2]."""
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    return torch.complex(cos.contiguous(), sin.contiguous())


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pairs (x0, x1), (x2, x3), … by `angles`. x: [N, heads, R]; angles: complex [N, 1, R / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).reshape(x.shape).to(x.dtype)


def short_conv(window: Tensor, weight: Tensor, length: int) -> Tensor:
    """Depthwise causal convolution over time, then SiLU.

    window: [B, width - 1 + length, C], the last width - 1 inputs before the first output and then the inputs; weight:
    [width, C], oldest tap first. Returns [B, length, C], FP32.
    """
    if length == 1:
        return F.silu((window * weight).sum(1, keepdim=True), inplace=True)
    out = window[:, :length] * weight[0]
    for tap in range(1, weight.shape[0]):
        out.addcmul_(window[:, tap : tap + length], weight[tap])
    return F.silu(out, inplace=True)


def short_conv_prompt(before: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`short_conv` of a long sequence without copying it. before: [width - 1, C]; x: [T, C] → [T, C], FP32."""
    width = weight.shape[0]
    out = x * weight[-1]
    for back in range(1, min(width, x.shape[0])):
        out[back:].addcmul_(x[:-back], weight[-1 - back])
    for t in range(min(width - 1, x.shape[0])):  # what reaches back before the sequence
        out[t] += (before[t:] * weight[: width - 1 - t]).sum(0)
    return F.silu(out, inplace=True)


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) · up of a fused [..., 2 I] → [..., I]; with a limit L: min(silu(gate), L) · clip(up, −L, L)."""
    half = gate_up.shape[-1] // 2
    gate, up = F.silu(gate_up.narrow(-1, 0, half)), gate_up.narrow(-1, half, half)
    if limit is None:
        return gate.mul_(up)
    return gate.clamp_(max=limit).mul_(up.clamp(-limit, limit))
