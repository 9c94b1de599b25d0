"""A stand-in for an SGLang server: real sockets, made-up tokens, and every misbehaviour a client has to survive.

`FakeServer()` serves from threads of this process. `python tests/fake_server.py --gap-ms 2` serves from a process of
its own and prints its address. The answer depends on the prompt and the position alone, so two requests agree. Token
ids are Unicode code points, so one character is one token.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os.path
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BOS = 1
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass
class Behaviour:
    """How the server answers. The `*_after` fields count events that were sent properly before it goes wrong."""

    first_ms: float = 0.0
    gap_ms: float = 0.0
    tokens_per_event: tuple[int, ...] = (1, 3, 2)
    drafts: int = 3  # 0: no speculative decoding reported
    incremental: bool = False  # /generate sends increments instead of the answer so far
    reasoning_field: str = "reasoning_content"
    reasoning_tokens: int = 0
    running_usage: bool = True
    final_usage: bool = True
    swallow_first: bool = False  # the chat's reasoning parser holds back the text of the first event
    prefix_cache: bool = True
    stop_at: int | None = None  # end of text after so many tokens
    status: int = 200
    status_body: str = '{"object":"error","message":"The input is longer than the context length (8192).","code":400}'
    cut_writes: int = 0  # write each event in pieces of so many bytes
    stall_after: int | None = None
    drop_after: int | None = None
    die_after: int | None = None
    malformed_after: int | None = None
    error_after: int | None = None
    abort_after: int | None = None
    end_after: int | None = None  # a proper end of the stream, without finish reason
    fail_first: int = 0  # so many requests are dropped before the server behaves
    trace: bytes | None = None  # what the profiler leaves when it is stopped


class FakeServer:
    def __init__(self, behaviour: Behaviour | None = None, api_key: str | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.api_key = api_key
        self.requests: list[dict[str, Any]] = []
        self.seen: list[list[int]] = []
        self.flushes = 0
        self.profile: dict[str, Any] = {}
        outer = self

        class Handler(_Handler):
            fake = outer

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def die(self) -> None:
        """As if the process was gone: nothing listens any more."""
        self.close()

    def answer(self, prompt: list[int], n: int) -> list[int]:
        digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
        return [ord(LETTERS[(digest[i % 32] + i) % len(LETTERS)]) for i in range(n)]


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._plain(json.dumps({"version": "fake", "internal_states": [{}], "max_total_num_tokens": 40000}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        behaviour, path = self.fake.behaviour, self.path.split("?")[0]
        if self.fake.api_key and self.headers.get("Authorization") != f"Bearer {self.fake.api_key}":
            return self._plain('{"error":"Unauthorized"}', 401)
        if path == "/flush_cache":
            self.fake.flushes += 1
            self.fake.seen.clear()
            return self._plain("Cache flushed.")
        if path == "/tokenize":
            turns = [f"<{m['role']}>{m['content']}" for m in body.get("messages", ())]
            text = body["prompt"] if "prompt" in body else "".join(turns)
            tokens = [BOS] * body.get("add_special_tokens", False) + [ord(c) for c in text]
            return self._plain(json.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": 65536}))
        if path == "/detokenize":
            return self._plain(json.dumps({"text": "".join(map(chr, body["tokens"]))}))
        if path == "/start_profile":
            self.fake.profile = body
            return self._plain("Start profiling.")
        if path == "/stop_profile":
            folder, name = Path(self.fake.profile["output_dir"]), f"{self.fake.profile['profile_id']}-TP-0"
            folder.mkdir(parents=True, exist_ok=True)
            if behaviour.trace is not None:
                (folder / f"{name}.trace.json.gz").write_bytes(behaviour.trace)
            return self._plain("Stop profiling.")
        self.fake.requests.append(body)
        if behaviour.status != 200:
            return self._plain(behaviour.status_body, behaviour.status)
        if behaviour.fail_first:
            behaviour.fail_first -= 1
            return self._hang_up()
        if path == "/generate":
            prompt = body.get("input_ids") or [ord(c) for c in body["text"]]
            self._stream(body, prompt, body["sampling_params"]["max_new_tokens"], self._generate_events)
        else:
            prompt = [ord(c) for c in json.dumps(body["messages"])]
            self._stream(body, prompt, body["max_completion_tokens"], self._chat_events)
        return None

    def _plain(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _write(self, data: str) -> None:
        raw = data.encode()
        framed = b"%x\r\n%s\r\n" % (len(raw), raw)
        step = self.fake.behaviour.cut_writes or len(framed)
        for i in range(0, len(framed), step):
            self.wfile.write(framed[i : i + step])
            if step < len(framed):
                time.sleep(0.001)

    def _stream(self, body: dict[str, Any], prompt: list[int], limit: int, events: Any) -> None:
        b = self.fake.behaviour
        cached = 0
        if b.prefix_cache:
            shared = [len(os.path.commonprefix([old, prompt])) for old in self.fake.seen]  # noqa: RUF071
            cached = min(max(shared, default=0), len(prompt) - 1)
            self.fake.seen.append(prompt)
        n = min(limit, b.stop_at or limit)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        meta = {"id": "1", "prompt_tokens": len(prompt), "cached_tokens": cached, "finish_reason": None}
        time.sleep(b.first_ms / 1e3)
        sent, sizes = 0, itertools.cycle(b.tokens_per_event)
        for index in itertools.count():
            if index and b.gap_ms:
                time.sleep(b.gap_ms / 1e3)
            sent = min(n, sent + next(sizes))
            if self._misbehave(index):
                return
            last = sent == n
            if last:
                meta["finish_reason"] = {"type": "length" if n == limit else "stop", "length": n}
                if b.drafts:
                    verifies = index or 1
                    histogram = [verifies] + [0] * b.drafts
                    meta |= {"spec_verify_ct": verifies, "spec_accept_length": n / verifies}
                    meta |= {"spec_correct_drafts_histogram": histogram}
            for text in events(body, meta | {"completion_tokens": sent}, self.fake.answer(prompt, n)[:sent], last):
                self._write(text)
            if last:
                break
        self._write("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _misbehave(self, index: int) -> bool:
        b = self.fake.behaviour
        if index == b.stall_after:
            time.sleep(3.0)
            self._hang_up()
        elif index == b.drop_after:
            self._hang_up()
        elif index == b.die_after:
            self.fake.die()
            self._hang_up()
        elif index == b.malformed_after:
            self._write('data: {"text": "abc", "output_ids": [1, 2\n\ndata: [DONE]\n\n')
            self.wfile.write(b"0\r\n\r\n")
        elif index == b.error_after:
            self._write('data: {"error": {"message": "out of memory in the KV pool", "code": 500}}\n\ndata: [DONE]\n\n')
            self.wfile.write(b"0\r\n\r\n")
        elif index == b.abort_after:
            meta = {"completion_tokens": 1, "finish_reason": {"type": "abort", "message": "aborted by the scheduler"}}
            self._write(
                "data: " + json.dumps({"text": "", "output_ids": [], "meta_info": meta}) + "\n\ndata: [DONE]\n\n"
            )
            self.wfile.write(b"0\r\n\r\n")
        elif index == b.end_after:
            self.wfile.write(b"0\r\n\r\n")
        else:
            return False
        return True

    def _generate_events(self, body: dict[str, Any], meta: dict[str, Any], ids: list[int], last: bool) -> list[str]:
        start = self._before if self.fake.behaviour.incremental and hasattr(self, "_before") else 0
        self._before = len(ids)
        if body["return_logprob"]:
            meta = {"output_token_logprobs": [[-0.5, i, None] for i in ids[start:]], **meta}
        event = {"text": "".join(map(chr, ids[start:])), "output_ids": ids[start:], "meta_info": meta}
        event["sent_ns"] = time.perf_counter_ns()
        return ["data: " + json.dumps(event) + "\n\n"]

    def _chat_events(self, body: dict[str, Any], meta: dict[str, Any], ids: list[int], last: bool) -> list[str]:
        b, out = self.fake.behaviour, []
        usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}

        def event(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> None:
            choices = [{"index": 0, "delta": delta, "finish_reason": finish}] if delta is not None else []
            out.append("data: " + json.dumps({"id": "1", "choices": choices, **more}) + "\n\n")

        start = getattr(self, "_before", 0)
        if not start:
            event({"role": "assistant", "content": ""})
        self._before = len(ids)
        thought, content = (ids[start : b.reasoning_tokens], ids[max(start, b.reasoning_tokens) :])
        running = {"usage": usage} if b.running_usage else {}
        if not (b.swallow_first and not start):
            if thought:
                event({b.reasoning_field: "".join(map(chr, thought))}, **running)
            if content:
                event({"content": "".join(map(chr, content))}, **running)
        if last:
            event({}, finish=meta["finish_reason"]["type"])
            extension: dict[str, Any] = {"output_ids": [ids]}
            if meta["cached_tokens"]:
                extension["cached_tokens_details"] = {"device": meta["cached_tokens"], "host": 0}
            if b.drafts:
                extension["spec_tokens_details"] = {k: v for k, v in meta.items() if k.startswith("spec_")}
            event(sglext=extension)
            if b.final_usage:
                event(usage=usage)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gap-ms", type=float, default=2.0)
    parser.add_argument("--first-ms", type=float, default=5.0)
    options = parser.parse_args()
    server = FakeServer(Behaviour(gap_ms=options.gap_ms, first_ms=options.first_ms, prefix_cache=False))
    print(server.url, flush=True)  # noqa: T201
    threading.Event().wait()


if __name__ == "__main__":
    main()
