"""The layers of Ling-3.0 as straight functions over prepared weights.

SGLang's own modules reach the same results through layer boundaries, dispatchers and kernel wrappers that pay off on
a GPU, where Python runs ahead of the device. On the CPU that machinery was nine tenths of a decode step. Each class
here is built once from a loaded SGLang module, whose tensors it shares wherever it can; what is folded at load
(queries into the latent space, the softmax scale, KDA's low-rank pairs) is folded in FP32. `Pass` holds what all
layers of one forward pass need.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparkmoe.sglang_plugin.torch_cpu import kda
from sparkmoe.sglang_plugin.torch_cpu.attention import Rows, latent_attention
from sparkmoe.sglang_plugin.torch_cpu.moe import Mlp, SparseMlp
from sparkmoe.sglang_plugin.torch_cpu.ops import (
    l2_normalize,
    rms_norm,
    rms_norm_gated,
    rotary_table,
    rotate,
    short_conv,
    short_conv_prompt,
)


@dataclass
class Pass:
    """One forward pass: which rows belong to which request and where their state lives.

    `verify` is the number of drafted tokens per request, or 0; `decode` says that every request has one token. `ends`
    are the rows of the requests' last tokens where nothing else of the result will be read: a prompt's next token.
    `state_slots` are the rows of the recurrent-state pool, one per request; `drafted` collects what `replay` needs,
    one entry per KDA layer.
    """

    rows: list[Rows]
    positions: Tensor
    out_slots: Tensor
    kv_pool: Any
    state_pool: Any = None
    state_slots: list[int] = field(default_factory=list)
    decode: bool = False
    verify: int = 0
    drafted: list[Drafted] = field(default_factory=list)
    angles: Tensor | None = None
    ends: Tensor | None = None

    def of_ends(self) -> Pass:
        """The pass of the last tokens alone, once all others' keys are in the cache."""
        rows = [Rows(i, i + 1, row.slots, row.run) for i, row in enumerate(self.rows)]
        angles = None if self.angles is None else self.angles[self.ends]
        return Pass(rows, self.positions[self.ends], self.out_slots[self.ends], self.kv_pool, angles=angles)


@dataclass(frozen=True)
class Drafted:
    """What one KDA layer remembers of a verified batch: keys, writes and cumulative log decay, each [B, H, T, *], and
    the
    convolution's inputs [B, width − 1 + T, C]."""

    k: Tensor
    u: Tensor
    total: Tensor
    window: Tensor


