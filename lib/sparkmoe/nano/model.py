"""Ling-3.0 in plain PyTorch: the definition everything else is compared with.

A serving engine computes this model with caches, fused kernels and three phases (prefill, decode, verify). This file
computes it once, on whole sequences, in the order a paper would write it, so that a wrong kernel, a dropped clamp or a
draft layer fed with the wrong hidden state shows as a difference. It is trainable too: nano Ling is made with it.

One layer is pre-norm attention plus pre-norm feed-forward. Most layers use KDA, a gated delta rule whose state has a
fixed size (so a decoded token costs the same at any context length); the last layer of every group uses MLA, softmax
attention over a low-rank latent. The feed-forward is a SwiGLU mixture of experts after the first dense layers. One MTP
("NEXTN") layer predicts the token after next and, fed with its own output, further ones: that is the draft model of
speculative decoding.

Shapes: B batch, T tokens, D hidden, H heads, K key size of KDA, V value size, E experts, N = B * T. Parameters are
named as in the checkpoint, except that the routed experts are stacked into [E, out, in]; `load_checkpoint` and
`tensors` translate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sparkmoe.errors import ModelError
from sparkmoe.nano import layers
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.layers import KDA, MLA, RMSNorm, linear, swiglu

FP32_NAMES = ("gate.expert_bias", "A_log", "dt_bias")  # stored in FP32 in every form of the checkpoint


class MLP(nn.Module):
    def __init__(self, D: int, inter: int, limit: float | None = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(D, inter), linear(D, inter), linear(inter, D)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x), self.limit))


class Router(nn.Module):
    """Sigmoid scores in FP32. expert_bias steers the choice only, so it has no gradient: `balance` moves it."""

    expert_bias: Tensor
    load: Tensor

    def __init__(self, c: LingConfig) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(c.num_experts))
        self.register_buffer("load", torch.zeros(c.num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, D] -> weights [N, E]: zero but for the chosen experts, computed from the scores without bias."""
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            choice = scores + self.expert_bias
            if c.topk_group < c.n_group:  # keep the groups whose two best sum highest
                best2 = choice.unflatten(-1, (c.n_group, -1)).topk(2, -1)[0].sum(-1)
                keep = torch.zeros_like(best2, dtype=torch.bool).scatter_(1, best2.topk(c.topk_group, -1)[1], True)
                choice = choice.masked_fill(~keep.repeat_interleave(c.num_experts // c.n_group, 1), -math.inf)
            chosen = torch.zeros_like(scores).scatter_(1, choice.topk(c.num_experts_per_tok, -1)[1], 1.0)
            if self.training:
                self.load.add_(chosen.sum(0))
        weights = scores * chosen
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: Tensor | float) -> Tensor:
        """bias += rate * sign(mean load - load); returns max load / mean load (a scalar) and clears the counts."""
        mean = self.load.mean().clamp(min=1)
        violation = self.load.max() / mean
        self.expert_bias.add_((mean - self.load).sign() * rate)
        self.load.zero_()
        return violation


class Experts(nn.Module):
    """All routed experts in three products over stacked matrices; an expert that was not chosen gets weight 0.

    That computes E / k times what a server computes. For 16 experts it is still the fastest way to train: no sorting,
    no capacity, no dropped token, no scatter, the same sums in the same order every time.
    """

    def __init__(self, c: LingConfig, limit: float | None) -> None:
        super().__init__()
        E, D, inter = c.num_experts, c.hidden_size, c.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(E, inter, D))
        self.up_proj = nn.Parameter(torch.empty(E, inter, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, inter))
        self.limit = limit

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x: [N, D]; weights: [N, E] -> [N, D]."""
        gate, up = F.linear(x, self.gate_proj.flatten(0, 1)), F.linear(x, self.up_proj.flatten(0, 1))
        act = layers.weighted_swiglu(gate, up, weights, self.limit)
        return F.linear(act, self.down_proj.transpose(0, 1).flatten(1))


class MoE(nn.Module):
    def __init__(self, c: LingConfig, layer: int) -> None:
        super().__init__()
        self.gate = Router(c)
        self.experts = Experts(c, c.swiglu_limit(layer, shared=False))
        shared = c.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(c.hidden_size, shared, c.swiglu_limit(layer, shared=True)) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        y = self.experts(flat, self.gate(flat)).view_as(x)
        return y if self.shared_experts is None else y + self.shared_experts(x)


# ---------------------------------------------------------------------------------------------------- model
class Block(nn.Module):
    def __init__(self, c: LingConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = MLA(c) if c.is_mla(layer) else KDA(c)
        dense = layer < c.first_k_dense_replace
        self.mlp = MLP(c.hidden_size, c.intermediate_size) if dense else MoE(c, layer)

    def forward(self, x: Tensor, *chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), *chain)
        return x + self.mlp(self.post_attention_layernorm(x))


class MTPBlock(Block):
    """The NEXTN layer, always MLA and MoE. It has no embedding and no head of its own: it uses the target's."""

    def __init__(self, c: LingConfig) -> None:
        super().__init__(c, c.num_hidden_layers)
        self.enorm, self.hnorm, self.final_layernorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3))
        self.eh_proj = linear(2 * c.hidden_size, c.hidden_size)

    def draft(self, embedding: Tensor, hidden: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], -1))
        return self.final_layernorm(self(x, chain))


