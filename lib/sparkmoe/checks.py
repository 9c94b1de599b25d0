"""The single claims that a recipe makes about its server, each compared with the evidence: `engagement` asks for all.

A check takes the recipe and the evidence file of the server (`sparkmoe.sglang_plugin.evidence`) and says what it
expected, what it found, and where; `CAUSES` holds what usually makes it fail.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkmoe.recipe import Recipe
    from sparkmoe.sample import Sample

Evidence = Mapping[str, Any]
MIN_ACCEPT_LENGTH = 1.2
"""Tokens per verify step below which a draft cannot be told from one that always fails (1.0)."""
# How the classes of SGLang's attention backends begin.
_ATTENTION = {"triton": "Triton", "flashinfer": "FlashInfer", "fa3": "FlashAttention"}

CAUSES = {
    "plugin": "SGLang did not load this plugin: SGLANG_PLUGINS leaves `sparkmoe` out or is misspelt, SGLANG_PLATFORM "
    "names another platform, or sparkmoe is not installed in the server's Python",
    "evidence": "the server's SGLang has other internals than the one this sparkmoe was made for",
    "served": "the server has not answered a request yet, or died in its first one; its log says why",
    "hooks": "the server was started with other variables than the recipe's, or SGLang renamed what a hook needs",
    "moe": "--moe-runner-backend was not passed, a config file overrode it, or SGLang fell back for these experts",
    "moe_activation": "SGLANG_HUMMING_INPUT_QUANT_CONFIG did not reach the server: Humming kept 16-bit activations",
    "clamp": "the plugin's clamp hooks are not on; this backend drops the experts' SwiGLU limit by itself",
    "head": "SGLANG_ENABLE_FP8_LM_HEAD did not reach the server's process, or reached one that should not have it; "
    "SGLang itself ignores that variable",
    "head_bytes": "the head was quantized to another format, or not at all",
    "draft": "the --speculative-… arguments did not reach the server, or SGLang changed them",
    "draft_moe": "--speculative-moe-runner-backend was not passed: the draft's experts took SGLang's default",
    "draft_head": "the draft holds the head's weight without its scales, which is how SGLang shares it; "
    "SPARKMOE_DRAFT_HEAD decides",
    "hot_vocabulary": "--speculative-token-map was not passed, or names another file",
    "accept_length": "the draft computes with another head or other weights than the target",
    "graphs": "CUDA graphs are switched off or their capture failed; every kernel is then launched one by one",
    "attention": "--attention-backend was overridden, or SGLang changed it for this model",
    "long_context": "Triton's verify kernel reads a request's keys without splitting them: on an H200 drafts cost more "
    "than they gave at 32,768 tokens; --attention flashinfer splits them (notebook 05)",
    "draft_graphs": "SGLang captures the draft's pass over the accepted tokens under Triton, FlashAttention and "
    "FlashMLA, not under FlashInfer's MLA: there the host launches it kernel by kernel in every step",
    "inert": "the setting does nothing without its switch",
    "tpot": "on this machine decoding may not be bound by the bytes that the lever saves",
}


@dataclass(frozen=True)
class Check:
    """One question about a running server. `required=False` marks a direction worth knowing, no proof of engagement."""

    name: str
    expected: str
    found: str
    where: str
    ok: bool
    required: bool = True

    @property
    def cause(self) -> str:
        """What usually makes this check fail."""
        return CAUSES[self.name]


def accept_length(samples: Iterable[Sample]) -> float | None:
    """Tokens per verify step over all samples together; None if none of them speculated."""
    pairs = [(s.completion_tokens, s.spec_verify_ct) for s in samples if s.spec_verify_ct]
    return sum(tokens for tokens, _ in pairs) / sum(steps for _, steps in pairs if steps) if pairs else None


def same(name: str, expected: Any, found: Any, where: str) -> Check:
    """A check that holds where both are equal."""
    return Check(name, str(expected), str(found), where, expected == found)


def hooks(recipe: Recipe, evidence: Evidence) -> Check:
    """The hooks that the recipe's levers stand on. That each really wraps its target the plugin has checked at load."""
    wanted = {"process_batch_result"}
    wanted |= {"_initialize_model"} if recipe.head == "fp8" else set()
    wanted |= {"init_lm_head"} if recipe.draft_steps else set()
    registered = {hook["target"].rpartition(".")[2] for hook in evidence["hooks"]}
    absent = sorted(wanted - registered)
    found = f"missing: {', '.join(absent)}" if absent else f"{len(evidence['hooks'])} hooks, these among them"
    return Check("hooks", ", ".join(sorted(wanted)), found, "evidence.hooks", not absent)


