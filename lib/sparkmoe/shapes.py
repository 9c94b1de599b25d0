"""What tensors does a model have, given its `config.json` alone?

The size of a decode step is decided before any weight exists: a config of two kilobytes fixes every matrix. So the
inventory of a model that is not on this machine (or not downloaded yet) can be written down from its config, tensor by
tensor, under the names a checkpoint would use. The same names then go through the same grouping as the names found in
real safetensors headers, which is how one is tested against the other.

An architecture is two functions: `Shape` (what a token touches: which layers keep a KV cache, which keep a recurrent
state, how many experts it meets) and the list of its tensors. Adding one means adding both to `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparkmoe.errors import ModelError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Tensor:
    """`count` equal tensors. `form` says how a quantized checkpoint treats it: "linear" may be quantized, "expert" are
    routed experts, "plain" keeps the model's dtype, "fp32" is FP32 always."""

    name: str
    shape: tuple[int, ...]
    form: Literal["linear", "expert", "plain", "fp32"] = "plain"
    count: int = 1


@dataclass(frozen=True)
class Shape:
    """What one token touches besides weights. `kinds` is the attention of each layer, MTP layers last: "kda" (a
    recurrent state), "mla" or "attention" (a KV cache of the whole context), "window" (one of its last tokens)."""

    architecture: str
    hidden: int
    vocab: int
    layers: int
    kinds: tuple[str, ...]
    dense_layers: int
    experts: int
    top_k: int
    mtp_layers: int
    tied: bool
    cache_values: int  # values a full-attention layer keeps per token
    window: int  # tokens a "window" layer looks back
    state_values: int  # FP32 values in the recurrent state of a KDA layer
    conv_values: int  # values (in the model's dtype) of its convolution state

    @property
    def moe_layers(self) -> int:
        """Target layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0


class _Reader:
    """Typed access to a config that names what is missing."""

    def __init__(self, config: Config, architecture: str) -> None:
        self.config, self.architecture = config, architecture

    def __call__(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key, default)
        if value is None:
            raise ModelError(f"config.json lacks {key!r}, without which the size of a {self.architecture} is unknown.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"config.json has {key} = {value!r}; a {self.architecture} needs a whole number there.")
        return value


def _swiglu(
    base: str, hidden: int, inner: int, form: Literal["linear", "expert"] = "linear", count: int = 1
) -> list[Tensor]:
    return [
        Tensor(base + "gate_proj.weight", (inner, hidden), form, count),
        Tensor(base + "up_proj.weight", (inner, hidden), form, count),
        Tensor(base + "down_proj.weight", (hidden, inner), form, count),
    ]


def _mla(base: str, c: _Reader, out: str) -> list[Tensor]:
    hidden, heads, rank = c("hidden_size"), c("num_attention_heads"), c("kv_lora_rank")
    nope, rope, v = c("qk_nope_head_dim"), c("qk_rope_head_dim"), c("v_head_dim")
    query = heads * (nope + rope)
    if lora := c("q_lora_rank", 0) if c.config.get("q_lora_rank") else 0:
        found = [
            Tensor(base + "q_a_proj.weight", (lora, hidden), "linear"),
            Tensor(base + "q_a_layernorm.weight", (lora,)),
        ]
        found.append(Tensor(base + "q_b_proj.weight", (query, lora), "linear"))
    else:
        found = [Tensor(base + "q_proj.weight", (query, hidden), "linear")]
    return [
        *found,
        Tensor(base + "kv_a_proj_with_mqa.weight", (rank + rope, hidden), "linear"),
        Tensor(base + "kv_a_layernorm.weight", (rank,)),
        Tensor(base + "kv_b_proj.weight", (heads * (nope + v), rank), "linear"),
        Tensor(base + out + ".weight", (hidden, heads * v), "linear"),
    ]


# ------------------------------------------------------------------------------------------------------------ Ling-3.0


def _ling_kinds(c: _Reader) -> tuple[str, ...]:
    layers, group = c("num_hidden_layers"), c("layer_group_size")
    mtp: tuple[str, ...] = ("mla",) * c("num_nextn_predict_layers", 0)
    return tuple("mla" if (i + 1) % group == 0 else "kda" for i in range(layers)) + mtp


def ling_shape(c: _Reader) -> Shape:
    heads, head_dim = c("num_attention_heads"), c("head_dim")
    return Shape(
        c.architecture, c("hidden_size"), c("vocab_size"), c("num_hidden_layers"), _ling_kinds(c),
        c("first_k_dense_replace"), c("num_experts"), c("num_experts_per_tok"), c("num_nextn_predict_layers", 0),
        bool(c.config.get("tie_word_embeddings")),
        cache_values=c("kv_lora_rank") + c("qk_rope_head_dim"), window=0,
        state_values=heads * head_dim * head_dim, conv_values=3 * heads * head_dim * (c("short_conv_kernel_size") - 1),
    )  # fmt: skip


def ling_tensors(c: _Reader) -> Iterator[Tensor]:
    hidden, vocab, heads, head_dim = c("hidden_size"), c("vocab_size"), c("num_attention_heads"), c("head_dim")
    width = heads * head_dim
    layers, gate = c("num_hidden_layers"), c.config.get("gated_attention_proj_granularity_type")
    yield Tensor("model.word_embeddings.weight", (vocab, hidden))
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (vocab, hidden))
    for i, kind in enumerate(_ling_kinds(c)):
        layer = f"model.layers.{i}."
        base = layer + "attention."
        yield Tensor(layer + "input_layernorm.weight", (hidden,))
        yield Tensor(layer + "post_attention_layernorm.weight", (hidden,))
        if i >= layers:
            yield Tensor(layer + "eh_proj.weight", (hidden, 2 * hidden), "linear")
            yield from (Tensor(f"{layer}{norm}.weight", (hidden,)) for norm in ("enorm", "hnorm", "final_layernorm"))
        if kind == "mla":
            yield from _mla(base, c, "dense")
            if gate:
                rows = heads if gate == "head_wise" else heads * c("v_head_dim")
                yield Tensor(base + "g_proj.weight", (rows, hidden), "linear")
        else:
            yield from (Tensor(f"{base}{n}_proj.weight", (width, hidden), "linear") for n in "qkv")
            yield from (Tensor(f"{base}{n}_conv1d.weight", (width, 1, c("short_conv_kernel_size"))) for n in "qkv")
            yield Tensor(base + "b_proj.weight", (heads, hidden), "linear")
            for n in "fg":
                if c.config.get("no_kda_lora"):
                    yield Tensor(f"{base}{n}_proj.weight", (width, hidden), "linear")
                else:
                    yield Tensor(f"{base}{n}_a_proj.weight", (head_dim, hidden), "linear")
                    yield Tensor(f"{base}{n}_b_proj.weight", (width, head_dim), "linear")
            yield Tensor(base + "A_log", (heads,), "fp32")
            yield Tensor(base + "dt_bias", (width,), "fp32")
            yield Tensor(base + "o_norm.weight", (head_dim,))
            yield Tensor(base + "dense.weight", (hidden, width), "linear")
        if i < c("first_k_dense_replace"):
            yield from _swiglu(layer + "mlp.", hidden, c("intermediate_size"))
            continue
        experts, inner = c("num_experts"), c("moe_intermediate_size")
        yield Tensor(
            layer + "mlp.gate.weight", (experts, hidden), "fp32" if c.config.get("router_dtype") == "fp32" else "plain"
        )
        if c.config.get("moe_router_enable_expert_bias"):
            yield Tensor(layer + "mlp.gate.expert_bias", (experts,), "fp32")
        yield from _swiglu(layer + "mlp.experts.*.", hidden, inner, "expert", experts)
        if shared := c("num_shared_experts", 0):
            each = c("moe_shared_expert_intermediate_size", inner)
            yield from _swiglu(layer + "mlp.shared_experts.", hidden, shared * each)


# ------------------------------------------------------------------------------------------------------- DeepSeek-V3/R1


def deepseek_shape(c: _Reader) -> Shape:
    layers, mtp = c("num_hidden_layers"), c("num_nextn_predict_layers", 0)
    return Shape(
        c.architecture, c("hidden_size"), c("vocab_size"), layers, ("mla",) * (layers + mtp),
        c("first_k_dense_replace"), c("n_routed_experts"), c("num_experts_per_tok"), mtp,
        bool(c.config.get("tie_word_embeddings")),
        cache_values=c("kv_lora_rank") + c("qk_rope_head_dim"), window=0, state_values=0, conv_values=0,
    )  # fmt: skip


def deepseek_tensors(c: _Reader) -> Iterator[Tensor]:
    hidden, vocab, layers = c("hidden_size"), c("vocab_size"), c("num_hidden_layers")
    yield Tensor("model.embed_tokens.weight", (vocab, hidden))
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (vocab, hidden))
    for i in range(layers + c("num_nextn_predict_layers", 0)):
        layer = f"model.layers.{i}."
        yield Tensor(layer + "input_layernorm.weight", (hidden,))
        yield Tensor(layer + "post_attention_layernorm.weight", (hidden,))
        yield from _mla(layer + "self_attn.", c, "o_proj")
        if i >= layers:  # embedding and head of this module are copies of the target's and are not counted again
            yield Tensor(layer + "eh_proj.weight", (hidden, 2 * hidden))
            yield from (Tensor(f"{layer}{norm}.weight", (hidden,)) for norm in ("enorm", "hnorm", "shared_head.norm"))
        if i < c("first_k_dense_replace"):
            yield from _swiglu(layer + "mlp.", hidden, c("intermediate_size"))
            continue
        experts, inner = c("n_routed_experts"), c("moe_intermediate_size")
        yield Tensor(layer + "mlp.gate.weight", (experts, hidden))
        yield Tensor(layer + "mlp.gate.e_score_correction_bias", (experts,), "fp32")
        yield from _swiglu(layer + "mlp.experts.*.", hidden, inner, "expert", experts)
        yield from _swiglu(layer + "mlp.shared_experts.", hidden, c("n_shared_experts") * inner)


# --------------------------------------------------------------------------------------------------- Qwen3-MoE, gpt-oss


def qwen_shape(c: _Reader) -> Shape:
    layers = c("num_hidden_layers")
    return Shape(
        c.architecture, c("hidden_size"), c("vocab_size"), layers, ("attention",) * layers, 0,
        c("num_experts"), c("num_experts_per_tok"), 0, bool(c.config.get("tie_word_embeddings")),
        cache_values=2 * c("num_key_value_heads") * c("head_dim"), window=0, state_values=0, conv_values=0,
    )  # fmt: skip


def _gqa(base: str, c: _Reader, bias: bool) -> Iterator[Tensor]:
    hidden, head_dim = c("hidden_size"), c("head_dim")
    query, key = c("num_attention_heads") * head_dim, c("num_key_value_heads") * head_dim
    for name, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
        yield Tensor(f"{base}{name}_proj.weight", (rows, columns), "linear")
        if bias:
            yield Tensor(f"{base}{name}_proj.bias", (rows,))


def qwen_tensors(c: _Reader) -> Iterator[Tensor]:
    hidden, vocab = c("hidden_size"), c("vocab_size")
    yield Tensor("model.embed_tokens.weight", (vocab, hidden))
    yield Tensor("model.norm.weight", (hidden,))
    if not c.config.get("tie_word_embeddings"):
        yield Tensor("lm_head.weight", (vocab, hidden))
    for i in range(c("num_hidden_layers")):
        layer = f"model.layers.{i}."
        yield Tensor(layer + "input_layernorm.weight", (hidden,))
        yield Tensor(layer + "post_attention_layernorm.weight", (hidden,))
        yield from _gqa(layer + "self_attn.", c, bool(c.config.get("attention_bias")))
        yield from (Tensor(f"{layer}self_attn.{n}_norm.weight", (c("head_dim"),)) for n in "qk")
        yield Tensor(layer + "mlp.gate.weight", (c("num_experts"), hidden))
        yield from _swiglu(layer + "mlp.experts.*.", hidden, c("moe_intermediate_size"), "expert", c("num_experts"))


def gpt_oss_shape(c: _Reader) -> Shape:
    layers, types = c("num_hidden_layers"), c.config.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"config.json needs layer_types, one per layer ({layers}), to tell sliding windows from full.")
    kinds: tuple[str, ...] = tuple("window" if t == "sliding_attention" else "attention" for t in types)
    return Shape(
        c.architecture, c("hidden_size"), c("vocab_size"), layers, kinds, 0, c("num_local_experts"),
        c("num_experts_per_tok"), 0, bool(c.config.get("tie_word_embeddings")),
        cache_values=2 * c("num_key_value_heads") * c("head_dim"), window=c("sliding_window"),
        state_values=0, conv_values=0,
    )  # fmt: skip


def gpt_oss_tensors(c: _Reader) -> Iterator[Tensor]:
    hidden, vocab, experts, inner = c("hidden_size"), c("vocab_size"), c("num_local_experts"), c("intermediate_size")
    yield Tensor("model.embed_tokens.weight", (vocab, hidden))
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (vocab, hidden))
    for i in range(c("num_hidden_layers")):
        layer = f"model.layers.{i}."
        yield Tensor(layer + "input_layernorm.weight", (hidden,))
        yield Tensor(layer + "post_attention_layernorm.weight", (hidden,))
        yield from _gqa(layer + "self_attn.", c, True)
        yield Tensor(layer + "self_attn.sinks", (c("num_attention_heads"),))
        yield Tensor(layer + "mlp.router.weight", (experts, hidden))
        yield Tensor(layer + "mlp.router.bias", (experts,))
        yield Tensor(layer + "mlp.experts.gate_up_proj", (2 * inner, hidden), "expert", experts)
        yield Tensor(layer + "mlp.experts.gate_up_proj_bias", (2 * inner,), count=experts)
        yield Tensor(layer + "mlp.experts.down_proj", (hidden, inner), "expert", experts)
        yield Tensor(layer + "mlp.experts.down_proj_bias", (hidden,), count=experts)


ARCHITECTURES: dict[str, tuple[Callable[[_Reader], Shape], Callable[[_Reader], Iterator[Tensor]]]] = {
    "BailingMoeV3ForCausalLM": (ling_shape, ling_tensors),
    "DeepseekV3ForCausalLM": (deepseek_shape, deepseek_tensors),
    "Qwen3MoeForCausalLM": (qwen_shape, qwen_tensors),
    "GptOssForCausalLM": (gpt_oss_shape, gpt_oss_tensors),
}


def describe(config: Config) -> tuple[Shape, Callable[[], Iterator[Tensor]]]:
    """The shape of a config's model and its tensors. Raises ModelError on an unknown architecture or missing field."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if name not in ARCHITECTURES:
        found = f"architecture {name}" if name else "no architecture"
        raise ModelError(f"config.json names {found}; sizes are known for {', '.join(ARCHITECTURES)}.")
    make_shape, make_tensors = ARCHITECTURES[name]
    reader = _Reader(config, name)
    return make_shape(reader), lambda: make_tensors(reader)
