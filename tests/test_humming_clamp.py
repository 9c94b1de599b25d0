import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkmoe.sglang_plugin import hooks, humming_clamp
from sparkmoe.sglang_plugin.humming_clamp import HOOKS, limit_after_silu
from sparkmoe.sglang_plugin.swiglu_step import swiglu_step

KERNEL = """
import json, sys, torch
from sparkmoe.sglang_plugin.swiglu_step import swiglu_step, swiglu_step_into
worst = {}
for dtype in (torch.float32, torch.float16):
    for rows, width in ((1, 1), (3, 768), (8, 257), (2, 256)):
        generator = torch.Generator().manual_seed(rows * width)
        x = (6 * torch.randn(rows, 2 * width, generator=generator)).to(dtype)
        out = torch.full((rows, width), float("nan"), dtype=dtype)
        swiglu_step_into(x, out, 4.0)
        gate, up = x.double().chunk(2, dim=-1)
        exact = (gate * torch.sigmoid(gate)).clamp(max=4.0) * up.clamp(-4.0, 4.0)
        worst[f"{dtype}{rows}x{width}"] = float((out.double() - exact).abs().max())
empty = torch.empty(0, 4)
swiglu_step_into(torch.empty(0, 8), empty, 4.0)
try:
    swiglu_step_into(torch.empty(2, 8), torch.empty(2, 8), 4.0)
except ValueError as error:
    worst["mismatch"] = str(error)
print(json.dumps(worst))
"""


def test_the_formula_clamps_after_silu() -> None:
    gate = torch.tensor([10.0, -10.0, 4.0, 1.0, 4.2])
    up = torch.tensor([9.0, -9.0, 1.0, -2.0, 3.0])
    out = swiglu_step(torch.cat([gate, up])[None], 4.0)[0]
    silu = torch.nn.functional.silu(gate)
    assert out[0] == 16.0  # min(silu(10), 4) · 4; clamping before SiLU would give 3.93 · 4
    assert out[1] == pytest.approx(float(silu[1]) * -4.0)  # the gate has no lower limit
    assert out[2] == pytest.approx(float(silu[2]))
    assert out[3] == pytest.approx(float(silu[3]) * -2.0)
    before = torch.nn.functional.silu(gate.clamp(max=4.0)) * up.clamp(-4.0, 4.0)
    assert abs(float(out[4] - before[4])) > 0.1
    assert swiglu_step(torch.ones(2, 3, 8, dtype=torch.bfloat16), 4.0).dtype == torch.bfloat16


def test_the_kernel_equals_the_float64_formula() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=env, capture_output=True, text=True, timeout=120)
    worst: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    assert worst, done.stderr
    assert "expected twice its width" in worst.pop("mismatch")
    assert len(worst) == 8
    for case, error in worst.items():
        assert error <= (5e-6 if "float32" in case else 8e-3), case


