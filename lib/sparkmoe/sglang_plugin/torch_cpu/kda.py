"""Kimi Delta Attention on the CPU: one token, a few tokens to verify, a whole prompt.

Per head there is a state S [V, K]. A token with key k, value v, query q, log decay g [K] and write strength beta does

    S ← S · diag(e^g);   u = beta · (v − S k);   S ← S + u kᵀ;   o = S q

Decode does just that. A prompt would need thousands of such steps, so it is cut into chunks: inside a chunk the u
solve a small triangular system, and only the state walks from chunk to chunk (`chunked`). Verification of drafted
tokens is one short chunk whose state is not written back, because nobody knows yet how many tokens will be accepted;
it keeps what each token would have added, and `replay` adds the accepted ones. That is far less traffic than storing
a state per drafted token.

Shapes: G sequences times heads in one axis (every head of every sequence is a problem of its own), T tokens. Queries
arrive scaled, queries and keys normalized, all in FP32.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkmoe.sglang_plugin.torch_cpu.ops import constant

CHUNK = 32
_MIN_LOG_DECAY = -40.0  # e^-40 of anything is nothing in FP32; keeps a chunk's exponents inside FP64


def log_decay(raw: Tensor, a: Tensor, a_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Forget gate → log decay per channel (≤ 0), FP32.

    raw: [..., H·K], the gate's projection; a = exp(A_log) repeated over K, a_bias = a · dt_bias: [H·K]. With a lower
    bound (the "safe gate") lower_bound · sigmoid(a (raw + dt_bias)), else −a · softplus(raw + dt_bias).
    """
    if lower_bound is not None:
        return torch.addcmul(a_bias, raw, a).sigmoid_().mul_(constant(lower_bound))
    return F.softplus(raw + a_bias / a).mul_(a).neg_()


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token. q, k, g: [G, K]; v: [G, V]; beta: [G]; `state` [G, V, K] is updated in place. Returns [G, V]."""
    state.mul_(g.exp().unsqueeze(1))
    seen = torch.bmm(state, k.unsqueeze(2))
    u = torch.sub(v.unsqueeze(2), seen).mul_(beta.view(-1, 1, 1))
    state.baddbmm_(u, k.unsqueeze(1))
    return torch.bmm(state, q.unsqueeze(2)).squeeze(2)


def verify(qk: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A few drafted tokens; `state` [G, V, K] stays as it is. qk: [G, 2, T, K]; g: [G, T, K]; v: [G, T, V]; beta:
    [G, T, 1].

    Returns the outputs [G, T, V], the writes u [G, T, V] and the cumulative log decay [G, T, K], which `replay`
    takes. The decay between two tokens is computed pair by pair, so any gate is exact here.
    """
    groups, _, n, size = qk.shape
    total = g.cumsum(1)
    reads = (qk * total.exp().unsqueeze(1)).view(groups, 2 * n, size)
    seen_q, seen_k = torch.bmm(reads, state.transpose(1, 2)).view(groups, 2, n, -1).unbind(1)
    pair = (total.unsqueeze(2) - total.unsqueeze(1)).exp_().mul_(qk[:, 1].unsqueeze(1))  # [G, t, s, K]
    attention, mixing = (qk.unsqueeze(3) * pair.unsqueeze(1)).sum(-1).unbind(1)  # [G, t, s], dropped where s > t
    u = torch.sub(v, seen_k).mul_(beta)
    if n > 1:  # reads only what lies below the diagonal
        u = torch.linalg.solve_triangular(mixing * beta, u, upper=False, unitriangular=True)
    return torch.baddbmm(seen_q, attention.tril(), u), u, total


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
    """A whole sequence, time first. q, k, g: [T, G, K]; v: [T, G, V]; beta: [T, G]; state: [G, V, K].

    Returns the outputs [T, G, V] and the new state. With L the cumulative log decay inside a chunk, e^(L_t − L_s) is
    split into two factors around the chunk's middle. Where the gate is bounded (g ≥ −5) a chunk of 32 stays inside
    FP32; otherwise the exponents go to FP64, with g cut at −40.
    """
    length, size = q.shape[0], q.shape[2]
    if not bounded:
        q, k, v, beta, state = (x.double() for x in (q, k, v, beta, state))
        g = g.clamp(min=_MIN_LOG_DECAY).double()
    chunk = min(CHUNK if bounded else CHUNK // 2, length)
    if pad := -length % chunk:
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, 0, 0, pad))
    n, groups = q.shape[0] // chunk, q.shape[1]
    q, k, v, g = (
        x.view(n, chunk, groups, -1).transpose(1, 2).reshape(n * groups, chunk, -1) for x in (q, k, v, g)
    )  # [n·G, C, *]
    beta = beta.reshape(n, chunk, groups).transpose(1, 2).reshape(n * groups, chunk, 1)
    total = torch.matmul(_ones_below(chunk, g.dtype), g)  # cumsum over the chunk
    centred = total - total[:, chunk // 2 : chunk // 2 + 1]
    forward = centred.exp()
    backward = centred.neg_().exp_().mul_(k).transpose(1, 2)  # may overflow where s > t; tril drops those
    mixing = torch.bmm(k * forward, backward).mul_(beta).tril_(-1)
    attention = torch.bmm(forward.mul_(q), backward).tril_()
    decay = total.exp()
    # (I + mixing)⁻¹ · diag(beta), C columns: solving for the K + V columns of what follows takes longer
    unit = torch.eye(chunk, dtype=mixing.dtype).expand_as(mixing)
    inverse = torch.linalg.solve_triangular(mixing, unit, upper=False, unitriangular=True).mul_(beta.transpose(1, 2))
    writes, reads = torch.bmm(inverse, v), torch.bmm(inverse, k * decay)
    last = total[:, -1:]
    at_end = (last - total).exp_().mul_(k).transpose(1, 2)
    # A chunk takes the state S [K, V] to  S · e^L + at_end (writes − reads S)  =  step S + gain.
    step = torch.bmm(at_end, reads).neg_()
    step.diagonal(dim1=1, dim2=2).add_(last.exp().squeeze(1))
    states = writes.new_empty(n + 1, groups, size, v.shape[2])
    states[0] = state.transpose(1, 2)
    torch.bmm(at_end, writes, out=states[1:].flatten(0, 1))
    walk = states.unbind(0)
    for before, after, a in zip(walk[:-1], walk[1:], step.split(groups), strict=True):
        after.baddbmm_(a, before)
    before = states[:n].flatten(0, 1)
    writes.baddbmm_(reads, before, alpha=-1.0)
    out = torch.bmm(decay.mul_(q), before).baddbmm_(attention, writes)
    out = out.view(n, groups, chunk, -1).transpose(1, 2).flatten(0, 1)
    return out[:length].float(), states[n].transpose(1, 2).float()


@cache
def _ones_below(size: int, kind: torch.dtype) -> Tensor:
    return torch.ones(size, size, dtype=kind).tril_()
