"""Ask the server one question, and time the answer without disturbing it.

A token's arrival is the moment its bytes reach this process, so nothing may stand between the socket and the clock: the
reader takes what the socket gives, reads `perf_counter_ns`, keeps the bytes, and goes back to the socket. Parsing waits
until the last byte is in (`sample.py`). That matters because `/generate` repeats the whole answer in every event: a
client that parses while it reads spends more and more time a chunk, and reports it as the server's. TTFT starts when
the request is handed to an open connection.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkmoe.errors import EngineError
from sparkmoe.sample import Arrivals, Failure, RequestFailed, Sample, finish, read_chat, read_generate, refusal

__all__ = ["Client", "RequestFailed", "Sample", "chat_body", "generate_body", "prompt_hash"]

_HELD_LIMIT_BYTES = 64 << 20


class Client:
    """Talks to one server. Holds no connection between calls, so threads may share it.

    `timeout_s` is the longest silence allowed, before the first byte as between two.
    """

    def __init__(self, url: str, api_key: str | None = None, *, timeout_s: float = 300.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"{url!r} is no server address; expected something like http://127.0.0.1:30000")
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Sample:
        """Stream one completion over `/generate`; keywords as in `generate_body`. Raises `RequestFailed`."""
        return self.start_generate(prompt, **sampling)()

    def start_generate(self, prompt: str | Sequence[int], **sampling: Any) -> Callable[[], Sample]:
        """Stream to the end and return the parsing as a call, for when several requests are timed side by side."""
        arrivals = self._stream("/generate", generate_body(prompt, **sampling), prompt_hash(prompt))
        return lambda: finish(arrivals, read_generate)

    def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Sample:
        """Stream one answer over `/v1/chat/completions`; keywords as in `chat_body`. Raises `RequestFailed`."""
        hashed = prompt_hash(json.dumps(list(messages), sort_keys=True))
        return finish(self._stream("/v1/chat/completions", chat_body(messages, **sampling), hashed), read_chat)

    def flush_cache(self) -> None:
        """Empty the prefix cache; waits up to 30 s for running requests to end."""
        self._call("POST", "/flush_cache?timeout=30")

    def server_info(self) -> dict[str, Any]:
        return json.loads(self._call("GET", "/server_info"))

    def start_profile(self, folder: Path | str, name: str, *, activities: Sequence[str] = ("CPU",)) -> None:
        """Start PyTorch's profiler in the server; the trace will be `folder/name-TP-0.trace.json.gz`, a file per rank.

        `activities`: CPU, GPU. Neither Python stacks nor shapes are recorded, which would slow the server down further.
        """
        body = {"output_dir": str(folder), "profile_id": name, "activities": list(activities)}
        self._call("POST", "/start_profile", body | {"with_stack": False, "record_shapes": False})

    def stop_profile(self) -> None:
        """Stop it; returns once the trace is written."""
        self._call("POST", "/stop_profile")

    def simulate_accept_length(self, tokens: float) -> None:
        """Make every verify step accept `tokens` on average, whatever was drafted (0: what the drafts are worth).

        For random weights. The server must have been started with SPARKMOE_ACCEPT_SWITCH=1 and a draft that long.
        """
        answer = json.loads(self._call("POST", "/set_internal_state", {"server_args": {"simulate_acc_len": tokens}}))
        if not answer or not all(answer):
            raise RequestFailed("rejected", f"the server does not simulate an accept length of {tokens:g}: it has no "
                                "draft that long, or was started without SPARKMOE_ACCEPT_SWITCH=1")  # fmt: skip

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`, with the model's special tokens (as a begin-of-text) added or not."""
        return self._tokenized({"prompt": text, "add_special_tokens": special})["tokens"]

    def render(self, messages: Sequence[dict[str, Any]], *, thinking: bool = True) -> list[int]:
        """Token ids of a conversation as the model's chat template would put it to the model."""
        body = {"messages": list(messages), "chat_template_kwargs": {"enable_thinking": thinking}}
        return self._tokenized(body)["tokens"]

    def token_limit(self) -> int:
        """Prompt and answer together: the context length, or the KV pool where that is smaller."""
        pool = self.server_info().get("max_total_num_tokens") or sys.maxsize
        return min(self._tokenized({"prompt": "a"})["max_model_len"], pool)

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        return json.loads(self._call("POST", "/tokenize", body))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return json.loads(self._call("POST", "/detokenize", {"tokens": list(token_ids)}))["text"]

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self.timeout_s)
        try:
            connection.connect()
        except OSError as error:
            why = error.strerror or str(error)
            message = f"no server answers at {self.url} ({why}); start one with `sparkmoe serve`"
            raise RequestFailed("refused", message) from None
        return connection

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        connection = self._connect()
        try:
            connection.request(method, path, json.dumps(body).encode() if body is not None else None, self._headers)
            response = connection.getresponse()
            content = response.read()
        except TimeoutError:
            raise RequestFailed("stalled", f"{self.url}{path}: no answer within {self.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(*self._lost(error, f"on {path}")) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise RequestFailed(*refusal(response.status, content))
        return content

    def _stream(self, path: str, body: dict[str, Any], hashed: str) -> Arrivals:
        payload = json.dumps(body).encode()
        arrivals = Arrivals(hashed, time.time())
        pieces, held, clock = arrivals.pieces, 0, time.perf_counter_ns
        try:
            connection = self._connect()
        except RequestFailed as error:
            arrivals.failure = (error.kind, str(error))
            return arrivals
        try:
            arrivals.sent_ns = clock()
            connection.request("POST", path, payload, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                arrivals.failure = refusal(response.status, response.read())
                return arrivals
            while piece := response.read1(1 << 20):
                pieces.append((clock(), piece))
                held += len(piece)
                if held > _HELD_LIMIT_BYTES and path == "/generate":
                    arrivals.let_go()
                    pieces, held = arrivals.pieces, 0
        except TimeoutError:
            arrivals.failure = ("stalled", f"silent for {self.timeout_s:g} s after {len(pieces)} pieces of the answer")
        except (OSError, http.client.HTTPException) as error:
            arrivals.failure = self._lost(error, f"after {len(pieces)} pieces of the answer")
        finally:
            connection.close()
        return arrivals

    def _lost(self, error: Exception, when: str) -> tuple[Failure, str]:
        """Was only this connection lost, or the server with it?"""
        try:
            socket.create_connection((self._host, self._port or (443 if self._tls else 80)), timeout=2.0).close()
        except OSError:
            return "died", f"the server at {self.url} died {when}; its log says why"
        return "dropped", f"connection to {self.url} lost {when} ({type(error).__name__}); the server still runs"


def prompt_hash(prompt: str | Sequence[int]) -> str:
    """SHA-256 of a prompt (of the JSON list, for token ids), the first 16 hex digits."""
    text = prompt if isinstance(prompt, str) else json.dumps(list(prompt))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def generate_body(
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = -1,
    seed: int | None = None,
    ignore_eos: bool = False,
    return_logprob: bool = False,
    stop: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The JSON of one streamed `/generate` request. `seed` counts only with deterministic inference switched on."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }
    sampling |= {"ignore_eos": ignore_eos} | ({"sampling_seed": seed} if seed is not None else {})
    sampling |= {"stop": list(stop)} if stop else {}
    key, value = ("text", prompt) if isinstance(prompt, str) else ("input_ids", list(prompt))
    return {key: value, "sampling_params": sampling, "stream": True, "return_logprob": return_logprob}


def chat_body(
    messages: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = -1,
    seed: int | None = None,
    ignore_eos: bool = False,
    thinking: bool = True,
) -> dict[str, Any]:
    """The JSON of one streamed chat request that asks for everything `Sample` records."""
    body: dict[str, Any] = {
        "messages": list(messages),
        "max_completion_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "ignore_eos": ignore_eos,
        "chat_template_kwargs": {"enable_thinking": thinking},
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
        "return_cached_tokens_details": True,
        "return_output_ids_in_sglext": True,
    }
    return body | ({"seed": seed} if seed is not None else {})
