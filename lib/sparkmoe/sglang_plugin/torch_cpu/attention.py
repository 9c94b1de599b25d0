"""Multi-head latent attention over SGLang's paged latent cache.

The absorbed form: queries are mapped into the latent space once, and every head reads the same latent vector per
token from the cache, as a key (latent and rotary part) and as a value (latent part). Which slots belong to which
request is read once per forward pass (`Rows`), not once per layer, and a request is a plain product, a softmax and a
product: for one query that is three small operators, where the fused attention of PyTorch costs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

_QUERY_BLOCK = 128  # bounds the score matrix of a long prompt: block · heads · length floats


class TorchCpuAttnBackend(TorchNativeAttnBackend):
    """Keeps SGLang's pools for Ling's layers, which attend by themselves; others attend as in torch_native."""


class TorchCpuDraftBackend:
    """SGLang wants an attention backend per draft step; the steps differ only in positions, so it gets the same one."""

    def __init__(self, backend: TorchCpuAttnBackend, steps: int) -> None:
        self.attn_backends = [backend] * steps

    def init_forward_metadata(self, forward_batch: object) -> None:
        """Nothing to plan ahead: `Rows` is read from the batch of each step."""


@dataclass(frozen=True)
class Rows:
    """One request's part of a batch: its tokens [start, stop) and the cache slots of its whole context.

    `run` is the slots' range where they follow one another, as they mostly do with one request at a time: the context
    is a view of the cache then, and nothing is gathered.
    """

    start: int
    stop: int
    slots: Tensor
    run: slice | None = None

    @classmethod
    def of(cls, start: int, stop: int, slots: Tensor) -> Rows:
        """slots: [context], int64 or int32."""
        first, last = int(slots[0]), int(slots[-1])
        if last - first == len(slots) - 1 and bool((slots[1:] > slots[:-1]).all()):
            return cls(start, stop, slots, slice(first, last + 1))
        return cls(start, stop, slots.long())

    @property
    def prefix(self) -> int:
        """Tokens in the cache before this batch."""
        return self.slots.shape[0] - (self.stop - self.start)


def latent_attention(query: Tensor, cache: Tensor, rows: list[Rows], latent: int) -> Tensor:
    """query: [N, H, C + R], already scaled and rotated; cache: [slots, C + R]. Returns [N, H, C], C = `latent`.

    Token i of a request sees its prefix and the request's tokens up to i.
    """
    out = query.new_empty(*query.shape[:2], latent)
    for row in rows:
        keys = (cache.index_select(0, row.slots) if row.run is None else cache[row.run]).to(query.dtype)
        for start in range(row.start, row.stop, _QUERY_BLOCK):
            stop = min(start + _QUERY_BLOCK, row.stop)
            _attend(query[start:stop], keys[: row.prefix + stop - row.start], out[start:stop])
    return out


def _attend(query: Tensor, keys: Tensor, out: Tensor) -> None:
    """The last `query.shape[0]` tokens of `keys` are the queries' own."""
    count, heads, size = query.shape
    scores = torch.mm(query.reshape(-1, size), keys.t())
    if count > 1:
        scores.view(count, heads, -1)[:, :, -count:].masked_fill_(_later(count), float("-inf"))
    torch.mm(scores.softmax(-1), keys[:, : out.shape[-1]], out=out.view(count * heads, -1))


@lru_cache(maxsize=16)
def _later(count: int) -> Tensor:
    """[count, 1, count]: True where a token would look ahead."""
    return torch.ones(count, count, dtype=torch.bool).triu_(1).unsqueeze(1)