class KdaLayer:
    """Kimi Delta Attention. [N, D] normed → [N, D]."""

    def __init__(self, module: Any) -> None:
        self.layer_id: int = module.layer_idx
        self.heads, self.size = module.local_num_heads, module.head_dim
        width = self.heads * self.size
        if module.no_kda_lora:
            self.weight = module.fused_qkvbfg_proj.weight.data
            self.order = [3 * width, self.heads, width, width]  # qkv, beta, forget, output gate
            if not module.fuse_no_lora_beta:
                raise NotImplementedError("torch_cpu: quantized KDA projections")
        else:
            qkvb, low = module.fused_qkvbfg_a_proj.weight.data.split([3 * width + self.heads, 2 * self.size])
            forget, gate = torch.bmm(module.fused_fg_b_proj.weight.data.float(), low.float().view(2, self.size, -1)).to(
                qkvb.dtype
            )
            self.weight = torch.cat([qkvb, forget, gate])
            self.order = [3 * width, self.heads, width, width]
        self.conv_weight = module.qkv_conv1d.weight.data.squeeze(1).float().t().contiguous()  # [taps, 3 H K]
        self.lower_bound: float | None = module.lower_bound
        self.a = module.A_log.data.float().exp().flatten().repeat_interleave(self.size)
        self.a_bias = self.a * module.dt_bias.data.float()
        self.norm_weight, self.norm_eps = module.o_norm.weight.data.float(), module.o_norm.eps
        self.out_weight = module.o_proj.weight.data
        self.qk_scale = torch.tensor([self.size**-0.5, 1.0]).view(2, 1, 1)
        self._pool: Any = None

    def states(self, pool: Any) -> tuple[Tensor, Tensor]:
        """This layer's part of the pool: convolution inputs [slots, taps − 1, 3 H K] and S [slots, H, V, K]."""
        if self._pool is not pool:
            cache = pool.mamba2_layer_cache(self.layer_id)
            self._pool, self._conv, self._state = pool, cache.conv[0], cache.temporal
        return self._conv, self._state

    def __call__(self, x: Tensor, p: Pass) -> Tensor:
        qkv, beta, forget, gate = F.linear(x, self.weight).float().split_with_sizes(self.order, -1)
        g = kda.log_decay(forget, self.a, self.a_bias, self.lower_bound)
        mix = self._short if p.decode or p.verify else self._prompts
        out = mix(qkv, g, beta.sigmoid(), p)
        out = rms_norm_gated(out, gate.unflatten(-1, (self.heads, self.size)), self.norm_weight, self.norm_eps)
        return F.linear(out.flatten(1).to(x.dtype), self.out_weight)

    def _short(self, qkv: Tensor, g: Tensor, beta: Tensor, p: Pass) -> Tensor:
        """Every request has the same few tokens. qkv: [B·T, 3 H K] → [B·T, H, V]."""
        conv_pool, state_pool = self.states(p.state_pool)
        batch, length = len(p.state_slots), p.verify or 1
        at = slice(p.state_slots[0], p.state_slots[0] + 1) if batch == 1 else p.state_slots
        window = torch.cat([conv_pool[at], qkv.view(batch, length, -1)], 1)
        mixed = short_conv(window, self.conv_weight, length).view(batch, length, 3, self.heads, self.size)
        state = state_pool[at].flatten(0, 1)
        if not p.verify:
            q, k = l2_normalize(mixed[:, 0, :2], self.qk_scale).transpose(0, 1).reshape(2, -1, self.size).unbind(0)
            out = kda.step(q, k, mixed[:, 0, 2].reshape(-1, self.size), g.view(-1, self.size), beta, state)
            conv_pool[at] = window[:, 1:]
            if batch > 1:
                state_pool[at] = state.view(batch, self.heads, self.size, self.size)
            return out.view(batch, self.heads, self.size)
        mixed = mixed.permute(0, 3, 2, 1, 4).contiguous().view(-1, 3, length, self.size)
        qk = l2_normalize(mixed[:, :2], self.qk_scale)
        g = g.view(batch, length, self.heads, self.size).transpose(1, 2).reshape(-1, length, self.size)
        beta = beta.view(batch, length, self.heads).transpose(1, 2).reshape(-1, length, 1)
        out, u, total = kda.verify(qk, mixed[:, 2], g, beta, state)
        p.drafted.append(Drafted(qk[:, 1], u, total, window))
        return out.view(batch, self.heads, length, self.size).transpose(1, 2).flatten(0, 1)

    def _prompts(self, qkv: Tensor, g: Tensor, beta: Tensor, p: Pass) -> Tensor:
        """Whole prompts or parts of them, one request after the other."""
        conv_pool, state_pool = self.states(p.state_pool)
        taps = self.conv_weight.shape[0]
        out = qkv.new_empty(qkv.shape[0], self.heads, self.size)
        for row, slot in zip(p.rows, p.state_slots, strict=True):
            span, length = slice(row.start, row.stop), row.stop - row.start
            if row.prefix:
                before, state = conv_pool[slot].float(), state_pool[slot].float()
            else:
                before = qkv.new_zeros(taps - 1, qkv.shape[1])
                state = qkv.new_zeros(self.heads, self.size, self.size)
            mixed = short_conv_prompt(before, qkv[span], self.conv_weight).view(length, 3, self.heads, self.size)
            q, k = l2_normalize(mixed[:, :2], self.qk_scale).unbind(1)
            decay = g[span].view(length, self.heads, self.size)
            out[span], state = kda.chunked(q, k, mixed[:, 2], decay, beta[span], state, self.lower_bound is not None)
            conv_pool[slot] = torch.cat([before, qkv[span][1 - taps :]])[1 - taps :]
            state_pool[slot] = state
        return out


