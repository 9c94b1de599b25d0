"""Prompts that are the same for every arm, to the token.

A comparison is spoiled before it starts if its arms answer different questions, or the same question with a different
number of tokens, or if one arm finds half of it in the prefix cache. So a run has one prompt file, written once with
the tokenizer of the server and named by its SHA-256; what is sent are its token ids, never text that a server could cut
otherwise.

Two kinds of prompt answer different questions. *Synthetic* ones fix the number of tokens read and written exactly, so
time does not depend on what the model finds to say: 32,768 in and 2,048 out is the published shape. They are random
words, and say nothing about speculative decoding, where the accept length is a property of the text. *Real* prompts
(prose, code, mathematics, the miniature's own problems, or a JSONL file) are for that.

Prompts start with different tokens where the model's tokenizer allows, so that no two share a cached prefix even when
they run side by side; a chat template begins all prompts alike, and then only flushing the cache helps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from sparkmoe.client import Client
from sparkmoe.errors import DataError
from sparkmoe.machine import Machine

Kind = Literal["prose", "code", "maths"]
KINDS: tuple[Kind, ...] = ("prose", "code", "maths")
PUBLISHED = (32768, 2048)


@dataclass(frozen=True)
class Prompt:
    """One question: `token_ids` is what the server gets, `text` what a reader sees, `answer` the right one, if known.

    With `ignore_eos` the answer has exactly `max_new_tokens` tokens; otherwise at most as many.
    """

    id: str
    kind: str
    text: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    ignore_eos: bool = False
    answer: str | None = None


@dataclass(frozen=True)
class Workload:
    """The prompts of one run, and the SHA-256 of the file they are in."""

    prompts: tuple[Prompt, ...]
    sha256: str
    path: Path

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def write(cls, prompts: Iterable[Prompt], path: Path) -> Workload:
        """Write the prompt file of a run, whole or not at all. Raises DataError for no prompts or repeated ids."""
        prompts = tuple(prompts)
        ids = [prompt.id for prompt in prompts]
        if not prompts or len(set(ids)) < len(ids):
            raise DataError(f"a workload needs prompts with different ids; found {len(ids)}, {len(set(ids))} different")
        text = "".join(json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
        return cls(prompts, hashlib.sha256(text.encode()).hexdigest(), path)

    @classmethod
    def load(cls, path: Path, sha256: str | None = None) -> Workload:
        """Read a prompt file. Raises DataError if it is damaged, or is not the one named by `sha256`."""
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the prompt file {path}: {error.strerror}") from None
        found = hashlib.sha256(raw).hexdigest()
        if sha256 is not None and found != sha256:
            raise DataError(
                f"{path} is not the prompt file of this run: SHA-256 {found[:16]}… instead of {sha256[:16]}…; "
                "start a new run for new prompts"
            )
        try:
            records = [json.loads(line) for line in raw.decode().splitlines()]
            prompts = tuple(Prompt(**record | {"token_ids": tuple(record["token_ids"])}) for record in records)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is not a prompt file written by sparkmoe ({error})") from None
        return cls(prompts, found, path)


def shape_for(machine: Machine) -> tuple[int, int]:
    """Tokens in and out of a synthetic request that takes seconds here: as published on a Spark, shorter elsewhere."""
    return {"spark": PUBLISHED, "hopper": (8192, 1024), "cpu": (256, 128)}[machine.profile]


def synthetic(client: Client, *, n: int, input_tokens: int, output_tokens: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts of exactly `input_tokens` tokens of random words, each to be answered by exactly `output_tokens`."""
    _fits(client, input_tokens, output_tokens)
    words = sorted({word for _, text in shipped() for word in text.split() if word.isalpha()})
    rng, prompts = random.Random(seed), []
    for index, start in enumerate(_different_starts(client, [""] * n)):
        text, ids = start, list[int]()
        while len(ids) < input_tokens:
            text += " ".join(rng.choices(words, k=input_tokens)) + " "
            ids = client.tokenize(text, special=False)
        ids = ids[:input_tokens]
        name = f"synthetic-{input_tokens}-{output_tokens}-{seed}-{index}"
        prompts.append(Prompt(name, "synthetic", client.detokenize(ids), tuple(ids), output_tokens, ignore_eos=True))
    return prompts


