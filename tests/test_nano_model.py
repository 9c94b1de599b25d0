"""The reference model: its two KDA forms, its drafts, its router, and checkpoints that do not fit."""

import json
import re
from pathlib import Path

import pytest
import torch

from sparkmoe.errors import ModelError
from sparkmoe.nano import random_checkpoint
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.layers import invert_unit_lower, kda_chunked, kda_recurrent, swiglu
from sparkmoe.nano.model import Router, load_checkpoint

SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_experts": 8,
    "expert_swiglu_limit_list": [0, 0, 0.5, 0.5],
    "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.5],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.make(tmp_path_factory.mktemp("small") / "model", alpha=0.7, **SMALL)


@pytest.mark.parametrize("decay", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("length", [1, 31, 32, 70])
def test_chunked_delta_rule_is_the_recurrent_one(decay: float, length: int) -> None:
    gen = torch.Generator().manual_seed(length)
    q, k, v, g = (torch.randn(2, 3, length, 16, generator=gen) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    k[:, 0] = k[:, 0, :1]  # equal keys: the triangular system at its worst
    beta = torch.rand(2, 3, length, generator=gen)
    g = -decay * g.sigmoid()
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    want, got = kda_recurrent(*inputs), kda_chunked(*inputs)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    seed = torch.randn(want.shape, generator=gen)
    for a, b in zip(torch.autograd.grad(got, inputs, seed), torch.autograd.grad(want, inputs, seed), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


def test_inverse_of_a_unit_triangle() -> None:
    a = torch.randn(3, 32, 32, dtype=torch.float64).tril(-1)
    eye = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(invert_unit_lower(a) @ (eye + a), eye.expand(3, -1, -1), atol=1e-6, rtol=0)


def test_limit_is_applied_after_silu() -> None:
    gate, up = torch.tensor([10.0, 10.0, -10.0, 0.1]), torch.tensor([10.0, -10.0, 10.0, 0.1])
    want = torch.tensor([2.0 * 2.0, 2.0 * -2.0, float(torch.nn.functional.silu(torch.tensor(-10.0))) * 2.0, 0.005250])
    torch.testing.assert_close(swiglu(gate, up, 2.0), want, atol=1e-5, rtol=1e-5)


def test_hidden_states_do_not_see_later_tokens(small: Path) -> None:
    model = load_checkpoint(small)
    ids = torch.randint(0, 256, (1, 50), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 40:] = 7
    torch.testing.assert_close(model(ids)[:, :40], model(other)[:, :40], atol=1e-4, rtol=1e-4)


def test_parallel_drafts_are_those_of_drafting_step_by_step(small: Path) -> None:
    """From one position, as a server does it: step-0 keys of the context, then one key a draft."""
    model, depth, base = load_checkpoint(small), 3, 20
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    hidden = model.hidden(ids)
    together = list(model.drafts(ids, hidden, depth))
    layer, embed = model.model.layers[-1], model.model.word_embeddings
    # One sequence: the context's step-0 inputs, then each later step's input behind it, at its own rope position.
    inputs = hidden[:, : base + 1]
    for step in range(depth):
        tokens = ids[:, 1 : base + 2 + step]
        out = layer.draft(embed(tokens), inputs, [])
        torch.testing.assert_close(out[:, -1], together[step][:, base], atol=1e-4, rtol=1e-4)
        inputs = torch.cat([inputs, out[:, -1:]], 1)


def test_router_bias_chooses_but_does_not_weigh_and_groups_are_kept() -> None:
    raw = random_checkpoint.BASE | {"n_group": 4, "topk_group": 2}
    router = Router(LingConfig.from_dict(raw))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(1))
    before = router(x)
    assert torch.all((before > 0).sum(1) == 4)
    torch.testing.assert_close(before.sum(1), torch.full((200,), 2.5))
    assert int((before.unflatten(1, (4, 4)).sum(-1) > 0).sum(1).max()) == 2
    router.expert_bias[5] = 100.0
    after = router(x)
    assert torch.all(after[:, 5] > 0)
    scores = (x @ router.weight.T).sigmoid()
    chosen = after > 0
    torch.testing.assert_close(after, 2.5 * scores * chosen / (scores * chosen).sum(1, keepdim=True))


def test_balance_moves_the_bias_against_the_load() -> None:
    router = Router(LingConfig.from_dict(random_checkpoint.BASE))
    router.load.copy_(torch.tensor([10.0] + [1.0] * 15))
    violation = router.balance(0.01)
    assert float(violation) == pytest.approx(10 / (25 / 16))
    assert torch.equal(router.expert_bias.sign(), torch.tensor([-1.0] + [1.0] * 15))
    assert float(router.load.sum()) == 0


@pytest.mark.parametrize(
    "variant",
    [
        {"q_lora_rank": 64},
        {"no_kda_lora": False},
        {"kda_safe_gate": False},
        {"gated_attention_proj_granularity_type": "element_wise"},
        {"use_mla_nope": True},
        {"layer_group_size": [1, 0, 1, 0]},
        {"num_nextn_predict_layers": 0},
    ],
    ids=lambda v: next(iter(v)),
)
def test_every_variant_computes_something_else(small: Path, tmp_path: Path, variant: dict[str, object]) -> None:
    ids = torch.arange(30)[None]
    plain = load_checkpoint(small)(ids)
    varied = load_checkpoint(random_checkpoint.make(tmp_path, alpha=0.7, **(SMALL | variant)))
    assert torch.isfinite(varied(ids)).all()
    assert not torch.allclose(varied(ids), plain)


def test_random_miniature_is_reproducible_and_its_accept_length_can_be_chosen(tmp_path: Path) -> None:
    one, two = random_checkpoint.make(tmp_path / "a", **SMALL), random_checkpoint.make(tmp_path / "b", **SMALL)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    agree = []
    for alpha in (0.2, 2.0):
        model = load_checkpoint(random_checkpoint.make(tmp_path / f"{alpha}", alpha=alpha, **SMALL))
        ids = torch.tensor([[5]])
        for _ in range(60):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        draft = model.lm_head(next(model.drafts(ids, model.hidden(ids), 1))).argmax(-1)
        agree.append((draft[:, :-2] == ids[:, 2:]).float().mean().item())
    assert agree[0] > 0.9 > agree[1]


def test_what_does_not_fit_is_refused_by_name(small: Path, tmp_path: Path) -> None:
    def copy(**changes: object) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(json.loads((small / "config.json").read_text()) | changes))
        (folder / "model.safetensors").symlink_to(small / "model.safetensors")
        return folder

    with pytest.raises(ModelError, match=re.escape("no config.json")):
        load_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.4"):
        load_checkpoint(copy(num_hidden_layers=8))
    with pytest.raises(ModelError, match="no place for"):
        load_checkpoint(copy(num_nextn_predict_layers=0))
    with pytest.raises(ModelError, match="has shape"):
        load_checkpoint(copy(kv_lora_rank=64))
    with pytest.raises(ModelError, match="score_function = 'softmax'"):
        load_checkpoint(copy(score_function="softmax"))
    with pytest.raises(ModelError, match="seeds 0…2147483647"):
        random_checkpoint.make(tmp_path / "x", seed=-1)
    with pytest.raises(ModelError, match="below the 268 tokens"):
        random_checkpoint.make(tmp_path / "x", vocab_size=100)
