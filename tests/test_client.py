"""The client against a server that does all that servers do: every answer measured right, or refused by name."""

from __future__ import annotations

import json
import socket
import statistics
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import bench_client
from fake_server import Behaviour, FakeServer
from sparkmoe.client import Client, RequestFailed, Sample, generate_body
from sparkmoe.errors import EngineError
from sparkmoe.sample import Arrivals, finish, read_generate


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


def client(server: FakeServer, **more: Any) -> Client:
    return Client(server.url, server.api_key, **{"timeout_s": 5.0} | more)


def ask(server: FakeServer, endpoint: str, prompt: str = "two and two", n: int = 12, **more: Any) -> Sample:
    c = client(server, **{k: more.pop(k) for k in ("timeout_s",) if k in more})
    if endpoint == "generate":
        return c.generate(prompt, max_new_tokens=n, **more)
    return c.chat([{"role": "user", "content": prompt}], max_new_tokens=n, **more)


def fail(server: FakeServer, endpoint: str, **more: Any) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        ask(server, endpoint, **more)
    return caught.value


BOTH = pytest.mark.parametrize("endpoint", ["generate", "chat"])


@BOTH
def test_several_tokens_an_event_are_counted_by_the_server(server: FakeServer, endpoint: str) -> None:
    server.behaviour = Behaviour(tokens_per_event=(1, 3, 2), gap_ms=20, first_ms=30)
    sample = ask(server, endpoint)
    assert sample.completion_tokens == 12
    assert sample.chunk_tokens == (1, 3, 2, 1, 3, 2)
    assert sample.finish_reason == "length"
    assert sample.token_ids is not None
    assert sample.text == "".join(map(chr, sample.token_ids))
    assert len(sample.text) == 12
    assert sample.ttft_ms is not None
    assert sample.ttft_ms >= 30
    first, last = sample.chunk_times_ms[0], sample.chunk_times_ms[-1]
    assert sample.tpot_ms == pytest.approx((last - first) / 11)
    assert len(sample.gaps_ms) == 5
    assert all(15 < gap < 100 for gap in sample.gaps_ms)
    assert sample.accept_length == pytest.approx(12 / 5)
    assert sample.accept_histogram == (5, 0, 0, 0)
    assert sample.spec_verify_ct == 5
    assert sample.cached_tokens == 0
    assert sample.error is None


def test_tpot_leaves_out_all_tokens_of_the_first_event(server: FakeServer) -> None:
    server.behaviour = Behaviour(tokens_per_event=(4, 2), gap_ms=10)
    sample = ask(server, "generate", n=12)
    assert sample.tpot_ms == pytest.approx((sample.chunk_times_ms[-1] - sample.chunk_times_ms[0]) / 8)


@BOTH
def test_an_answer_of_one_event_has_no_tpot(server: FakeServer, endpoint: str) -> None:
    sample = ask(server, endpoint, n=1)
    assert sample.tpot_ms is None
    assert sample.ttft_ms is not None


@BOTH
def test_answer_that_ends_by_itself(server: FakeServer, endpoint: str) -> None:
    server.behaviour = Behaviour(stop_at=7)
    assert (ask(server, endpoint).completion_tokens, ask(server, endpoint).finish_reason) == (7, "stop")


def test_increments_and_whole_answers_read_alike(server: FakeServer) -> None:
    whole = ask(server, "generate", return_logprob=True)
    server.behaviour.incremental = True
    parts = ask(server, "generate", return_logprob=True)
    assert (whole.text, whole.token_ids, whole.logprobs) == (parts.text, parts.token_ids, parts.logprobs)
    assert whole.chunk_tokens == parts.chunk_tokens
    assert parts.logprobs is not None
    assert len(parts.logprobs) == 12


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_under_either_name(server: FakeServer, name: str) -> None:
    server.behaviour = Behaviour(reasoning_field=name, reasoning_tokens=5, tokens_per_event=(1, 3, 2))
    sample = ask(server, "chat")
    assert sample.token_ids is not None
    whole = "".join(map(chr, sample.token_ids))
    assert (sample.reasoning, sample.text) == (whole[:5], whole[5:])
    assert sample.chunk_tokens == (1, 3, 2, 1, 3, 2)


