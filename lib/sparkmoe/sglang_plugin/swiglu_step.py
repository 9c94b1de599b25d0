"""Ling's SwiGLU with a limit, as one kernel: out = min(silu(gate), L) · clip(up, −L, L).

The limit comes after SiLU. Clamping the gate before it, as other models do, is another function: silu(4) is 3.93, so a
gate of 10 would give 3.93 instead of 4. Everything is computed in float32 and rounded once, on the way out. The plain
PyTorch function is the formula to test against, and what the CPU runs; the Triton kernel reads gate and up once and
writes the result, where a chain of PyTorch operators would go to memory five times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


def swiglu_step(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """[..., 2N] (gate, then up) → [..., N], in the dtype of `gate_up`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


@triton.jit
def _kernel(gate_up, out, width, limit, row_stride, out_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    product = tl.minimum(gate * tl.sigmoid(gate), limit) * tl.maximum(tl.minimum(up, limit), -limit)
    tl.store(out + row * out_stride + column, product.to(out.dtype.element_ty), mask=inside)


def swiglu_step_into(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    """The same, written into `out` [..., N]; both contiguous in the last dimension. Runs inside CUDA graphs."""
    rows, target = gate_up.view(-1, gate_up.shape[-1]), out.view(-1, out.shape[-1])
    width = target.shape[-1]
    if rows.shape != (len(target), 2 * width):
        raise ValueError(f"gate and up are {tuple(gate_up.shape)}, out is {tuple(out.shape)}: expected twice its width")
    if len(rows):
        grid = (len(rows), triton.cdiv(width, _BLOCK))
        _kernel[grid](rows, target, width, limit, rows.stride(0), target.stride(0), BLOCK=_BLOCK)
