"""How fast can this model decode here, at best? Predicted from bytes, before anything is measured.

One decoded token at batch 1 reads every weight it touches once, and computes about two operations per weight: far below
what any processor can do in the time that the read takes. So the bytes ÷ the bandwidth is the floor of the time per
token, and the ceiling of the speed. A lever can then be priced before it is tried: an FP8 head halves the head's bytes
and nothing else; a better MoE kernel changes no byte, it only gets closer to the floor.

Speculative decoding changes the question. A NEXTN step drafts K tokens (K passes over the MTP layer and the head) and
verifies them in one pass over the target, which reads its dense weights once, but *more experts*, because K + 1
tokens choose theirs independently. The step costs more than a plain one and yields more than one token: it pays from
the accept length at which both grow equally, the break-even.

What the floor leaves out is time that is not reading: launches, gaps, host work. `overhead_ms` stands for it where it
was measured; on a GPU with 4.8 TB/s it is most of the time, and a lever that saves bytes saves next to nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparkmoe.errors import ModelError
from sparkmoe.inventory import Inventory

Head = Literal["stored", "fp32", "bf16", "fp8"]
Routing = Callable[[int], float]


def expected_distinct(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens touch in one layer when each picks `top_k` uniformly and independently.

    Real routing is neither: neighbouring tokens share experts, so this is an upper estimate. Pass measured numbers as
    `routing` where a run recorded them.
    """
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True)
class Load:
    """What is decoded: `context` tokens behind each of `batch` sequences, with which head and how many drafts.

    `head` "fp32" reads the BF16 weight (SGLang multiplies it into an FP32 result). `cache_bytes` is the size of a
    value in the KV cache. `routing(n)` is the number of distinct experts per layer for n tokens; None expects uniform
    routing. `draft_head` and `hot_tokens` are for a draft that does not score with the target's head: its format, and
    the rows of the vocabulary that it has.
    """

    context: int = 0
    batch: int = 1
    head: Head = "stored"
    drafts: int = 0
    cache_bytes: int = 2
    dtype: Literal["stored", "float32"] = "stored"
    routing: Routing | None = None
    draft_head: Head | None = None
    hot_tokens: int | None = None


def head_bytes(inventory: Inventory, head: Head = "stored", rows: int | None = None) -> float:
    """Bytes of the LM head in the asked format, or of `rows` of its rows: FP8 has one FP32 scale per row."""
    shape = inventory.shape
    rows = shape.vocab if rows is None else rows
    if head == "stored":
        return inventory.bytes("embedding" if shape.tied else "head") * rows / shape.vocab
    return rows * (shape.hidden + 4) if head == "fp8" else 2 * rows * shape.hidden


