"""The server's own account of what it runs, in one JSON file.

Requested is not engaged. A misspelt variable, a plugin that was skipped, a backend that fell back: in each case the
server starts, answers, and is measured as something that it is not. So the scheduler process, which holds the loaded
models, writes what it finds on them: once after load, and again after the first decode step, when runners that are
built on the way exist and the clamp has been applied or has not. `sparkmoe.engagement` compares file and recipe.

`SPARKMOE_EVIDENCE` names the file; rank 0 writes it, atomically. No file means that this plugin was not loaded, which
is itself the finding. A fault in here must not end a server that serves: it is written into the file as `error`.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import torch

from sparkmoe.sglang_plugin import draft_head, findings, hooks, humming_clamp

logger = logging.getLogger(__name__)

PATH_ENV = "SPARKMOE_EVIDENCE"
SCHEMA = 1
_PACKAGES = ("sparkmoe", "sglang", "torch", "triton", "transformers", "flashinfer-python", "humming-kernels")
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--config")


def collect(scheduler: Any, stage: str) -> dict[str, Any]:
    """Everything there is to say about a `Scheduler` that has loaded its models; `stage` is "loaded" or "served"."""
    runner = scheduler.tp_worker.model_runner
    worker = drafting(scheduler.draft_worker)
    return {
        "schema": SCHEMA,
        "stage": stage,
        "written_unix_s": time.time(),
        "pid": os.getpid(),
        "versions": versions(),
        "device": device(runner),
        "hooks": [{"target": h.target, "kind": h.kind.value, "reason": h.reason} for h in hooks.registered()],
        "target": target(runner),
        "draft": None if worker is None else draft(worker, runner.model),
        "speculative": None if worker is None else speculative(worker),
        "graphs": findings.graphs(runner, worker),
        "memory": memory(scheduler, runner),
        "applied_limits": {str(limit): count for limit, count in humming_clamp.applied.items()},
        "forward_passes": int(scheduler.forward_ct),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("SGLANG_", "SPARKMOE_"))},
        "argv": launch_arguments(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device(runner: Any) -> dict[str, Any]:
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    gpu = torch.cuda.is_available()
    return {
        "platform": getattr(current_platform, "device_name", type(current_platform).__name__),
        "type": str(runner.device),
        "name": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "capability": list(torch.cuda.get_device_capability()) if gpu else None,
        "dtype": findings.dtype_name(runner.dtype),
        "tensor_parallel": int(get_parallel().tp_size),
    }


def target(runner: Any) -> dict[str, Any]:
    model = runner.model
    return {
        "class": type(model).__name__,
        "layers": int(getattr(model.config, "num_hidden_layers", 0)),
        "vocabulary": int(model.config.vocab_size),
        "weight_bytes": findings.model_bytes(model),
        "moe": findings.moe(model),
        "head": findings.head(model),
        "attention": findings.attention(runner),
        "replayssm": replayssm(runner),
    }


def replayssm(runner: Any) -> dict[str, Any] | None:
    """Whether the linear-attention state pool really keeps a replay ring; None for a model without such a pool."""
    pool = getattr(runner.req_to_token_pool, "mamba_pool", None)
    if pool is None:
        return None
    return {
        "decode": bool(pool.enable_linear_replayssm),
        "verify": bool(pool.enable_linear_replayssm_spec),
        "cache_len": int(pool.linear_replayssm_cache_len),
    }


def drafting(worker: Any) -> Any:
    """What drafts, or None: the worker inside NEXTN's; DSpark's own, for the one inside is that of any model."""
    return worker if hasattr(worker, "gamma") else getattr(worker, "draft_worker", None)


def draft(worker: Any, target_model: Any) -> dict[str, Any]:
    model = worker.draft_model if hasattr(worker, "gamma") else worker.draft_runner.model
    hot = getattr(worker, "hot_token_id", None)
    return {
        "class": type(model).__name__,
        "mode": draft_head.mode(),
        "moe": findings.moe(model),
        "head": findings.draft_head(model, target_model),
        "hot_vocabulary": None if hot is None else len(hot.unique()),
        "hot_rows": None if hot is None else len(hot),
    }


def speculative(worker: Any) -> dict[str, Any]:
    if hasattr(worker, "gamma"):  # a block is drafted in one pass, which SGLang counts as one step
        drafts = {"steps": int(worker.gamma), "topk": 1, "draft_tokens": int(worker.speculative_num_draft_tokens)}
        return {"algorithm": "DSPARK"} | drafts
    return {
        "algorithm": worker.speculative_algorithm.name,
        "steps": int(worker.speculative_num_steps),
        "topk": int(worker.topk),
        "draft_tokens": int(worker.speculative_num_draft_tokens),
    }


def memory(scheduler: Any, runner: Any) -> dict[str, Any]:
    used = torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_full_info().pss
    return {"kv_tokens": int(scheduler.max_total_num_tokens), "process_bytes": int(used)}


def launch_arguments() -> list[str]:
    """The arguments of `sglang.launch_server` as its process has them, secrets blanked; [] if it cannot be found."""
    for process in (psutil.Process(), *psutil.Process().parents()):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if any("launch_server" in part for part in line) and "--model-path" in line:
            return ["…" if before in _SECRET_FLAGS else part for before, part in zip(["", *line], line, strict=False)]
    return []


def write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps(found, indent=1, default=str) + "\n")
    os.chmod(scratch, 0o600)
    os.replace(scratch, path)


def report(scheduler: Any, stage: str) -> None:
    """Collect and write, on rank 0 and where the environment names a file."""
    from sglang.srt.runtime_context import get_parallel

    where = os.environ.get(PATH_ENV)
    if not where or get_parallel().tp_rank != 0 or get_parallel().pp_rank != 0:
        return
    try:
        found = collect(scheduler, stage)
    except Exception:
        logger.exception("evidence could not be collected")
        found = {"schema": SCHEMA, "stage": stage, "pid": os.getpid(), "error": traceback.format_exc(limit=-3)}
    write(Path(where), found)


def _after_init(result: None, self: Any, server_args: Any, port_args: Any) -> None:
    report(self, "loaded")


def _after_batch(outcome: None, self: Any, batch: Any, result: Any) -> None:
    if not getattr(self, "sparkmoe_served", False) and batch.forward_mode.is_decode():
        self.sparkmoe_served = True
        report(self, "served")


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.__init__",
        _after_init,
        hooks.Kind.AFTER,
        "without it nobody can tell what the server has loaded",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        _after_batch,
        hooks.Kind.AFTER,
        "without it nobody can tell what the server ran in its first decode step",
    ),
)


def register() -> None:
    """Register where the environment names a file."""
    if os.environ.get(PATH_ENV):
        hooks.register(HOOKS)
