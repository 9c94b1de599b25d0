"""The run store survives kills, refuses what it cannot read, and compares runs with their conditions."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sparkmoe import compare, conditions, results
from sparkmoe.cli import main
from sparkmoe.errors import DataError, StoreError
from sparkmoe.results import Run


def record(arm: str, boot: int, request: int, tpot: float = 25.0, **more: object) -> dict:
    sample = {"tpot_ms": tpot, "ttft_ms": 80.0, "chunk_tokens": (1, 2), "accept_length": None}
    return {"arm": arm, "boot": boot, "request": request, "spoiled": [], "sample": sample} | more


def filled(
    root: Path, run_id: str, scale: float = 1.0, arm: str = "baseline", boots: int = 4, **conditions: object
) -> Run:
    run = Run.create(root, run_id=run_id, **conditions)
    rng = np.random.default_rng(len(run_id))
    for boot in range(boots):
        level = 25 * scale * np.exp(0.005 * rng.standard_normal())
        for request in range(5):
            run.append(record(arm, boot, request, level * np.exp(0.003 * rng.standard_normal())))
    run.close()
    return run


def test_manifest_holds_the_conditions(tmp_path: Path) -> None:
    @dataclass
    class Recipe:
        name: str
        home: Path

    run = Run.create(tmp_path, name="bench", arms={"base": Recipe("base", tmp_path)}, seeds=[1, 2], prompt_hash="ab")
    seen = Run.open(run.id, root=tmp_path).manifest
    assert seen["schema"] == results.SCHEMA
    assert seen["arms"]["base"] == {"name": "base", "home": str(tmp_path)}
    assert {"kernel", "driver", "memory_total_bytes", "packages", "source", "argv", "clocks_before"} <= set(seen)
    assert seen["packages"]["torch"]
    run.update(clocks_after=conditions.clocks())
    assert Run.open(run.path).manifest["clocks_after"]["at_unix_s"] >= seen["clocks_before"]["at_unix_s"]
    assert not list(run.path.glob(".*.tmp"))
    with pytest.raises(StoreError, match="exists already"):
        Run.create(tmp_path, run_id=run.id)


def test_a_run_killed_before_its_manifest_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".manifest.json.4711.tmp").write_text("{")  # half written, not yet renamed
    assert Run.create(tmp_path, run_id="r", name="again").manifest["run"] == "r"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        Run.create(tmp_path, run_id="other")


def test_source_state_of_this_checkout_and_of_none(tmp_path: Path) -> None:
    assert conditions.source_state(tmp_path) == {"commit": None, "dirty": None}
    state = conditions.source_state()
    if (Path(__file__).parents[1] / ".git").exists():
        assert len(state["commit"]) == 40
        assert isinstance(state["dirty"], bool)


def test_records_come_back_as_written(tmp_path: Path) -> None:
    with Run.create(tmp_path) as run:
        run.append(record("a", 0, 0, float("nan"), gaps=np.array([1.5, 2.5]), where=tmp_path))
        run.append(record("a", 0, 1))
    first, second = run.records()
    assert first["sample"]["tpot_ms"] is None
    assert first["gaps"] == [1.5, 2.5]
    assert first["where"] == str(tmp_path)
    assert second == json.loads(json.dumps(record("a", 0, 1)))
    assert run.done() == {("a", 0, 0), ("a", 0, 1)}
    with pytest.raises(StoreError, match="boot, request"):
        run.append({"arm": "a"})


@pytest.mark.parametrize("torn", [b'{"arm": "a", "bo', b'{"arm": "a"}', b"\x00\x00\x00\n"])
def test_half_written_last_line_is_dropped_and_cut_off(tmp_path: Path, torn: bytes) -> None:
    run = filled(tmp_path, "torn", boots=1)
    with run.samples_path.open("ab") as file:
        file.write(torn)
    assert len(list(run.records())) == 5
    run.append(record("a", 9, 9))
    run.close()
    assert [r["boot"] for r in run.records()] == [0] * 5 + [9]


def test_damage_before_the_last_line_is_an_error_with_its_number(tmp_path: Path) -> None:
    run = filled(tmp_path, "damaged", boots=1)
    lines = run.samples_path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:20] + b"\n"
    run.samples_path.write_bytes(b"".join(lines))
    with pytest.raises(StoreError, match=r"line 3, is damaged"):
        list(run.records())


def test_killed_writer_loses_at_most_the_line_in_hand(tmp_path: Path) -> None:
    run = Run.create(tmp_path)
    big = "x" * 200_000
    for attempt in range(4):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:  # pragma: no cover
            request = 0
            while True:
                run.append(record("a", attempt, request, text=big))
                os.write(writer, b".")
                request += 1
        first = len(os.read(reader, 1))  # a busy machine may take its time to get there
        time.sleep(0.013 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writer)
        reported = first + sum(len(part) for part in iter(lambda r=reader: os.read(r, 1 << 16), b""))
        os.close(reader)
        kept = [r for r in run.records() if r["boot"] == attempt]
        assert reported <= len(kept) <= reported + 1
        assert [r["request"] for r in kept] == list(range(len(kept)))


def test_two_writers_are_refused(tmp_path: Path) -> None:
    run = filled(tmp_path, "busy", boots=1)
    run.append(record("a", 5, 5))
    with pytest.raises(StoreError, match="another process"):
        Run.open(run.path).append(record("a", 6, 6))
    run.close()
    with Run.open(run.path) as second:
        second.append(record("a", 6, 6))
    assert len(list(run.records())) == 7


def test_unknown_schema_missing_run_and_unwritable_place_are_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path, run_id="future")
    run.write_json("manifest.json", run.manifest | {"schema": "sparkmoe.run/9"})
    with pytest.raises(StoreError, match=r"'sparkmoe.run/9'; this version reads 'sparkmoe.run/1'"):
        Run.open(run.path)
    (run.path / "manifest.json").write_text("[]")
    with pytest.raises(StoreError, match="no manifest of a run"):
        Run.open(run.path)
    with pytest.raises(StoreError, match=r"No run at nowhere.*future"):
        Run.open("nowhere", root=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"Cannot make a run in .*[Nn]ot a directory|File exists"):
        Run.create(tmp_path / "file")


def test_a_full_disk_is_one_sentence_and_the_next_append_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = filled(tmp_path, "full", boots=1)
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:10]))
    with pytest.raises(StoreError, match="is it full"):
        run.append(record("a", 1, 0))
    monkeypatch.undo()
    run.append(record("a", 1, 0))
    assert [r["boot"] for r in run.records()] == [0] * 5 + [1]


def test_export(tmp_path: Path) -> None:
    run = filled(tmp_path, "out", boots=2)
    parquet = pd.read_parquet(run.export(tmp_path / "x" / "out.parquet"))
    csv = pd.read_csv(run.export(tmp_path / "out.csv"))
    assert len(parquet) == len(csv) == 10
    assert list(parquet["chunk_tokens"][0]) == json.loads(csv["chunk_tokens"][0]) == [1, 2]
    assert np.allclose(parquet["tpot_ms"], csv["tpot_ms"])
    with pytest.raises(StoreError, match=r"\.csv or \.parquet"):
        run.export(tmp_path / "out.xlsx")
    with pytest.raises(StoreError, match="nothing to export"):
        Run.create(tmp_path, run_id="empty").export(tmp_path / "empty.csv")


def test_spoiled_samples_are_counted_and_left_out(tmp_path: Path) -> None:
    run = filled(tmp_path, "spoiled", boots=2)
    run.append(record("baseline", 1, 5, 999.0, spoiled=["compile"]))
    values, spoiled = results.by_boot(run.records(), "baseline", "tpot_ms")
    assert (len(values), spoiled) == (2, 1)
    assert max(map(max, values)) < 30


# -------------------------------------------------------------------------------------------------------------- compare


def test_compare_finds_the_gain_and_the_conditions_that_differ(tmp_path: Path) -> None:
    a = filled(tmp_path, "before", 1.0, prompt_hash="p", machine={"gpu_name": "GB10", "mem_available_bytes": 5})
    b = filled(tmp_path, "after", 0.8, prompt_hash="p", machine={"gpu_name": "H200", "mem_available_bytes": 6})
    found = compare.compare(a, b)
    assert found.differing == [("machine.gpu_name", "GB10", "H200")]
    tpot = next(row for row in found.rows if row.metric == "tpot_ms")
    assert tpot.ratio is not None
    assert tpot.ratio.estimate == pytest.approx(0.8, rel=0.01)
    assert tpot.ratio.excludes(1)
    same = next(row for row in found.rows if row.metric == "ttft_ms")
    assert same.ratio is not None
    assert (same.ratio.low, same.ratio.high) == pytest.approx((1, 1))
    text, line = compare.compare_command("before", "after", root=tmp_path).rsplit("\n", 1)
    assert "| baseline | tpot_ms (ms)" in text
    assert "GB10 → H200" in text
    assert json.loads(line)["rows"][0]["ratio"]["estimate"] == pytest.approx(tpot.ratio.estimate)


def test_compare_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path, "before")
    filled(tmp_path, "after", 0.8)
    with pytest.raises(SystemExit) as done:
        main(["compare", "before", "after", "--results", str(tmp_path)])
    assert done.value.code == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert json.loads(line)["run_b"] == "after"
    assert any("tpot_ms (ms)" in row for row in table)
    with pytest.raises(SystemExit) as done:
        main(["compare", "before", "nowhere", "--results", str(tmp_path)])
    assert done.value.code == 2
    assert capsys.readouterr().err.startswith("error: No run at nowhere")


def test_compare_grades_shared_problems_in_pairs(tmp_path: Path) -> None:
    runs = []
    for run_id, wrong in (("x", {1, 2}), ("y", {2, 3, 4})):
        run = Run.create(tmp_path, run_id=run_id)
        for problem in range(30):
            run.append(record("all", 0, problem, problem=f"p{problem}", correct=problem not in wrong))
        runs.append(run)
    accuracy = compare.compare(*runs).accuracy["all"]
    assert accuracy["table"] == {"both": 26, "only_base": 2, "only_new": 1, "neither": 1}
    assert accuracy["mcnemar_p"] == 1.0
    assert "93.33 % → 90.00 %" in compare.compare(*runs).text()


def test_compare_pairs_single_arms_and_refuses_strangers(tmp_path: Path) -> None:
    a = filled(tmp_path, "a", arm="baseline", boots=1)
    b = filled(tmp_path, "b", arm="humming", boots=1)
    text = compare.compare(a, b).text()
    assert "baseline → humming" in text
    assert "note: one boot" in text
    b.append(record("nextn", 0, 0))
    with pytest.raises(DataError, match="a has baseline; b has humming, nextn"):
        compare.compare(a, b)
