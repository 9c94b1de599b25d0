"""Small operators of Ling-3.0 for the CPU: norms, rotary embedding, short convolution, SwiGLU.
 At batch 1 a decode step of a small model is a few hundred tiny operators, and each costs 2–5 µs to launch whatever
its size: the time is the number of operators. So the functions here use the fewest that PyTorch offers (`addcmul` for
a sum and a product, in-place forms on temporaries, complex numbers for the rotation) and leave to the caller all that
can be computed once per forward pass or once at load.

All arithmetic is FP32, as in the Triton kernels that these functions stand in for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis. [..., D] → [..., D], dtype of x."""
    xf = x.float()
    scale = torch.linalg.vector_norm(xf, dim=-1, keepdim=True)
    scale = scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return ((xf * scale) * weight).to(x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, then times sigmoid(gate): KDA's output norm. x, gate: [..., D]; weight: [D]."""
    return rms_norm(x.float(), weight, eps).mul_(gate.float().sigmoid()).to(x.dtype)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(Σ x² + eps) over the last axis, as KDA normalizes queries and keys (eps inside the root)."""
    return x * torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()


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


def swiglu(gate_up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) · up of a fused [..., 2 I] → [..., I]; with a limit L: min(silu(gate), L) · clip(up, −L, L)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = F.silu(gate)
    if limit is None:
        return gate.mul_(up)
    return gate.clamp_(max=limit).mul_(up.clamp(-limit, limit))