def _expected_backend(recipe: Recipe, evidence: Evidence) -> str | None:
    capability = evidence["device"]["capability"]
    if capability is None:
        return "native"
    if recipe.moe == "auto":
        return "flashinfer_mxfp4" if tuple(capability) == (12, 1) else None
    return "triton" if recipe.moe == "native" else recipe.moe


def moe(recipe: Recipe, evidence: Evidence) -> list[Check]:
    """The experts' runner, its activations and the limits in force, in the target and in the draft."""
    layers, where = evidence["target"]["moe"], "evidence.target.moe[].runner"
    found = sorted({str(layer["runner"]) for layer in layers})
    expected = _expected_backend(recipe, evidence)
    if expected is None:
        checks = [Check("moe", "one backend (SGLang's choice)", ", ".join(found), where, len(found) == 1)]
    else:
        checks = [Check("moe", expected, ", ".join(found), where, found == [expected])]
    if recipe.moe_activation == "fp8":
        dtypes = sorted({layer["activation_dtype"] for layer in layers})
        fine = all("float8e4m3" in dtype.replace("_", "") for dtype in dtypes)
        checks.append(
            Check("moe_activation", "float8e4m3", ", ".join(dtypes), where.replace("runner", "activation_dtype"), fine)
        )
    drafted = evidence["draft"]["moe"] if evidence["draft"] else []
    limited = [layer for layer in (*layers, *drafted) if layer["limit"] is not None]
    if limited:
        dropped = [layer["name"] for layer in limited if layer["clamp"] != layer["limit"]]
        state = f"dropped in {len(dropped)}, first {dropped[0]}" if dropped else f"in force in all {len(limited)}"
        asked = f"in force in {len(limited)} layers"
        checks.append(Check("clamp", asked, state, "evidence.target.moe[].clamp", not dropped))
    if drafted:
        own = sorted({str(layer["runner"]) for layer in drafted})
        text = ", ".join(found)
        checks.append(
            Check("draft_moe", f"{text} as in the target", ", ".join(own), "evidence.draft.moe[].runner", own == found)
        )
    return checks


def _describe(head: Mapping[str, Any]) -> str:
    precision = "fp8" if head["dtype"] == "float8_e4m3fn" else "fp32" if head["fp32_logits"] else "bf16"
    scales = f", one scale per {head['scales']}" if head["scales"] != "none" else ""
    return f"{precision} ({head['dtype']}{scales})"


def head(recipe: Recipe, evidence: Evidence) -> list[Check]:
    """The target's LM head: its format and its bytes."""
    head, where = evidence["target"]["head"], "evidence.target.head"
    found = _describe(head)
    wanted = {"fp8": "fp8", "fp32": "fp32", "bf16": "bf16"}[recipe.head]
    scaled = recipe.head != "fp8" or head["scales"] in ("channel", "tensor")
    per_value = 1 if recipe.head == "fp8" else 2
    values = head["rows"] * head["columns"]
    scales = {"channel": 4 * head["rows"], "tensor": 4}.get(head["scales"], 0)
    expected_bytes = values * per_value + scales
    return [
        Check("head", wanted, found, where, found.startswith(wanted) and scaled),
        same("head_bytes", f"{expected_bytes:,}", f"{head['bytes']:,}", where + ".bytes"),
    ]


def draft(recipe: Recipe, evidence: Evidence, samples: Sequence[Sample]) -> list[Check]:
    """How much is drafted, with which head and vocabulary, and whether any of it is accepted in `samples`."""
    speculative, draft = evidence["speculative"], evidence["draft"]
    steps = speculative["steps"] if speculative else 0
    expected = f"{recipe.draft_steps} steps, top 1" if recipe.draft_steps else "none"
    expected += ", by DSpark" if recipe.draft_model else ""
    found = f"{steps} steps, top {speculative['topk']}" if speculative else "none"
    found += ", by DSpark" if speculative and speculative.get("algorithm") == "DSPARK" else ""
    checks = [same("draft", expected, found, "evidence.speculative")]
    if not recipe.draft_steps or draft is None:
        return checks
    head, hot = draft["head"], draft["hot_vocabulary"]
    checks.append(_draft_head(recipe, evidence["target"]["head"], head))
    wanted = len(_ids(recipe.hot_vocab)) if recipe.hot_vocab else None
    checks.append(same("hot_vocabulary", wanted, hot, "evidence.draft.hot_vocabulary"))
    length = accept_length(samples)
    text = "no answers" if length is None else f"{length:.2f} in {len(samples)} answers"
    fine = length is not None and length >= MIN_ACCEPT_LENGTH
    checks.append(Check("accept_length", f"at least {MIN_ACCEPT_LENGTH}", text, "samples", fine))
    return checks


