"""Ling-3.0 on the CPU: what takes the place of SGLang's target and draft model bodies.

The hooks here keep SGLang's modules, loading, logits and scheduling, and replace what lies between embedding and
final norm. A `Network` is built from the loaded module when the platform hears that the weights are there, and hangs
on it; the replaced `forward` finds it, describes the batch once (`describe`), and runs the layers. After a verified
batch SGLang asks to commit the accepted tokens' recurrent state: `commit` replays them for all layers at once.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkmoe.sglang_plugin.torch_cpu import kda
from sparkmoe.sglang_plugin.torch_cpu.attention import Rows
from sparkmoe.sglang_plugin.torch_cpu.layers import Block, KdaLayer, Pass, rotary_of
from sparkmoe.sglang_plugin.torch_cpu.ops import rms_norm

ATTRIBUTE = "torch_cpu_network"
_FEW_ROWS = 64
_recently_idle: deque[int] = deque(maxlen=8)


def threads(rows: int) -> int:
    """How many threads a pass over `rows` tokens is worth now.

    One token leaves 20 µs of work to an operator, too little to share. A few drafted tokens read most experts: two
    threads read faster than one. A prompt takes what is free. But only cores that nobody else wants: threads meet at
    the end of every operator, and one that waits for its turn on a busy core makes all of them wait, thirty times as
    long as the work takes. A core counts as idle if it was so at one of the last eight passes: the server's other
    processes work for a moment between two passes, a neighbour's program does all the time.
    """
    _recently_idle.append(idle_cores())
    wanted = 1 if rows == 1 else 2 if rows <= _FEW_ROWS else 8
    return min(wanted, max(_recently_idle) + 1)


def idle_cores() -> int:
    """Cores of this process that nobody computes on at this moment, its own aside (Linux: /proc/loadavg)."""
    try:
        with open("/proc/loadavg", "rb") as file:
            running = int(file.read().split()[3].split(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, len(os.sched_getaffinity(0)) - running)


class Network:
    """The layers of one model and what the last verified batch left behind."""

    def __init__(self, layers: list[Any]) -> None:
        self.blocks = [Block(layer) for layer in layers]
        self.kda = [block.mixer for block in self.blocks if isinstance(block.mixer, KdaLayer)]
        self.table = rotary_of(self.blocks)
        self.verified: Pass | None = None

    def __call__(self, x: Tensor, p: Pass) -> Tensor:
        torch.set_num_threads(threads(len(x)))
        if self.table is not None:
            p.angles = self.table[p.positions].unsqueeze(1)
        *inner, last = self.blocks
        for block in inner:
            x = block(x, p)
        x = last(x, p) if p.ends is None else last.last(x, p)
        self.verified = p if p.verify else None
        return x


def prepare(model: Any) -> None:
    """Attach a `Network` to a loaded Ling-3.0 target or draft; other architectures stay with SGLang's own code."""
    from sglang.srt.models.bailing_moe_nextn import BailingMoeForCausalLMNextN
    from sglang.srt.models.bailing_moe_v3 import BailingMoELinearDecoderLayer, BailingMoeV3ForCausalLM
    from sglang.srt.runtime_context import get_parallel

    if isinstance(model, BailingMoeV3ForCausalLM):
        layers = list(model.model.layers)
    elif isinstance(model, BailingMoeForCausalLMNextN) and isinstance(
        model.model.decoder, BailingMoELinearDecoderLayer
    ):
        layers = [model.model.decoder]
    else:
        return
    parallel = get_parallel()
    if parallel.tp_size > 1 or parallel.pp_group.world_size > 1:
        raise SystemExit("sparkmoe: the torch_cpu platform serves a model in one process; use --tp-size 1 --pp-size 1.")
    if model.quant_config is not None:
        kind = model.quant_config.get_name()
        raise SystemExit(
            f"sparkmoe: the torch_cpu platform serves unquantized weights, this model has {kind}; dequantize it first."
        )
    torch.set_flush_denormal(True)  # long-decayed states are denormal numbers, with which products run 20 times slower
    setattr(model.model, ATTRIBUTE, Network(layers))