def test_a_swallowed_first_token_does_not_start_the_clock_late(server: FakeServer) -> None:
    server.behaviour = Behaviour(swallow_first=True, first_ms=10, gap_ms=80)
    sample = ask(server, "chat", n=4)
    assert sample.ttft_ms is not None
    assert sample.ttft_ms < 70
    assert sample.chunk_tokens == (1, 3)


def test_chat_without_running_usage_never_counts_events_as_tokens(server: FakeServer) -> None:
    server.behaviour = Behaviour(running_usage=False, gap_ms=10)
    sample = ask(server, "chat")
    assert sample.chunk_tokens == ()
    assert sample.tpot_ms == pytest.approx((sample.chunk_times_ms[-1] - sample.chunk_times_ms[0]) / 11)


def test_chat_without_any_usage_is_refused(server: FakeServer) -> None:
    server.behaviour = Behaviour(running_usage=False, final_usage=False)
    error = fail(server, "chat")
    assert error.kind == "malformed"
    assert "completion_tokens" in str(error)


@BOTH
def test_cached_tokens_are_reported_and_flushed_away(server: FakeServer, endpoint: str) -> None:
    assert ask(server, endpoint).cached_tokens == 0
    assert (ask(server, endpoint).cached_tokens or 0) > 0
    client(server).flush_cache()
    assert ask(server, endpoint).cached_tokens == 0


def test_no_speculation_no_accept_length(server: FakeServer) -> None:
    server.behaviour = Behaviour(drafts=0)
    sample = ask(server, "generate")
    assert (sample.accept_length, sample.accept_histogram, sample.spec_verify_ct) == (None, None, None)


@BOTH
@pytest.mark.parametrize("size", [1, 7, 50])
def test_events_cut_anywhere_read_the_same(server: FakeServer, endpoint: str, size: int) -> None:
    server.behaviour = Behaviour(tokens_per_event=(1, 2), prefix_cache=False)
    whole = ask(server, endpoint, n=3)
    server.behaviour.cut_writes = size
    cut = ask(server, endpoint, n=3)
    assert (cut.text, cut.chunk_tokens, cut.token_ids) == (whole.text, whole.chunk_tokens, whole.token_ids)


@BOTH
@pytest.mark.parametrize(
    ("behaviour", "kind", "says"),
    [
        ({"stall_after": 3}, "stalled", "silent for 0.5 s"),
        ({"stall_after": 0}, "stalled", "silent for 0.5 s"),
        ({"drop_after": 3}, "dropped", "still runs"),
        ({"die_after": 3}, "died", "its log says why"),
        ({"malformed_after": 3}, "malformed", "no answer"),
        ({"error_after": 3}, "server_error", "out of memory in the KV pool"),
        ({"end_after": 3}, "dropped", "without a finish reason"),
    ],
)
def test_failures_have_names_and_keep_what_was_measured(
    server: FakeServer, endpoint: str, behaviour: dict[str, int], kind: str, says: str
) -> None:
    server.behaviour = Behaviour(gap_ms=5, **behaviour)  # type: ignore[arg-type]
    error = fail(server, endpoint, timeout_s=0.5)
    assert (error.kind, says in str(error)) == (kind, True)
    assert isinstance(error, EngineError)
    assert error.sample is not None
    assert error.sample.error == f"{kind}: {error}"
    after = next(iter(behaviour.values()))
    assert error.sample.chunk_tokens == (1, 3, 2)[:after]
    assert error.sample.completion_tokens == sum((1, 3, 2)[:after])
    assert len(error.sample.text) == error.sample.completion_tokens


def test_an_abort_by_the_scheduler_is_no_answer(server: FakeServer) -> None:
    server.behaviour = Behaviour(abort_after=2)
    error = fail(server, "generate")
    assert (error.kind, "aborted by the scheduler" in str(error)) == ("server_error", True)
    assert error.sample is not None
    assert error.sample.completion_tokens == 4


