import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from sparkmoe.errors import DataError
from sparkmoe.hot_vocab import (
    COUNT_MULTIPLE,
    bytes_per_step,
    choose,
    count,
    draft_copy_bytes,
    load,
    save,
    tokens_of_run,
    tokens_of_texts,
)


def test_the_most_frequent_tokens_are_kept_and_their_share_is_told() -> None:
    counts = count([[5] * 50 + [7] * 30, [9] * 19 + [11]])
    hot = choose(counts, 16, 1000)
    assert hot.ids[:4] == (5, 7, 9, 11)
    assert hot.ids[4:] == (0, 1, 2, 3, 4, 6, 8, 10, 12, 13, 14, 15)  # unseen ids, lowest first
    assert hot.coverage == 1.0
    assert hot.corpus_tokens == 100


def test_coverage_counts_only_what_is_kept() -> None:
    counts = {i: 10 if i < 16 else 1 for i in range(176)}
    hot = choose(counts, 16, 1000)
    assert hot.ids == tuple(range(16))
    assert hot.coverage == pytest.approx(0.5)


def test_the_count_is_a_multiple_the_gemm_likes_and_never_exceeds_the_vocabulary() -> None:
    counts = dict.fromkeys(range(100), 1)
    for size in (1, 16, 17, 90):
        assert len(choose(counts, size, 1000).ids) == -(-size // COUNT_MULTIPLE) * COUNT_MULTIPLE
    assert len(choose(counts, 100, 100).ids) == 100


def test_kept_ids_stay_whatever_their_frequency() -> None:
    counts = {i: 100 - i for i in range(90)}
    hot = choose(counts, 16, 1000, always=[999, 85, 999])
    assert {999, 85} < set(hot.ids)
    assert len(hot.ids) == len(set(hot.ids)) == 16
    assert set(range(14)) < set(hot.ids)


@pytest.mark.parametrize(
    ("counts", "size", "message"),
    [
        ({}, 16, "corpus is empty"),
        ({1: 1}, 0, "does not fit"),
        ({1: 1}, 101, "does not fit"),
        ({100: 1}, 16, "outside the vocabulary"),
    ],
)
def test_bad_input_is_named(counts: dict[int, int], size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose(counts, size, 100)


def test_save_and_load_as_sglang_reads_it(tmp_path: Path) -> None:
    hot = choose(dict.fromkeys(range(40), 1), 32, 100)
    path = tmp_path / "maps" / "hot.pt"
    save(path, hot)
    assert load(path) == list(hot.ids)
    assert torch.tensor(torch.load(path, weights_only=True), dtype=torch.int64).tolist() == list(hot.ids)
    facts = json.loads(path.with_suffix(".json").read_text())
    assert facts == {"coverage": 0.8, "corpus_tokens": 40, "vocabulary": 100, "rows": 32}


def test_what_is_no_map_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no token map"):
        load(tmp_path / "absent.pt")
    torch.save({"a": 1}, tmp_path / "dict.pt")
    with pytest.raises(DataError, match="holds no list"):
        load(tmp_path / "dict.pt")
    torch.save(torch.tensor([3, 1]), tmp_path / "tensor.pt")
    assert load(tmp_path / "tensor.pt") == [3, 1]


def test_tokens_come_from_texts_and_from_a_run(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = tmp_path / "corpus.txt"
    text.write_text("a b a\nb z\n")
    assert count(tokens_of_texts([text], tokenizer)) == {0: 2, 1: 2, 2: 1}
    text.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match="cannot be read as text"):
        list(tokens_of_texts([text], tokenizer))
    run = tmp_path / "run"
    run.mkdir()
    records = [{"sample": {"token_ids": [1, 1, 2]}}, {"sample": None}, {"sample": {"token_ids": [2]}}]
    (run / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert count(tokens_of_run(run)) == {1: 2, 2: 2}
    (run / "samples.jsonl").write_text(json.dumps({"sample": {}}) + "\n")
    with pytest.raises(DataError, match="no answers with token ids"):
        list(tokens_of_run(run))


def test_predicted_bytes_at_full_size() -> None:
    """Ling-3.0-flash: 805 MB of BF16 head, 402 of FP8, read K+1 times a step."""
    ling = {"vocabulary": 157_184, "hidden": 2560}
    assert bytes_per_step(**ling, draft_steps=0) == 804_782_080
    assert bytes_per_step(**ling, draft_steps=3) == 4 * 804_782_080
    fp8 = bytes_per_step(**ling, draft_steps=3, head="fp8")
    assert fp8 == pytest.approx(4 * 402_391_040, rel=0.002)
    hot = bytes_per_step(**ling, draft_steps=3, hot=32_768)
    assert hot < fp8  # with three drafts a hot vocabulary saves more than FP8 does
    assert bytes_per_step(**ling, draft_steps=3, head="fp8", hot=32_768) < hot / 1.9
    draft_only = bytes_per_step(**ling, draft_steps=3, draft_head="fp8")
    assert draft_only == pytest.approx(804_782_080 + 3 * 402_391_040, rel=0.002)


def test_a_copy_for_the_draft_alone_counts_as_memory() -> None:
    ling = {"vocabulary": 157_184, "hidden": 2560}
    assert draft_copy_bytes(**ling, head="fp8") == 0
    assert draft_copy_bytes(**ling, head="bf16", draft_head="fp8") == pytest.approx(402_391_040, rel=0.002)
    assert draft_copy_bytes(**ling, head="bf16", hot=32_768) == 2 * 32_768 * 2560


def test_the_command_writes_a_map(miniature: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sparkmoe.cli import main

    corpus, out = tmp_path / "corpus.txt", tmp_path / "hot.pt"
    corpus.write_text("one two three\n" * 20)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "hot-vocab",
                str(out),
                "--size",
                "48",
                "--text",
                str(corpus),
                "--model",
                str(miniature),
                "--machine",
                "cpu",
            ]
        )
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert ended.value.code == 0
    assert said["rows"] == 48 == len(load(out))
    assert said["coverage"] == 1.0
    ends = json.loads((miniature / "config.json").read_text())["eos_token_id"]
    assert set(ends if isinstance(ends, list) else [ends]) <= set(load(out))
    with pytest.raises(SystemExit) as ended:
        main(["hot-vocab", str(out), "--model", str(miniature), "--machine", "cpu"])
    assert ended.value.code == 2
    assert "the corpus is empty" in capsys.readouterr().err
