"""The layers of Ling-3.0: norms, SwiGLU with its limit, KDA and MLA.

KDA is a gated delta rule: a matrix of fixed size stands for the whole context, decays channel by channel, and is
corrected towards each new value. `kda_recurrent` is that definition; `kda_chunked` computes the same with matrix
products, which is how one trains. MLA is softmax attention over a low-rank latent, with a rotated part that all heads
share.

What lies between two matrix products is in functions without a module (`rms_norm`, `kda_mix`, `weighted_swiglu`): they
are most of a training step's time, and `trainer` replaces them by compiled ones.

Shapes: B batch, T tokens, D hidden, H heads, K key size of KDA, V value size, N = B * T.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparkmoe.nano.config import LingConfig


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


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor, limit: float | None) -> Tensor:
    """gate, up: [N, E * inter]; weights: [N, E], one for each expert's `inter` columns -> [N, E * inter]."""
    act = swiglu(gate, up, limit).unflatten(-1, (weights.shape[1], -1))
    return (act * weights.to(gate.dtype).unsqueeze(-1)).flatten(1)


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
