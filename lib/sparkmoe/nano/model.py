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

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sparkmoe.errors import ModelError

FP32_NAMES = ("gate.expert_bias", "A_log", "dt_bias")  # stored in FP32 in every form of the checkpoint


@dataclass(frozen=True)
class LingConfig:
    """The keys of config.json that change what is computed; the defaults are those of SGLang's config class."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    layer_group_size: int | list[int] = 1
    short_conv_kernel_size: int = 4
    no_kda_lora: bool = False
    kda_safe_gate: bool = False
    kda_lower_bound: float | None = None
    gated_attention_proj_granularity_type: str | None = None
    rope_theta: float = 6e5
    rope_interleave: bool = True
    use_mla_nope: bool = False
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    num_nextn_predict_layers: int = 0
    expert_swiglu_limit_list: list[float] | None = None
    share_expert_swiglu_limit_list: list[float] | None = None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LingConfig:
        """Reads a config.json; refuses what this reference would compute differently from SGLang."""
        only = {
            "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "tie_word_embeddings": False,
            "rope_scaling": None, "use_bias": False, "use_qkv_bias": False,
        }  # fmt: skip
        for key, want in only.items():
            if raw.get(key, want) != want:
                raise ModelError(f"config.json has {key} = {raw[key]!r}; the reference covers {want!r} only.")
        if raw["v_head_dim"] != raw["head_dim"]:
            raise ModelError(
                f"v_head_dim {raw['v_head_dim']} differs from head_dim {raw['head_dim']}: KDA needs them equal."
            )
        return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})

    @classmethod
    def from_json(cls, path: str | Path) -> LingConfig:
        return cls.from_dict(json.loads(Path(path).read_text()))

    def is_mla(self, layer: int) -> bool:
        if layer >= self.num_hidden_layers:  # the MTP layer
            return True
        if isinstance(self.layer_group_size, list):
            return self.layer_group_size[layer] != 1
        return (layer + 1) % self.layer_group_size == 0

    def swiglu_limit(self, layer: int, shared: bool) -> float | None:
        """None where there is none: a missing entry or 0. SGLang builds the MTP layer with layer id 0, so it reads
        entry 0.
        """
        limits = self.share_expert_swiglu_limit_list if shared else self.expert_swiglu_limit_list
        layer = 0 if layer >= self.num_hidden_layers else layer
        return (limits[layer] or None) if limits and layer < len(limits) else None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up; with a limit L, min(silu(gate), L) * clip(up, -L, L): the clamp comes after SiLU."""
    if limit is None:
        return F.silu(gate) * up
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


