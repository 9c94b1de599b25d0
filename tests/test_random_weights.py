import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkmoe.nano.quantize import fp8_dequantize, mxfp4_dequantize
from sparkmoe.roofline import expected_distinct
from sparkmoe.sglang_plugin import random_weights
from sparkmoe.sglang_plugin.random_weights import _after_select, _after_state, fill, routed, spread

WORKER = Path(__file__).parent / "random_weights_worker.py"


class Model(torch.nn.Module):
    """One parameter of each kind, with the names and formats that SGLang's layers give them before repacking."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            *path, leaf = name.split("/")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))


def filled(seed: int = 0, **parameters: torch.Tensor) -> dict[str, torch.Tensor]:
    model = Model(**parameters)
    fill(model, seed)
    return {name.replace(".", "/"): p.data for name, p in model.named_parameters()}


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("scale", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("k", [768, 2560])
def test_fp4_experts_get_random_codes_and_the_variance_of_a_matrix(scale: torch.dtype, k: int) -> None:
    packed, blocks = torch.zeros(4, 64, k // 2, dtype=torch.int8), torch.zeros(4, 64, k // 32).to(scale)
    p = filled(**{"experts/w13_weight": packed, "experts/w13_weight_scale_inv": blocks})
    scales = p["experts/w13_weight_scale_inv"]
    if scale == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    codes = p["experts/w13_weight"].view(torch.uint8)
    assert len(codes.unique()) == 256
    assert torch.equal(scales.float().log2(), scales.float().log2().round())
    assert len(scales.float().unique()) == 3
    middle = float(scales.float().log2().median())
    assert -9 <= middle <= -6
    weight = mxfp4_dequantize(p["experts/w13_weight"], scales)
    assert weight.isfinite().all()
    assert 0.7 < rms(weight) * math.sqrt(k) < 1.42  # powers of two get no closer


def test_fp8_matrices_use_their_range_and_have_the_variance_of_a_matrix() -> None:
    weight, scales = torch.zeros(256, 384).to(torch.float8_e4m3fn), torch.zeros(2, 3)
    p = filled(**{"q_proj/weight": weight, "q_proj/weight_scale_inv": scales})
    stored, scales = p["q_proj/weight"], p["q_proj/weight_scale_inv"]
    assert stored.float().isfinite().all()
    assert len(stored.view(torch.uint8).unique()) > 150
    assert rms(fp8_dequantize(stored, scales)) * math.sqrt(384) == pytest.approx(1.0, rel=0.02)


def test_everything_else_is_what_its_name_says() -> None:
    bf16 = {"word_embeddings/weight": (512, 64), "lm_head/weight": (512, 64), "attention/b_proj/weight": (8, 64)}
    bf16 |= {"input_layernorm/weight": (64,), "attention/o_norm/weight": (16,), "q_conv1d/weight": (256, 1, 4)}
    fp32 = {"gate/weight": (32, 64), "gate/expert_bias": (32,), "A_log": (8,), "dt_bias": (64,)}
    made = {name: torch.full(shape, float("nan"), dtype=torch.bfloat16) for name, shape in bf16.items()}
    p = filled(**made, **{name: torch.full(shape, float("nan")) for name, shape in fp32.items()})
    assert all(value.isfinite().all() for value in p.values())
    assert (p["input_layernorm/weight"] == 1).all()
    assert (p["attention/o_norm/weight"] == 1).all()
    assert (p["gate/expert_bias"] == 0).all()
    assert rms(p["word_embeddings/weight"]) == pytest.approx(1.0, rel=0.02)
    assert rms(p["q_conv1d/weight"]) == pytest.approx(0.5, rel=0.1)
    for name in ("lm_head/weight", "attention/b_proj/weight", "gate/weight"):
        assert rms(p[name]) * 8 == pytest.approx(1.0, rel=0.1)
    assert 0 <= p["A_log"].min() < p["A_log"].max() <= 1
    assert -4 <= p["dt_bias"].min() < p["dt_bias"].max() <= 0


def test_values_depend_on_name_and_seed_alone() -> None:
    one, two = torch.zeros(16, 16), torch.zeros(16, 16)
    first, other = filled(**{"a/weight": one, "b/weight": two}), filled(**{"b/weight": two.clone()})
    assert torch.equal(first["b/weight"], other["b/weight"])
    assert not torch.equal(first["a/weight"], first["b/weight"])
    assert not torch.equal(first["a/weight"], filled(seed=1, **{"a/weight": one.clone()})["a/weight"])


def test_spread_counts_the_experts_of_neighbours() -> None:
    found = spread(torch.tensor([[3, 1], [1, 2], [5, 6], [6, 5]]))
    assert found["tokens"] == 4
    assert found["all"] == 5
    assert found["1"] == 2
    assert found["2"] == pytest.approx((3 + 4 + 2) / 3)
    assert found["3"] == pytest.approx((5 + 4) / 2)


def test_uniform_routing_spreads_as_expected() -> None:
    scores = torch.rand(2048, 512, generator=torch.Generator().manual_seed(0))
    found = spread(scores.topk(8, dim=1).indices)
    for n in (1, 2, 4, 8):
        assert found[str(n)] == pytest.approx(expected_distinct(512, 8, n), rel=0.01)


def test_only_prompts_of_middling_length_are_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_weights, "routed", routed)
    monkeypatch.setitem(routed, 7, torch.zeros(256, 2, dtype=torch.int32))

    def select(tokens: int, layer: int | None) -> None:
        ids = torch.arange(2 * tokens).view(tokens, 2)
        _after_select(SimpleNamespace(topk_ids=ids), *[Any] * 3, layer_id=layer)  # type: ignore[arg-type]

    for tokens, layer in ((4, 7), (8192, 7), (512, None)):
        select(tokens, layer)
    assert routed[7].shape == (256, 2)
    _after_select(SimpleNamespace(), *[Any] * 3, layer_id=7)  # type: ignore[arg-type]  # a backend that routes itself
    select(512, 7)
    state = SimpleNamespace(internal_state={})
    _after_state(state, None, None)
    assert state.internal_state["sparkmoe_routing"]["7"]["all"] == 1024


@pytest.mark.timeout(120)
def test_the_whole_model_in_its_fp4_form_is_filled() -> None:
    """Through SGLang's own classes, with the hooks as a server would apply them."""
    env = os.environ | {"SPARKMOE_RANDOM_WEIGHTS": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(WORKER)], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("filled "), done.stdout
