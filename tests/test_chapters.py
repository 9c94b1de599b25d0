"""Reading a run back: what its notebooks left, found by the convention of `notebook`."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import synthetic_run
from sparkmoe import notebook, recorded
from sparkmoe.chapters import chapters, ladder, latest, story
from sparkmoe.errors import DataError, NotEngaged, StoreError
from sparkmoe.gsm8k_compare import PUBLISHED
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run


def test_chapters_hold_checks_arms_and_figures(tmp_path: Path) -> None:
    first, second, third = chapters(synthetic_run.make(tmp_path))
    assert [c.name for c in (first, second, third)] == ["02_baseline", "05_mtp_nextn", "06_gsm8k"]
    assert all(c.ok for c in (first, second, third))
    arms = {arm.name: arm for arm in second.arms()}
    assert arms["nextn"].gain is not None
    assert arms["nextn"].gain.estimate == pytest.approx(12 / 7, rel=0.01)
    assert arms["nextn"].accept_length == pytest.approx(3.0)
    assert (arms["nextn"].predicted_gain, arms["nextn"].ceiling_tok_s) == (1.8, 400.0)
    assert (arms["baseline"].gain, arms["baseline"].accept_length) == (None, None)
    assert list(second.figures) == ["ladder"]
    assert second.not_shown == {"Humming kernels": "they need an NVIDIA GPU"}
    assert third.benches[0].graded == ["baseline", "fp8_head_nextn"]
    assert second.benches[0].boot_facts("nextn")[0]["bandwidth_before_gb_s"] == 12.0


def test_the_ladder_is_one_bench(tmp_path: Path) -> None:
    found = chapters(synthetic_run.make(tmp_path))
    assert ladder([found[-1]]) == [], "graded arms were asked one after the other, not in turns"
    rungs = ladder(found)
    assert {arm.chapter for arm in rungs} == {"05_mtp_nextn"}
    assert [arm.name for arm in rungs][-2:] == ["nextn", "fp8_head_nextn"]


def test_a_notebook_that_ended_early_is_no_good_one(tmp_path: Path) -> None:
    path = synthetic_run.make(tmp_path, disengaged="fp8_head_nextn")
    _, broken, _ = chapters(path)
    assert [check.what for check in broken.failed] == ["fp8_head_nextn is engaged"]
    assert (broken.finished, broken.ok) == (False, False)
    assert "NotEngaged" in str(broken.error)
    summary = json.loads((path / "run.json").read_text())
    summary["notebooks"].append({"name": "07_beyond", "ok": False, "seconds": 1.0, "output": "", "error": "no module"})
    (path / "run.json").write_text(json.dumps(summary))
    assert [(c.name, c.error, c.checks) for c in chapters(path)][-1] == ("07_beyond", "no module", [])


def test_the_latest_of_every_notebook_alone_or_in_a_run(tmp_path: Path) -> None:
    synthetic_run.make(tmp_path, "older")
    alone = Run.create(tmp_path, run_id="alone-02", notebook="02_baseline", machine=synthetic_run.MACHINE)
    assert {c.run.path.parent.name for c in latest(tmp_path)} == {"older"}, "an unfinished one does not count"
    checks = notebook.Checks(alone, "02_baseline")
    checks.add("it ran", True, 1, 1)
    checks.finish()
    assert [c.run.path.name for c in latest(tmp_path)] == ["alone-02", "05_mtp_nextn", "06_gsm8k"]
    assert [c.name for c in chapters(alone)] == ["02_baseline"]


def test_the_last_notebook_tells_of_its_run_or_of_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic_run.make(tmp_path, "older")
    inside = Run.create(tmp_path, run_id="now")
    Run.create(inside.path, run_id="08_report", notebook="08_report")
    monkeypatch.setenv("SPARKMOE_RUN", str(inside.path))
    assert {c.run.path.parent.name for c in story()} == {"older"}, "this run has nothing else"
    Run.create(inside.path, run_id="02_baseline", notebook="02_baseline")
    assert [(c.run.path.parent.name, c.name) for c in story()] == [("now", "02_baseline")]
    assert len(story("older")) == 3


def test_a_part_is_a_bench_of_its_own(tmp_path: Path) -> None:
    path = synthetic_run.make(tmp_path)
    run = Run.open(path / "02_baseline")
    part = notebook.open_part(run, "sweep")
    part.append({"arm": "nextn", "boot": 0, "request": 0, "spoiled": [], "sample": synthetic_run.sample(7.0, 3.0, 0)})
    assert [(b.name, b.arms) for b in chapters(path)[0].benches] == [
        ("", ["baseline", "fp8_head"]),
        ("sweep", ["nextn"]),
    ]
    assert part.manifest["machine"]["profile"] == "cpu"


def test_what_several_users_got_is_no_sample_of_one(tmp_path: Path) -> None:
    run = Run.create(tmp_path, run_id="07_beyond", notebook="07_beyond", machine=synthetic_run.MACHINE)
    for request, (users, tpot_ms) in enumerate([(1, 7.0), (1, 7.1), (4, 21.0), (4, 22.0)]):
        one = synthetic_run.sample(tpot_ms, 3.0, request)
        line = {"arm": "nextn", "boot": 0, "request": request, "spoiled": [], "sample": one, "concurrency": users}
        run.append(line)
    assert notebook.Measured(run).values("nextn", "tpot_ms") == [[7.0, 7.1]]
    assert chapters(run)[0].arms()[0].samples == 2


def test_a_missing_run_and_another_schema_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No run at nowhere"):
        chapters("nowhere", root=tmp_path)
    with pytest.raises(StoreError, match="holds no notebook's data"):
        chapters(Run.create(tmp_path, run_id="empty"))
    path = synthetic_run.make(tmp_path)
    (path / "02_baseline" / "checks.json").write_text('{"schema": "sparkmoe.checks/9"}')
    with pytest.raises(StoreError, match="checks/9"):
        chapters(path)


class Server:
    """What `Checks.prove` asks of an engine."""

    recipe = Recipe.named("fp8_head")
    ready_s = 17.0

    def __init__(self, evidence: Path) -> None:
        self.evidence_path = evidence

    def memory_bytes(self) -> int:
        return 1_500_000_000


def test_a_lever_that_is_off_is_a_red_check_on_disk_before_it_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path, run_id="r", notebook="04_fp8_lm_head")
    checks = notebook.Checks(run, "04_fp8_lm_head")
    with pytest.raises(NotEngaged, match="fp8_head is not engaged: plugin: none"):
        checks.prove(Server(tmp_path / "none.json"), [])  # type: ignore[arg-type]
    (chapter,) = chapters(run)
    assert [c.what for c in chapter.failed] == ["fp8_head is engaged"]
    assert chapter.manifest["servers"]["fp8_head"] == [{"ready_s": 17.0, "memory_bytes": 1_500_000_000}]
    assert "fp8_head is engaged" in capsys.readouterr().out


def test_records_say_where_they_come_from() -> None:
    assert set(recorded.names()) >= {"levers-h200", "spark-published"}
    assert "NVIDIA H200" in recorded.load("levers-h200").line()
    gsm8k = recorded.load("spark-published").findings["gsm8k"]
    table = PUBLISHED.table
    assert [table.both, table.only_base, table.only_new, table.neither] == [
        gsm8k[key] for key in ("both_right", "only_baseline", "only_all_three", "neither")
    ]
    assert PUBLISHED.new_tokens == gsm8k["all_three"]["completion_tokens"]
    with pytest.raises(DataError, match="did you mean spark-published"):
        recorded.load("spark-publishd")


TWO_FIGURES = """
import plotly.graph_objects as go
from pathlib import Path
from sparkmoe import notebook
from sparkmoe.results import Run
run = Run.create({root!r}, run_id="figures")
notebook.show_figure(run, "first", go.Figure().add_bar(y=[1]))
###
notebook.show_figure(run, "second", go.Figure().add_bar(y=[2]))
###
notebook.show_figure(run, "first", go.Figure().add_bar(y=[3]))
"""


def test_an_executed_notebook_holds_plotlys_script_once(tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in TWO_FIGURES.format(root=str(tmp_path)).split("###")]
    executed = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
    text = json.dumps(executed)
    assert text.count("plotly.js v") == 1
    assert text.count("Plotly.newPlot(") == 3
    assert Run.open(tmp_path / "figures").manifest["figures"] == ["first", "second"]