@BOTH
def test_refusals_carry_the_servers_words(server: FakeServer, endpoint: str) -> None:
    server.behaviour.status = 400
    error = fail(server, endpoint)
    assert (error.kind, "longer than the context length (8192)" in str(error)) == ("rejected", True)
    server.behaviour.status, server.behaviour.status_body = 503, "<html>busy</html>"
    error = fail(server, endpoint)
    assert (error.kind, "<html>busy</html>" in str(error)) == ("server_error", True)


def test_wrong_key_and_right_key() -> None:
    with FakeServer(api_key="secret") as server:
        assert ask(server, "generate").completion_tokens == 12
        server.api_key = "another"
        with pytest.raises(RequestFailed, match="Unauthorized"):
            Client(server.url, "secret").generate("a", max_new_tokens=2)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RequestFailed, match="no server answers") as caught:
        Client(url).generate("a", max_new_tokens=2)
    assert caught.value.kind == "refused"
    with pytest.raises(RequestFailed, match="no server answers"):
        Client(url).flush_cache()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host/", "", "http://"])
def test_no_address(url: str) -> None:
    with pytest.raises(EngineError, match="no server address"):
        Client(url)


def test_other_calls(server: FakeServer) -> None:
    c = client(server)
    assert c.detokenize(c.tokenize("sieben Äpfel", special=False)) == "sieben Äpfel"
    assert len(c.tokenize("abc")) == 4
    assert c.detokenize(c.render([{"role": "user", "content": "hi"}])) == "<user>hi"
    assert c.token_limit() == 40000
    assert c.server_info()["version"] == "fake"


def test_what_is_asked_for_reaches_the_server(server: FakeServer) -> None:
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 29, "ignore_eos": True, "seed": 7}
    client(server).generate([3, 1, 4], max_new_tokens=2, stop=["Q:"], **sampling)
    sent = server.requests[-1]
    assert sent["input_ids"] == [3, 1, 4]
    assert sent["sampling_params"] == {
        "max_new_tokens": 2, "temperature": 0.6, "top_p": 0.95, "top_k": 29, "ignore_eos": True,
        "sampling_seed": 7, "stop": ["Q:"],
    }  # fmt: skip
    ask(server, "chat", thinking=False, **sampling)
    sent = server.requests[-1]
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert {k: sent[k] for k in sampling} == sampling
    assert sent["return_spec_tokens_details"] is True


def test_a_sample_survives_a_json_file(server: FakeServer) -> None:
    sample = ask(server, "generate", return_logprob=True)
    assert Sample.from_json(json.loads(json.dumps(sample.to_json() | {"later_field": 1}))) == sample


def test_prompt_hash_tells_prompts_apart(server: FakeServer) -> None:
    hashes = {ask(server, "generate", prompt=p).prompt_hash for p in ("a", "b", "a")}
    assert len(hashes) == 2


def test_threads_may_share_a_client(server: FakeServer) -> None:
    server.behaviour = Behaviour(gap_ms=2, prefix_cache=False)
    c, got = client(server), {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: c.generate(f"{i} apples", max_new_tokens=24).text}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: c.generate(f"{i} apples", max_new_tokens=24).text for i in range(8)}


def test_a_long_cumulative_answer_is_let_go_of_without_loss() -> None:
    """Past a limit the raw events are dropped, and times, counts and the text of the last one stay."""

    def event(n: int, finish: bool = False) -> bytes:
        end = {"type": "length"} if finish else None
        text = 'say "completion_tokens": 9 ' + "x" * n  # the key inside a text must not be taken for the count
        meta = {"id": "1", "completion_tokens": n, "prompt_tokens": 3, "cached_tokens": 0, "finish_reason": end}
        return (
            b"data: " + json.dumps({"text": text, "output_ids": list(range(n)), "meta_info": meta}).encode() + b"\n\n"
        )

    def arrive(release: tuple[int, ...]) -> Sample:
        arrivals = Arrivals("hash", 0.0, sent_ns=0)
        stream = b"".join([*(event(n) for n in range(1, 41)), event(42, finish=True), b"data: [DONE]\n\n"])
        for i, piece in enumerate(_batched(stream, 777)):
            arrivals.pieces.append((1_000_000 * (i + 1), bytes(piece)))
            if i in release:
                arrivals.let_go()
        return finish(arrivals, read_generate)

    kept, let_go = arrive(()), arrive((5, 6, 20))
    assert kept == let_go
    assert kept.completion_tokens == 42
    assert kept.chunk_tokens[-1] == 2
    assert sum(kept.chunk_tokens) == 42