def _pass_bytes(inventory: Inventory, load: Load, tokens: int, mtp: bool) -> dict[str, float]:
    """Bytes that one pass of `tokens` tokens per sequence reads, by part, of the target or of the MTP layers."""
    shape = inventory.shape
    parts: dict[str, float] = {}
    for entry in inventory.entries:
        if entry.mtp == mtp and entry.part not in ("head", "embedding"):
            widened = 2 if load.dtype == "float32" and entry.dtype in ("BF16", "F16") else 1
            parts[entry.part] = parts.get(entry.part, 0.0) + widened * entry.bytes
    if "experts" in parts:
        routing = load.routing or (lambda n: expected_distinct(shape.experts, shape.top_k, n))
        parts["experts"] *= routing(tokens * load.batch) / shape.experts
    if mtp:
        parts["head"] = head_bytes(inventory, load.draft_head or load.head, load.hot_tokens)
    else:
        parts["head"] = head_bytes(inventory, load.head)
    kinds = shape.kinds[shape.layers :] if mtp else shape.kinds[: shape.layers]
    seen = {"mla": load.context, "attention": load.context, "window": min(load.context, shape.window), "kda": 0}
    parts["KV cache"] = load.batch * load.cache_bytes * shape.cache_values * float(sum(seen[k] for k in kinds))
    # The recurrent state is read and written once a pass. (A verify pass may keep one state per draft besides.)
    state = 2 * (4 * shape.state_values + 2 * shape.conv_values)
    parts["KDA state"] = float(load.batch * state * kinds.count("kda"))
    return {part: size for part, size in parts.items() if size}


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step reads: of the target, and of all draft passes together, by part."""

    target: dict[str, float]
    draft: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.target.values()) + sum(self.draft.values())

    def by_part(self) -> dict[str, float]:
        """Target and draft in one dict; draft parts are named `draft head`, …"""
        return {**self.target, **{f"draft {part}": size for part, size in self.draft.items()}}


def step_bytes(inventory: Inventory, load: Load = Load()) -> StepBytes:
    """Bytes of one step: a plain decoding step, or with `load.drafts` = K one verify pass of K + 1 tokens and K draft
    passes. Raises ModelError where drafts are asked of a model without an MTP layer."""
    if load.drafts < 0 or load.batch < 1 or load.context < 0:
        raise ModelError(f"No such load: {load.drafts} drafts, batch {load.batch}, context {load.context}.")
    if load.drafts and not inventory.shape.mtp_layers:
        raise ModelError(f"{inventory.source} has no MTP (NEXTN) layer to draft with; leave drafts at 0.")
    draft = _pass_bytes(inventory, load, 1, mtp=True) if load.drafts else {}
    return StepBytes(
        _pass_bytes(inventory, load, load.drafts + 1, mtp=False), {p: load.drafts * size for p, size in draft.items()}
    )


WHOLE = ("router", "norms", "draft input", "KV cache")
"""What tensor parallelism leaves whole on every GPU: small matrices, and the latent cache that all heads read."""


def split(step: StepBytes, tp: int) -> StepBytes:
    """What each of `tp` GPUs reads of a step: its share of every large matrix and of the recurrent states, and `WHOLE`.

    Every expert is cut, so each GPU reads a slice of the same experts; small gates that are copied count as cut.
    """

    def share(parts: Mapping[str, float]) -> dict[str, float]:
        return {part: size if part in WHOLE else size / tp for part, size in parts.items()}

    return StepBytes(share(step.target), share(step.draft))


# ---------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class Prediction:
    """A step of `bytes` at `gb_s` plus `overhead_ms`, and what it means per token of one sequence."""

    bytes: float
    step_ms: float
    accept_length: float
    overhead_ms: float

    @property
    def tpot_ms(self) -> float:
        return self.step_ms / self.accept_length

    @property
    def tok_s(self) -> float:
        return 1000 / self.tpot_ms


def predict(
    inventory: Inventory,
    gb_s: float,
    load: Load = Load(),
    *,
    accept_length: float = 1.0,
    overhead_ms: float = 0.0,
) -> Prediction:
    """The floor of a step at `gb_s` (nominal or measured, 1e9 bytes/s), plus a measured `overhead_ms` per target pass.

    A draft pass is charged overhead in proportion to its layers. With `overhead_ms=0` the result is the ceiling.
    """
    if gb_s <= 0 or accept_length < 1:
        raise ModelError(f"No prediction at {gb_s:g} GB/s and accept length {accept_length:g}: needs > 0 and ≥ 1.")
    size = step_bytes(inventory, load).total
    shape = inventory.shape
    waiting = overhead_ms * (1 + load.drafts * shape.mtp_layers / shape.layers)
    return Prediction(size, size / gb_s / 1e6 + waiting, accept_length, waiting)


def overhead(inventory: Inventory, gb_s: float, measured_ms: float, load: Load = Load()) -> float:
    """What a measured plain TPOT holds beyond reading, in ms; negative if `gb_s` is too low or bytes are cached."""
    return measured_ms - predict(inventory, gb_s, load).step_ms


def break_even(inventory: Inventory, drafts: int, load: Load = Load()) -> float:
    """The accept length above which K drafts beat plain decoding, when only bytes count."""
    drafted = step_bytes(inventory, replace(load, drafts=drafts)).total
    return drafted / step_bytes(inventory, replace(load, drafts=0)).total


@dataclass(frozen=True)
class Gain:
    """What a set of levers should give against the baseline."""

    levers: tuple[str, ...]
    tpot_ms: float
    speedup: float
    note: str = ""


def lever_gains(
    inventory: Inventory,
    gb_s: float,
    load: Load = Load(),
    *,
    drafts: int = 3,
    accept_length: float = 1.0,
    overhead_ms: float = 0.0,
    experts_gb_s: float | None = None,
) -> list[Gain]:
    """Each lever alone, then all of them together, against BF16 head, no drafts and the MoE kernel at hand.

    `accept_length` is what NEXTN reaches (expected or measured). `experts_gb_s` is the bandwidth that the baseline's
    MoE kernel was seen to reach (`trace.py`); a better one can at most bring the experts to `gb_s`. Without it that
    lever is predicted to give nothing, because it changes no byte.
    """

    def slow(step: StepBytes) -> float:
        experts = step.target.get("experts", 0.0) + step.draft.get("experts", 0.0)
        return max(0.0, experts / experts_gb_s - experts / gb_s) / 1e6 if experts_gb_s else 0.0

    def tpot(head: Head, nextn: bool, better_moe: bool) -> float:
        use = replace(load, drafts=drafts if nextn else 0, head=head)
        made = predict(inventory, gb_s, use, accept_length=accept_length if nextn else 1.0, overhead_ms=overhead_ms)
        return (made.step_ms + (0.0 if better_moe else slow(step_bytes(inventory, use)))) / made.accept_length

    base = tpot("bf16", False, False)
    moe_note = "at most: the experts at full bandwidth" if experts_gb_s else "no byte changes; only a trace can tell"
    rows = [
        ((), base, ""),
        (("moe",), tpot("bf16", False, True), moe_note),
        (("fp8_head",), tpot("fp8", False, False), ""),
    ]
    if inventory.shape.mtp_layers:
        note = f"K = {drafts}, accept length {accept_length:.2f}"
        rows += [(("nextn",), tpot("bf16", True, False), note)]
        rows += [(("moe", "fp8_head", "nextn"), tpot("fp8", True, True), note)]
    else:
        rows += [(("moe", "fp8_head"), tpot("fp8", False, True), "no MTP layer")]
    return [Gain(levers, ms, base / ms, note) for levers, ms, note in rows]


# ------------------------------------------------------------------------------------------------- how many drafts to
# make


def acceptance(histogram: Sequence[int]) -> list[float]:
    """Conditional acceptance by position from an accept histogram (`histogram[k]` steps accepted exactly k drafts).

    Entry i is the probability that draft i + 1 is right, given that those before it were. Positions never reached are
    left out.
    """
    reached, rates = sum(histogram), []
    for exact in histogram[:-1]:
        if reached == 0:
            break
        rates.append((reached - exact) / reached)
        reached -= exact
    return rates


def accept_length(rates: Sequence[float], drafts: int) -> float:
    """Expected accept length (target's own token included) with K drafts; the last rate continues beyond the list."""
    if not rates:
        raise ModelError("An acceptance profile needs at least one rate; this run accepted or proposed no draft.")
    survive, length = 1.0, 1.0
    for i in range(drafts):
        survive *= rates[min(i, len(rates) - 1)]
        length += survive
    return length


def sweep(
    inventory: Inventory,
    gb_s: float,
    rates: Sequence[float],
    load: Load = Load(),
    *,
    most: int = 8,
    overhead_ms: float = 0.0,
) -> dict[int, Prediction]:
    """The prediction for K = 0 … `most` drafts under an acceptance profile, keyed by K (see `best_drafts`)."""
    return {
        k: predict(
            inventory,
            gb_s,
            replace(load, drafts=k),
            accept_length=accept_length(rates, k) if k else 1.0,
            overhead_ms=overhead_ms,
        )
        for k in range(most + 1)
    }


def best_drafts(predictions: Mapping[int, Prediction]) -> int:
    """The K of a `sweep` with the least time per token."""
    return min(predictions, key=lambda k: predictions[k].tpot_ms)
