"""Which head the NEXTN draft scores its proposals with, and how it goes wrong.

A NEXTN layer brings no head of its own: it borrows the target's. SGLang lends it the weight tensor. That is enough for
a BF16 head, and a trap for an FP8 one, whose weight means nothing without its scales. Lending the module instead lends
everything that belongs to it, and draft and target then cannot disagree about the format.

The draft reads its head once per drafted token, so K drafts cost K more readings of the largest matrix there is. Two
ways to make these cheaper leave the target's own logits, and so the output distribution, as they are: an FP8 copy for
the draft alone (half the bytes, 402 MB more memory for Ling-3.0-flash), and a copy of only those rows that stand for
frequent tokens (`--speculative-token-map`). A rare token then can never be drafted; the target still emits it, one
rejected draft later. SGLang's own slicing of the map cuts an FP8 weight along the wrong axis and leaves its scales.

`SPARKMOE_DRAFT_HEAD` chooses: `shared` (default), `fp8`, and two for teaching that show the failures. `weight_only` is
what SGLang does by itself: with an FP8 target head the first request ends the server, because the weight is stored
[K, N]. `unscaled` turns the weight back to [N, K] and drops the scales: it serves, and the accept length collapses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from sparkmoe.sglang_plugin import hooks
from sparkmoe.sglang_plugin.fp8_lm_head import E4M3, Fp8HeadMethod, Refused, decode, granularity, quantize_weight

logger = logging.getLogger(__name__)

Mode = Literal["shared", "fp8", "weight_only", "unscaled"]
MODE_ENV = "SPARKMOE_DRAFT_HEAD"
COUNT_MULTIPLE = 16
"""Rows of a head that CUTLASS can multiply come in multiples of this; any other count falls to a slower kernel."""


class DraftHead(torch.nn.Module):
    """A head of the draft's own: BF16 `weight` [N, K], or e4m3 seen as [K, N] with `weight_scale`, `quant_method`."""

    quant_method: Fp8HeadMethod | None = None

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)


def mode() -> Mode:
    """The draft head that the environment asks for. Raises Refused for an unknown one."""
    wanted = os.environ.get(MODE_ENV, "shared")
    if wanted not in get_args(Mode):
        raise Refused(f"{MODE_ENV}={wanted!r} is none of {', '.join(get_args(Mode))}")
    return wanted  # type: ignore[return-value]


def padded_ids(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Hot token ids, filled up to a multiple of `COUNT_MULTIPLE` by repeating the first one.

    A repeated row scores the same logit for the same token, so it can win a draft without changing it. Raises Refused
    for an empty map, ids outside the vocabulary, and repeated ids.
    """
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(ids.unique()) != len(ids):
        raise Refused(
            f"the token map does not fit: {ids.numel()} ids, {len(ids.unique())} different, "
            f"expected 1 to {vocabulary} different ids below {vocabulary}; make it anew with `sparkmoe hot-vocab`"
        )
    return torch.cat([ids, ids[:1].expand(-len(ids) % COUNT_MULTIPLE)])


def build(target_head: torch.nn.Module, wanted: Mode, ids: torch.Tensor | None) -> torch.nn.Module:
    """The module that the draft shall use: the target's own, or a copy of some of its rows, in FP8 where asked for.

    `ids` are the rows to keep (None: all). Copies of an FP8 head keep its numbers: weight and scales are cut together.
    """
    weight = target_head.weight
    is_fp8 = weight.dtype == E4M3
    if wanted == "unscaled":
        if not is_fp8 or ids is not None:
            raise Refused(
                f"{MODE_ENV}=unscaled shows what a lost scale does: it needs an FP8 target head and no token map"
            )
        return DraftHead(decode(weight.t().contiguous()).to(torch.bfloat16))
    if is_fp8:
        if ids is None:
            return target_head
        scales = target_head.weight_scale.data
        rows = weight.data.t().view(torch.uint8)[ids].view(E4M3)
        return _fp8(rows, scales[:, ids] if scales.numel() > 1 else scales, target_head.quant_method.granularity)
    if wanted == "fp8":
        rows = weight.data if ids is None else weight.data[ids]
        return _fp8(*quantize_weight(rows, granularity()), granularity())
    return target_head if ids is None else DraftHead(weight.data[ids])


def _fp8(quantized: torch.Tensor, scales: torch.Tensor, scale: Any) -> DraftHead:
    head = DraftHead(quantized)
    Fp8HeadMethod(scale).store(head, quantized, scales.contiguous())
    return head


def _around_init_lm_head(original: Callable[[Any], None], self: Any) -> None:
    """`EagleDraftWorker.init_lm_head`, which runs after KV sizing and before graph capture."""
    wanted, draft = mode(), self.draft_runner.model
    handled_upstream = wanted == "shared" and self.hot_token_id is None and hasattr(draft, "set_lm_head_from_target")
    if self.speculative_algorithm.is_eagle3() or wanted == "weight_only" or handled_upstream:
        original(self)
        return
    from sglang.srt.runtime_context import get_parallel

    target_model = self.target_worker.model_runner.model
    ids = None
    if self.hot_token_id is not None:
        shards = get_parallel().tp_size
        if shards > 1:
            raise Refused(f"--speculative-token-map holds ids of the whole vocabulary, a head here is one of {shards} "
                          "shards; drop the map or the tensor parallelism")  # fmt: skip
        ids = padded_ids(self.hot_token_id, target_model.config.vocab_size).to(target_model.lm_head.weight.device)
        self.hot_token_id = ids
    embedding, head_weight = self._resolve_shared_embed_and_head()
    draft.set_embed_and_head(embedding, head_weight)  # frees the draft's own tables
    draft.lm_head = build(target_model.lm_head, wanted, ids)
    how = "the target's module" if draft.lm_head is target_model.lm_head else "a head of its own"
    logger.info("NEXTN draft head (%s): %s, weight %s", wanted, how, tuple(draft.lm_head.weight.shape))


HOOKS = (
    hooks.Hook(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
        _around_init_lm_head,
        hooks.Kind.AROUND,
        "without it the draft gets the head's weight without its scales, and a token map cuts an FP8 weight wrongly",
        relies_on=(
            ("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head", "set_embed_and_head"),
            ("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head", "_resolve_shared_embed_and_head"),
            ("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward", "hot_token_id"),
        ),
    ),
)


def register() -> None:
    """Register always: whether there is a draft is known only when the arguments are parsed."""
    mode()
    hooks.register(HOOKS)