class Ling(nn.Module):
    def __init__(self, c: LingConfig) -> None:
        super().__init__()
        self.config = c
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        mtp = [MTPBlock(c)] if c.num_nextn_predict_layers else []
        self.model.layers = nn.ModuleList([*(Block(c, i) for i in range(c.num_hidden_layers)), *mtp])
        self.model.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] -> hidden states after the final norm [B, T, D]: what lm_head and the MTP layer read."""
        x = self.model.word_embeddings(ids)
        for block in self.model.layers[: self.config.num_hidden_layers]:
            x = block(x)
        return self.model.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, vocab] in FP32; row p predicts the token at p + 1."""
        return self.lm_head(self.hidden(ids)).float()

    def drafts(self, ids: Tensor, hidden: Tensor, depth: int) -> Iterator[Tensor]:
        """The MTP hidden states of draft steps 0…depth-1, each [B, T, D]; element p of step s predicts the token at p
        + s + 2.

        Step 0 reads hidden[:, p] and the token at p + 1, step s its predecessor's output and the token at p + s + 1:
        with the true tokens in `ids` this is what a server drafts from p as long as its drafts are right. The last s +
        1 elements of step s have no true token to read and mean nothing.
        """
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            token = F.pad(ids[:, step + 1 :], (0, step + 1))
            hidden = self.model.layers[-1].draft(self.model.word_embeddings(token), hidden, chain)
            yield hidden

    def routers(self) -> list[Router]:
        return [m for m in self.modules() if isinstance(m, Router)]


def tensors(model: Ling) -> dict[str, Tensor]:
    """The model's parameters and buffers under the checkpoint's names, detached, experts one by one."""
    out: dict[str, Tensor] = {}
    for name, t in model.state_dict().items():
        stem, _, leaf = name.partition(".mlp.experts.")
        if leaf:
            out |= {f"{stem}.mlp.experts.{e}.{leaf}.weight": w for e, w in enumerate(t.detach())}
        else:
            out[name] = t.detach()
    return out


def load_checkpoint(folder: str | Path, dtype: torch.dtype = torch.float32) -> Ling:
    """An unquantized checkpoint (config.json, *.safetensors) as a model in eval mode. Raises ModelError if it does not
    fit.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is no model folder.")
    with torch.device("meta"):
        model = Ling(LingConfig.from_json(folder / "config.json"))
    raw = {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}
    state = {}
    for name, want in model.state_dict().items():
        stem, _, leaf = name.partition(".mlp.experts.")
        names = [f"{stem}.mlp.experts.{e}.{leaf}.weight" for e in range(len(want))] if leaf else [name]
        missing = [n for n in names if n not in raw]
        if missing:
            raise ModelError(
                f"{folder} lacks the tensor {missing[0]}; its config.json and its weights do not belong together."
            )
        parts = [raw.pop(n) for n in names]
        value = torch.stack(parts) if leaf else parts[0]
        if value.shape != want.shape:
            raise ModelError(
                f"{folder}: {name} has shape {list(value.shape)}, config.json asks for {list(want.shape)}."
            )
        state[name] = value.to(torch.float32 if name.endswith((*FP32_NAMES, "gate.weight")) else dtype)
    if raw:
        raise ModelError(f"{folder} holds {len(raw)} tensors that its config.json has no place for, as {min(raw)}.")
    model.load_state_dict(state, assign=True)
    for router in model.routers():
        router.load = torch.zeros_like(router.expert_bias)
    return model.eval().requires_grad_(False)
