"""Which part of the model is an operator working for? On the CPU the profiler is told, while it runs and only then.

A trace of the CPU names operators (`aten::mm`, a thousand times a step) and no modules. So when SGLang's profiler
starts, the functions below are wrapped in a scope that bears the name of an inventory part, and when it stops they are
put back as they were. Serving without a profiler runs the code that it would run if this file did not exist.

Scopes nest and the innermost counts, so a wide one catches what its inner ones leave: a block's residual norms around
attention and experts, SGLang's own bookkeeping (`scheduling`) around everything. Inside the draft every scope bears the
draft's name. `trace` reads them back.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from torch._C._profiler import _RecordFunctionFast  # the public one costs 12 µs a scope, six times an operator's own

from sparkmoe.sglang_plugin.hooks import Hook, Kind
from sparkmoe.trace import scope_name

logger = logging.getLogger(__name__)


class Scope(NamedTuple):
    """A function (dotted name) and the part that it works for; `draft`: it and all it calls belong to the draft."""

    target: str
    part: str
    draft: bool = False


_SRT = "sglang.srt."
_HERE = "sparkmoe.sglang_plugin.torch_cpu."
_PROFILER = _SRT + "managers.scheduler_components.profiler_manager.SchedulerProfilerManager."
SCOPES = (
    Scope(_SRT + "managers.scheduler.Scheduler.get_next_batch_to_run", "scheduling"),
    Scope(_SRT + "managers.scheduler.Scheduler.run_batch", "scheduling"),
    Scope(_SRT + "managers.scheduler.Scheduler.process_batch_result", "scheduling"),
    Scope(_SRT + "speculative.eagle_worker_v2.EAGLEWorkerV2.verify", "verification"),
    Scope(_SRT + "speculative.eagle_worker_v2.EagleDraftWorker.draft", "scheduling", draft=True),
    Scope(_SRT + "speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode", "scheduling", draft=True),
    Scope(_SRT + "layers.logits_processor.LogitsProcessor.forward", "head"),
    Scope(_SRT + "layers.sampler.Sampler.forward", "sampling"),
    Scope(
        _SRT
        + "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "kda",
    ),
    Scope(_SRT + "models.bailing_moe_v3.BailingMoELinearModel.forward", "embedding"),
    Scope(_SRT + "models.bailing_moe_nextn.BailingMoEModelNextN.forward", "draft input"),
    Scope(_HERE + "model.describe", "scheduling"),
    Scope(_HERE + "model.rms_norm", "norms"),
    Scope(_HERE + "model.Network.__call__", "mla"),  # its own operators look up the rotary angles
    Scope(_HERE + "layers.Block.__call__", "norms"),
    Scope(_HERE + "layers.Block.last", "norms"),
    Scope(_HERE + "layers.KdaLayer.__call__", "kda"),
    Scope(_HERE + "layers.MlaLayer.__call__", "mla"),
    Scope(_HERE + "layers.MlaLayer.remember", "mla"),
    Scope(_HERE + "moe.Mlp.__call__", "dense"),
    Scope(_HERE + "moe.SparseMlp.__call__", "shared"),  # the router's product is joined to the shared expert's
    Scope(_HERE + "moe.Router.__call__", "router"),
    Scope(_HERE + "moe.Experts.__call__", "experts"),
)

_wrapped: list[tuple[Any, str, Any]] = []  # (owner, name, the attribute as it was)
_depth = 0  # how many draft scopes are open


def open_scopes() -> None:
    """Wrap the functions of `SCOPES`; does nothing where they are wrapped already.

    One that the installed SGLang does not have is left out, with a warning: what it did is then in a wider scope.
    """
    if _wrapped:
        return
    for scope in SCOPES:
        path, _, name = scope.target.rpartition(".")
        try:
            owner = pkgutil.resolve_name(path)
            original = inspect.getattr_static(owner, name)
        except (ImportError, AttributeError) as error:
            logger.warning("no profiler scope on %s: %s", scope.target, error)
            continue
        setattr(owner, name, _scoped(original, scope))
        _wrapped.append((owner, name, original))


def close_scopes() -> None:
    """Put every function back as it was."""
    while _wrapped:
        owner, name, original = _wrapped.pop()
        setattr(owner, name, original)


def _scoped(function: Callable[..., Any], scope: Scope) -> Callable[..., Any]:
    names = scope_name(scope.part), scope_name(scope.part, draft=True)
    enters = int(scope.draft)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        global _depth
        _depth += enters
        try:
            with _RecordFunctionFast(names[_depth > 0]):
                return function(*args, **kwargs)
        finally:
            _depth -= enters

    return run


def _started(result: Any, self: Any, stage: Any = None) -> None:
    if result is None or result.success:
        open_scopes()


def _stopped(result: Any, self: Any, stage: Any = None) -> None:
    close_scopes()


_REASON = "a trace of the CPU names no part of the model"
HOOKS = (
    Hook(_PROFILER + "_start_profile", _started, Kind.AFTER, _REASON),
    Hook(_PROFILER + "_stop_profile", _stopped, Kind.AFTER, _REASON),
)
