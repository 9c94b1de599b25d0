import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparkmoe.sglang_plugin.fp8_lm_head import (
    E4M3,
    SCALE_ENV,
    Fp8HeadMethod,
    Refused,
    attach,
    decode,
    granularity,
    quantize_rows,
    quantize_weight,
)

VOCABULARY, HIDDEN = 1000, 64  # 1000 is no multiple of SGLang's padding, 64
WORKER = Path(__file__).parent / "head_worker.py"
CPU_ENV = {"SGLANG_PLATFORM": "torch_cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def head_of(weight: torch.Tensor, scale: Any = "channel") -> torch.nn.Module:
    head = torch.nn.Module()
    head.weight = torch.nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    Fp8HeadMethod(scale).process_weights_after_loading(head)
    return head


def test_decode_is_exact_for_every_finite_value() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 0x7F) != 0x7F].view(E4M3)
    assert torch.equal(decode(finite), finite.float())


def test_a_row_uses_the_whole_range_and_keeps_three_bits() -> None:
    x = random(7, 256) * torch.logspace(-6, 6, 7)[:, None]
    rows, scales = quantize_rows(x)
    back = rows.float() * scales
    assert torch.equal(rows.float().abs().amax(dim=1), torch.full((7,), 448.0))
    normal = (x.abs() / scales) >= 2**-6
    assert ((back - x).abs() / x.abs())[normal].max() <= 2**-4 + 1e-6


def test_rows_of_zeros_stay_zero() -> None:
    rows, scales = quantize_rows(torch.zeros(2, 16))
    assert torch.equal(rows.float(), torch.zeros(2, 16))
    assert scales.isfinite().all()


def test_the_weight_is_quantized_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkmoe.sglang_plugin import fp8_lm_head

    weight = random(100, 32)
    whole = [quantize_weight(weight, g) for g in ("channel", "tensor")]
    monkeypatch.setattr(fp8_lm_head, "_CHUNK_ROWS", 7)
    pieces = [quantize_weight(weight, g) for g in ("channel", "tensor")]
    for (q, s), (q2, s2) in zip(whole, pieces, strict=True):
        assert torch.equal(q.view(torch.uint8), q2.view(torch.uint8))
        assert torch.equal(s, s2)


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_weight_memory_halves(scale: str) -> None:
    weight = random(512, 256)
    head = head_of(weight, scale)
    bf16 = weight.numel() * 2
    assert head.weight.untyped_storage().nbytes() == bf16 // 2
    assert head.weight_scale.numel() == (512 if scale == "channel" else 1)
    assert tuple(head.weight.shape) == (256, 512)


@pytest.mark.parametrize("scale", ["channel", "tensor"])
def test_logits_equal_the_float64_product_of_the_stored_numbers(scale: str) -> None:
    head = head_of(random(512, 256) * torch.linspace(0.1, 3, 512)[:, None], scale)
    x = random(5, 256, seed=1)
    rows, scales = quantize_rows(x)
    exact = (rows.double() * scales) @ (head.weight.double() * head.weight_scale)
    got = head.quant_method.apply(head, x)
    assert got.dtype == torch.float32
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.allclose(head.quant_method.apply(head, x, torch.ones(512)), got + 1)


def test_a_scale_per_channel_is_closer_than_one_for_all() -> None:
    weight = random(512, 256) * torch.logspace(-6, 1, 512)[:, None]
    x = random(4, 256, seed=1)
    exact = x @ weight.to(torch.bfloat16).float().t()

    def error(scale: str) -> float:
        head = head_of(weight, scale)
        return float(((head.quant_method.apply(head, x) - exact) / exact.abs().mean(dim=0)).abs().mean())

    assert error("channel") < 0.5 * error("tensor")


def test_two_shards_hold_the_numbers_of_one() -> None:
    weight, x = random(1024, 64), random(3, 64, seed=1)
    whole, left, right = head_of(weight), head_of(weight[:512]), head_of(weight[512:])
    parts = [part.quant_method.apply(part, x) for part in (left, right)]
    assert torch.equal(torch.cat(parts, dim=1), whole.quant_method.apply(whole, x))


def test_a_second_visit_of_the_loader_changes_nothing() -> None:
    head = head_of(random(64, 16))
    before = head.weight
    head.quant_method.process_weights_after_loading(head)
    assert head.weight is before


def test_unknown_granularity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCALE_ENV, "row")
    with pytest.raises(Refused, match=r"SPARKMOE_FP8_HEAD_SCALE='row' is none of channel, tensor"):
        granularity()


def fake_model(**changes: Any) -> Any:
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    head = ParallelLMHead.__new__(ParallelLMHead)
    torch.nn.Module.__init__(head)
    head.weight = torch.nn.Parameter(random(64, 16), requires_grad=False)
    head.quant_method = type("UnquantizedEmbeddingMethod", (), {})()
    model = SimpleNamespace(lm_head=head, config=SimpleNamespace(tie_word_embeddings=False), logits_processor=None)
    for key, value in changes.items():
        setattr(model, key, value)
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": SimpleNamespace(tie_word_embeddings=True)}, "tied to the embedding"),
        ({"lm_head": torch.nn.Linear(4, 4)}, "its lm_head is Linear"),
        ({"lm_head": None}, "it has no lm_head"),
        ({"logits_processor": SimpleNamespace(use_fp32_lm_head=True)}, "exclude each other.*--enable-fp32-lm-head"),
    ],
)
def test_what_cannot_be_quantized_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        attach(fake_model(**changes))


