"""Measures nano Ling as it is served: `python -m sparkmoe.nano.evaluate`; the last line is one JSON object.

Accuracy is greedy, without examples, thinking on, from a running SGLang server. Accept length is tokens a verification,
with three drafts, on problems and on prompts of random tokens: a draft is only as good as its text is predictable.
Agreement compares the server with `nano.model` token by token: same most likely token, same log-probability, and the
number of drafts accepted in every round, which the reference predicts without drafting: it knows from every position
what would have been drafted there. What the SwiGLU limits are worth is the reference against itself without them.

Everything is kept as a run (`--results`): the figures in `result.json`, the conditions in `manifest.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkmoe.client import Client
from sparkmoe.engine import Engine
from sparkmoe.extraction import extract
from sparkmoe.nano import bundle, problems
from sparkmoe.nano.model import MLP, Experts, Ling, load_checkpoint
from sparkmoe.results import Run

MAX_NEW_TOKENS = 320


@dataclass(frozen=True)
class Served:
    """One greedy generation: prompt and reply ids, the server's figures for it."""

    ids: list[int]
    prompt_tokens: int
    logprobs: list[float]  # of ids[1:], each given the tokens before it
    best: list[int]  # most likely tokens in the same places
    histogram: list[int] | None  # rounds with 0, 1, … accepted drafts


def accuracy(client: Client, split: str, count: int, parallel: int, thinking: bool = True) -> dict[str, float]:
    """Share of right answers of `count` problems, and the share that did not end within MAX_NEW_TOKENS."""
    asked = problems.split(split, count)

    def one(problem: problems.Problem) -> tuple[bool, bool]:
        message = [{"role": "user", "content": problem.question}]
        sample = client.chat(message, max_new_tokens=MAX_NEW_TOKENS, thinking=thinking)
        found = extract(sample.text)
        return found is not None and found.number == problem.result, sample.finish_reason == "length"

    with ThreadPoolExecutor(parallel) as pool:
        marks = list(pool.map(one, asked))
    return {"accuracy": sum(r for r, _ in marks) / count, "truncated": sum(t for _, t in marks) / count}


def accept_length(client: Client, prompts: Sequence[list[int]], max_new_tokens: int, **sampling: Any) -> float:
    """Tokens per verification, over all prompts together."""
    tokens = rounds = 0
    for prompt in prompts:
        sample = client.generate(prompt, max_new_tokens=max_new_tokens, **sampling)
        tokens, rounds = tokens + sample.completion_tokens, rounds + (sample.spec_verify_ct or 0)
    return tokens / max(1, rounds)


def generate(engine: Engine, prompt: list[int]) -> Served:
    """A greedy reply, then the log-probabilities of prompt and reply in one prefill.

    The cache is flushed first. A prefix that two prompts share is kept once, with the first prompt's draft keys, and
    the last of those depends on the token behind the prefix. SGLang's tree keys drafts by pairs of tokens for that
    reason, but not where it keeps recurrent states (`unified_tree_core`): another prompt's drafts would differ there.
    """
    engine.client().flush_cache()
    meta = _post(engine, {"input_ids": prompt, "sampling_params": _greedy(MAX_NEW_TOKENS)})
    ids = prompt + meta["output_ids"]
    scored = _post(engine, {
        "input_ids": ids, "sampling_params": _greedy(1), "return_logprob": True, "logprob_start_len": 0,
        "top_logprobs_num": 1,
    })  # fmt: skip
    given, top = scored["meta_info"]["input_token_logprobs"], scored["meta_info"]["input_top_logprobs"]
    histogram = meta["meta_info"].get("spec_correct_drafts_histogram")
    return Served(ids, len(prompt), [x[0] for x in given[1:]], [x[0][1] for x in top[1:]], histogram)


def _greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens}


