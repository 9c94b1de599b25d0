"""The feed-forward half of a layer on the CPU: router, experts, dense and shared parts.

SGLang's own CPU path forgets two things that Ling-3.0 needs: the factor on the routed experts' sum (2.5) and the
limit inside their SwiGLU. Both are applied here. How the experts are computed depends on how many tokens there are:

- a token or a few: matrix-vector products, one per chosen expert; nothing is gathered or copied;
- a few tokens that want most experts anyway (verification on two cores, small batches): all experts as one batched
product, which reads each weight once and is the only form that threads share well;
- many tokens: sorted by expert, one matrix product per expert.

At these sizes the time is that of reading weights, as it is on the big machine: four drafted tokens that go to eleven
of sixteen experts cost more than one token that goes to four.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkmoe.sglang_plugin.torch_cpu.ops import constant, swiglu

_PAIRS = 20  # up to this many token-expert pairs, vectors are fastest on one thread
_DENSE_TOKENS = 32  # above this, work that no token asked for costs more than sorting


class Router:
    """Which experts a token goes to, and with what weight.

    bias: [E] or None, added for the choice only; groups: (all, kept); `scale` multiplies the weights.
    """

    def __init__(self, bias: Tensor | None, top_k: int, groups: tuple[int, int], normalize: bool, scale: float) -> None:
        self.bias, self.top_k, self.groups = bias, top_k, groups
        self.normalize, self.scale = normalize, constant(scale)
        self._tiny = constant(1e-20 / scale)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, E], FP32 → expert ids and weights, [N, k]. Scores are sigmoids with a bias, else a softmax."""
        if self.bias is None:
            scores = choice = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            choice = scores + self.bias
        ids = self._kept(choice).topk(self.top_k, -1, sorted=False)[1]
        weights = scores.gather(1, ids)
        if self.normalize:
            return ids, weights.div_(torch.addcdiv(self._tiny, weights.sum(-1, keepdim=True), self.scale))
        return ids, weights.mul_(self.scale)

    def _kept(self, choice: Tensor) -> Tensor:
        """Only the groups with the largest sum of their two best scores stay in the race."""
        count, kept = self.groups
        if kept >= count:
            return choice
        grouped = choice.unflatten(-1, (count, -1))
        best = grouped.topk(2, -1)[0].sum(-1).topk(kept, -1, sorted=False)[1]
        lost = torch.ones(grouped.shape[:-1], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(lost.unsqueeze(-1), float("-inf")).flatten(1)


class Experts:
    """Routed experts with stacked weights: w13 [E, 2 I, D] (gate, then up), w2 [E, D, I]; `limit` as in `swiglu`.

    `transposed` says how the weights should lie in memory; another layout works too, more slowly.
    """

    def __init__(self, w13: Tensor, w2: Tensor, limit: float | None) -> None:
        self.limit = limit
        self.w13, self.w2 = w13.transpose(1, 2), w2.transpose(1, 2)  # [E, D, 2 I], [E, I, D]
        self.each = list(zip(w13.unbind(0), w2.unbind(0), strict=True))  # indexing a tensor costs as much as a product
        self.width = w13.shape[1]

    @staticmethod
    def transposed(weight: Tensor) -> Tensor:
        """The same [E, out, in] values with the outputs side by side in memory, as the products read them fastest."""
        return weight.transpose(1, 2).contiguous().transpose(1, 2)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x: [N, D]; ids, weights: [N, k] → Σ over a token's experts of weight · expert(x), [N, D]."""
        count, k = ids.shape
        most = 4 * count * k >= 3 * len(self.each)
        if count == 1 or (count * k <= _PAIRS and not (most and torch.get_num_threads() > 1)):
            return self._pairs(x, ids, weights)
        if most and count <= _DENSE_TOKENS:
            return self._all(x, ids, weights)
        return self._sorted(x, ids, weights)

    def _pairs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Pairs in the order of their experts: an expert's weights are still in the cache for its second token."""
        k, chosen = ids.shape[1], ids.flatten().tolist()
        order = sorted(range(len(chosen)), key=chosen.__getitem__)
        rows = x.unbind(0)
        hidden = torch.stack([torch.mv(self.each[chosen[pair]][0], rows[pair // k]) for pair in order])
        shares = torch.tensor([[float(w)] for w in map(weights.flatten().tolist().__getitem__, order)])
        hidden = swiglu(hidden, self.limit).mul_(shares).to(x.dtype)
        out = torch.zeros_like(x)
        sums = out.unbind(0)
        for pair, row in zip(order, hidden.unbind(0), strict=True):
            sums[pair // k].addmv_(self.each[chosen[pair]][1], row)
        return out

    def _all(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        share = torch.zeros(x.shape[0], len(self.each)).scatter_(1, ids, weights)
        hidden = torch.bmm(x.expand(len(self.each), *x.shape), self.w13)
        hidden = swiglu(hidden, self.limit).mul_(share.t().unsqueeze(-1)).to(x.dtype)
        return torch.bmm(hidden, self.w2).sum(0)

    def _sorted(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        token = order.div(ids.shape[1], rounding_mode="floor")
        counts = torch.bincount(ids.flatten(), minlength=len(self.each)).tolist()
        rows = x.index_select(0, token)
        hidden = x.new_empty(len(order), self.width)
        spans, start = [], 0
        for expert, n in enumerate(counts):
            if n:
                spans.append((expert, slice(start, start + n)))
                start += n
        for expert, span in spans:
            torch.mm(rows[span], self.each[expert][0].t(), out=hidden[span])
        hidden = swiglu(hidden, self.limit).mul_(weights.flatten()[order].unsqueeze(-1)).to(x.dtype)
        for expert, span in spans:
            torch.mm(hidden[span], self.each[expert][1].t(), out=rows[span])
        return torch.zeros_like(x).index_add_(0, token, rows)


class Mlp:
    """Dense or shared SwiGLU feed-forward. [N, D] → [N, D]."""

    def __init__(self, module: Any) -> None:
        self.up, self.down = module.gate_up_proj.weight.data, module.down_proj.weight.data
        self.limit: float | None = module.swiglu_limit

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(F.linear(x, self.up))

    def second(self, gate_up: Tensor) -> Tensor:
        """From the first projection on: [N, 2 I] → [N, D]."""
        return F.linear(swiglu(gate_up, self.limit), self.down)


class SparseMlp:
    """Routed experts and the shared one. [N, D] → [N, D]."""

    def __init__(self, module: Any) -> None:
        if module.multi_gate or module.num_fused_shared_experts:
            raise NotImplementedError("torch_cpu: one router per modality, fused shared experts")
        self.router = Router(
            bias=None if module.gate.expert_bias is None else module.gate.expert_bias.data,
            top_k=module.top_k,
            groups=(module.num_expert_group or 1, module.topk_group or 1),
            normalize=module.norm_expert_prob,
            scale=1.0 if module.routed_scaling_factor is None else float(module.routed_scaling_factor),
        )
        for weight in (module.experts.w13_weight, module.experts.w2_weight):
            weight.data = Experts.transposed(weight.data)
        experts = module.experts
        self.experts = Experts(experts.w13_weight.data, experts.w2_weight.data, module.expert_swiglu_limit)
        self.gate = module.gate.weight.data
        self.shared = Mlp(module.shared_experts) if module.shared_experts is not None else None
        self.joined: Tensor | None = None  # router and the shared expert's first projection, which read the same input
        if self.shared is not None and self.shared.up.dtype == self.gate.dtype:
            self.joined = torch.cat([self.gate, self.shared.up])

    def __call__(self, x: Tensor) -> Tensor:
        if self.shared is not None and self.joined is not None:
            both, count = F.linear(x, self.joined), self.gate.shape[0]
            logits = both.narrow(1, 0, count).float()
            shared = self.shared.second(both.narrow(1, count, both.shape[1] - count))
            return self.experts(x, *self.router(logits)).add_(shared)
        out = self.experts(x, *self.router(F.linear(x.to(self.gate.dtype), self.gate).float()))
        return out if self.shared is None else out.add_(self.shared(x))
