"""The bookkeeping of NEXTN on the CPU: cache slots, the (chain) draft tree, greedy verification.

On a GPU these are Triton kernels over a handful of integers. Here the integers are read as Python numbers, which
costs less than the tensor operators would. Only chains are served (`--speculative-eagle-topk 1`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Any = None,
) -> None:
    """Slots of the next `num_cols` tokens of every request, in place; positions become the requests' lengths."""
    if topk != 1 or mrope is not None:
        raise NotImplementedError("torch_cpu: only --speculative-eagle-topk 1, no multimodal positions")
    columns = seq_lens.long().unsqueeze(1) + torch.arange(num_cols)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long().unsqueeze(1), columns].flatten())
    if positions is not None:
        positions.copy_(seq_lens)


def extend_cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """Slots [start, end) of every request, one after the other, int64: the platform's own cache-locs function."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[request, start:end] for request, start, end in spans]).long()


def assign_req_to_token_pool_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write newly allocated slots into the requests' rows [start, end), in place."""
    position = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in spans:
        req_to_token[request, start:end] = out_cache_loc[position : position + end - start].to(req_to_token.dtype)
        position += end - start


def build_tree_kernel_efficient_func(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    """The "tree" of a chain: token i is followed by token i + 1 and has no sibling. The attention mask stays
    unwritten, because
    attention here is causal by itself."""
    if topk != 1:
        raise NotImplementedError("torch_cpu: only --speculative-eagle-topk 1")
    batch, n = seq_lens.shape[0], num_verify_tokens
    column = torch.arange(n)
    torch.add(seq_lens.unsqueeze(1), column, out=positions.view(batch, n))
    retrieve_index.copy_(torch.arange(batch * n).view(batch, n))
    column += 1
    column[-1] = -1
    retrieve_next_token.copy_(column.expand(batch, n))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts while they equal the target's choice; then take the target's choice. All in place.

    candidates, target_predict: [B, T]; `predicts` [B·T] gets the target's tokens, `accept_index` [B, ≤ T] their
    places.
    """
    width = accept_index.shape[1]
    accepted = []
    for b, (drafted, wanted) in enumerate(zip(candidates.tolist(), target_predict.tolist(), strict=True)):
        count = 0
        while count + 1 < width and drafted[count + 1] == wanted[count]:
            count += 1
        accepted.append(count)
        accept_index[b, : count + 1] = retrieve_index[b, : count + 1]
    predicts[retrieve_index.flatten().long()] = target_predict.flatten().to(predicts.dtype)
    accept_token_num.copy_(torch.tensor(accepted))
    return predicts, accept_index, accept_token_num


def fill_bonus_tokens_func(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """The last accepted token of every request. accept_tokens: [B·stride]; accept_lens, bonus_tokens: [B]."""
    rows = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(rows.gather(1, (accept_lens.long() - 1).unsqueeze(1)).squeeze(1))


def create_decode_backend(self: Any) -> Any:
    """In place of `DraftBackendFactory.create_decode_backend`."""
    from sparkmoe.sglang_plugin.torch_cpu.attention import TorchCpuDraftBackend

    if self.topk != 1:
        raise SystemExit("sparkmoe: the torch_cpu platform drafts chains; use --speculative-eagle-topk 1.")
    if self.speculative_num_steps <= 1:
        return None
    return TorchCpuDraftBackend(create_draft_extend_backend(self), self.speculative_num_steps - 1)


def create_draft_extend_backend(self: Any) -> Any:
    """In place of `DraftBackendFactory.create_draft_extend_backend`."""
    from sparkmoe.sglang_plugin.torch_cpu.attention import TorchCpuAttnBackend

    backend = TorchCpuAttnBackend(self.draft_model_runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend


def set_embed_and_head(self: Any, embed: Tensor, head: Tensor) -> None:
    """In place of `BailingMoeForCausalLMNextN.set_embed_and_head`, which calls torch.cuda.synchronize()."""
    del self.model.word_embeddings.weight
    del self.lm_head.weight
    self.model.word_embeddings.weight = embed
    self.lm_head.weight = head
