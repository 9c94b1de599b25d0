"""Whether SGLang's own attention kernel can be compiled for nano Ling's latents on the GPUs that serve it."""

from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, CompiledKernel

from sparkmoe.nano import bundle
from sparkmoe.nano.config import LingConfig

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
GB10_SHARED_BYTES = 99 * 1024  # a block's most; an H200 has 227 KiB


@pytest.fixture
def decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from sglang.kernels.ops.attention import decode_attention

    return decode_attention


def launched(decode: ModuleType, monkeypatch: pytest.MonkeyPatch, heads: int, rank: int, rope: int) -> dict[str, Any]:
    """The arguments with which SGLang launches its grouped decode kernel for one token and a latent of `rank`."""
    kernel, seen = decode._fwd_grouped_kernel_stage1, {}

    def launch(*args: Any, **kwargs: Any) -> None:
        seen.update(dict(zip(kernel.arg_names, args, strict=False)) | kwargs)

    cache, splits = torch.zeros(64, 1, rank + rope, dtype=torch.bfloat16), 16
    with monkeypatch.context() as patch:
        patch.setattr(decode, kernel.__name__, defaultdict(lambda: launch))  # kernel[grid](…)
        decode._decode_grouped_att_m_fwd(
            torch.zeros(1, heads, rank + rope, dtype=torch.bfloat16), cache, cache[..., :rank],
            torch.zeros(1, heads, splits, rank), torch.zeros(1, heads, splits), torch.zeros(2, dtype=torch.int32),
            torch.zeros(64, dtype=torch.int64), torch.ones(1, dtype=torch.int32), splits, 0.1, 0.0, has_mla=True,
            use_pdl=True,
        )  # fmt: skip
    return seen


def compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> CompiledKernel:
    """`kernel` for a GPU that need not be here, specialized as a launch with these arguments specializes it."""
    signature, constants, attributes = {}, {}, {}
    for i, p in enumerate(kernel.params):
        value = arguments[p.name]
        if isinstance(value, torch.Tensor):
            signature[p.name] = POINTERS[value.dtype]
        elif p.is_constexpr or value is None or value == 1:
            signature[p.name], constants[p.name] = "constexpr", value
        else:
            signature[p.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (signature[p.name] == "i32" and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {n: arguments[n] for n in ("num_warps", "num_stages")}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [90, 121])
def test_mla_decode_compiles_for_the_latent_that_gpus_serve(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    ling = LingConfig.from_json(bundle.BUNDLE / "config.json")
    heads, rank, rope = ling.num_attention_heads, ling.kv_lora_rank, ling.qk_rope_head_dim
    kernel, wide = decode._fwd_grouped_kernel_stage1, launched(decode, monkeypatch, heads, rank, rope)
    assert (wide["Lk"], wide["Lv"]) == (288, 256)
    assert (wide["BLOCK_DMODEL"], wide["BLOCK_DPE"]) == (rank, rope)
    assert compiled(kernel, wide, capability).metadata.shared <= GB10_SHARED_BYTES
    with pytest.raises(CompilationError, match="128 and 256"):  # else `bundle.widen` is no longer needed
        compiled(kernel, launched(decode, monkeypatch, heads, rank // 2, rope), capability)