def config(**changes: Any) -> Any:
    fields = {
        "gemm1_clamp_limit": 4.0,
        "gemm1_alpha": None,
        "activation": "silu",
        "is_gated": True,
        "swiglu_limit": None,
    }
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    "changes", [{"gemm1_clamp_limit": None}, {"gemm1_alpha": 1.7}, {"activation": "situ"}, {"is_gated": False}]
)
def test_only_ling_s_kind_of_limit_is_ours(changes: dict[str, Any]) -> None:
    assert limit_after_silu(config()) == 4.0
    assert limit_after_silu(config(**changes)) is None


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The kernel replaced by its formula: no GPU here."""
    seen: list[float] = []

    def step(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
        seen.append(limit)
        out.copy_(swiglu_step(gate_up, limit))

    monkeypatch.setattr(humming_clamp, "_step", step)
    return seen


def test_humming_s_activation_is_ours_only_in_limited_layers(steps: list[float]) -> None:
    original: list[Any] = []
    x, out = 5 * torch.randn(4, 16), torch.empty(4, 8)
    core = SimpleNamespace(config=config(), humming_gemm_configs={"indexed": {}})
    humming_clamp._humming_activation(lambda *a: original.append(a), core, x, out)
    assert steps == [4.0]
    assert torch.equal(out, swiglu_step(x, 4.0))
    assert original == []
    core.config = config(gemm1_clamp_limit=None)
    humming_clamp._humming_activation(lambda *a: original.append(a), core, x, out)
    assert len(original) == 1
    assert original[0][0] is core
    assert steps == [4.0]
    assert "indexed" in humming_clamp.gemm_types


def test_marlin_carries_the_limit_through_its_own_argument(steps: list[float]) -> None:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    limited, free = MoeRunnerConfig(gemm1_clamp_limit=4.0), MoeRunnerConfig()
    for made in (limited, free):
        method = SimpleNamespace()

        def create(self: Any, layer: Any, config: Any) -> None:
            self.runner = SimpleNamespace(config=config)

        humming_clamp._marlin_create(create, method, torch.nn.Module(), made)
        assert method.runner.config.swiglu_limit == (-4.0 if made is limited else None)
        assert made.swiglu_limit is None  # the layer's own config stays as it is
    x, out, original = 5 * torch.randn(4, 16), torch.empty(4, 8), []
    humming_clamp._marlin_limit(lambda *a: original.append(a), out, x, -4.0)
    assert torch.equal(out, swiglu_step(x, 4.0))
    humming_clamp._marlin_limit(lambda *a: original.append(a), out, x, 7.0)
    assert original == [(out, x, 7.0)]
    assert steps == [4.0]


def test_marlin_s_runner_hands_our_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own runner function, with the operator behind it replaced: what it would be called with."""
    import importlib

    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    operator = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe")
    marlin = importlib.import_module("sglang.srt.layers.moe.moe_runner.marlin")
    utils = importlib.import_module("sglang.srt.layers.quantization.marlin_utils")
    seen: dict[str, Any] = {}

    def fused(**arguments: Any) -> torch.Tensor:
        seen.update(arguments)
        return arguments["hidden_states"]

    monkeypatch.setattr(operator, "fused_marlin_moe", fused)
    monkeypatch.setattr(utils, "marlin_make_workspace", lambda *a, **k: None)
    topk = SimpleNamespace(topk_weights=None, topk_ids=None, router_logits=None)
    dispatched = SimpleNamespace(hidden_states=torch.ones(2, 4, dtype=torch.bfloat16), topk_output=topk)
    info = marlin.MarlinMoeQuantInfo(*(torch.ones(1) for _ in range(4)), None, None, weight_bits=8)
    marlin.fused_experts_none_to_marlin(dispatched, info, MoeRunnerConfig(gemm1_clamp_limit=4.0, swiglu_limit=-4.0))
    assert seen["clamp_limit"] == -4.0
    assert seen["gemm1_alpha"] is None


def test_every_hook_fits_the_installed_sglang() -> None:
    assert [hooks.status(hook).state for hook in HOOKS] == [hooks.State.NEEDED] * 4


def test_a_version_that_reads_the_limit_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import inspect

    caught_up = "limit = config.gemm1_clamp_limit\n" * 2
    monkeypatch.setattr(inspect, "getsource", lambda _: caught_up)
    assert {hooks.status(hook).state for hook in HOOKS} == {hooks.State.NOT_NEEDED}


@pytest.mark.parametrize(("value", "hooked"), [("0", False), ("1", True), (None, True)])
def test_the_clamp_can_be_left_out_to_measure_what_it_is_worth(
    monkeypatch: pytest.MonkeyPatch, value: str | None, hooked: bool
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hooks, "register", asked.append)
    monkeypatch.delenv(humming_clamp.OFF_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(humming_clamp.OFF_ENV, value)
    humming_clamp.register()
    assert asked == ([HOOKS] if hooked else [])
