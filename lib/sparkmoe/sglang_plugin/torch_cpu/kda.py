"""Kimi Delta Attention on the CPU: one token, a few tokens to verify, a whole prompt.

Per head there is a state S [V, K]. A token with key k, value v, query q, log decay g [K] and write strength beta does

    S ← S · diag(e^g);   u = beta · (v − S k);   S ← S + u kᵀ;   o = S q
 Decode does just that. A prompt would need thousands of such steps, so it is cut into chunks: inside a chunk the u
solve a small triangular system, and only the state walks from chunk to chunk (`chunked`). Verification of drafted
tokens is one short chunk whose state is not written back, because nobody knows yet how many tokens will be accepted;
it keeps what each token would have added, and `replay` adds the accepted ones. That is far less traffic than storing
a state per drafted token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32
_MIN_LOG_DECAY = -40.0  # e^-40 of anything is nothing in FP32; keeps exponents of a chunk inside FP64


def log_decay(raw: Tensor, a: Tensor, a_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Forget gate → log decay per channel (≤ 0), FP32.

    raw: [..., H·K], the gate's projection; a = exp(A_log) repeated over K, a_bias = a · dt_bias: [H·K]. With a lower
    bound (the "safe gate") lower_bound · sigmoid(a (raw + dt_bias)), else −a · softplus(raw + dt_bias).
    """
    if lower_bound is not None:
        return torch.addcmul(a_bias, raw, a).sigmoid_().mul_(lower_bound)
    return F.softplus(raw + a_bias / a).mul_(a).neg_()


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token per sequence; `state` [B, H, V, K] is updated in place. q, k, g: [B, H, K]; v: [B, H, V]; beta: [B,
    H].

    q is already scaled, q and k are normalized. Returns [B, H, V].
    """
    state.mul_(g.exp().unsqueeze(-2))
    seen = torch.matmul(state, k.unsqueeze(-1)).squeeze(-1)
    u = torch.sub(v, seen).mul_(beta.unsqueeze(-1))
    state.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))
    return torch.matmul(state, q.unsqueeze(-1)).squeeze(-1)


def verify(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """T ≤ 8 drafted tokens per sequence, `state` [B, H, V, K] untouched. q, k, g: [B, H, T, K]; v: [B, H, T, V];
    beta: [B, H, T].

    Returns the outputs [B, H, T, V], the writes u [B, H, T, V], and the cumulative log decay [B, H, T, K], which
    `replay` takes. Decay between two tokens is computed pair by pair, so any gate is exact here.
    """
    total = g.cumsum(2)
    n = q.shape[2]
    pair = (total.unsqueeze(3) - total.unsqueeze(2)).clamp_(max=0.0).exp_()  # [B, H, t, s, K]; s > t is masked below
    pair.mul_(k.unsqueeze(2))
    kk = torch.matmul(pair, k.unsqueeze(-1)).squeeze(-1)  # [B, H, t, s]
    qk = torch.matmul(pair, q.unsqueeze(-1)).squeeze(-1).tril_()
    decayed = torch.cat([k, q], 2) * total.exp().repeat(1, 1, 2, 1)
    seen = torch.matmul(decayed, state.transpose(-1, -2))  # [B, H, 2 T, V]
    u = torch.sub(v, seen[:, :, :n]).mul_(beta.unsqueeze(-1))
    if n > 1:
        mixing = kk.mul_(beta.unsqueeze(-1)).tril_(-1)
        u = torch.linalg.solve_triangular(mixing, u, upper=False, unitriangular=True)
    return torch.matmul(qk, u).add_(seen[:, :, n:]), u, total


def replay(state: Tensor, k: Tensor, u: Tensor, total: Tensor, count: int) -> Tensor:
    """The state after the first `count` ≥ 1 tokens of `verify`.

    state: [..., V, K]; k, total: [..., T, K]; u: [..., T, V].
    """
    last = total[..., count - 1 : count, :]
    kept = (last - total[..., :count, :]).exp_().mul_(k[..., :count, :])
    return (state * last.exp()).add_(torch.matmul(u[..., :count, :].transpose(-1, -2), kept))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, bounded: bool
) -> tuple[Tensor, Tensor]:
    """A whole sequence. q, k, g: [H, T, K]; v: [H, T, V]; beta: [H, T]; state: [H, V, K]. Returns [H, T, V] and the
    new state.

    With G the cumulative log decay inside a chunk, e^(G_t − G_s) is split into two factors around the chunk's middle.
    Where the gate is bounded (g ≥ −5) a chunk of 32 stays inside FP32; otherwise the exponents go to FP64, with g cut
    at −40.
    """
    length, size = q.shape[1:]
    kind = q.dtype
    if not bounded:
        q, k, v, beta, state = (x.double() for x in (q, k, v, beta, state))
        g = g.clamp(min=_MIN_LOG_DECAY).double()
    chunk = CHUNK if bounded else CHUNK // 2
    if pad := -length % chunk:
        q, k, v, g = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, pad))
    q, k, v, g = (x.unflatten(1, (-1, chunk)) for x in (q, k, v, g))  # [H, n, C, *]
    beta = beta.unflatten(1, (-1, chunk)).unsqueeze(-1)
    total = g.cumsum(2)
    middle = total[:, :, chunk // 2 - 1 : chunk // 2]
    centred = total - middle
    forward = centred.exp()
    backward = centred.neg_().exp_().mul_(k).transpose(-1, -2)  # may overflow where s > t; tril drops those
    mixing = torch.matmul(k * forward, backward).mul_(beta).tril_(-1)
    attention = torch.matmul(q * forward, backward).tril_()
    decay = total.exp()
    right = torch.cat([v, k * decay], -1).mul_(beta)
    solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], size], -1)
    last = total[:, :, -1:]
    at_end = (last - total).exp_().mul_(k)
    query = q * decay
    keep = last.exp().transpose(-1, -2)  # [H, n, K, 1]
    s = state.transpose(-1, -2).contiguous()  # [H, K, V]
    out = torch.empty_like(writes)
    reading = torch.cat([reads, query], 2)  # both meet the state before the chunk
    end_t = at_end.transpose(-1, -2)
    for i in range(out.shape[1]):
        seen = torch.bmm(reading[:, i], s)
        u = writes[:, i] - seen[:, :chunk]
        torch.baddbmm(seen[:, chunk:], attention[:, i], u, out=out[:, i])
        s = torch.baddbmm(s * keep[:, i], end_t[:, i], u)
    return out.flatten(1, 2)[:, :length].to(kind), s.transpose(-1, -2).to(kind)