def test_a_quantized_head_and_shards_of_a_tensor_scale_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fake_model()
    model.lm_head.quant_method = type("ModelOptFp8LinearMethod", (), {})()
    with pytest.raises(Refused, match="quantized already"):
        attach(model)
    monkeypatch.setenv(SCALE_ENV, "tensor")
    with pytest.raises(Refused, match="each of 2 shards another scale"):
        attach(fake_model(), shards=2)
    model = fake_model()
    attach(model)
    assert model.lm_head.quant_method == Fp8HeadMethod("tensor")


def qwen3_moe(folder: Path, *, tied: bool) -> Path:
    """A random Qwen3-MoE of one layer, as a checkpoint."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16"}
    config |= {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "tie_word_embeddings": tied, "hidden_act": "silu"}
    config |= {"max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "norm_topk_prob": True}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_sparse_step": 1, "mlp_only_layers": []} | sizes
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (64, HIDDEN),
        layer + "self_attn.k_proj.weight": (32, HIDDEN),
        layer + "self_attn.v_proj.weight": (32, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, 64),
        layer + "self_attn.q_norm.weight": (16,),
        layer + "self_attn.k_norm.weight": (16,),
        layer + "mlp.gate.weight": (4, HIDDEN),
    }
    for expert in range(4):
        experts = f"{layer}mlp.experts.{expert}."
        shapes |= {experts + "gate_proj.weight": (32, HIDDEN), experts + "up_proj.weight": (32, HIDDEN)}
        shapes |= {experts + "down_proj.weight": (HIDDEN, 32)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: (0.1 * random(*shape, seed=i)).to(torch.bfloat16) for i, (name, shape) in enumerate(shapes.items())
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, tmp_path: Path, *, shards: int = 1, flags: tuple[str, ...] = ()) -> tuple[list[Any], str]:
    """Load a model with an FP8 head through SGLang's own loader, one process a shard: (results, what they printed)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for rank in range(shards):
        out = tmp_path / f"{folder.name}-{rank}-of-{shards}.pt"
        spec = {"model": str(folder), "shards": shards, "rank": rank, "port": port, "out": str(out), "flags": flags}
        out.with_suffix(".json").write_text(json.dumps(spec))
        command = [sys.executable, str(WORKER), str(out.with_suffix(".json"))]
        cores = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * shards)}
        env = os.environ | CPU_ENV | cores | {"SGLANG_ENABLE_FP8_LM_HEAD": "1"}
        pipe = subprocess.PIPE
        running.append((out, subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)))
    said = "".join(process.communicate(timeout=120)[0] for _, process in running)
    return [torch.load(out) for out, _ in running if out.exists()], said


@pytest.mark.server
def test_qwen3_moe_and_two_shards_give_the_same_logits(tmp_path: Path) -> None:
    folder = qwen3_moe(tmp_path / "qwen", tied=False)
    (whole,), said = load(folder, tmp_path)
    assert whole["facts"]["class"] == "Qwen3MoeForCausalLM", said
    assert whole["facts"]["dtype"] == "torch.float8_e4m3fn"
    assert whole["facts"]["rows"] == 1024  # padded to a multiple of 64
    assert whole["facts"]["bytes"] == 1024 * HIDDEN + 4 * 1024  # half of BF16, and a scale a row
    weight = load_file(folder / "model.safetensors")["lm_head.weight"]
    head = head_of(weight)
    hidden = random(5, HIDDEN, seed=1)
    assert torch.equal(whole["logits"][:, :VOCABULARY], head.quant_method.apply(head, hidden))
    exact = hidden @ weight.float().t()
    assert float((whole["logits"][:, :VOCABULARY] - exact).norm() / exact.norm()) < 0.05
    shards, said = load(folder, tmp_path, shards=2)
    assert len(shards) == 2, said
    both = torch.cat([shard["logits"] for shard in shards], dim=1)
    assert torch.equal(both[:, :VOCABULARY], whole["logits"][:, :VOCABULARY])


@pytest.mark.server
@pytest.mark.slow
def test_a_tied_head_is_refused_by_a_real_load(tmp_path: Path) -> None:
    results, said = load(qwen3_moe(tmp_path / "tied", tied=True), tmp_path)
    assert not results
    assert "sparkmoe plugin: the FP8 LM head cannot be applied to Qwen3MoeForCausalLM: its head is tied" in said


@pytest.mark.server
@pytest.mark.slow
def test_an_fp32_head_beside_it_is_refused_by_a_real_load(tmp_path: Path) -> None:
    results, said = load(qwen3_moe(tmp_path / "fp32", tied=False), tmp_path, flags=("--enable-fp32-lm-head",))
    assert not results
    assert "an FP8 head and an FP32 head exclude each other" in said
