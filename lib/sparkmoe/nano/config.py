"""Which keys of a Ling-3.0 config.json change what is computed, and what the reference does not cover."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sparkmoe.errors import ModelError


@dataclass(frozen=True)
class LingConfig:
    """The keys of config.json that change what is computed; the defaults are those of SGLang's config class."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    n_group: int = 1
    topk_group: int = 1
    first_k_dense_replace: int = 1
    layer_group_size: int | list[int] = 1
    short_conv_kernel_size: int = 4
    no_kda_lora: bool = False
    kda_safe_gate: bool = False
    kda_lower_bound: float | None = None
    gated_attention_proj_granularity_type: str | None = None
    rope_theta: float = 6e5
    rope_interleave: bool = True
    use_mla_nope: bool = False
    rms_norm_eps: float = 1e-6
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    num_nextn_predict_layers: int = 0
    expert_swiglu_limit_list: list[float] | None = None
    share_expert_swiglu_limit_list: list[float] | None = None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LingConfig:
        """Reads a config.json; refuses what this reference would compute differently from SGLang."""
        only = {
            "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "tie_word_embeddings": False,
            "rope_scaling": None, "use_bias": False, "use_qkv_bias": False,
        }  # fmt: skip
        for key, want in only.items():
            if raw.get(key, want) != want:
                raise ModelError(f"config.json has {key} = {raw[key]!r}; the reference covers {want!r} only.")
        if raw["v_head_dim"] != raw["head_dim"]:
            raise ModelError(
                f"v_head_dim {raw['v_head_dim']} differs from head_dim {raw['head_dim']}: KDA needs them equal."
            )
        return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})

    @classmethod
    def from_json(cls, path: str | Path) -> LingConfig:
        return cls.from_dict(json.loads(Path(path).read_text()))

    def is_mla(self, layer: int) -> bool:
        if layer >= self.num_hidden_layers:  # the MTP layer
            return True
        if isinstance(self.layer_group_size, list):
            return self.layer_group_size[layer] != 1
        return (layer + 1) % self.layer_group_size == 0

    def swiglu_limit(self, layer: int, shared: bool) -> float | None:
        """None where there is none: a missing entry or 0. SGLang builds the MTP layer with layer id 0, so it reads
        entry 0.
        """
        limits = self.share_expert_swiglu_limit_list if shared else self.expert_swiglu_limit_list
        layer = 0 if layer >= self.num_hidden_layers else layer
        return (limits[layer] or None) if limits and layer < len(limits) else None
