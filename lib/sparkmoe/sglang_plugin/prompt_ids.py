"""Refuse a prompt with a token that the vocabulary does not have.

Stock SGLang 0.5.23 checks a prompt's length but not its ids (those of `token_ids_logprob` it does check). One id beyond
the embedding's rows ends the scheduler, on a CPU by an IndexError and on a GPU by a device assertion, and with it every
other request. Here it is the answer to that one request, with status 400, as for a prompt that is too long.
"""

from __future__ import annotations

import os
from typing import Any

from sparkmoe.sglang_plugin import hooks
from sparkmoe.sglang_plugin.evidence import PATH_ENV


def _after_validation(result: str | None, req: Any, max_req_input_len: int, allow_auto_truncate: bool) -> str | None:
    if result is not None or not req.vocab_size or not len(req.origin_input_ids):
        return result
    for token in (min(req.origin_input_ids), max(req.origin_input_ids)):
        if not 0 <= token < req.vocab_size:
            return f"the prompt has token id {token}; the vocabulary's are 0…{req.vocab_size - 1}"
    return None


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.validate_input_length",
        _after_validation,
        hooks.Kind.AFTER,
        "without it one prompt with an id beyond the vocabulary ends the server",
        relies_on=(
            ("sglang.srt.managers.scheduler.Scheduler._handle_generate_request", "validate_input_length"),
            ("sglang.srt.managers.schedule_batch.Req.__init__", "vocab_size"),
        ),
    ),
)


def register() -> None:
    """Register in a server that sparkmoe started."""
    if PATH_ENV in os.environ:
        hooks.register(HOOKS)