def describe(forward_batch: Any) -> Pass:
    """Read the batch once for all layers. Raises NotImplementedError for what the platform does not serve."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    mode = forward_batch.forward_mode
    positions, count = forward_batch.positions, forward_batch.batch_size
    verify = forward_batch.spec_info.draft_token_num if mode.is_target_verify() else 0
    decode = mode.is_decode()
    if decode:
        lengths = [1] * count
    elif verify:
        lengths = [verify] * count
    elif mode.is_extend(include_draft_extend_v2=True):
        lengths = forward_batch.extend_seq_lens.tolist()
    else:
        raise NotImplementedError(f"torch_cpu: forward mode {mode.name}")
    table = backend.req_to_token_pool.req_to_token
    rows, start = [], 0
    for request, n in zip(forward_batch.req_pool_indices.tolist(), lengths, strict=True):
        context = int(positions[start]) + n
        rows.append(Rows.of(start, start + n, table[request, :context]))
        start += n
    described = Pass(
        rows, positions, forward_batch.out_cache_loc, backend.token_to_kv_pool, decode=decode, verify=verify
    )
    if mode.is_extend() and not verify and not _reads_all(forward_batch):
        described.ends = torch.tensor([row.stop - 1 for row in rows])
    linear = getattr(backend, "linear_attn_backend", None)
    if linear is not None:
        described.state_pool = linear.req_to_token_pool
        described.state_slots = linear.forward_metadata.mamba_cache_indices.tolist()
    return described


def _reads_all(forward_batch: Any) -> bool:
    """Whether more than the last hidden state of a prompt is read: by a draft or a client (both make the capture full),
    for log-probabilities, to score it."""
    full = forward_batch.capture_hidden_mode.is_full()
    return full or forward_batch.return_logprob or forward_batch.is_prefill_only


def forward_target(
    self: Any,
    input_ids: Tensor | None,
    positions: Tensor,
    forward_batch: Any = None,
    input_embeds: Tensor | None = None,
    pp_proxy_tensors: Any = None,
) -> Tensor:
    """In place of `BailingMoELinearModel.forward`: [N] → hidden states after the final norm [N, D]."""
    if self.capture_aux_hidden_states:
        raise NotImplementedError("torch_cpu: drafts that read hidden states of inner layers")
    x = F.embedding(input_ids, self.word_embeddings.weight) if input_embeds is None else input_embeds.clone()
    x = getattr(self, ATTRIBUTE)(x, describe(forward_batch))
    return rms_norm(x, self.norm.weight, self.norm.variance_epsilon)


def forward_draft(
    self: Any, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None
) -> Tensor:
    """In place of `BailingMoEModelNextN.forward`: token p + 1 and hidden state p → hidden state that predicts p + 2."""
    x = F.embedding(input_ids, self.word_embeddings.weight) if input_embeds is None else input_embeds
    hidden = forward_batch.spec_info.hidden_states
    both = torch.cat(
        [
            rms_norm(x, self.enorm.weight, self.enorm.variance_epsilon),
            rms_norm(hidden.to(x.dtype), self.hnorm.weight, self.hnorm.variance_epsilon),
        ],
        -1,
    )
    x = getattr(self, ATTRIBUTE)(F.linear(both, self.eh_proj.weight), describe(forward_batch))
    return rms_norm(x, self.final_layernorm.weight, self.final_layernorm.variance_epsilon)


def commit(
    self: Any,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    model: Any,
    req_pool_indices: Tensor | None = None,
) -> None:
    """In place of `HybridLinearAttnBackend.update_mamba_state_after_mtp_verify`: move the recurrent state of every
    request past
    its accepted tokens. last_correct_step_indices: [B], index of the last accepted drafted token."""
    if mamba_track_indices is not None:
        raise NotImplementedError("torch_cpu: --mamba-radix-cache-strategy extra_buffer; use no_buffer")
    network: Network = getattr(model.model, ATTRIBUTE)
    done, network.verified = network.verified, None
    if done is None:
        raise RuntimeError("torch_cpu: a commit without a verified batch")
    pools = [layer.states(done.state_pool) for layer in network.kda]
    requests = len(done.state_slots)
    for index, (slot, step) in enumerate(zip(done.state_slots, last_correct_step_indices.tolist(), strict=True)):
        count = step + 1
        if count < 1:
            continue
        kept = [(d.k, d.u, d.total) for d in done.drafted]
        if requests > 1:
            kept = [tuple(t.unflatten(0, (requests, -1))[index] for t in layer) for layer in kept]
        k, u, total = map(torch.stack, zip(*kept, strict=True))
        states, convs = [state[slot] for _, state in pools], [conv[slot] for conv, _ in pools]
        torch._foreach_copy_(states, kda.replay(torch.stack(states), k, u, total, count).unbind(0))
        torch._foreach_copy_(convs, [d.window[index, count : count + len(convs[0])] for d in done.drafted])
