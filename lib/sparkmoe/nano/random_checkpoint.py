"""A random miniature of Ling-3.0: the right shapes and names, in a second, with an accept length one can choose.

Random weights answer nonsense, but a server needs no sense to be tested. What it does need is a draft that is
sometimes right: with plain random weights a draft layer never agrees with its target, and nothing of speculative
decoding is exercised. So the embedding and the head carry a bigram rule, token i is followed by perm[i], which both
the target and the MTP layer can read off the residual stream; the layers add noise of size `alpha` (target) and
`mtp_noise` (draft) to it. Small alpha: both follow the rule and drafts are accepted. Large alpha: they part.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparkmoe.errors import ModelError
from sparkmoe.nano import tokenizer
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.model import FP32_NAMES, Ling, tensors

BASE: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 6000000,
    "max_position_embeddings": 4096,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "rope_interleave": True,
    "rotary_dim": 32,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_scaling": None,
    "expert_swiglu_limit_list": [0.0] * 8 + [0.5] * 4,
    "share_expert_swiglu_limit_list": [0.0] * 8 + [0.5] * 4,
    "pad_token_id": 256,
    "eos_token_id": 257,
}
MAX_SEED = 2**31 - 1


def make(out: Path, *, seed: int = 0, alpha: float = 1.0, mtp_noise: float = 0.3, **config_overrides: Any) -> Path:
    """Writes config.json, model.safetensors (BF16) and tokenizer files into `out` and returns it.

    `alpha` ≥ 0 is the size of the layers' noise on top of the bigram rule, `mtp_noise` ≥ 0 that of the draft's input;
    `config_overrides` replace keys of `BASE`. The same arguments give the same bytes. Raises ModelError for a seed
    outside 0…2^31-1 or a config the reference does not cover.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ModelError(f"seed {seed} is out of range; a random miniature has seeds 0…{MAX_SEED}.")
    raw = BASE | config_overrides
    config = LingConfig.from_dict(raw)
    names = tokenizer.bytes_only()
    if config.vocab_size < names.get_vocab_size():
        raise ModelError(
            f"vocab_size {config.vocab_size} is below the {names.get_vocab_size()} tokens of the byte tokenizer."
        )
    gen = torch.Generator().manual_seed(seed)
    model = Ling(config)
    D = config.hidden_size
    rule = torch.randn(config.vocab_size, D, generator=gen)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(_draw(name, p, alpha, gen))
        for router in model.routers():
            router.expert_bias.normal_(0.0, 0.01, generator=gen)
        model.model.word_embeddings.weight.copy_(rule)
        model.lm_head.weight[torch.randperm(config.vocab_size, generator=gen)] = rule * 4.0 / math.sqrt(D)
        if config.num_nextn_predict_layers:
            noise = torch.randn(D, D, generator=gen) * (mtp_noise / math.sqrt(D))
            model.model.layers[-1].eh_proj.weight.copy_(torch.cat([torch.eye(D), noise], 1))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(names, out)
    (out / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    weights = {
        name: t.to(torch.float32 if name.endswith(FP32_NAMES) else torch.bfloat16).contiguous()
        for name, t in tensors(model).items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _draw(name: str, p: Tensor, alpha: float, gen: torch.Generator) -> Tensor:
    """Scales that keep activations of order one. Norms are drawn around 1, so that a swapped pair of them shows."""
    if name.endswith("A_log"):
        return torch.rand(p.shape, generator=gen)
    if name.endswith("dt_bias"):
        return torch.rand(p.shape, generator=gen) * 4.0 - 4.0
    noise = torch.randn(p.shape, generator=gen)
    if "norm" in name:
        return 1.0 + 0.1 * noise
    if "conv1d" in name:
        return 0.5 * noise
    scale = {"dense": alpha, "down_proj": 1.5 * alpha, "q_proj": 2.0}
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return noise * (scale.get(leaf, 1.0) / math.sqrt(p.shape[-1]))