def _post(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {engine.api_key}"}
    request = urllib.request.Request(f"{engine.url}/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.loads(response.read())


@torch.no_grad()
def agreement(model: Ling, served: Sequence[Served], draft_steps: int) -> dict[str, float]:
    """How the server differs from the reference in log-probabilities, most likely tokens, accepted drafts."""
    worst, same, total, rounds_same = 0.0, 0, 0, 0
    for s in served:
        ids = torch.tensor([s.ids])
        hidden = model.hidden(ids)
        logprobs = model.lm_head(hidden).float().log_softmax(-1)[0, :-1]
        given = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        worst = max(worst, float((given - torch.tensor(s.logprobs)).abs().max()))
        same += int((logprobs.argmax(-1) == torch.tensor(s.best)).sum())
        total += len(s.best)
        longer = ids
        for _ in range(draft_steps):  # the last round is verified beyond the end
            longer = torch.cat([longer, model(longer)[:, -1:].argmax(-1)], 1)
        after = model.drafts(longer, model.hidden(longer), draft_steps)
        drafts = [model.lm_head(h)[0].argmax(-1) for h in after]
        predicted = predicted_histogram(longer[0].tolist(), s.prompt_tokens, len(s.ids), drafts)
        rounds_same += predicted == s.histogram
    return {
        "argmax_agreement": same / total,
        "largest_logprob_difference": worst,
        "tokens_compared": total,
        "accept_histograms_equal": rounds_same / len(served),
    }


def predicted_histogram(ids: list[int], start: int, end: int, drafts: list[Tensor]) -> list[int]:
    """Rounds with 0…K accepted drafts of a greedy server whose reply is ids[start:end].

    `ids` goes on K tokens behind `end`; drafts[s][p] is what step s drafts for position p + s + 2. The prefill gives
    the first token; a round from p drafts K tokens behind p + 1 and yields one more than it accepts.
    """
    counts: Counter[int] = Counter()
    base = start - 1
    while base + 2 < end:
        accepted = 0
        while accepted < len(drafts) and int(drafts[accepted][base]) == ids[base + accepted + 2]:
            accepted += 1
        counts[accepted] += 1
        base += accepted + 1
    return [counts[i] for i in range(len(drafts) + 1)]


@torch.no_grad()
def worth_of_limits(model: Ling, served: Sequence[Served]) -> dict[str, float]:
    """Without the SwiGLU limits: mean |change| of the reply's log-probabilities, share of changed argmax tokens."""
    moved: list[Tensor] = []
    other: list[Tensor] = []
    limited = [m for m in model.modules() if isinstance(m, MLP | Experts) and m.limit is not None]
    limits = [m.limit for m in limited]
    for s in served:
        ids = torch.tensor([s.ids])
        with_limit = model(ids).log_softmax(-1)[0, s.prompt_tokens - 1 : -1]
        for m in limited:
            m.limit = None
        without = model(ids).log_softmax(-1)[0, s.prompt_tokens - 1 : -1]
        for m, limit in zip(limited, limits, strict=True):
            m.limit = limit
        true = ids[0, s.prompt_tokens :, None]
        moved.append((with_limit.gather(1, true) - without.gather(1, true)).abs().flatten())
        other.append((with_limit.argmax(-1) != without.argmax(-1)).float())
    return {
        "mean_logprob_change": float(torch.cat(moved).mean()),
        "argmax_changed": float(torch.cat(other).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="an unquantized checkpoint; left out: the bundled one")
    parser.add_argument("--count", type=int, default=500, help="problems a split")
    parser.add_argument("--prompts", type=int, default=100, help="prompts for agreement and accept length")
    parser.add_argument("--thinking-off", type=int, default=200, help="problems asked once more with thinking off")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--draft-steps", type=int, default=3)
    parser.add_argument("--splits", default=",".join(problems.SPLITS), help="comma-separated, may be empty")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the run's folder is made")
    args = parser.parse_args()
    folder = args.model or bundle.folder("bf16")
    run = Run.create(args.results, name="nano-evaluate", model=folder.name)
    result: dict[str, Any] = {"model": str(folder.name), "count": args.count, "draft_steps": args.draft_steps}
    rng = random.Random(0)
    with Engine("nextn", "cpu", folder, show=False) as engine:
        client = engine.client()
        asked = problems.split("instances", args.prompts, seed=2)
        prompts = [client.render([{"role": "user", "content": p.question}], thinking=True) for p in asked]
        noise = [[rng.randrange(2036) for _ in range(64)] for _ in range(max(1, args.prompts // 5))]
        result["accept_length"] = {
            "problems_t0.6": accept_length(client, prompts, MAX_NEW_TOKENS, temperature=0.6, top_p=0.95),
            "problems_greedy": accept_length(client, prompts, MAX_NEW_TOKENS),
            "random_tokens_t0.6": accept_length(client, noise, 128, temperature=0.6, top_p=0.95, ignore_eos=True),
        }
        print(json.dumps(result), flush=True)  # noqa: T201
        served = [generate(engine, p) for p in prompts]
        for split in filter(None, args.splits.split(",")):
            result[split] = accuracy(client, split, args.count, args.parallel)
            print(json.dumps({split: result[split]}), flush=True)  # noqa: T201
        if args.thinking_off:
            off = accuracy(client, "instances", args.thinking_off, args.parallel, thinking=False)
            result["instances, thinking off"] = off
    model = load_checkpoint(folder)
    result["agreement"] = agreement(model, served, args.draft_steps)
    result["limits"] = worth_of_limits(model, served[:50])
    run.write_json("result.json", result)
    print(json.dumps(result | {"run": str(run.path)}))  # noqa: T201


if __name__ == "__main__":
    main()