def _batched(data: bytes, n: int) -> list[bytes]:
    return [data[i : i + n] for i in range(0, len(data), n)]


def test_generate_body_leaves_out_what_was_not_asked() -> None:
    body = generate_body("a", max_new_tokens=4)
    assert body["text"] == "a"
    assert "stop" not in body["sampling_params"]
    assert "sampling_seed" not in body["sampling_params"]


@pytest.mark.slow  # a time, on a machine that does nothing else
def test_the_client_adds_less_than_50_us_to_a_bare_socket() -> None:
    found = bench_client.delay(runs=4, tokens=150)
    assert found["client_us"] - found["bare_us"] < 50


# ------------------------------------------------------------------------------------------------ a real server


@pytest.mark.server
@pytest.mark.parametrize("recipe", ["baseline", "nextn"])
def test_a_real_server_over_both_endpoints(serve: Any, recipe: str) -> None:
    """The same conversation over `/generate` and over chat: same tokens, same counts, facts from different places."""
    c = serve(recipe).client(timeout_s=60)
    messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many are there?"}]
    prompt = c.render(messages)
    c.flush_cache()
    direct = c.generate(prompt, max_new_tokens=48, ignore_eos=True, return_logprob=True)
    c.flush_cache()
    chat = c.chat(messages, max_new_tokens=48, ignore_eos=True)
    for sample in (direct, chat):
        assert sample.completion_tokens == sum(sample.chunk_tokens) == 48
        assert sample.prompt_tokens == len(prompt)
        assert sample.finish_reason == "length"
        assert sample.cached_tokens == 0
        assert sample.ttft_ms is not None
        assert sample.latency_ms is not None
        assert 0 < sample.ttft_ms < sample.latency_ms
        assert sample.chunk_tokens[0] == 1
    assert chat.token_ids == direct.token_ids
    assert len(direct.logprobs or ()) == 48
    if recipe == "nextn":
        assert direct.accept_histogram == chat.accept_histogram
        assert direct.spec_verify_ct == chat.spec_verify_ct == sum(direct.accept_histogram or ())
        assert direct.accept_length == pytest.approx(48 / (direct.spec_verify_ct or 1))
        steps = (direct.spec_verify_ct or 0) + 1  # the first token comes from the prompt
        assert 0.7 * steps < len(direct.chunk_tokens) <= steps  # a busy server sends two steps as one chunk
    else:
        assert (direct.accept_histogram, chat.accept_histogram) == (None, None)
        assert statistics.median(direct.chunk_tokens) == 1  # a busy server sends two tokens as one chunk


@pytest.mark.server
def test_a_real_servers_cache_and_refusals(serve: Any) -> None:
    engine = serve("baseline")
    c = engine.client(timeout_s=60)
    messages = [{"role": "user", "content": "The same words are asked for twice, so that they are known by then."}]
    ids = c.render(messages)
    for ask in (lambda: c.generate(ids, max_new_tokens=4), lambda: c.chat(messages, max_new_tokens=4)):
        c.flush_cache()
        c.generate(ids[:-5], max_new_tokens=1)  # a recurrent state is kept where a request ended
        assert ask().cached_tokens == len(ids) - 5
        c.flush_cache()
        assert ask().cached_tokens == 0
    limit = c.token_limit()
    with pytest.raises(RequestFailed, match=r"status 400: .*context length") as caught:
        c.generate([5] * (limit + 10), max_new_tokens=4)
    assert caught.value.kind == "rejected"
    with pytest.raises(RequestFailed, match="status 401"):
        Client(engine.url, "wrong key").generate(ids, max_new_tokens=4)
    text = "sieben Äpfel, drei Birnen"
    assert c.detokenize(c.tokenize(text, special=False)) == text
