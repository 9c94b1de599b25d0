"""What the CPU platform replaces in SGLang, and why; `sparkmoe doctor --sglang` lists it.

Five groups: the bodies of the two models and the commit of their recurrent state (`model`), the Triton kernels of
NEXTN's bookkeeping (`speculative`), the sampling functions that SGLang leaves empty (`sampling`), how the server's
processes are started (`forking`), and scopes for the profiler (`scopes`).
"""

from __future__ import annotations

from typing import Any

from sparkmoe.sglang_plugin import hooks
from sparkmoe.sglang_plugin.hooks import Hook, Kind
from sparkmoe.sglang_plugin.torch_cpu import forking, model, sampling, scopes, speculative

_OPS = "sglang.kernels.ops."
_SRT = "sglang.srt."
_TRITON = "a Triton kernel, which needs a GPU"
_BODY = "the layers reach Triton kernels; the CPU path drops routed_scaling_factor and expert_swiglu_limit_list"
_NONE = "without a kernel library the name is None, and sampled verification calls it"
_FACTORY = "speculative.draft_utils.DraftBackendFactory."
_VERIFY = ((_SRT + "speculative.eagle_utils.eagle_sample", "tree_speculative_sampling_target_only"),)
_RENORM = (
    (_SRT + "speculative.eagle_utils.eagle_sample", "top_k_renorm_prob"),
    (_SRT + "speculative.eagle_utils.eagle_sample", "top_p_renorm_prob"),
)


def _replace(target: str, replacement: Any, reason: str) -> Hook:
    return Hook(target, replacement, Kind.REPLACE, reason)


HOOKS: tuple[Hook, ...] = (
    _replace(_SRT + "models.bailing_moe_v3.BailingMoELinearModel.forward", model.forward_target, _BODY),
    _replace(_SRT + "models.bailing_moe_nextn.BailingMoEModelNextN.forward", model.forward_draft, _BODY),
    _replace(
        _SRT
        + "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        model.commit,
        _TRITON,
    ),
    _replace(
        _OPS + "speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
        speculative.assign_draft_cache_locs_contiguous_func,
        _TRITON,
    ),
    _replace(
        _OPS + "speculative.spec_tree.build_tree_kernel_efficient_func",
        speculative.build_tree_kernel_efficient_func,
        _TRITON,
    ),
    _replace(_OPS + "speculative.spec_tree.verify_tree_greedy_func", speculative.verify_tree_greedy_func, _TRITON),
    _replace(_OPS + "speculative.eagle.fill_bonus_tokens_func", speculative.fill_bonus_tokens_func, _TRITON),
    _replace(
        _SRT + "mem_cache.allocation.assign_req_to_token_pool_func", speculative.assign_req_to_token_pool_func, _TRITON
    ),
    _replace(
        _SRT + _FACTORY + "create_decode_backend",
        speculative.create_decode_backend,
        "torch_native is not offered to drafts",
    ),
    _replace(
        _SRT + _FACTORY + "create_draft_extend_backend",
        speculative.create_draft_extend_backend,
        "torch_native is not offered to drafts",
    ),
    _replace(
        _SRT + "models.bailing_moe_nextn.BailingMoeForCausalLMNextN.set_embed_and_head",
        speculative.set_embed_and_head,
        "it calls torch.cuda.synchronize()",
    ),
    Hook(
        _SRT + "entrypoints.engine._set_envs_and_config",
        forking.prefer_fork,
        Kind.AFTER,
        "every server process would import everything again",
        ((_SRT + "entrypoints.engine._set_envs_and_config", "set_start_method"),),
    ),
    *(
        Hook(f"{module}.{name}", getattr(sampling, name), Kind.FILL, _NONE, relies)
        for module, name, relies in (
            (_OPS + "speculative.verify_sampling", "tree_speculative_sampling_target_only", ()),
            (_OPS + "sampling.renorm", "top_k_renorm_prob", ()),
            (_OPS + "sampling.renorm", "top_p_renorm_prob", ()),
            (_SRT + "speculative.eagle_utils", "tree_speculative_sampling_target_only", _VERIFY),
            (_SRT + "speculative.eagle_utils", "top_k_renorm_prob", _RENORM[:1]),
            (_SRT + "speculative.eagle_utils", "top_p_renorm_prob", _RENORM[1:]),
        )
    ),
    *scopes.HOOKS,
)


def _torch_native(runner: Any) -> Any:
    from sparkmoe.sglang_plugin.torch_cpu.attention import TorchCpuAttnBackend

    return TorchCpuAttnBackend(runner)


def register() -> None:
    """Called when this platform is the active one."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    hooks.register(HOOKS)
    register_attention_backend("torch_native")(_torch_native)
