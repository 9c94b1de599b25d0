"""Training rows for nano Ling: text from the generators, tokenized, weighted, packed into batches of a few lengths.

A row is one conversation. Most are a word problem with thinking on; some with thinking off (the number at once, which
is as hard as it sounds), some as bare `Question: … Answer: …` text or as a conversation of several problems, some
prose and code. Every token is a target, but those of the reply weigh ten times those of the prompt: the numbers of a
question cannot be predicted, and trying hard would waste the model.

Rows are made in shards by worker processes and used in the order of the shards, so the same seed gives the same batches
whatever the number of workers. A batch has one of `LENGTHS` tokens a row, so that a step's shapes are few and fixed.
"""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sparkmoe.nano import problems, sentences, texts, tokenizer

LENGTHS = (192, 384)
REPLY, PROMPT = 10, 1  # weights of a target, times 10
SHARD_ROWS = 4096
VOCABULARY = 2048
TOKENIZER = Path(__file__).parent / "bundle" / "fp4" / "tokenizer.json"
Segments = list[tuple[str, int]]


def _row(rng: random.Random, source: Iterator[problems.Problem]) -> Segments:
    """One conversation as (text, weight) segments, cut where a tokenizer cuts anyway."""
    kind = rng.random()
    if kind < 0.78:
        p = next(source)
        return [(tokenizer.prompt(p.question), PROMPT), (f"{p.reasoning}</think>{p.reply}<|role_end|>", REPLY)]
    if kind < 0.86:
        p = next(source)
        return [(tokenizer.prompt(p.question, thinking=False), PROMPT), (f"{p.reply}<|role_end|>", REPLY)]
    if kind < 0.89:  # a conversation: earlier replies have lost their thinking, as the chat template has it
        row: Segments = [("<role>SYSTEM</role>detailed thinking on<|role_end|>", PROMPT)]
        turns = [next(source) for _ in range(rng.randint(2, 3))]
        for p in turns[:-1]:
            row += [(f"<role>HUMAN</role>{p.question}<|role_end|><role>ASSISTANT</role>{p.reply}<|role_end|>", PROMPT)]
        p = turns[-1]
        row += [(f"<role>HUMAN</role>{p.question}<|role_end|><role>ASSISTANT</role><think>", PROMPT)]
        return [*row, (f"{p.reasoning}</think>{p.reply}<|role_end|>", REPLY)]
    if kind < 0.92:
        row = []
        for i in range(rng.randint(1, 3)):
            p = next(source)
            row += [(("\n\n" if i else "") + f"Question: {p.question}\nAnswer:", PROMPT), (f" {p.answer}", REPLY)]
        return [*row, ("<|endoftext|>", REPLY)]
    ask, reply = texts.prose(rng) if kind < 0.97 else texts.code(rng)
    thinking = rng.random() < 0.5
    thought = "</think>" if thinking else ""
    return [(tokenizer.prompt(ask, thinking), PROMPT), (f"{thought}{reply}<|role_end|>", REPLY)]


@dataclass
class Rows:
    """Rows of one length T: ids [n, T] and the weight of each as a target, [n, T]."""

    ids: NDArray[np.int16]
    weights: NDArray[np.uint8]


def shard(path: Path, seed: int, index: int) -> dict[int, Rows]:
    """Rows of shard `index` by length. `path` is a tokenizer.json."""
    tok = Tokenizer.from_file(str(path))
    rng = random.Random(f"rows-{seed}-{index}")
    source = problems.training(rng.randrange(problems.MAX_SEED))
    rows = [_row(rng, source) for _ in range(SHARD_ROWS)]
    encoded = iter(tok.encode_batch_fast([text for row in rows for text, _ in row], add_special_tokens=False))
    by_length: dict[int, list[tuple[list[int], list[int]]]] = {n: [] for n in LENGTHS}
    for row in rows:
        ids: list[int] = []
        weights: list[int] = []
        for _, weight in row:
            piece = next(encoded).ids
            ids += piece
            weights += [weight] * len(piece)
        fit = next((n for n in LENGTHS if len(ids) <= n), None)
        if fit is not None:  # a row longer than the longest length is dropped
            by_length[fit].append((ids, weights))
    out = {}
    for n, kept in by_length.items():
        a, w = np.zeros((len(kept), n), np.int16), np.zeros((len(kept), n), np.uint8)
        for i in range(len(kept)):
            j, at = i, 0
            while at < n:  # behind the end come the next rows: no token is padding, and a context may hold old matter
                ids, weights = kept[j % len(kept)]
                a[i, at : at + len(ids)], w[i, at : at + len(ids)] = ids[: n - at], weights[: n - at]
                at, j = at + len(ids), j + 1
        out[n] = Rows(a, w)
    return out


class Batches:
    """Batches without end, each `tokens` // T rows of one length T, in an order that `seed` alone decides.

    `state` is enough to go on from: `Batches(…, state=state)` yields what the first one would have yielded next.
    """

    def __init__(self, path: Path, seed: int, tokens: int, workers: int, state: dict[str, Any] | None = None) -> None:
        self.path, self.seed, self.tokens = path, seed, tokens
        state = state or {"shard": 0, "ready": [], "waiting": {}}
        self.shard: int = state["shard"]
        self.ready: deque[Rows] = deque(state["ready"])
        self.waiting: dict[int, Rows] = dict(state["waiting"])
        self.pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        self.ahead: deque[Future[dict[int, Rows]]] = deque()
        self.limit = 3 * workers

    @property
    def state(self) -> dict[str, Any]:
        return {"shard": self.shard, "ready": list(self.ready), "waiting": self.waiting}

    def __next__(self) -> Rows:
        while len(self.ahead) < self.limit:
            self.ahead.append(self.pool.submit(shard, self.path, self.seed, self.shard + len(self.ahead)))
        while not self.ready:
            made = self.ahead.popleft().result()
            self.shard += 1
            for n, rows in made.items():
                held = self.waiting.get(n)
                if held is not None:
                    rows = Rows(np.concatenate([held.ids, rows.ids]), np.concatenate([held.weights, rows.weights]))
                size = self.tokens // n
                full = len(rows.ids) // size * size
                self.ready += [Rows(rows.ids[i : i + size], rows.weights[i : i + size]) for i in range(0, full, size)]
                self.waiting[n] = Rows(rows.ids[full:], rows.weights[full:])
        return self.ready.popleft()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """The bundled tokenizer: merges from 20,000 rows of the generators and every word they can use."""
    rng = random.Random(f"tokenizer-{seed}")
    source = problems.training(seed)
    rows = ["".join(text for text, _ in _row(rng, source)) for _ in range(20_000)]
    kinds = [*sentences.START.values(), *sentences.EVENT.values(), *sentences.END.values()]
    unseen = [text for kind in kinds for text in kind.unseen]
    marked = [*tokenizer.SPECIAL, *tokenizer.MARKERS]
    plain = []
    for row in rows:
        for mark in marked:
            row = row.replace(mark, "\n")
        plain.append(row)
    common = [f" {w} {w}ing {w}ed {w}s" for w in (*texts.NOUNS, *texts.ADJECTIVES, *texts.VERBS, *texts.ADVERBS)]
    return tokenizer.train([*plain, *unseen * 20, *common * 20], VOCABULARY)
