"""Training: rows are what they should be, and a run in two stretches is the run in one."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sparkmoe.nano import data, train, trainer
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.optim import orthogonalize
from sparkmoe.nano.quantize import round_weight

TINY = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32,
    "num_experts": 4, "num_experts_per_tok": 2, "layer_group_size": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "expert_swiglu_limit_list": [0, 1.0], "share_expert_swiglu_limit_list": [0, 2.0],
}  # fmt: skip


def arguments(out: Path, **changes: object) -> argparse.Namespace:
    plain: dict[str, object] = {
        "out": out, "seed": 0, "steps": 6, "stop": 2**31, "minutes": 1e9, "tokens": 768, "lr": 2e-3, "warmup": 1,
        "decay_from": 0.5, "no_compile": True, "workers": 1, "held_out": 2, "log_every": 1, "save_every": 2,
        "deliver": None, "config": json.dumps(TINY),
    }  # fmt: skip
    return argparse.Namespace(**(plain | changes))


def test_a_run_in_two_stretches_is_the_run_in_one(tmp_path: Path) -> None:
    """Also across the step where rounding begins. Weights equal to the bit, curves too but for the clock."""
    train.run(arguments(tmp_path / "two", stop=2), lambda line: None)
    train.run(arguments(tmp_path / "two"), lambda line: None)
    train.run(arguments(tmp_path / "one"), lambda line: None)
    one, two = (load_file(tmp_path / n / "weights-0.safetensors") for n in ("one", "two"))
    assert all(torch.equal(one[n], two[n]) for n in one)
    curves = [json.loads((tmp_path / n / "curves.json").read_text()) for n in ("one", "two")]
    losses = [[point["loss"] for point in c] for c in curves]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.2
    stored = one["model.layers.1.mlp.experts.0.up_proj.weight"].float()
    assert torch.equal(round_weight(stored, "mxfp4"), stored)


def test_rows_hold_conversations_and_weigh_replies() -> None:
    tok = Tokenizer.from_file(str(data.TOKENIZER))
    rows = data.shard(data.TOKENIZER, seed=1, index=0)
    assert set(rows) == set(data.LENGTHS)
    short = rows[data.LENGTHS[0]]
    assert short.ids.shape[1] == data.LENGTHS[0]
    assert set(short.weights.flatten().tolist()) == {data.PROMPT, data.REPLY}
    text = [tok.decode(r.tolist(), skip_special_tokens=False) for r in short.ids[:400]]
    assert sum("<think></think>The answer is" in t for t in text) > 10
    assert sum("```python" in t for t in text) > 3
    for ids, weights in zip(short.ids[:50], short.weights[:50], strict=True):
        reply = tok.decode(ids[weights == data.REPLY].tolist(), skip_special_tokens=False)
        assert "<role>HUMAN" not in reply
    again = data.shard(data.TOKENIZER, seed=1, index=0)[data.LENGTHS[0]]
    assert (again.ids == short.ids).all()


def test_every_parameter_gets_a_gradient_and_the_draft_losses_count() -> None:
    one = trainer.Trainer(LingConfig.from_dict(train.CONFIG | TINY), 0, "cpu")
    rows = data.shard(data.TOKENIZER, seed=1, index=0)[data.LENGTHS[0]]
    ids, weights = torch.from_numpy(rows.ids[:4]), torch.from_numpy(rows.weights[:4])
    losses, grads = one._gradients(ids, weights, rounded=True)
    assert losses.shape == (1 + trainer.DEPTH,)
    silent = [n for n, g in zip(one.names, grads, strict=True) if not g.abs().sum() > 0]
    assert not silent
    assert sum(float(r.load.sum()) for r in one.ling.routers()) > 0


def test_learning_rate_warms_up_holds_and_ends_near_zero() -> None:
    rate = [train.learning_rate(s, 1000, 1.0, 100, 0.6) for s in (1, 50, 100, 600, 800, 1000)]
    assert rate == pytest.approx([0.01, 0.5, 1.0, 1.0, 0.5025, 0.0025])


@pytest.mark.parametrize("shape", [(3, 48, 64), (2, 64, 48)])
def test_orthogonalized_singular_values_are_near_one(shape: tuple[int, int, int]) -> None:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(g))
    assert values.min() > 0.5
    assert values.max() < 1.3
