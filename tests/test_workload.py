"""Prompts: exact lengths, the same twice, different at the start, and refused when they are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_server import BOS, FakeServer
from sparkmoe.client import Client
from sparkmoe.errors import DataError
from sparkmoe.machine import Machine
from sparkmoe.workload import KINDS, PUBLISHED, Prompt, Workload, jsonl, miniature, real, shape_for, shipped, synthetic


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with FakeServer() as server:
        yield Client(server.url)


@pytest.mark.parametrize("shape", [(1, 1), (17, 4), (256, 128), PUBLISHED])
def test_synthetic_prompts_have_exactly_the_tokens_asked_for(client: Client, shape: tuple[int, int]) -> None:
    prompts = synthetic(client, n=3, input_tokens=shape[0], output_tokens=shape[1])
    assert [len(p.token_ids) for p in prompts] == [shape[0]] * 3
    assert all(p.max_new_tokens == shape[1] and p.ignore_eos for p in prompts)
    assert all(client.tokenize(p.text, special=False) == list(p.token_ids) for p in prompts)


def test_seed_decides_and_nothing_else(client: Client) -> None:
    def draw(seed: int) -> list[Prompt]:
        return synthetic(client, n=4, input_tokens=40, output_tokens=8, seed=seed)

    assert draw(1) == draw(1)
    assert {p.token_ids for p in draw(1)}.isdisjoint(p.token_ids for p in draw(2))


def test_prompts_share_no_first_token(client: Client) -> None:
    for prompts in (
        synthetic(client, n=40, input_tokens=8, output_tokens=8),
        real(client, chat=False),
    ):
        firsts = [p.token_ids[0] for p in prompts]
        assert len(set(firsts)) == len(firsts)
        assert BOS not in firsts


def test_more_prompts_than_first_tokens_is_said(client: Client) -> None:
    with pytest.raises(DataError, match="different first tokens"):
        synthetic(client, n=400, input_tokens=8, output_tokens=8)


def test_too_long_for_the_server_is_said_before_anything_is_built(client: Client) -> None:
    with pytest.raises(DataError, match="32768 tokens in and 8192 out do not fit the server, which holds 40000"):
        synthetic(client, n=1, input_tokens=32768, output_tokens=8192)


def test_real_prompts_take_the_kinds_in_turn(client: Client) -> None:
    prompts = real(client, n=6)
    assert [p.kind for p in prompts] == [*KINDS, *KINDS]
    assert client.detokenize(prompts[0].token_ids).startswith("<user>Describe a harbour")
    assert not prompts[0].ignore_eos
    assert len(real(client)) == 36
    assert {p.kind for p in real(client, kinds=["code"])} == {"code"}
    with pytest.raises(DataError, match="no shipped prompts of kind 'poems'"):
        real(client, kinds=["poems"])  # type: ignore[list-item]
    with pytest.raises(DataError, match="37 prompts asked for"):
        real(client, n=37)


def test_the_miniatures_problems_come_with_their_answers(client: Client) -> None:
    prompts = miniature(client, n=5, split="templates", output_tokens=100)
    assert len({p.text for p in prompts}) == 5
    assert all(p.answer is not None and p.answer.isdigit() for p in prompts)
    assert client.detokenize(prompts[0].token_ids) == f"<user>{prompts[0].text}"
    assert prompts == miniature(client, n=5, split="templates", output_tokens=100)
    with pytest.raises(DataError, match="no test split 'poems'"):
        miniature(client, n=5, split="poems")


def test_shipped_prompts_are_many_and_different() -> None:
    kinds = [kind for kind, _ in shipped()]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(KINDS, 12)
    assert len({text for _, text in shipped()}) == 36


def test_any_jsonl(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"prompt": "What is seven times six?", "answer": "42", "kind": "sums", "id": "first"},
        {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 5},
        {"token_ids": [72, 105], "ignore_eos": True},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    first, second, third = jsonl(client, path, output_tokens=64)
    assert (first.id, first.kind, first.answer, first.max_new_tokens) == ("first", "sums", "42", 64)
    assert first.token_ids[0] == BOS
    assert (second.id, second.text, second.max_new_tokens) == ("mine-3", "Hello", 5)
    assert client.detokenize(second.token_ids) == "<user>Hello"
    assert (third.text, third.token_ids, third.ignore_eos) == ("Hi", (72, 105), True)
    assert len(jsonl(client, path, n=2)) == 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "fine"}\n{"question": "what?"}\n', "line 2: nothing to ask"),
        ('{"prompt": "fine"}\n{"prompt": \n', "line 2"),
        ("[1, 2]\n", "line 1"),
        ('{"token_ids": []}\n', "line 1: an empty prompt"),
        ('{"token_ids": ["x"]}\n', "line 1"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_jsonl_names_the_line(client: Client, tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        jsonl(client, path)


def test_missing_or_binary_files(client: Client, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read prompts"):
        jsonl(client, tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot read prompts"):
        jsonl(client, tmp_path / "binary")


def test_a_prompt_file_is_known_by_its_hash(client: Client, tmp_path: Path) -> None:
    prompts = real(client, n=5)
    written = Workload.write(prompts, tmp_path / "run" / "prompts.jsonl")
    assert len(written) == 5
    assert Workload.load(written.path, written.sha256) == written
    assert list(written) == prompts
    assert [p.name for p in written.path.parent.iterdir()] == ["prompts.jsonl"]
    again = Workload.write(real(client, n=5), tmp_path / "other.jsonl")
    assert again.sha256 == written.sha256
    written.path.write_text(written.path.read_text().replace("harbour", "harbor"))
    with pytest.raises(DataError, match="not the prompt file of this run"):
        Workload.load(written.path, written.sha256)


def test_what_is_no_prompt_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(DataError, match="cannot read the prompt file"):
        Workload.load(path)
    for content in ('{"id": "a"}\n', "nonsense\n", '{"token_ids": [1], "id": "a", "surprise": 1}\n'):
        path.write_text(content)
        with pytest.raises(DataError, match="not a prompt file"):
            Workload.load(path)


def test_a_workload_without_prompts_or_with_one_twice_is_refused(client: Client, tmp_path: Path) -> None:
    prompts = real(client, n=2)
    for wrong in ([], [prompts[0], prompts[0]]):
        with pytest.raises(DataError, match="different ids"):
            Workload.write(wrong, tmp_path / "prompts.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_shapes_follow_the_machine() -> None:
    assert shape_for(Machine.named("spark")) == PUBLISHED
    assert sum(shape_for(Machine.named("cpu"))) < 512
