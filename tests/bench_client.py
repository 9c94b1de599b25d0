"""Is the client right? Its delay against a bare socket, and its times against SGLang's own benchmark.

    python tests/bench_client.py delay
    python tests/bench_client.py sglang --recipe baseline --recipe nextn

`delay` streams from a fake server in another process that puts its clock into every event (both processes read
CLOCK_MONOTONIC), once into a socket that does nothing but `recv` and stamp, once into the client, in turns. The delay
is what the client adds to the median time from server to stamp.

`sglang` starts a real server for a recipe and measures the same prompts with `sglang.benchmark.serving` (its own
command line, called in this process because importing it takes 20 s) and with the client, in turns. Each pair of runs
is a unit: the interval is that of the ratio of their means. The server keeps to the first core and whoever measures
to the last: a client that works harder would otherwise take a core from the server, which then computes with one thread
less. Both rest for a second before they ask. The last line is one JSON object, kept as a run too.

A server on a shared machine is slower in one minute than in the next, by more than a client could ever be wrong. So the
server's own account is read too: SGLang's metrics say when it handed out the first and the last token of each run.
`ratio` compares what the clients saw; `controlled` compares what they saw in units of what the server says it did (a
control variate: the server cannot know who asks, so the expectation stays and the noise goes); `server` is that part.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fake_server
from sparkmoe import stats
from sparkmoe.client import Client, generate_body, prompt_hash
from sparkmoe.engine import Engine
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run
from sparkmoe.workload import Prompt, synthetic


@contextlib.contextmanager
def fake_process(gap_ms: float) -> Iterator[str]:
    """A fake server in a process of its own; gives its address."""
    process = subprocess.Popen(
        [sys.executable, fake_server.__file__, "--gap-ms", str(gap_ms)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def bare_delays(url: str, body: dict[str, Any]) -> list[float]:
    """Time from server to stamp of each event, in µs, for a reader that only receives and stamps."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    pieces = []
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + payload)
        while piece := connection.recv(1 << 20):
            pieces.append((time.perf_counter_ns(), piece))
    return _delays([(at, line) for at, piece in pieces for line in piece.split(b"\n") if line.startswith(b"data: {")])


def client_delays(url: str, body: dict[str, Any]) -> list[float]:
    """The same for the client."""
    arrivals = Client(url)._stream("/generate", body, prompt_hash(""))
    return _delays([(at, b"data: " + data) for at, data in arrivals.events()[0] if data.startswith(b"{")])


def _delays(events: list[tuple[int, bytes]]) -> list[float]:
    return [(at - json.loads(line[6:])["sent_ns"]) / 1e3 for at, line in events]


def delay(runs: int = 8, tokens: int = 256, gap_ms: float = 1.0) -> dict[str, Any]:
    """What the client adds to the median delay of an event, in µs, with its interval over pairs of runs."""
    body = generate_body("how late?", max_new_tokens=tokens)
    readers = {"bare": bare_delays, "client": client_delays}
    medians: dict[str, list[float]] = {name: [] for name in readers}
    with fake_process(gap_ms) as url:
        for read in readers.values():  # imports and the first connection
            read(url, body)
        for turn in range(runs):
            for name in sorted(readers, reverse=bool(turn % 2)):
                found = readers[name](url, body)
                assert len(found) >= tokens // 3, f"{name} reader saw {len(found)} events"
                medians[name].append(statistics.median(found))
    added = [client - bare for client, bare in zip(medians["client"], medians["bare"], strict=True)]
    interval = stats.summarize([[value] for value in added])
    return {
        "bare_us": statistics.median(medians["bare"]),
        "client_us": statistics.median(medians["client"]),
        "added_us": interval.as_dict(),
        "pairs_us": [list(pair) for pair in zip(medians["bare"], medians["client"], strict=True)],
    }


