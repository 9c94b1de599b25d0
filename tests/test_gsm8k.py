"""Questions are loaded whole or refused with a sentence, and the prompt depends on the question alone."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest

from sparkmoe import gsm8k
from sparkmoe.errors import DataError
from sparkmoe.gsm8k import PUBLISHED, Question, exam, few_shot, load, messages, miniature, shown_solution
from sparkmoe.machine import Machine

GSM8K = Path(os.environ.get("SPARKMOE_GSM8K", Path(__file__).parents[2] / "shared" / "gsm8k"))
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K folder here; SPARKMOE_GSM8K may name one")


@needs_gsm8k
def test_the_whole_test_set_loads_with_a_number_and_a_key_each() -> None:
    questions = load("test", GSM8K)
    assert len(questions) == gsm8k.TEST_QUESTIONS
    assert [question.index for question in questions] == list(range(gsm8k.TEST_QUESTIONS))
    assert len({question.key for question in questions}) == gsm8k.TEST_QUESTIONS
    assert len({question.seed(0) for question in questions}) == gsm8k.TEST_QUESTIONS
    assert all(isinstance(question.number, Fraction) for question in questions)


@needs_gsm8k
def test_five_shots_come_from_the_training_set_and_show_the_mark() -> None:
    turns = messages(load("test", GSM8K)[0], few_shot(GSM8K))
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 5 + ["user"]
    assert all("\n#### " in turn["content"] and "<<" not in turn["content"] for turn in turns[1::2])
    assert turns[0]["content"].startswith("Natalia sold clips to 48 of her friends in April")
    assert turns[-1]["content"].startswith("Janet’s ducks lay 16 eggs per day.")


def test_calculator_marks_are_not_shown() -> None:
    assert shown_solution("Half of 48 is 48/2=<<48/2=24>>24.\n#### 24") == "Half of 48 is 48/2=24.\n#### 24"


def test_seeds_and_keys_depend_on_the_question_alone() -> None:
    question = Question(3, "1 + 1?", "#### 2")
    assert question.seed(0) == Question(3, "1 + 1?", "#### 2").seed(0)
    assert question.seed(0) != question.seed(1)
    assert 0 <= question.seed(0) < 2**31
    others = [Question(4, "1 + 1?", "#### 2"), Question(3, "1 + 2?", "#### 2"), Question(3, "1 + 1?", "#### 3")]
    assert len({question.key, *(other.key for other in others)}) == 4
    assert question.seed(0) not in {other.seed(0) for other in others}


def test_the_hub_is_asked_for_the_public_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[object, ...]] = []

    def load_dataset(*names: str, split: str) -> list[dict[str, str]]:
        asked.append((*names, split))
        return [{"question": "1 + 1?", "answer": "#### 2"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("test") == [Question(0, "1 + 1?", "#### 2")]
    assert asked == [("openai/gsm8k", "main", "test")]


def test_without_a_network_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*names: str, split: str) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"ConnectionError: no route to the hub\); without a network, give a folder"):
        load("test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no test.jsonl in .*; a GSM8K folder holds one JSON object a line"),
        ("", "holds no problem"),
        ('{"question": "1 + 1?"', "is not one JSON object a line"),
        ('{"question": "1 + 1?"}', "problem 0: fields `question` and `answer` are needed: 'answer'"),
        ('{"question": "1 + 1?", "answer": "two"}', "problem 0: a reference answer must end with '#### '"),
        ("5", "problem 0: fields `question` and `answer` are needed"),
    ],
)
def test_a_bad_folder_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "test.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load("test", tmp_path)


def test_too_few_examples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    with pytest.raises(DataError, match="5 examples were asked for, the training problems found are 1"):
        few_shot(tmp_path)


def test_the_miniatures_problems_come_the_same_way() -> None:
    from sparkmoe.nano import problems

    questions = miniature("instances", 20, seed=1)
    drawn = problems.split("instances", 20, 1)
    assert [question.number for question in questions] == [problem.result for problem in drawn]
    assert messages(questions[0]) == [{"role": "user", "content": drawn[0].question}]


def test_an_exam_is_the_miniatures_on_a_cpu_and_gsm8k_as_published_elsewhere(tmp_path: Path) -> None:
    own = exam(Machine.named("cpu"), 12)
    asked = [q.question for q in own.questions]
    assert asked[4::5] == [q.question for q in miniature("templates", 2)]
    assert [q for i, q in enumerate(asked) if i % 5 != 4] == [q.question for q in miniature(count=10)]
    assert [q.index for q in own.questions] == list(range(12))
    assert own.name == "nano Ling's problems"
    assert (own.shots, own.sampling.temperature, own.sampling.max_new_tokens) == ([], 0.6, 512)
    for name in ("test", "train"):
        rows = [{"question": f"{name} {i}?", "answer": f"#### {i}"} for i in range(7)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    real = exam(Machine.named("spark"), 3, tmp_path)
    assert [q.question for q in real.questions] == ["test 0?", "test 1?", "test 2?"]
    assert [q.question for q in real.shots] == [f"train {i}?" for i in range(5)]
    assert real.sampling == PUBLISHED
    assert real.name == "GSM8K"