def real(
    client: Client,
    *,
    kinds: Sequence[Kind] = KINDS,
    n: int | None = None,
    output_tokens: int = 256,
    chat: bool = True,
    thinking: bool = False,
) -> list[Prompt]:
    """Prose, code and mathematics shipped with this package, the kinds in turn: `n` of 36, or all.

    With `chat` a prompt goes through the model's chat template, without it comes as plain text to be continued. The
    model may end its answer before `output_tokens`. Raises DataError for an unknown kind and for more than there are.
    """
    texts = {kind: [text for k, text in shipped() if k == kind] for kind in kinds}
    if unknown := [kind for kind in kinds if not texts[kind]]:
        raise DataError(f"no shipped prompts of kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    in_turn = [(kind, i, texts[kind][i]) for i in range(min(map(len, texts.values()))) for kind in texts]
    if n is not None and n > len(in_turn):
        raise DataError(f"{n} prompts asked for, {len(in_turn)} of {', '.join(kinds)} are shipped; use a JSONL file")
    in_turn = in_turn[:n]
    starts = [""] * len(in_turn) if chat else _different_starts(client, [text for *_, text in in_turn])
    prompts = []
    for (kind, index, text), start in zip(in_turn, starts, strict=True):
        question = start + text
        user = [{"role": "user", "content": text}]
        ids = client.render(user, thinking=thinking) if chat else client.tokenize(question, special=False)
        prompts.append(Prompt(f"{kind}-{index}", kind, question, tuple(ids), output_tokens))
    _fits(client, max(len(p.token_ids) for p in prompts), output_tokens)
    return prompts


def miniature(
    client: Client, *, n: int, split: str = "instances", seed: int = 0, output_tokens: int = 256
) -> list[Prompt]:
    """Arithmetic word problems of the bundled model's own kind (`nano.problems`), with their answers, to be thought
    about. Raises DataError for an unknown split or more problems than one holds."""
    from sparkmoe.nano import problems

    prompts = []
    for index, problem in enumerate(problems.split(split, n, seed)):
        ids = client.render([{"role": "user", "content": problem.question}], thinking=True)
        name, answer = f"{split}-{seed}-{index}", str(problem.result)
        prompts.append(Prompt(name, "problem", problem.question, tuple(ids), output_tokens, answer=answer))
    _fits(client, max(len(p.token_ids) for p in prompts), output_tokens)
    return prompts


def typical(client: Client, machine: Machine, *, n: int, output_tokens: int = 256, seed: int = 0) -> list[Prompt]:
    """What a machine's default model is good at: nano Ling's problems on a CPU, shipped mathematics elsewhere."""
    if machine.profile == "cpu":
        return miniature(client, n=n, seed=seed, output_tokens=output_tokens)
    return real(client, kinds=["maths"], n=n, output_tokens=output_tokens, thinking=True)


def jsonl(
    client: Client, path: Path, *, n: int | None = None, output_tokens: int = 256, thinking: bool = True
) -> list[Prompt]:
    """Prompts from any JSONL file: a line is an object with `prompt` (text), `messages` (a chat) or `token_ids`.

    It may also have `id`, `kind`, `answer`, `max_new_tokens` and `ignore_eos`. Raises DataError with the line at fault.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read prompts from {path}: {error}") from None
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (n is not None and len(prompts) == n):
            continue
        try:
            prompts.append(_from_record(client, json.loads(line), f"{path.stem}-{number}", output_tokens, thinking))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number}: {error}; a line is an object with `prompt`, `messages` or `token_ids`"
            ) from None
    if not prompts:
        raise DataError(f"{path} holds no prompts")
    longest = max(prompts, key=lambda p: len(p.token_ids) + p.max_new_tokens)
    _fits(client, len(longest.token_ids), longest.max_new_tokens)
    return prompts


def shipped() -> list[tuple[str, str]]:
    """(kind, text) of the prompts in this package; written for it, under its licence."""
    lines = resources.files("sparkmoe").joinpath("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [(record["kind"], record["prompt"]) for record in map(json.loads, lines)]


def _from_record(client: Client, record: dict[str, Any], name: str, output_tokens: int, thinking: bool) -> Prompt:
    if "token_ids" in record:
        ids = [int(token) for token in record["token_ids"]]
        text = record.get("text") or client.detokenize(ids)
    elif "messages" in record:
        ids, text = client.render(record["messages"], thinking=thinking), str(record["messages"][-1]["content"])
    elif isinstance(record.get("prompt"), str):
        ids, text = client.tokenize(record["prompt"]), record["prompt"]
    else:
        raise ValueError("nothing to ask")
    if not ids:
        raise ValueError("an empty prompt")
    return Prompt(
        id=str(record.get("id", name)),
        kind=str(record.get("kind", "jsonl")),
        text=text,
        token_ids=tuple(ids),
        max_new_tokens=int(record.get("max_new_tokens", output_tokens)),
        ignore_eos=bool(record.get("ignore_eos", False)),
        answer=record.get("answer"),
    )


def _different_starts(client: Client, texts: Sequence[str]) -> list[str]:
    """What to put before each text so that all begin with different tokens: nothing where that is so already."""
    seen: set[int] = set()
    candidates = [f"{c} " for c in string.ascii_uppercase + string.digits + string.ascii_lowercase]
    candidates += [f"{word.capitalize()} " for _, text in shipped() for word in text.split() if word.isalpha()]
    spare, starts = iter(candidates), []
    for text in texts:
        for start in itertools.chain([""] if text else [], spare):
            first = client.tokenize(start + text[:32], special=False)[0]
            if first not in seen:
                break
        else:
            raise DataError(f"this tokenizer has only {len(seen)} different first tokens; ask for fewer prompts")
        seen.add(first)
        starts.append(start)
    return starts


def _fits(client: Client, input_tokens: int, output_tokens: int) -> None:
    limit = client.token_limit()
    if input_tokens + output_tokens > limit:
        raise DataError(
            f"{input_tokens} tokens in and {output_tokens} out do not fit the server, which holds {limit}; "
            "ask for less or raise the recipe's context length"
        )