class MlaLayer:
    """Multi-head latent attention with the queries absorbed into the latent space at load. [N, D] normed → [N, D]."""

    def __init__(self, module: Any) -> None:
        self.layer_id: int = module.layer_id
        self.heads, self.latent, self.rope = module.num_local_heads, module.kv_lora_rank, module.qk_rope_head_dim
        self.kind: str | None = module.gated_attention_proj_granularity_type
        self.lora = module.q_lora_rank
        if self.lora is not None:
            down, latent = module.fused_qkv_a_proj_with_mqa.weight.data.split([self.lora, self.latent + self.rope])
            self.query_norm = module.q_a_layernorm
            query = module.q_b_proj.weight.data
        else:
            down, latent = None, module.kv_a_proj_with_mqa.weight.data
            query = module.q_proj.weight.data
        absorbed = self._absorbed(query, module).to(query.dtype)
        if module.rotary_emb is not None and module.rotary_emb.is_neox_style:
            raise NotImplementedError("torch_cpu: rotary halves instead of interleaved pairs")
        self.up_weight = absorbed if self.lora is not None else None
        gate = [module.g_proj.weight.data] if module.g_proj is not None else []
        first = absorbed if down is None else down
        self.weight = torch.cat([first, latent, *gate])
        self.order = [first.shape[0], self.latent, self.rope, *(w.shape[0] for w in gate)]
        self.norm_weight, self.norm_eps = _norm(module.kv_a_layernorm)
        self.value_weight = module.w_vc.data  # [H, C, v]
        self.out_weight = module.o_proj.weight.data
        self.rotary = None if module.rotary_emb is None else module.rotary_emb.cos_sin_cache
        self._pool: Any = None

    def _absorbed(self, query: Tensor, module: Any) -> Tensor:
        """Rows of the query projection, times the softmax scale: [H·(C + R), in]; scores are then plain products."""
        per_head = query.float().view(self.heads, -1, query.shape[1])
        nope, rope = per_head.split([module.qk_nope_head_dim, self.rope], 1)
        latent = torch.bmm(module.w_kc.data.float().transpose(1, 2), nope)
        return torch.cat([latent, rope], 1).flatten(0, 1).mul_(module.scaling)

    def cache(self, pool: Any) -> Tensor:
        """This layer's latent cache, [slots, C + R]."""
        if self._pool is not pool:
            self._pool, self._cache = pool, pool.get_key_buffer(self.layer_id).squeeze(1)
        return self._cache

    def _store(self, latent: Tensor, key_rope: Tensor, p: Pass) -> Tensor:
        """Latents [N, C], normed, and rotated keys [N, R] into the cache, which is returned."""
        cache = self.cache(p.kv_pool)
        return cache.index_copy_(0, p.out_slots, torch.cat([latent, key_rope], -1).to(cache.dtype))

    def remember(self, x: Tensor, p: Pass) -> None:
        """The part of `__call__` that later tokens need: what the cache holds of each token."""
        weight = self.weight.narrow(0, self.order[0], self.latent + self.rope)
        latent, key_rope = F.linear(x, weight).split_with_sizes([self.latent, self.rope], -1)
        if p.angles is not None:
            key_rope = rotate(key_rope.unsqueeze(1), p.angles).squeeze(1)
        self._store(rms_norm(latent, self.norm_weight, self.norm_eps), key_rope, p)

    def __call__(self, x: Tensor, p: Pass) -> Tensor:
        query, latent, key_rope, *gate = F.linear(x, self.weight).split_with_sizes(self.order, -1)
        if self.up_weight is not None:
            query = F.linear(rms_norm(query, *_norm(self.query_norm)), self.up_weight)
        query = query.view(-1, self.heads, self.latent + self.rope)
        latent = rms_norm(latent, self.norm_weight, self.norm_eps)
        if p.angles is not None:
            both = torch.cat([query[:, :, self.latent :], key_rope.unsqueeze(1)], 1)
            both = rotate(both, p.angles)
            query = torch.cat([query[:, :, : self.latent], both[:, :-1]], -1)
            key_rope = both[:, -1]
        cache = self._store(latent, key_rope, p)
        seen = latent_attention(query, cache, p.rows, self.latent)
        out = torch.bmm(seen.transpose(0, 1), self.value_weight).transpose(0, 1)  # [N, H, v]
        if gate:
            weight = gate[0].float().sigmoid_().to(x.dtype)
            out = out * (weight.unsqueeze(-1) if self.kind == "head_wise" else weight.view(out.shape))
        return F.linear(out.reshape(x.shape[0], -1), self.out_weight)


class Block:
    """One decoder layer on the residual stream. [N, D] → [N, D]; the input may be overwritten."""

    def __init__(self, layer: Any) -> None:
        self.mixer = KdaLayer(layer.attention) if layer.attention_type == 0 else MlaLayer(layer.attention)
        self.mlp = SparseMlp(layer.mlp) if layer.is_layer_sparse else Mlp(layer.mlp)
        self.norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)

    def __call__(self, x: Tensor, p: Pass) -> Tensor:
        x = x.add_(self.mixer(rms_norm(x, *self.norms[0]), p))
        return x.add_(self.mlp(rms_norm(x, *self.norms[1])))

    def last(self, x: Tensor, p: Pass) -> Tensor:
        """A model's last layer where only `p.ends` will be read: no query and no expert for the other tokens.

        Their rows of the result are NaN, so that a reader whom nobody thought of is found out. Only MLA is cut short:
        Ling-3.0 closes every group of layers with it.
        """
        if not isinstance(self.mixer, MlaLayer):
            return self(x, p)
        normed = rms_norm(x, *self.norms[0])
        self.mixer.remember(normed, p)
        ends = self.mixer(normed[p.ends], p.of_ends()).add_(x[p.ends])
        ends.add_(self.mlp(rms_norm(ends, *self.norms[1])))
        return torch.full_like(x, float("nan")).index_copy_(0, p.ends, ends)


def rotary_of(blocks: list[Block]) -> Tensor | None:
    """The rotary table that all MLA layers of a model share, complex [positions, R / 2]; None without rotation."""
    for block in blocks:
        if isinstance(block.mixer, MlaLayer):
            return None if block.mixer.rotary is None else rotary_table(block.mixer.rotary)
    return None


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight.data, module.variance_epsilon
