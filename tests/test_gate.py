"""The gate: a slow change fails, a slow machine does not, and nothing but --update moves a baseline."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import synthetic_run
from sparkmoe import baseline
from sparkmoe.cli import main
from sparkmoe.errors import DataError, StoreError
from sparkmoe.gate import gate, thresholds
from sparkmoe.outcome import Outcome, Row
from sparkmoe.results import Run


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("baseline")
    baseline.update(Run.open(synthetic_run.make(root, "good")), root / "baseline.json")
    return root / "baseline.json"


def against(file: Path, root: Path, **changes: object) -> Outcome:
    run = synthetic_run.make(root, "changed", seed=7, **changes)  # type: ignore[arg-type]
    return gate(Run.open(run), baseline.load(file), thresholds())


def which(outcome: Outcome, state: str) -> list[tuple[str, str, str]]:
    return [(row.notebook, row.metric, row.what) for row in outcome.rows if row.state == state]


def test_the_same_again_passes(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path)
    assert outcome.ok
    assert (outcome.count("fail"), outcome.count("look"), outcome.count("skip")) == (0, 0, 0)
    assert {row.metric for row in outcome.rows} == set(thresholds())


def test_a_slower_lever_fails_alone(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path, slower={"nextn": 1.5})
    assert which(outcome, "fail") == [("05_mtp_nextn", "tpot_ratio", "nextn")]
    (row,) = [row for row in outcome.rows if row.state == "fail"]
    assert re.search(r"\+(49|50|51)\.\d%", row.found)
    assert row.expected.endswith("at most 35% worse")


def test_more_boots_find_smaller_losses(file: Path, tmp_path: Path) -> None:
    assert against(file, tmp_path / "one", slower={"nextn": 1.2}).ok
    base = baseline.summary(Run.open(synthetic_run.make(tmp_path, "base", boots=3)))
    slower = Run.open(synthetic_run.make(tmp_path, "slower", boots=3, seed=7, slower={"nextn": 1.2}))
    (row,) = [row for row in gate(slower, base, thresholds()).rows if row.state == "fail"]
    assert (row.metric, row.what) == ("tpot_ratio", "nextn")
    assert row.expected.endswith("at most 10% worse")


def test_a_slow_machine_is_no_slow_change(file: Path, tmp_path: Path) -> None:
    """Everything takes 2.2 times as long, and the probe lost as much: no failure, said in words."""
    outcome = against(file, tmp_path, machine_slower=2.2, bandwidth_gb_s=6.0)
    assert outcome.ok
    slow = [row for row in outcome.rows if row.state == "look"]
    assert {row.metric for row in slow} == {"tpot", "start"}
    assert all("slow machine: its bandwidth lost 100% as well" in row.note for row in slow)
    assert "6.0 GB/s, baseline 12.0" in outcome.machine


def test_the_same_slowness_on_a_sound_machine_fails_at_the_reference(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path, machine_slower=1.5)
    assert {(metric, what) for _, metric, what in which(outcome, "fail") if metric == "tpot"} == {("tpot", "baseline")}
    assert not [row for row in outcome.rows if row.metric == "tpot_ratio" and row.state != "pass"]


def test_a_slow_machine_does_not_excuse_what_is_slower_still(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path, machine_slower=3.0, bandwidth_gb_s=6.0)
    assert ("05_mtp_nextn", "tpot", "baseline") in which(outcome, "fail")


def test_an_arm_measured_in_a_bad_minute_is_to_look_at(file: Path, tmp_path: Path) -> None:
    """Its answers took one, four and nine times as long: no change of the code scatters them so."""
    outcome = against(file, tmp_path, disturbed="nextn")
    assert outcome.ok
    (row,) = [row for row in outcome.rows if row.state == "look"]
    assert (row.metric, row.what) == ("tpot_ratio", "nextn")
    assert row.note.startswith("disturbed machine: quartiles of nextn")


def test_each_metric_by_itself(file: Path, tmp_path: Path) -> None:
    for changes, metric in (
        ({"accept": {"nextn": 2.8}}, "accept_length"),
        ({"memory_bytes": 2.0e9}, "memory"),
        ({"ready_s": 40.0}, "start"),
        ({"wrong": 8}, "accuracy"),
    ):
        outcome = against(file, tmp_path / metric, **changes)
        assert {row.metric for row in outcome.rows if row.state == "fail"} == {metric}


def test_a_loss_that_chance_explains_is_to_look_at(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path, wrong=2)
    assert outcome.ok
    assert which(outcome, "look") == [("06_gsm8k", "accuracy", "fp8_head_nextn")]


def test_a_lever_that_is_off_fails_its_check_and_nothing_else(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path, disengaged="fp8_head_nextn")
    assert which(outcome, "fail") == [("05_mtp_nextn", "engagement", "fp8_head_nextn is engaged")]
    skipped = {row.note for row in outcome.rows if row.state == "skip"}
    assert skipped == {"the notebook ended before it"}


def test_what_was_dropped_fails_and_what_was_not_run_is_skipped(file: Path, tmp_path: Path) -> None:
    path = synthetic_run.make(tmp_path)
    checks = path / "02_baseline" / "checks.json"
    content = json.loads(checks.read_text())
    content["checks"].pop()
    checks.write_text(json.dumps(content))
    for part in sorted((path / "06_gsm8k").rglob("*"), reverse=True):
        part.rmdir() if part.is_dir() else part.unlink()
    (path / "06_gsm8k").rmdir()
    summary = json.loads((path / "run.json").read_text())
    summary["notebooks"].pop()
    (path / "run.json").write_text(json.dumps(summary))
    outcome = gate(Run.open(path), baseline.load(file), thresholds())
    assert which(outcome, "fail") == [("02_baseline", "checks", "samples kept")]
    assert which(outcome, "skip") == [("06_gsm8k", "checks", "the notebook ran")]


def test_another_machine_or_other_prompts_are_not_compared(file: Path, tmp_path: Path) -> None:
    content = baseline.load(file)
    other = content | {"machine": content["machine"] | {"cores": 96}}
    outcome = gate(Run.open(synthetic_run.make(tmp_path, slower={"nextn": 2.0})), other, thresholds())
    assert outcome.ok
    assert {row.note for row in outcome.rows if row.state == "skip"} == {"not compared: another machine"}
    run = Run.open(synthetic_run.make(tmp_path, "other", prompt_hash="ab", slower={"nextn": 2.0}))
    assert {row.note for row in gate(run, content, thresholds()).rows if row.state == "skip"} == {
        "not compared: other prompts"
    }


def test_the_summaries(file: Path, tmp_path: Path) -> None:
    outcome = against(file, tmp_path, slower={"nextn": 1.5})
    suites = ElementTree.fromstring(outcome.junit())
    by_name = {suite.get("name"): suite for suite in suites}
    assert by_name["05_mtp_nextn"].get("failures") == "1"
    assert by_name["02_baseline"].get("failures") == "0"
    (failure,) = suites.iter("failure")
    assert "for the worse" in str(failure.get("message"))
    text = outcome.markdown()
    assert "**1 metrics got worse.**" in text
    assert text.count("✘ FAIL") == 1
    assert Outcome("a", "b", "", [Row("n", "tpot", "x", "skip", "1", "2", "not compared")]).ok


# Bad input, and the command


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('schema = "sparkmoe.gate/1"\n[tpot_ratoi]\nlimit = 0.1', "no metric 'tpot_ratoi'; did you mean tpot_ratio"),
        ('schema = "sparkmoe.gate/1"\n[tpot]\nlimits = 0.1', r"\[tpot\]: limits: only limit, noise"),
        ('schema = "sparkmoe.gate/1"\n[tpot]\nlimit = "5 %"', r"\[tpot\]: limit: only limit, noise"),
        ("schema = ", "is no TOML"),
        ("[tpot]\nlimit = 0.1", "has schema None"),
    ],
)
def test_bad_thresholds_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "gate.toml").write_text(text)
    with pytest.raises((DataError, StoreError), match=sentence):
        thresholds(tmp_path / "gate.toml")


def test_only_a_good_run_becomes_a_baseline(tmp_path: Path) -> None:
    run = Run.open(synthetic_run.make(tmp_path, disengaged="nextn"))
    with pytest.raises(DataError, match="05_mtp_nextn: nextn is engaged"):
        baseline.update(run, tmp_path / "baseline.json")
    assert not (tmp_path / "baseline.json").exists()
    (tmp_path / "x.json").write_text('{"schema": "sparkmoe.baseline/7"}')
    with pytest.raises(StoreError, match="baseline/7"):
        baseline.load(tmp_path / "x.json")
    with pytest.raises(StoreError, match="No run at nowhere"):
        baseline.load("nowhere", root=tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    synthetic_run.make(Path("results"), "a")
    synthetic_run.make(Path("results"), "b", slower={"nextn": 1.5})

    def sparkmoe(*words: str) -> tuple[int, dict]:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out = capsys.readouterr()
        code = ended.value.code or 0
        return int(code), json.loads(out.out.splitlines()[-1]) if out.out else {"error": out.err}

    assert sparkmoe("gate", "a", "--baseline", "baseline.json", "--update") == (
        0,
        {"baseline": "baseline.json", "run": "a", "notebooks": ["02_baseline", "05_mtp_nextn", "06_gsm8k"]},
    )
    before = Path("baseline.json").read_bytes()
    code, said = sparkmoe("gate", "b", "--baseline", "baseline.json")
    assert (code, said["ok"], said["fail"]) == (1, False, 1)
    assert sparkmoe("gate", "a", "--baseline", "a")[0] == 0, "a run is a baseline too"
    assert Path("baseline.json").read_bytes() == before
    assert Path("results/b/gate.xml").is_file()
    assert "got worse" in Path("results/b/gate.md").read_text()
    code, said = sparkmoe("gate", "b", "--baseline", "basline.json")
    assert code == 2
    assert said["error"].startswith("error: No run at basline.json")