def official_run(url: str, api_key: str, model: Path, prompts: list[Prompt], folder: Path) -> dict[str, list[float]]:
    """TTFT and TPOT of each request in ms, as `python -m sglang.benchmark.serving` measures them."""
    from sglang.benchmark import serving

    data, out = folder / "prompts.jsonl", folder / "official.jsonl"
    turns = [[{"content": p.text}, {"content": "unused"}] for p in prompts]
    data.write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns))
    out.unlink(missing_ok=True)
    options = {
        "--backend": "sglang", "--base-url": url, "--model": model, "--dataset-name": "custom",
        "--dataset-path": data, "--num-prompts": len(prompts), "--sharegpt-output-len": prompts[0].max_new_tokens,
        "--max-concurrency": 1, "--warmup-requests": 0, "--output-file": out,
    }  # fmt: skip
    argv = ["serving", *(str(part) for option in options.items() for part in option)]
    os.environ["OPENAI_API_KEY"] = api_key
    before, sys.argv = sys.argv, [*argv, "--flush-cache", "--output-details", "--disable-tqdm"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            serving.cli_main()
    finally:
        sys.argv = before
    found = json.loads(out.read_text())
    wanted = [len(p.token_ids) for p in prompts]
    assert sorted(found["input_lens"]) == sorted(wanted), "the official benchmark cut the prompts otherwise"
    assert found["output_lens"] == [p.max_new_tokens for p in prompts]
    # Its TPOT: from the first token to the end of the stream, over all tokens but one.
    itls = [sum(gaps) / (n - 1) for gaps, n in zip(found["itls"], found["output_lens"], strict=True)]
    return {
        "ttft_ms": [1e3 * t for t in found["ttfts"]],
        "tpot_ms": [1e3 * t for t in itls],
    }


def server_account(engine: Any) -> tuple[float, float]:
    """Sums since the server's start, in ms: its time to first tokens, its time from first to last tokens."""
    request = urllib.request.Request(f"{engine.url}/metrics", headers={"Authorization": f"Bearer {engine.api_key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    names = ("sglang:time_to_first_token_seconds_sum", "sglang:inter_token_latency_seconds_sum")
    first, rest = (sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name)) for name in names)
    return 1e3 * first, 1e3 * rest


def own_run(client: Client, prompts: list[Prompt]) -> dict[str, list[float]]:
    """The same with the client, the official one's second of rest included: a rested server begins more slowly."""
    client.flush_cache()
    time.sleep(1.0)
    measured = [client.generate(p.text, max_new_tokens=p.max_new_tokens, ignore_eos=True) for p in prompts]
    assert all(s.cached_tokens == 0 for s in measured)
    assert [s.prompt_tokens for s in measured] == [len(p.token_ids) for p in prompts]
    return {
        "ttft_ms": [s.ttft_ms for s in measured if s.ttft_ms],
        "tpot_ms": [s.tpot_ms for s in measured if s.tpot_ms],
        "accept_length": [s.accept_length for s in measured if s.accept_length],
    }


def paired_ratio(new: np.ndarray, base: np.ndarray) -> dict[str, Any]:
    """new ÷ base with its interval over pairs of runs."""
    return stats.ratio([[x] for x in new], [[x] for x in base], paired=True).as_dict()


@dataclass
class Running:
    """A server that somebody else started."""

    url: str
    api_key: str
    model: Path


def against_sglang(
    server: contextlib.AbstractContextManager[Any], recipe: str, pairs: int, requests: int, shape: tuple[int, int]
) -> dict[str, Any]:
    """Ratio client ÷ official of the TTFT and TPOT medians, with intervals over interleaved pairs of runs."""
    runs: dict[str, list[dict[str, list[float]]]] = {"official": [], "client": []}
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    with server as engine, tempfile.TemporaryDirectory() as folder:
        os.sched_setaffinity(0, cores[-1:])
        client = Client(engine.url, engine.api_key)
        prompts = synthetic(client, n=requests, input_tokens=shape[0], output_tokens=shape[1], seed=3)
        for turn in range(pairs + 1):
            for name in random.Random(turn).sample(sorted(runs), 2):
                before = server_account(engine)
                if name == "client":
                    found = own_run(client, prompts)
                else:
                    found = official_run(engine.url, engine.api_key, engine.model, prompts, Path(folder))
                first, rest = (after - was for after, was in zip(server_account(engine), before, strict=True))
                found |= {"server_ttft_ms": [first / requests], "server_tpot_ms": [rest / requests / (shape[1] - 1)]}
                if turn:  # the first pair warms up
                    runs[name].append(found)
    result: dict[str, Any] = {
        "recipe": recipe,
        "pairs": pairs,
        "requests": requests,
        "shape": list(shape),
        "cores": cores,
    }
    for metric in ("ttft_ms", "tpot_ms"):
        new, base = (np.array([np.mean(run[metric]) for run in runs[name]]) for name in ("client", "official"))
        own = [np.array([run[f"server_{metric}"][0] for run in runs[name]]) for name in ("client", "official")]
        result[metric] = {
            "client": stats.summarize([[x] for x in new]).as_dict(),
            "official": stats.summarize([[x] for x in base]).as_dict(),
            "ratio": paired_ratio(new, base),
            "controlled": paired_ratio(new / own[0], base / own[1]),
            "server": paired_ratio(*own),
            "pairs": np.stack([new, base, *own], 1).round(4).tolist(),
        }
    os.sched_setaffinity(0, cores)
    accepted = [value for run in runs["client"] for value in run["accept_length"]]
    return result | {"accept_length": statistics.mean(accepted) if accepted else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["delay", "sglang"])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--model", type=Path, help="default: the machine's own model")
    parser.add_argument("--url", help="measure this server (with --enable-metrics) instead; needs --model")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the run's folder is made")
    options = parser.parse_args()
    run = Run.create(options.results, name=f"bench-client-{options.what}")
    if options.what == "delay":
        added = delay()
        run.write_json("result.json", added)
        print(json.dumps(added | {"run": str(run.path)}))  # noqa: T201
        return
    shape = (options.input_tokens, options.output_tokens)
    for recipe in options.recipe or ["baseline", "nextn"]:
        server: contextlib.AbstractContextManager[Any]
        if options.url:
            server = contextlib.nullcontext(Running(options.url, options.api_key, options.model))
        else:
            server = Engine(Recipe.named(recipe).with_(metrics=True), "auto", options.model, show=False)
        found = against_sglang(server, recipe, options.pairs, options.requests, shape)
        run.write_json(f"{recipe}.json", found)
        print(json.dumps(found | {"run": str(run.path)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
