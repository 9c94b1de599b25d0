"""Ask every question once, keep every answer, and survive whatever happens in between.

The whole test set takes hours on a Spark, so a run must be able to end at any moment without losing or repeating an
answer. The run store is the only state: an answer counts when its line is on disk (see `results`), and a run that is
started again asks what the store does not hold. Two runs of one arm are told apart by `boot`, as everywhere.

Not every question ends in a right or wrong number, and mixing the rest in would hide it. An answer cut at
`max_new_tokens` is *truncated*: the model gave none within its budget, which costs accuracy but is counted apart, and
more than 0.5 % of it fails the run, because then the limit is what gets measured. A request without an answer
is *failed*: it says something about the server and nothing about the model, so a run that has one is not complete.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, Protocol

from sparkmoe.errors import DataError, EngineError, StoreError
from sparkmoe.extraction import extract
from sparkmoe.gsm8k import PUBLISHED, Question, Sampling, messages
from sparkmoe.results import Run, jsonable
from sparkmoe.sample import RequestFailed, Sample

log = logging.getLogger(__name__)

Status = Literal["right", "wrong", "truncated", "failed"]
NOTEWORTHY: tuple[Status, ...] = ("truncated", "failed")
MAX_TRUNCATED = 0.005
_ANSWERED = ("stop", "length")  # finish reasons; "abort" is none of the model's doing


class Chat(Protocol):
    """What is needed of `client.Client`. Must be usable from several threads if `concurrency` is above 1."""

    def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Sample: ...


@dataclass(frozen=True)
class Record:
    """One question as it was asked and answered, a line of the run store.

    `problem` is the question's key and `request` its index; `extracted` and `reference` are exact numbers as text
    ("18", "3/4"), `rule` the one that found it; `attempt` counts the requests it took, over restarts too. `sample` has
    prompt hash, text, reasoning, tokens, times and accept length."""

    arm: str
    boot: int
    request: int
    problem: str
    question: str
    reference: str
    status: Status
    correct: bool
    extracted: str | None
    rule: str | None
    attempt: int
    seed: int
    concurrency: int
    spoiled: tuple[str, ...]
    sample: Sample

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Record":
        """The inverse of what the store writes."""
        values = {field.name: record[field.name] for field in fields(cls)}
        return cls(**values | {"spoiled": tuple(values["spoiled"]), "sample": Sample.from_json(values["sample"])})


@dataclass(frozen=True)
class Progress:
    """Where a run stands. `record` is the question just answered, None in the first report, which tells what was found
    on disk. `left_s` is None until something was answered in this process."""

    record: Record | None
    total: int
    counts: Counter[Status]
    resumed: int
    elapsed_s: float

    @property
    def done(self) -> int:
        return self.counts.total()

    @property
    def accuracy(self) -> float | None:
        """Share of right answers so far; failed requests are no answers."""
        answered = self.done - self.counts["failed"]
        return self.counts["right"] / answered if answered else None

    @property
    def left_s(self) -> float | None:
        asked = self.done - self.resumed
        return self.elapsed_s / asked * (self.total - self.done) if asked else None

    def text(self) -> str:
        """One line for a progress bar: `412 of 1319, 96.8 % right, 1 truncated, 3 h 12 min left`."""
        parts = [f"{self.done} of {self.total}"]
        if self.accuracy is not None:
            parts.append(f"{100 * self.accuracy:.1f} % right")
        parts += [f"{self.counts[name]} {name}" for name in NOTEWORTHY if self.counts[name]]
        if self.left_s is not None:
            minutes, seconds = divmod(round(self.left_s), 60)
            hours, minutes = divmod(minutes, 60)
            parts.append(f"{hours} h {minutes} min left" if hours else f"{minutes} min {seconds} s left")
        return ", ".join(parts)


def evaluate(
    questions: Sequence[Question],
    client: Chat,
    run: Run,
    *,
    arm: str,
    boot: int = 0,
    sampling: Sampling = PUBLISHED,
    shots: Sequence[Question] = (),
    concurrency: int = 1,
    limit: int | None = None,
    seed: int = 0,
    conditions: Mapping[str, Any] | None = None,
    attempts: int = 3,
    backoff_s: float = 2.0,
    give_up_after: int = 5,
) -> Iterator[Progress]:
    """Ask those of `questions` (of its first `limit`) that `run` holds no answer to; yield at first and per answer.

    What must not change when a run is taken up again (sampling, shots, seed, and `conditions`, such as the recipe's
    fingerprint) goes into the manifest under `evaluations`; StoreError if it did. A request that fails in a way that
    may pass is sent up to `attempts` times, waiting `backoff_s`, then twice as long; after `give_up_after` failed
    questions in a row the run stops with EngineError, to be taken up later. At its end the run is checked (`check`)."""
    asked = list(questions)[:limit]
    if not asked or min(concurrency, attempts, give_up_after) < 1:
        raise DataError(
            f"nothing to ask with {len(asked)} questions, concurrency {concurrency}, {attempts} attempts and giving up "
            f"after {give_up_after}: each must be at least 1"
        )
    _hold_to(
        run,
        f"{arm}/{boot}",
        {
            "sampling": asdict(sampling),
            "shots": [shot.key for shot in shots],
            "seed": seed,
            "conditions": dict(conditions or {}),
        },
    )
    before = {record.problem: record for record in read(run, arm, boot)}
    answered = {key: record for key, record in before.items() if record.status != "failed"}
    todo = [question for question in asked if question.key not in answered]
    counts = Counter(answered[question.key].status for question in asked if question.key in answered)
    stop, resumed, start, failed_in_a_row = threading.Event(), counts.total(), time.monotonic(), 0
    yield Progress(None, len(asked), counts.copy(), resumed, 0.0)

    def ask(question: Question) -> Record:
        earlier = before[question.key].attempt if question.key in before else 0
        chat = partial(client.chat, messages(question, shots), seed=question.seed(seed), **asdict(sampling))
        sample, attempt = _attempt(chat, attempts, backoff_s, stop)
        found = extract(sample.text)
        status = _status(sample, found.number if found else None, question.number)
        return Record(
            arm=arm,
            boot=boot,
            request=question.index,
            problem=question.key,
            question=question.question,
            reference=str(question.number),
            status=status,
            correct=status == "right",
            extracted=str(found.number) if found else None,
            rule=found.rule if found else None,
            attempt=earlier + attempt,
            seed=question.seed(seed),
            concurrency=concurrency,
            spoiled=(sample.error,) if sample.error else (),
            sample=sample,
        )

    answers = _in_parallel(ask, todo, concurrency)
    try:
        for record in answers:
            run.append(jsonable(record))
            counts[record.status] += 1
            failed_in_a_row = failed_in_a_row + 1 if record.status == "failed" else 0
            yield Progress(record, len(asked), counts.copy(), resumed, time.monotonic() - start)
            if failed_in_a_row >= give_up_after:
                raise EngineError(
                    f"{failed_in_a_row} questions in a row got no answer, the last because {record.sample.error}; "
                    f"{counts.total() - counts['failed']} of {len(asked)} are answered and kept in {run.path}: "
                    "see to the server, then run the same call again, it asks only the others"
                )
    finally:
        stop.set()
        answers.close()
        run.close()
    check(read(run, arm, boot, asked))


def show(progress: Iterable[Progress]) -> None:
    """Run an evaluation to its end behind a progress bar that tells accuracy and time left."""
    from tqdm.auto import tqdm

    with tqdm(bar_format="{desc} |{bar}| {elapsed}") as bar:
        for now in progress:
            bar.total, bar.n = now.total, now.done
            bar.set_description(now.text(), refresh=True)


def read(run: Run, arm: str, boot: int = 0, questions: Sequence[Question] | None = None) -> list[Record]:
    """The answers of one arm, one a problem (the last, where it failed before), in the questions' order; only those to
    `questions` if given."""
    latest = {
        found["problem"]: found
        for found in run.records()
        if found.get("problem") and (found["arm"], found["boot"]) == (arm, boot)
    }
    keys = set(latest) if questions is None else {question.key for question in questions}
    records = [Record.from_json(found) for key, found in latest.items() if key in keys]
    return sorted(records, key=lambda record: record.request)


def check(records: Sequence[Record], max_truncated: float = MAX_TRUNCATED) -> None:
    """Raise what makes a run unfit for comparison: failed questions (EngineError), more than `max_truncated` of the
    answers cut off, or reasoning in the content (DataError)."""
    counts = Counter(record.status for record in records)
    if counts["failed"]:
        last = next(record for record in reversed(records) if record.status == "failed")
        raise EngineError(
            f"{counts['failed']} of {len(records)} questions got no answer, one because {last.sample.error}; "
            "run the same call again: it asks only them"
        )
    if counts["truncated"] > max_truncated * len(records):
        raise DataError(
            f"{counts['truncated']} of {len(records)} answers were cut off at the token limit, more than "
            f"{100 * max_truncated:g} %, so the limit is what is measured; raise max_new_tokens and start a new run"
        )
    if leaked := sum("</think>" in record.sample.text for record in records):
        raise DataError(
            f"{leaked} of {len(records)} answers hold their reasoning in the content, so the server runs without a "
            "reasoning parser; start it with --reasoning-parser and start a new run"
        )


def _hold_to(run: Run, name: str, conditions: dict[str, Any]) -> None:
    """Write down what this arm is asked under, or make sure it is what was written down before."""
    known = run.manifest.get("evaluations", {})
    conditions = jsonable(conditions)
    changed = [key for key, value in conditions.items() if known.get(name, conditions).get(key) != value]
    if changed:
        raise StoreError(
            f"{run.path} holds answers of {name} under another {' and '.join(changed)}: "
            f"{known[name].get(changed[0])!r} there, {conditions[changed[0]]!r} now; start a new run or another arm"
        )
    if name not in known:
        run.update(evaluations=known | {name: conditions})


def _attempt(chat: Callable[[], Sample], attempts: int, backoff_s: float, stop: threading.Event) -> tuple[Sample, int]:
    """(what came of it, requests sent): asked until there is an answer or trying again is pointless."""
    attempt = 0
    while True:
        attempt += 1
        pointless = attempt == attempts
        try:
            sample = chat()
            if sample.finish_reason in _ANSWERED:
                return sample, attempt
            sample = replace(sample, error=f"server_error: the answer ended with {sample.finish_reason!r}")
        except RequestFailed as failure:
            sample = failure.sample or Sample("", time.time(), error=f"{failure.kind}: {failure}")
            pointless = pointless or failure.kind == "rejected"
        log.warning("attempt %d of %d: %s", attempt, attempts, sample.error)
        if pointless or stop.wait(backoff_s * 2 ** (attempt - 1)):
            return sample, attempt


def _status(sample: Sample, number: Fraction | None, reference: Fraction) -> Status:
    if sample.error:
        return "failed"
    if sample.finish_reason == "length":
        return "truncated"
    return "right" if number == reference else "wrong"


def _in_parallel(
    ask: Callable[[Question], Record], todo: Sequence[Question], concurrency: int
) -> Generator[Record, None, None]:
    """Answers as they come, never more than `concurrency` questions under way. A single one is asked in the calling
    thread, so that an interrupt ends its request too."""
    if concurrency == 1:
        yield from map(ask, todo)
        return
    pool, rest = ThreadPoolExecutor(concurrency), iter(todo)
    waiting: set[Future[Record]] = set()
    try:
        while True:
            free = range(concurrency - len(waiting))
            waiting |= {pool.submit(ask, question) for _, question in zip(free, rest, strict=False)}
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
