"""MXFP4 and FP8 against ml_dtypes, and the properties that make the two forms of the bundle one model."""

import ml_dtypes
import numpy as np
import pytest
import torch

from sparkmoe.nano import random_checkpoint
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.model import Ling, tensors
from sparkmoe.nano.quantize import (
    E2M1,
    form,
    fp8_dequantize,
    fp8_quantize,
    mxfp4_dequantize,
    mxfp4_quantize,
    round_weight,
)


def weights(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different size, with zeros, ties between two values, and a row of zeros."""
    gen = torch.Generator().manual_seed(1)
    w = torch.randn(rows, columns, generator=gen) * torch.exp(4 * torch.randn(rows, 1, generator=gen))
    w[0, : columns // 2] = 0
    w[1] = 0
    w[2, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    w[2, 8:] = -w[2, : columns - 8] if columns == 16 else w[2, 8:].clamp(-6, 6)
    return w


def test_mxfp4_is_ml_dtypes_rounding() -> None:
    w = weights(64, 256)
    packed, scale = mxfp4_quantize(w)
    assert (packed.shape, packed.dtype) == ((64, 128), torch.int8)
    assert (scale.shape, scale.dtype) == ((64, 8), torch.float8_e8m0fnu)
    power = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    v = w.numpy().reshape(64, 8, 32) / power[..., None]
    assert np.abs(v).max() <= 6
    code = v.astype(ml_dtypes.float4_e2m1fn)
    low, high = packed.view(torch.uint8).numpy() & 15, packed.view(torch.uint8).numpy() >> 4
    assert np.array_equal(np.stack([low, high], -1).reshape(64, 8, 32), code.view(np.uint8))
    back = code.astype(np.float32) * power[..., None]
    assert np.array_equal(mxfp4_dequantize(packed, scale).numpy(), back.reshape(64, 256))


def test_mxfp4_uses_the_whole_range() -> None:
    """A scale one power larger would waste half of the range: every block but zeros reaches above 3."""
    packed, scale = mxfp4_quantize(weights(64, 256)[3:])
    top = (mxfp4_dequantize(packed, scale).unflatten(-1, (-1, 32)).abs() / scale.float().unsqueeze(-1)).amax(-1)
    assert set(top.flatten().tolist()) <= {3.0, 4.0, 6.0}
    assert len(E2M1) == 8


def test_fp8_is_ml_dtypes_rounding_in_blocks() -> None:
    w = weights(160, 384)
    q, scale = fp8_quantize(w)
    assert (scale.shape, scale.dtype, q.dtype) == ((2, 3), torch.float32, torch.float8_e4m3fn)
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))  # powers of two
    for i in range(2):
        for j in range(3):
            block = w[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].numpy() / float(scale[i, j])
            want = block.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            got = q[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].contiguous().view(torch.uint8).numpy()
            assert np.array_equal(got, want)


@pytest.mark.parametrize("how", ["mxfp4", "fp8"])
def test_rounding_is_quantizing_and_back_once_and_for_all(how: str) -> None:
    w = weights(128, 256)
    pair = (mxfp4_quantize, mxfp4_dequantize) if how == "mxfp4" else (fp8_quantize, fp8_dequantize)
    once = pair[1](*pair[0](w))
    assert torch.equal(round_weight(w, how), once)  # type: ignore[arg-type]
    assert torch.equal(pair[1](*pair[0](once)), once)
    assert torch.equal(once.bfloat16().float(), once)
    assert 0 < (once - w).norm() / w.norm() < (0.2 if how == "mxfp4" else 0.05)


def test_gradient_goes_straight_through() -> None:
    w = torch.randn(4, 64, requires_grad=True)
    (round_weight(w, "mxfp4") * torch.arange(64.0)).sum().backward()
    assert torch.equal(w.grad, torch.arange(64.0).expand(4, 64))  # type: ignore[arg-type]


def test_layout_is_that_of_ling_3_0_flash_fp4() -> None:
    config = LingConfig.from_dict(random_checkpoint.BASE)
    names = {n: form(n, config) for n in tensors(Ling(config))}
    expected = {
        "model.layers.1.mlp.experts.3.down_proj.weight": "mxfp4",
        "model.layers.12.mlp.experts.3.gate_proj.weight": "mxfp4",
        "model.layers.1.mlp.shared_experts.up_proj.weight": "fp8",
        "model.layers.0.mlp.down_proj.weight": "fp8",
        "model.layers.0.attention.g_proj.weight": "fp8",
        "model.layers.3.attention.g_proj.weight": "bf16",
        "model.layers.3.attention.kv_b_proj.weight": "fp8",
        "model.layers.0.attention.b_proj.weight": "bf16",
        "model.layers.0.attention.q_conv1d.weight": "bf16",
        "model.layers.1.mlp.gate.weight": "bf16",
        "model.layers.1.mlp.gate.expert_bias": "fp32",
        "model.layers.0.attention.A_log": "fp32",
        "model.layers.12.eh_proj.weight": "fp8",
        "model.word_embeddings.weight": "bf16",
        "lm_head.weight": "bf16",
        "model.norm.weight": "bf16",
    }
    assert {n: names[n] for n in expected} == expected
