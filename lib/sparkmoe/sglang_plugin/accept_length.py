"""Change the simulated accept length of a running server.

Random weights accept no draft, so how fast NEXTN would be has to be asked for a given accept length, which SGLang can
simulate: `SGLANG_SIMULATE_ACC_LEN` makes every verification accept so many tokens on average, whatever was drafted. It
is read once, when a module is imported; a curve over accept lengths would cost a boot of 66 GB for every point.

The verification looks the number up anew in every round, so it can be changed between two requests. With
`SPARKMOE_ACCEPT_SWITCH=1` the plugin adds a key to what `/set_internal_state` may set: `simulate_acc_len`, 0 for what
the drafts really are. Nothing is read or compared while requests run. `Client.simulate_accept_length` asks for it.
"""

from __future__ import annotations

import os
from typing import Any

from sparkmoe.sglang_plugin import hooks

SWITCH_ENV = "SPARKMOE_ACCEPT_SWITCH"
KEY = "simulate_acc_len"
_STATE = "sglang.srt.managers.scheduler_components.internal_state."


def _validate(key: str, value: float) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
    from sglang.srt.runtime_context import get_spec

    most = get_spec().speculative_num_draft_tokens or 0
    if value != 0 and not 1 <= value <= most:
        raise UpdateRejected(f"{key}={value} is not in 1…{most}, the tokens of a verify step (0: do not simulate)")


def _apply(key: str, value: float) -> None:
    from sglang.srt.speculative import spec_utils

    spec_utils.SIMULATE_ACC_LEN = float(value)


def _after_handlers(result: dict[str, Any], self: Any) -> dict[str, Any]:
    from sglang.srt.managers.scheduler_components.internal_state import _UpdateHandler

    return {**result, KEY: _UpdateHandler(_validate, _apply)}


HOOKS = (
    hooks.Hook(
        _STATE + "SchedulerInternalStateController._update_handlers",
        _after_handlers,
        hooks.Kind.AFTER,
        "without it every simulated accept length needs a boot of its own",
        relies_on=(
            (_STATE + "SchedulerInternalStateController.set_internal_state", "_update_handlers"),
            # looked up in the module in every round
            ("sglang.srt.speculative.eagle_utils.eagle_sample", "SIMULATE_ACC_LEN"),
        ),
    ),
)


def register() -> None:
    """Register where the environment asks for it."""
    if os.environ.get(SWITCH_ENV) == "1":
        hooks.register(HOOKS)
