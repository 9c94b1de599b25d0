"""Sampled verification for chain drafts, and the renormalizations that go before it.

SGLang leaves three names `None` where no kernel library exists; these functions fill them. The draft is
deterministic (its argmax), so the rule for keeping the target's distribution is short: accept the drafted token with
the probability that the target gives it; otherwise draw from the target without that token. After the last accepted
draft, draw from the target.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Fill `predicts` [B·T], `accept_index` [B, ≤ T] and `accept_token_num` [B] in place.

    candidates: [B, T], the last committed token and T − 1 drafts; target_probs: [B, T, V], after temperature and
    top-k/p; uniform_samples: [B, T] and [B] in [0, 1). A draft is also accepted where its probability reaches
    `threshold_single`.
    """
    batch, length = candidates.shape
    drafts = candidates[:, 1:].long()
    chance = target_probs[:, :-1].gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    passed = (uniform_samples[:, : length - 1] * threshold_acc < chance) | (chance >= threshold_single)
    accepted = passed[:, : accept_index.shape[1] - 1].long().cumprod(1).sum(1)
    row = torch.arange(batch)
    last = target_probs[row, accepted].clone()
    rejected = (accepted < passed.shape[1]).nonzero().squeeze(1)
    last[rejected, drafts[rejected, accepted[rejected]]] = 0.0
    cdf = last.cumsum(-1)
    point = uniform_samples_for_final_sampling.unsqueeze(1).to(cdf.dtype) * cdf[:, -1:]
    token = torch.searchsorted(cdf, point, right=True).squeeze(1)
    for b, count in enumerate(accepted.tolist()):
        where = retrive_index[b, : count + 1].long()
        accept_index[b, : count + 1] = where
        predicts[where[:-1]] = drafts[b, :count].to(predicts.dtype)
        predicts[where[-1]] = _possible(token[b], last[b]).to(predicts.dtype)
    accept_token_num.copy_(accepted)


def _possible(token: Tensor, probs: Tensor) -> Tensor:
    """Rounding can push a draw past the last token that has any probability; take that one then."""
    if int(token) >= probs.shape[0] or float(probs[token]) == 0.0:
        return probs.nonzero()[-1, 0]
    return token


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keep each row's k most likely tokens (ties with the k-th stay) and renormalize. probs: [N, V]; top_ks: [N]."""
    k = top_ks.long().clamp(min=1, max=probs.shape[-1])
    pivot = probs.sort(dim=-1, descending=True).values.gather(-1, (k - 1).unsqueeze(1))
    kept = probs.masked_fill(probs < pivot, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep each row's smallest set of most likely tokens with mass ≥ p (ties with the last stay) and renormalize.

    probs: [N, V]; top_ps: [N].
    """
    ordered = probs.sort(dim=-1, descending=True).values
    surplus = ordered.cumsum(-1) - ordered >= top_ps.unsqueeze(1)
    pivot = ordered.masked_fill(surplus, torch.inf).amin(-1, keepdim=True)
    kept = probs.masked_fill(probs < pivot, 0.0)
    return kept / kept.sum(-1, keepdim=True)
