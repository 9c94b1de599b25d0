"""The number an answer ends with, over the shapes answers have and over GSM8K's own solutions."""

import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkmoe.errors import DataError
from sparkmoe.extraction import content_of, extract, reference_number

HERE = Path(__file__).parent
GOLDEN = [json.loads(line) for line in (HERE / "data" / "gsm8k_answers.jsonl").read_text(encoding="utf-8").splitlines()]
GSM8K = Path(os.environ.get("SPARKMOE_GSM8K", HERE.parents[1] / "shared" / "gsm8k"))


@pytest.mark.parametrize("golden", GOLDEN, ids=[f"{n}-{golden['why']}" for n, golden in enumerate(GOLDEN)])
def test_golden_shape(golden: dict[str, str | None]) -> None:
    found = extract(golden["text"] or "")
    if golden["number"] is None:
        assert found is None
    else:
        assert found is not None
        assert (found.number, found.rule) == (Fraction(golden["number"]), golden["rule"])


def test_golden_shapes_are_many_and_different() -> None:
    assert len({golden["text"] for golden in GOLDEN}) == len(GOLDEN) >= 60


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no GSM8K folder beside the checkout, and SPARKMOE_GSM8K is not set")
@pytest.mark.parametrize(("name", "count"), [("test.jsonl", 1319), ("train-head.jsonl", 64)])
def test_reads_every_reference_solution(name: str, count: int) -> None:
    """By the mark, and again with the mark taken away and the number written as a sentence."""
    answers = [json.loads(line)["answer"] for line in (GSM8K / name).read_text(encoding="utf-8").splitlines()]
    assert len(answers) == count
    for answer in answers:
        solution, _, final = answer.rpartition("####")
        expected = Fraction(final.replace(",", "").strip())
        found = extract(answer)
        assert found is not None
        assert (found.number, found.rule) == (expected, "####")
        assert reference_number(answer) == expected
        for spoken in (f"{solution}\nThe answer is ${final.strip()}.", f"{solution}\n\\boxed{{{final.strip()}}}"):
            found = extract(spoken)
            assert found is not None
            assert found.number == expected


@given(
    number=st.integers(-(10**12), 10**12),
    shape=st.sampled_from(
        [
            "{plain}", "{grouped}", "**{plain}**", "so #### {grouped}", "The answer is ${grouped}.", "= {plain}.00",
            "\\boxed{{{plain}}}", "\\boxed{{{latex}}}", "it costs \\${grouped}", "{plain} apples", "#### {plain}%",
        ]
    ),
)  # fmt: skip
def test_any_integer_in_common_dress(number: int, shape: str) -> None:
    grouped = f"{number:,}"
    found = extract(shape.format(plain=number, grouped=grouped, latex=grouped.replace(",", "{,}")))
    assert found is not None
    assert found.number == number


@given(st.text(alphabet="0123456789,./-+$%#\\boxed{}()^ \n=×*_½ek", max_size=60))
def test_never_fails_on_noise(text: str) -> None:
    found = extract(text)
    assert found is None or isinstance(found.number, Fraction)


@pytest.mark.parametrize(
    "piece", ["1", "1,", "####", "#### ", "\\boxed{", "\\boxed{1", "1/", "1 ", "{", "#### x\n", "½", "-$"]
)
def test_time_stays_linear_on_a_model_that_got_stuck(piece: str) -> None:
    text = piece * (100_000 // len(piece))
    start = time.perf_counter()
    extract(text)
    assert time.perf_counter() - start < 5


def test_reasoning_is_cut_off() -> None:
    assert content_of("<think>a</think>b") == "b"
    assert content_of("a</think>b") == "b"
    assert content_of("b<think>a") == "b"
    assert content_of("b") == "b"


@pytest.mark.parametrize("answer", ["", "no mark 5", "#### ", "#### five", "#### 1/0"])
def test_reference_without_a_number_is_an_error(answer: str) -> None:
    with pytest.raises(DataError, match="must end with '#### ' and a number"):
        reference_number(answer)
