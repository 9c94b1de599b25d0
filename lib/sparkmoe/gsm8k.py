"""GSM8K's questions, and how they are asked.

Two arms can only be compared problem by problem if both were asked the same thing: the same prompt, the same sampling
and the same seed for each question. So everything that reaches the model is decided here, from the question alone, and
nothing of it depends on the arm, on the order of answering or on what was answered before.

The prompt is a conversation: a few worked training problems as earlier turns, then the question. The worked solutions
show the form `#### 18`, so no instruction is added, and no stop string either: a stop string such as "Question" also
cuts an answer that quotes the word. The bundled miniature's own problems have the same two fields and go the same way.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sparkmoe.errors import DataError
from sparkmoe.extraction import reference_number
from sparkmoe.machine import Machine

Split = Literal["train", "test"]
TEST_QUESTIONS = 1319
_FILES: dict[Split, tuple[str, ...]] = {"test": ("test.jsonl",), "train": ("train.jsonl", "train-head.jsonl")}

AS_TRAINED, UNSEEN = "worded as in training", "in unseen wording"
WORDINGS = {AS_TRAINED: "instances", UNSEEN: "templates"}  # nano Ling's own problems, by split


@dataclass(frozen=True)
class Question:
    """One problem: its place in the set, the question, and the worked solution that ends with `#### ` and a number;
    `wording` where a set has several kinds."""

    index: int
    question: str
    answer: str
    wording: str = ""

    @cached_property
    def number(self) -> Fraction:
        """The reference answer."""
        return reference_number(self.answer)

    @cached_property
    def key(self) -> str:
        """Names the problem in a run's file; differs as soon as place, question or answer differ."""
        digest = hashlib.sha256(json.dumps([self.question, self.answer]).encode()).hexdigest()
        return f"{self.index:05d}-{digest[:12]}"

    def seed(self, run_seed: int) -> int:
        """The sampling seed of this problem, the same in every arm, 31 bits. A server heeds it only where it runs
        deterministic inference; elsewhere two runs at temperature 0.6 differ, which is what the control shows."""
        return int.from_bytes(hashlib.sha256(f"{run_seed}/{self.key}".encode()).digest()[:4], "big") >> 1


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. `max_new_tokens` includes the reasoning."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    thinking: bool = True


PUBLISHED = Sampling(temperature=0.6, top_p=0.95, top_k=29, max_new_tokens=32_768)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=32_768)


def questions_from(rows: Iterable[Mapping[str, Any]], source: str) -> list[Question]:
    """Questions from rows with the fields `question` and `answer`; DataError names `source` and the row at fault."""
    questions = []
    for index, row in enumerate(rows):
        try:
            question = Question(index, str(row["question"]), str(row["answer"]))
            _ = question.number
        except (KeyError, TypeError) as error:
            raise DataError(f"{source}, problem {index}: fields `question` and `answer` are needed: {error}") from error
        except DataError as error:
            raise DataError(f"{source}, problem {index}: {error}") from error
        questions.append(question)
    if not questions:
        raise DataError(f"{source} holds no problem")
    return questions


def load(split: Split = "test", folder: Path | None = None) -> list[Question]:
    """The problems of one split, in the data set's order.

    From `folder` (`test.jsonl`; `train.jsonl` or its head `train-head.jsonl`) where one is given, else `openai/gsm8k`
    through the `datasets` library, which needs a network the first time. DataError says what is missing."""
    if folder is None:
        return questions_from(_from_hub(split), "openai/gsm8k")
    found = next((path for name in _FILES[split] if (path := folder / name).is_file()), None)
    if found is None:
        raise DataError(f"no {' or '.join(_FILES[split])} in {folder}; a GSM8K folder holds one JSON object a line")
    try:
        rows = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"{found} is not one JSON object a line: {error}") from error
    return questions_from(rows, str(found))


def miniature(split: str = "instances", count: int = 500, seed: int = 0) -> list[Question]:
    """Problems of the bundled miniature, from one of the splits its training never saw (`nano.problems`)."""
    from sparkmoe.nano import problems

    drawn = problems.split(split, count, seed)
    return questions_from(({"question": p.question, "answer": p.answer} for p in drawn), f"nano problems, {split}")


@dataclass(frozen=True)
class Exam:
    """What is asked, and how: the benchmark's name, its questions, the worked examples before each, the sampling."""

    name: str
    questions: list[Question]
    shots: list[Question]
    sampling: Sampling


def exam(machine: Machine, count: int | None = None, folder: Path | str = "") -> Exam:
    """What a machine's default model is examined in: the first `count` test questions of GSM8K as published, on a CPU
    500 or `count` problems of nano Ling's own kind, which take it less than 200 tokens each and no examples.

    It solves all that are worded as its training was, and few that are not. Every fifth problem is of these: a model
    that is always right cannot show a small loss, and one that is unsure does."""
    if machine.profile == "cpu":
        count = count or 500
        kinds = {word: iter(miniature(split, count)) for word, split in WORDINGS.items()}
        words = [UNSEEN if i % 5 == 4 else AS_TRAINED for i in range(count)]
        asked = [next(kinds[word]) for word in words]
        own = [Question(i, q.question, q.answer, word) for i, (q, word) in enumerate(zip(asked, words, strict=True))]
        return Exam("nano Ling's problems", own, [], replace(PUBLISHED, max_new_tokens=512))
    place = Path(folder) if folder else None
    return Exam("GSM8K", load("test", place)[:count], few_shot(place), PUBLISHED)


def _from_hub(split: Split) -> Iterable[Mapping[str, Any]]:
    from datasets import load_dataset  # takes a second to import, and only this path needs it

    try:
        return load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:  # the library's and its transports' errors have no common base
        raise DataError(
            f"openai/gsm8k could not be loaded ({type(error).__name__}: {error}); without a network, give a folder "
            "that holds test.jsonl and train.jsonl"
        ) from error


def few_shot(folder: Path | None = None, count: int = 5) -> list[Question]:
    """The first `count` training problems, which is what a few-shot prompt shows, whatever question follows."""
    train = load("train", folder)
    if len(train) < count:
        raise DataError(f"{count} examples were asked for, the training problems found are {len(train)}")
    return train[:count]


def shown_solution(answer: str) -> str:
    """A worked solution as an example turn: without the calculator marks `<<48/2=24>>` that the data set carries."""
    return re.sub(r"<<[^<>]*>>", "", answer)


def messages(question: Question, shots: Sequence[Question] = ()) -> list[dict[str, str]]:
    """The conversation that asks `question`: each example as a question and its worked solution, then the question."""
    turns: list[dict[str, str]] = []
    for shot in shots:
        turns.append({"role": "user", "content": shot.question})
        turns.append({"role": "assistant", "content": shown_solution(shot.answer)})
    return [*turns, {"role": "user", "content": question.question}]
