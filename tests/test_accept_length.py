"""The switch itself; that a running server obeys it is test_full_shape.py's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparkmoe.client import Client, RequestFailed
from sparkmoe.sglang_plugin import hooks
from sparkmoe.sglang_plugin.accept_length import HOOKS, KEY, SWITCH_ENV, register


@pytest.mark.parametrize(("value", "asked"), [(None, 0), ("0", 0), ("1", 1)])
def test_it_is_there_only_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: int
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(hooks, "register", seen.append)
    monkeypatch.delenv(SWITCH_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH_ENV, value)
    register()
    assert seen == [HOOKS] * asked


def test_the_handler_sets_what_every_round_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
    from sglang.srt.speculative import spec_utils

    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_LEN", -1.0)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=4))
    handlers = HOOKS[0].replacement({"pp_max_micro_batch_size": "kept"}, None)
    assert handlers["pp_max_micro_batch_size"] == "kept"
    for value in (1.0, 2.68, 4.0, 0.0):
        handlers[KEY].validate(KEY, value)
        assert handlers[KEY].apply(KEY, value) is None
        assert value == spec_utils.SIMULATE_ACC_LEN
    for value in (0.5, 4.01, -1.0):
        with pytest.raises(UpdateRejected, match=r"not in 1…4"):
            handlers[KEY].validate(KEY, value)
    assert hooks.status(HOOKS[0]).state is hooks.State.NEEDED


@pytest.mark.parametrize(("answer", "fine"), [(b"[true]", True), (b"[true, false]", False), (b"[]", False)])
def test_the_client_does_not_take_silence_for_consent(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, fine: bool
) -> None:
    sent: list[Any] = []
    call: Callable[..., bytes] = lambda self, *request: sent.append(request) or answer  # noqa: E731
    monkeypatch.setattr(Client, "_call", call)
    client = Client("http://127.0.0.1:1")
    if fine:
        client.simulate_accept_length(2.68)
    else:
        with pytest.raises(RequestFailed, match="SPARKMOE_ACCEPT_SWITCH=1"):
            client.simulate_accept_length(2.68)
    assert sent == [("POST", "/set_internal_state", {"server_args": {KEY: 2.68}})]
