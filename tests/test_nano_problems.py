"""Word problems: right, held out for certain, and in GSM8K's form."""

import itertools
import json
import re
from pathlib import Path

import pytest

from sparkmoe.errors import DataError
from sparkmoe.extraction import extract
from sparkmoe.nano import problems, sentences

TRAINING = list(itertools.islice(problems.training(7), 3000))
SPLITS = {name: problems.split(name, 150, seed=3) for name in problems.SPLITS}
EVERYTHING = [*TRAINING, *itertools.chain(*SPLITS.values())]


def test_every_line_of_reasoning_is_one_right_operation() -> None:
    operation = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
    for problem in EVERYTHING:
        lines = problem.reasoning.split("\n")
        assert len(lines) == problem.steps or (problem.steps == 0 and not problem.reasoning)
        results = []
        for line in lines:
            ((a, sign, b, r),) = operation.findall(line)
            exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
            assert exact == int(r), line
            results.append(int(r))
        assert results[-1] == problem.result
        assert 0 < max(results) <= problems.MAX_NUMBER


def test_first_operands_come_from_the_question_or_an_earlier_result() -> None:
    for problem in EVERYTHING:
        known = set(re.findall(r"\d+", problem.question)) | {"2", "3", "4", "5"}  # twice, half, a third…
        for a, b, r in re.findall(r"(\d+)[-+*/](\d+)=(\d+)", problem.reasoning):
            assert {a, b} <= known, problem
            known.add(r)


def test_steps_reach_from_one_to_six() -> None:
    assert {p.steps for p in TRAINING} == set(range(1, problems.MAX_STEPS + 1))


def test_training_never_yields_what_a_split_can_hold() -> None:
    assert not any(problems.held_out_question(p.question) or problems.held_out_shape(p.shape) for p in TRAINING)
    for name, held in SPLITS.items():
        assert all(problems.held_out_question(p.question) for p in held)
        assert all(problems.held_out_shape(p.shape) == (name == "combinations") for p in held)
        assert len({p.question for p in held}) == len(held)


def test_wholly_unseen_wording_shares_no_sentence_with_training() -> None:
    """Each kind's sentence is matched as a pattern: a training pattern must not fit in a question of `templates`."""
    kinds = [*sentences.START.values(), *sentences.EVENT.values(), *sentences.END.values()]

    def pattern(text: str) -> re.Pattern[str]:
        return re.compile(r"(?<![^ ])" + re.sub(r"\\{\w+\\}", r".+?", re.escape(text)) + r"(?![^ ])")

    told = [pattern(t) for kind in kinds for t in kind.told if len(re.sub(r"\{\w+\}", "", t)) > 22]
    assert sum(any(p.search(q.question) for p in told) for q in TRAINING[:150]) > 140
    assert not [q.question for q in SPLITS["templates"] if any(p.fullmatch(q.question) for p in told)]
    assert not set(itertools.chain(*(k.told for k in kinds))) & set(itertools.chain(*(k.unseen for k in kinds)))


def test_same_seed_same_problems_other_seed_others() -> None:
    again = list(itertools.islice(problems.training(7), 50))
    assert again == TRAINING[:50]
    assert problems.split("instances", 150, seed=3) == SPLITS["instances"]
    assert problems.split("instances", 20, seed=4) != SPLITS["instances"][:20]


def test_records_are_gsm8k_s(tmp_path: Path) -> None:
    problems.write_jsonl(SPLITS["instances"], tmp_path / "a" / "test.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "a" / "test.jsonl").read_text().splitlines()]
    assert [set(r) for r in rows] == [{"question", "answer"}] * 150
    for row, problem in zip(rows, SPLITS["instances"], strict=True):
        found = extract(row["answer"])
        assert found is not None
        assert found.number == problem.result


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: problems.split("train"), "the splits are instances, combinations, templates"),
        (lambda: problems.split("instances", 0), "1…20000"),
        (lambda: problems.split("instances", 5, seed=-1), "0…2147483647"),
        (lambda: problems.training(2**31), "0…2147483647"),
    ],
)
def test_bad_arguments_are_told_with_the_allowed_range(call: object, says: str) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        call()  # type: ignore[operator]
