"""Which part of the model does a kernel work for? By its name, and for what bears no name by its place.

A kernel's name says enough where it was written for one part; a GEMM is a GEMM. But a CUDA graph replays the layers in
order, and the residual norms cut that sequence into blocks: whatever stands in a block with a KDA kernel is KDA, in a
block with an MoE kernel the GEMM before the routing is the router's and one after it the shared expert's, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparkmoe.trace import Ints

UNKNOWN = "unknown"
# A kernel's name → a part, or a class in capitals that only its place can resolve. The first match wins.
RULES: tuple[tuple[str, str], ...] = (
    (r"nccl|all_?reduce|cross_device", "communication"),
    (r"memcpy|memset", "copies"),
    (r"kda|gdn|delta_rule|fused_recurrent|conv1d|conv_window|l2norm|mamba|ssm_|norm_gated?_", "kda"),
    (r"router|(?<!MoE)routing|topk_?gating|moe_fused_gate|(gate|grouped|biased|sigmoid|deepseek\w*)_?topk", "ROUTING"),
    (
        r"humming|moe|expert|group(ed|ProblemShape)?_?(gemm|<)|(pre|post)_reorder|src2dst|align_single_token|topk_sum",
        "experts",
    ),
    (r"tree|accept|bonus|draft_|verify_commit", "verification"),
    (
        r"sampl|argmax|multinomial|renorm|top_?k_?top_?p|topp|top_?k_kernel|softmax_(finalize|partials|write)",
        "sampling",
    ),
    (r"add_?(rms|layer)?_?norm|norm_?residual|residual_?(rms)?_?norm", "RESIDUAL NORM"),
    (r"(rms|layer)_?norm", "NORM"),
    (r"mla|flash_?(attn|fwd|decode)|fmha|attention|batch_?(decode|prefill)|_fwd_(grouped_)?kernel|rotary|rope", "mla"),
    (r"kv_buffer|kv_cache|kv_indices|kv_splits|cast_(q|mha)", "mla"),
    (
        r"gemm|gemv|gemvx|matvec|matmul|scaled_mm|cutlass|cublas|xmma|nvjet|split_?k|linear|dot_kernel|aten::\w*mm",
        "GEMM",
    ),
    (r"quant|cast|convert|fp8", "SMALL"),
    (
        r"element_?wise|vectorized|reduce|index|gather|scatter|copy|fill|silu|act_and_mul|sigmoid|mul|cat|softmax",
        "SMALL",
    ),
    (r"embedding", "embedding"),
)


def classify(name: str, rules: Sequence[tuple[str, str]] = RULES) -> str:
    """The part of a kernel by its name, a class in capitals, or `unknown`."""
    return next((label for pattern, label in rules if re.search(pattern, name, re.IGNORECASE)), UNKNOWN)


def by_place(labels: Sequence[str]) -> list[str]:
    """Resolve the classes in capitals among `labels`, one step's kernels in order of execution, from their neighbours.

    Blocks lie between residual norms. The norms themselves are `norms`; a block without any named kernel is the
    `dense` FFN if it lies between two residual norms, the `head` at the end of the step, and `embedding` at its
    beginning. Where one pass follows another, the choice of a token divides the block between them into the first one's
    `head` and the next one's attention.
    """
    parts = list(labels)
    norms = [i for i, label in enumerate(labels) if label == "RESIDUAL NORM"]
    for begin, end in zip([-1, *norms], [*norms, len(labels)], strict=True):
        block = range(begin + 1, end)
        named = [labels[i] for i in block]
        routing = next((i for i in block if labels[i] in ("ROUTING", "experts")), None)
        if begin >= 0:
            parts[begin] = "norms"
        if routing is not None and not {"kda", "mla"} & set(named):
            for i in block:
                if labels[i] == "ROUTING" or (labels[i].isupper() and i < routing):
                    parts[i] = "router"
                elif labels[i] == "GEMM":
                    parts[i] = "shared"
                elif labels[i].isupper():
                    parts[i] = "experts"
            continue
        last = "head" if end == len(labels) else "embedding" if begin < 0 else "dense"
        home = next((part for part in ("kda", "mla") if part in named), last)
        attends = next((i for i in block if labels[i] in ("kda", "mla")), end)
        chosen = [i for i in block if labels[i] in ("sampling", "verification") and i < attends < end]
        for i in block:
            if labels[i].isupper():
                parts[i] = "head" if begin >= 0 and chosen and i < chosen[-1] else home
    return parts


def place_step(labels: list[str], cause: Ints, in_graph: NDArray[np.bool_]) -> list[str]:
    """One step's kernels to parts. Of several graphs the largest is the target's pass, the others are the drafts'; a
    pass outside of them, which no graph was captured for, is a draft's too."""
    if not in_graph.any():
        return by_place(labels)
    parts = ["between graphs" if label.isupper() else label for label in labels]
    graphs, sizes = np.unique(cause[in_graph], return_counts=True)
    passes = [("" if graph == graphs[sizes.argmax()] else "draft ", np.flatnonzero(cause == graph)) for graph in graphs]
    loose = [i for i in np.flatnonzero(~in_graph) if labels[i] in ("GEMM", "NORM", "RESIDUAL NORM", "experts")]
    if any(labels[i] == "experts" for i in loose):
        outside = np.flatnonzero(~in_graph)
        passes.append(("draft ", outside[(outside >= loose[0]) & (outside <= loose[-1])]))
    for prefix, mine in passes:
        for i, part in zip(mine, by_place([labels[i] for i in mine]), strict=True):
            parts[i] = part if part == UNKNOWN else prefix + part
    return parts
