"""Let the draft score only the tokens that are likely at all.

A verify step with K drafts reads the LM head K+1 times: once to verify, K times to draft. At a vocabulary of 157,184
the draft's readings are most of what drafting costs, and most of these rows stand for words that a given user's texts
hardly ever hold. So the draft gets a head with the rows of the N most frequent tokens, and SGLang translates its row
numbers back into token ids (`--speculative-token-map`). The target still scores everything, so what is emitted stays
the same; a rare token costs one rejected draft.

`coverage` is the share of a corpus's tokens that the map holds: the accept length cannot stay above what it allows.
`bytes_per_step` is the prediction to hold the measurement against.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkmoe.errors import DataError

COUNT_MULTIPLE = 16
"""Rows that CUTLASS can multiply come in multiples of this; any other count falls to a slower kernel."""


@dataclass(frozen=True)
class HotVocabulary:
    """The rows a draft scores, most frequent first, and how much of the corpus they are."""

    ids: tuple[int, ...]
    coverage: float
    corpus_tokens: int
    vocabulary: int


def count(sequences: Iterable[Sequence[int]]) -> Counter[int]:
    """How often each token id occurs."""
    counts: Counter[int] = Counter()
    for ids in sequences:
        counts.update(ids)
    return counts


def choose(counts: Mapping[int, int], size: int, vocabulary: int, *, always: Iterable[int] = ()) -> HotVocabulary:
    """The `size` most frequent tokens (rounded up to a multiple of 16), `always` among them, ties by lower id.

    `always` is for what ends or structures an answer and must stay draftable (end of text, `</think>`). Where the
    corpus has fewer different tokens, ids that it does not hold fill the rows up, lowest first. Raises DataError for an
    empty corpus, a size outside the vocabulary, or ids outside it.
    """
    if not counts:
        raise DataError("no tokens to count: the corpus is empty")
    if not 0 < size <= vocabulary:
        raise DataError(f"a hot vocabulary of {size} tokens does not fit a vocabulary of {vocabulary}")
    kept = tuple(dict.fromkeys(always))
    if strange := [i for i in (*counts, *kept) if not 0 <= i < vocabulary]:
        raise DataError(f"token id {strange[0]} is outside the vocabulary of {vocabulary}; is this its tokenizer?")
    rows = min(-(-size // COUNT_MULTIPLE) * COUNT_MULTIPLE, vocabulary)
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    unseen = (i for i in range(vocabulary) if i not in counts)
    first = dict.fromkeys(kept)
    for i in (*ranked, *unseen):
        if len(first) >= rows:
            break
        first.setdefault(i)
    chosen = sorted(first, key=lambda i: (-counts.get(i, 0), i))
    total = sum(counts.values())
    return HotVocabulary(tuple(chosen), sum(counts.get(i, 0) for i in chosen) / total, total, vocabulary)


def tokens_of_texts(paths: Iterable[Path], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of text files, line by line; `tokenizer` is a `tokenizers.Tokenizer`. Raises DataError."""
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                for line in file:
                    yield tokenizer.encode(line, add_special_tokens=False).ids
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as text ({error})") from None


def tokens_of_run(run: Path) -> Iterator[list[int]]:
    """Token ids that the servers of a run gave as answers (`samples.jsonl`). Raises DataError if it holds none."""
    found = False
    try:
        with (run / "samples.jsonl").open(encoding="utf-8") as file:
            for line in file:
                ids = (json.loads(line).get("sample") or {}).get("token_ids")
                if ids:
                    found = True
                    yield list(ids)
    except (OSError, ValueError) as error:
        raise DataError(f"{run} is no run with readable samples ({error})") from None
    if not found:
        raise DataError(f"{run} holds no answers with token ids")


def save(path: Path, hot: HotVocabulary) -> None:
    """Write the map as SGLang reads it (a .pt list of ids), and beside it a .json that says what it covers."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(list(hot.ids), path)
    facts = {key: value for key, value in asdict(hot).items() if key != "ids"} | {"rows": len(hot.ids)}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


def load(path: Path | str) -> list[int]:
    """The ids of a map. Raises DataError if the file is missing or is no list of ids."""
    import torch

    try:
        ids = torch.load(path, weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is no token map ({type(error).__name__}); make one with `sparkmoe hot-vocab`"
        ) from None
    values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(values, list) or not values or not all(isinstance(i, int) for i in values):
        raise DataError(f"{path} holds no list of token ids; make one with `sparkmoe hot-vocab`")
    return values


def row_bytes(form: str, hidden: int) -> int:
    """Bytes of one row of a head: e4m3 with a float32 scale, else 16 bits a value."""
    return hidden + 4 if form == "fp8" else 2 * hidden


def draft_copy_bytes(
    *, vocabulary: int, hidden: int, head: str, draft_head: str = "shared", hot: int | None = None
) -> int:
    """Bytes of the draft's own head, taken after the KV cache was sized; 0 where it shares the target's."""
    if draft_head != "fp8" and hot is None:
        return 0
    return row_bytes("fp8" if draft_head == "fp8" else head, hidden) * (vocabulary if hot is None else hot)


def bytes_per_step(
    *,
    vocabulary: int,
    hidden: int,
    draft_steps: int,
    head: str = "bf16",
    draft_head: str = "shared",
    hot: int | None = None,
) -> int:
    """Bytes of LM head that one verify step reads: the target's once, the draft's `draft_steps` times.

    `head` and `draft_head` as in a Recipe. FP8 rows carry a float32 scale each. Source: every reading of the head is a
    matrix-vector product at batch 1, and K drafts are K of them in turn.
    """
    drafted = row_bytes("fp8" if draft_head == "fp8" else head, hidden) * (vocabulary if hot is None else hot)
    return vocabulary * row_bytes(head, hidden) + draft_steps * drafted
