"""The levers under SGLang's real runners, on a GPU, against float64 formulas. Ling-3.0-flash's shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experts_layer import Layer, distance

from sparkmoe.sglang_plugin import humming_clamp
from sparkmoe.sglang_plugin.draft_head import build
from sparkmoe.sglang_plugin.fp8_lm_head import E4M3, Fp8HeadMethod, quantize_rows
from sparkmoe.sglang_plugin.swiglu_step import swiglu_step, swiglu_step_into

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
Record = Callable[..., None]
VOCABULARY, HIDDEN = 157_184, 2560


@pytest.mark.parametrize("rows", [8, 32, 4096])
def test_the_kernel_equals_the_formula_and_is_one_launch(rows: int, record: Record) -> None:
    x = (5 * torch.randn(rows, 1536, device="cuda")).to(torch.bfloat16)
    out = torch.empty(rows, 768, device="cuda", dtype=torch.bfloat16)
    swiglu_step_into(x, out, 4.0)
    gate, up = x.double().chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate).clamp(max=4.0) * up.clamp(-4.0, 4.0)
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()  # one rounding to BF16
    assert torch.equal(out, swiglu_step(x, 4.0))
    timings = {}
    for name, call in (("kernel", lambda: swiglu_step_into(x, out, 4.0)), ("torch", lambda: swiglu_step(x, 4.0))):
        timings[name + "_us"] = graph_us(call)
    record(f"kernel_{rows}", **timings)


def graph_us(call: Callable[[], Any], repeats: int = 20) -> float:
    """Microseconds of one call inside a replayed CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (5 * repeats)


def head_of(scale: Any) -> Any:
    head = torch.nn.Module()
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(VOCABULARY, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16)
    rows *= torch.linspace(0.01, 0.05, VOCABULARY, device="cuda", dtype=torch.bfloat16)[:, None]
    head.weight = torch.nn.Parameter(rows, requires_grad=False)
    Fp8HeadMethod(scale).process_weights_after_loading(head)
    return head, rows


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_fp8_head_logits_and_bytes(scale: Any, sglang: Any, record: Record) -> None:
    head, bf16 = head_of(scale)
    assert head.weight.untyped_storage().nbytes() == VOCABULARY * HIDDEN
    facts: dict[str, Any] = {
        "bytes": VOCABULARY * HIDDEN + 4 * head.weight_scale.numel(),
        "bf16_bytes": 2 * bf16.numel(),
    }
    for tokens in (1, 4, 16):
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        found = head.quant_method.apply(head, x)
        quantized, scales = quantize_rows(x)
        exact = (quantized.double() * scales) @ (head.weight[:, :4096].double() * head.weight_scale[..., :4096])
        facts[f"error_{tokens}"] = distance(found[:, :4096], exact)
        facts[f"against_bf16_{tokens}"] = distance(found[:, :4096], x.double() @ bf16[:4096].double().t())
        facts[f"fp8_us_{tokens}"] = graph_us(lambda x=x: head.quant_method.apply(head, x))
        facts[f"bf16_us_{tokens}"] = graph_us(lambda x=x: x @ bf16.t())
        assert facts[f"error_{tokens}"] < 4e-3  # BF16 output
        assert facts[f"against_bf16_{tokens}"] < 0.05
    hot = build(head, "shared", torch.arange(0, VOCABULARY, VOCABULARY // 32768, device="cuda")[:32768])
    facts["hot_us_1"] = graph_us(lambda: hot.quant_method.apply(hot, x[:1]))
    assert hot.weight.dtype == E4M3
    record(f"fp8_head_{scale}", **facts)


def compare(layer: Layer, tokens: int) -> dict[str, float]:
    inputs = layer.inputs(tokens)
    found = layer(*inputs)
    return {name: distance(found[:4], layer.exact(*inputs, formula=name)) for name in ("after", "before", "none")}


def captured(layer: Layer, tokens: int) -> bool:
    """A CUDA graph captured on one input and replayed on another gives what the eager call gives."""
    first, second = layer.inputs(tokens), layer.inputs(tokens, seed=2)
    held = tuple(t.clone() for t in first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = layer(*held)
    for mine, new in zip(held, second, strict=True):
        mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    return bool(distance(out, layer(*second).double()) < 2e-3)


BACKENDS = [("humming", "indexed"), ("marlin", ""), ("humming", "grouped")]


@pytest.mark.parametrize(("backend", "gemm"), BACKENDS, ids=lambda x: x or "only")
@pytest.mark.parametrize("limit", [4.0, 1.0, None], ids=["four", "one", "free"])
def test_the_limit_under_the_real_runner(
    backend: str, gemm: str, limit: float | None, sglang: Any, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gemm:
        monkeypatch.setenv("SGLANG_HUMMING_MOE_GEMM_TYPE", gemm)
    before = humming_clamp.applied.total()
    layer = Layer(sglang, backend, limit)
    layer.finish()
    facts: dict[str, Any] = {f"tokens_{n}": compare(layer, n) for n in (1, 4, 300)}
    facts["graph_1"], facts["graph_4"] = captured(layer, 1), captured(layer, 4)
    inputs = layer.inputs(1)
    facts["layer_us_1"] = graph_us(lambda: layer(*inputs), repeats=4)
    facts["applied"] = humming_clamp.applied.total() - before
    record(f"{backend}_{gemm or 'fused'}_limit_{limit}", **facts)
    for n in (1, 4, 300):
        errors = facts[f"tokens_{n}"]
        assert errors["after"] < 0.008, errors
        if limit:
            assert min(errors["before"], errors["none"]) > 2.5 * errors["after"], errors
    assert facts["graph_1"]
    assert facts["graph_4"]
    assert (facts["applied"] > 0) == (limit is not None)


def test_marlin_without_the_hook_drops_the_limit(sglang: Any, record: Record) -> None:
    """What the hook is for: with SGLang's own config the same runner gives the unlimited result."""
    import dataclasses

    layer = Layer(sglang, "marlin", 4.0)
    layer.module.quant_method.runner.config = dataclasses.replace(
        layer.module.quant_method.runner.config, swiglu_limit=None
    )
    layer.finish()
    errors = compare(layer, 4)
    record("marlin_without_hook", **errors)
    assert errors["none"] < 0.02
    assert errors["after"] > 0.05