def _ids(path: str) -> Sequence[int]:
    from sparkmoe.hot_vocab import load

    return load(path)


def _draft_head(recipe: Recipe, target: Mapping[str, Any], head: Mapping[str, Any]) -> Check:
    where = "evidence.draft.head"
    found = _describe(head)
    found += ", the target's module" if head["is_target_module"] else f", its own {head['extra_bytes']:,} bytes"
    if recipe.draft_head == "fp8" or (recipe.hot_vocab and recipe.head == "fp8"):
        fine = head["dtype"] == "float8_e4m3fn" and head["scales"] in ("channel", "tensor") and bool(head["method"])
        return Check("draft_head", "fp8 with its scales, its own", found, where, fine and not head["is_target_module"])
    if recipe.hot_vocab:
        return Check("draft_head", "rows of the target's head", found, where, head["dtype"] == target["dtype"])
    return Check("draft_head", "the target's module", found, where, bool(head["is_target_module"]))


def inert(evidence: Evidence) -> list[Check]:
    """Flags on the server's own command line that do nothing by themselves."""
    argv, ring = evidence["argv"], evidence["target"]["replayssm"]
    checks = []
    if any(part.startswith("--linear-replayssm-cache-len") for part in argv):
        on = bool(ring and (ring["decode"] or ring["verify"]))
        found = "a ring is kept" if on else "no ring: --enable-linear-replayssm(-spec) is missing"
        checks.append(Check("inert", "--linear-replayssm-cache-len has effect", found, "evidence.target.replayssm", on))
    return checks


def graphs(evidence: Evidence) -> list[Check]:
    """Whether decoding replays CUDA graphs, and whether the draft's passes do."""
    captured, where = [phase for phase, sizes in evidence["graphs"].items() if sizes], "evidence.graphs"
    found = f"captured: {', '.join(captured) or 'nothing'}"
    checks = [Check("graphs", "captured: decode", found, where, "decode" in captured)]
    if evidence["draft"] is not None and evidence["speculative"].get("algorithm") != "DSPARK":
        # The pass over the accepted tokens makes the first draft; only further ones have a graph of their own.
        wanted = ["draft_extend", *(["draft_decode"] if evidence["speculative"]["steps"] > 1 else [])]
        fine = set(wanted) <= set(captured)
        checks.append(Check("draft_graphs", f"captured: {', '.join(wanted)}", found, where, fine, required=False))
    return checks


def attention(recipe: Recipe, evidence: Evidence) -> list[Check]:
    """Which backend attends, and with drafts, whether its verify pass shares a long context among the GPU's units.

    Both are directions worth knowing: the class names were read in SGLang's source, and not met on a GPU yet.
    """
    classes, where = evidence["target"].get("attention") or [], "evidence.target.attention"
    text, checks = ", ".join(classes), []
    if recipe.attention != "auto":
        prefix = _ATTENTION[recipe.attention]
        fine = bool(classes) and all(name.startswith(prefix) for name in classes)
        checks.append(Check("attention", recipe.attention, text or "unknown", where, fine, required=False))
    if recipe.draft_steps and classes:
        alone = classes[-1].startswith(_ATTENTION["triton"])
        asked = "not Triton's, whose verify pass walks it alone"
        checks.append(Check("long_context", asked, text, where, not alone, required=False))
    return checks


def tpot(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Check:
    """Whether a token takes less time than without the lever."""

    def middle(group: Sequence[Sample]) -> float:
        return statistics.median(s.tpot_ms for s in group if s.tpot_ms is not None)

    mine, theirs = middle(samples), middle(baseline)
    return Check("tpot", f"below {theirs:.2f} ms", f"{mine:.2f} ms", "samples", mine < theirs, required=False)