# ---------------------------------------------------------------------------------------------------- KDA
def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The definition, token by token. q, k, g: [B, H, T, K]; v: [B, H, T, V]; beta: [B, H, T]; g is the log of the
    decay.

    With the state S [K, V], from zero:  S <- diag(exp g_t) S;  u = beta_t (v_t - S^T k_t);  S <- S + k_t u^T;  o_t =
    S^T q_t.
    """
    S = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[2]):
        S = S * g[:, :, t, :, None].exp()
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, :, t]))
        S = S + k[:, :, t, :, None] * u[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, :, t]))
    return torch.stack(out, 2)


def invert_unit_lower(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower a [..., C, C], C a power of two.

    Block inversion from the bottom: with X the inverse of the diagonal blocks of size b, X - X M X inverts those of
    size 2b, where M holds a's entries below them. Only products, as stable as substitution, and fast on a GPU.
    """
    size = a.shape[-1]
    x = torch.eye(size, dtype=a.dtype, device=a.device).expand_as(a)
    row = torch.arange(size, device=a.device)
    b = 1
    while b < size:
        same = row[:, None] // (2 * b) == row // (2 * b)
        below = same & (row[:, None] // b > row // b)
        x = x - x @ (a * below) @ x
        b *= 2
    return x


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 32) -> Tensor:
    """The same function as `kda_recurrent`; only the state walks, chunk by chunk. Needs g >= -5 (the safe gate) in
    FP32.

    With G = cumsum(g) inside a chunk and the state S before it, the u of the chunk solve a triangular system:
      u_t + beta_t sum_{s<t} <k_t e^(G_t - G_s), k_s> u_s = beta_t (v_t - S^T (e^(G_t) k_t)).
    e^(G_t - G_s) is split into two factors around the chunk's middle: |exponent| <= 5 * 32 / 2 = 80 < 88, FP32's limit.
    Products at s > t may overflow; tril drops them before anything is multiplied with them.
    """
    B, H, T, K = q.shape
    pad = -T % chunk
    if pad:
        q, k, v, g = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, pad))
    q, k, v, g = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, g))  # [B, H, n, C, *]
    beta = beta.unflatten(2, (-1, chunk)).unsqueeze(-1)
    G = g.cumsum(3)
    mid, last = G[..., chunk // 2 - 1 : chunk // 2, :], G[..., -1:, :]
    fwd, k_bwd = (G - mid).exp(), (k * (mid - G).exp()).transpose(-1, -2)
    inverse = invert_unit_lower(beta * torch.tril((k * fwd) @ k_bwd, -1))
    attn = torch.tril((q * fwd) @ k_bwd)
    decay = G.exp()
    uv, w = (inverse @ torch.cat([beta * v, beta * k * decay], -1)).split([v.shape[-1], K], -1)
    q_in, k_end = q * decay, (k * (last - G).exp()).transpose(-1, -2)
    keep = last.exp().transpose(-1, -2)
    S, out = q.new_zeros(B, H, K, v.shape[-1]), []
    for n in range(q.shape[2]):
        u = uv[:, :, n] - w[:, :, n] @ S
        out.append(q_in[:, :, n] @ S + attn[:, :, n] @ u)
        S = keep[:, :, n] * S + k_end[:, :, n] @ u
    return torch.cat(out, 2)[:, :, :T]


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution, then SiLU, in FP32. x: [B, T, C]; weight: [C, 1, width] -> [B, T, C]."""
    width, T = weight.shape[-1], x.shape[1]
    x, w = F.pad(x.float(), (0, 0, width - 1, 0)), weight.float()
    acc = x[:, :T] * w[:, 0, 0]
    for j in range(1, width):
        acc = acc + x[:, j : j + T] * w[:, 0, j]
    return F.silu(acc)


def kda_mix(qkv: tuple[Tensor, ...], conv: tuple[Tensor, ...], f: Tensor, beta: Tensor, gate: Tensor,
            A_log: Tensor, dt_bias: Tensor, norm: Tensor, bound: float | None) -> Tensor:  # fmt: skip
    """What KDA does between its projections: convolution, norm, decay, delta rule, gated norm. All in FP32.

    qkv, f, gate: [B, T, P] with P = H * K; conv: three [P, 1, width]; beta: [B, T, H]; A_log: [H]; dt_bias: [P];
    norm: [K], whose eps SGLang fixes at 1e-6. -> [B, T, P]
    """
    H = beta.shape[-1]
    q, k, v = (short_conv(x, w).unflatten(-1, (H, -1)).transpose(1, 2) for x, w in zip(qkv, conv, strict=True))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    raw = (f.float() + dt_bias).unflatten(-1, (H, -1)).transpose(1, 2)
    rate, b = A_log.float().exp()[:, None, None], beta.float().sigmoid().transpose(1, 2)
    if bound is None:
        o = kda_recurrent(q, k, v, -rate * F.softplus(raw), b)
    else:
        o = kda_chunked(q, k, v, bound * torch.sigmoid(rate * raw), b)
    return rms_norm(o, norm, 1e-6).transpose(1, 2).flatten(2) * gate.float().sigmoid()


class ShortConv(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class KDA(nn.Module):
    """No positions: order comes from the convolution and the recurrence."""

    def __init__(self, c: LingConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.bound = (
            c.num_attention_heads,
            c.head_dim,
            c.kda_lower_bound if c.kda_safe_gate else None,
        )
        P = self.heads * self.dim
        self.q_proj, self.k_proj, self.v_proj = (linear(c.hidden_size, P) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(P, c.short_conv_kernel_size) for _ in "qkv")
        self.lora = not c.no_kda_lora
        if self.lora:
            self.f_a_proj, self.f_b_proj = linear(c.hidden_size, self.dim), linear(self.dim, P)
            self.g_a_proj, self.g_b_proj = linear(c.hidden_size, self.dim), linear(self.dim, P)
        else:
            self.f_proj, self.g_proj = linear(c.hidden_size, P), linear(c.hidden_size, P)
        self.b_proj = linear(c.hidden_size, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(P))
        self.o_norm = RMSNorm(self.dim, 1e-6)
        self.dense = linear(P, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        qkv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        conv = self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight
        f = self.f_b_proj(self.f_a_proj(x)) if self.lora else self.f_proj(x)
        gate = self.g_b_proj(self.g_a_proj(x)) if self.lora else self.g_proj(x)
        beta = self.b_proj(x)
        with torch.autocast(x.device.type, enabled=False):
            o = kda_mix(qkv, conv, f, beta, gate, self.A_log, self.dt_bias, self.o_norm.weight, self.bound)
        return self.dense(o.to(x.dtype))


# ---------------------------------------------------------------------------------------------------- MLA
def rope(x: Tensor, theta: float, interleave: bool, start: int = 0) -> Tensor:
    """Rotates pairs of the last axis: (x0, x1), (x2, x3)… if interleaved, else (x0, x_R/2)…  x: [B, h, T, R]."""
    T, R = x.shape[-2:]
    freq = theta ** (-torch.arange(0, R, 2, device=x.device, dtype=torch.float32) / R)
    angle = torch.arange(start, start + T, device=x.device, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1) if interleave else x.float().chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    return (torch.stack(pair, -1).flatten(-2) if interleave else torch.cat(pair, -1)).to(x.dtype)


class MLA(nn.Module):
    def __init__(self, c: LingConfig) -> None:
        super().__init__()
        self.c, H, D = c, c.num_attention_heads, c.hidden_size
        q_out = H * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank:
            self.q_a_proj, self.q_b_proj = linear(D, c.q_lora_rank), linear(c.q_lora_rank, q_out)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        else:
            self.q_proj = linear(D, q_out)
        self.kv_a_proj_with_mqa = linear(D, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)  # of the latent, not of the rope part
        self.kv_b_proj = linear(c.kv_lora_rank, H * (c.qk_nope_head_dim + c.v_head_dim))
        gates = {None: 0, "head_wise": H, "element_wise": H * c.v_head_dim}[c.gated_attention_proj_granularity_type]
        self.g_proj = linear(D, gates) if gates else None
        self.dense = linear(H * c.v_head_dim, D)

    def forward(self, x: Tensor, chain: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; one rope key per token, shared by all heads.

        `chain` is for drafting: it collects keys and values of the draft steps taken from every position. At step s >
        0 the element p stands for position p + s and sees, as in a server, the step-0 keys up to p and the later
        steps' keys of p.
        """
        c, T, step = self.c, x.shape[1], len(chain or ())
        rotate = not c.use_mla_nope and c.qk_rope_head_dim > 0
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if c.q_lora_rank else self.q_proj(x)
        q = q.unflatten(-1, (c.num_attention_heads, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.num_attention_heads, -1)).transpose(1, 2)
        k, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k_rope = k_rope.unsqueeze(1)
        if rotate:
            q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
            q = torch.cat([q_nope, rope(q_rope, c.rope_theta, c.rope_interleave, step)], -1)
            k_rope = rope(k_rope, c.rope_theta, c.rope_interleave, step)
        k = torch.cat([k, k_rope.expand(*k.shape[:3], -1)], -1)
        keys, values = k, v
        see = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if chain is not None:
            chain.append((k, v))
            keys, values = (torch.cat(part, 2) for part in zip(*chain, strict=True))
            see = torch.cat([see] + [torch.eye(T, dtype=torch.bool, device=x.device)] * step, 1)
        score = (q @ keys.transpose(-1, -2)).float() * (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5
        o = score.masked_fill(~see, -math.inf).softmax(-1).to(values.dtype) @ values
        if self.g_proj is not None:  # one gate a head, or one an element
            gate = self.g_proj(x).float().sigmoid().to(o.dtype)
            o = o * gate.unflatten(-1, (c.num_attention_heads, -1)).transpose(1, 2)
        return self.dense(o.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------------------------------------------- feed-forward
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


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float | None) -> Tensor:
    """gate, up: [N, E * inter]; weights: [N, E], one for each expert's `inter` columns -> [N, E * inter]."""
    act = swiglu(gate, up, limit).unflatten(-1, (weights.shape[1], -1))
    return (act * weights.to(gate.dtype).unsqueeze(-1)).flatten(1)


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
        act = weighted_swiglu(gate, up, weights, self.limit)
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
