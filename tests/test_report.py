"""The report: one file that works without a network, clicked through in a real browser where there is one."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright
from plotly.offline import get_plotlyjs

import synthetic_run
from sparkmoe.chapters import STORY, chapters
from sparkmoe.errors import StoreError
from sparkmoe.report import accuracy, beside_published, not_shown, report, serve_command
from sparkmoe.results import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = synthetic_run.make(tmp_path_factory.mktemp("report"), wrong=3)
    report(path)
    return path


def test_plotlys_script_is_in_it_once_and_nothing_comes_from_elsewhere(run: Path) -> None:
    html = (run / "report.html").read_text()
    script = get_plotlyjs()
    assert html.count(script) == 1
    rest = html.replace(script, "")
    assert len(rest) < 500_000
    assert re.findall(r"(?:src|href)=.?https?:|url\(.?https?:", rest) == []


def test_published_figures_stand_beside_what_this_machine_can(run: Path) -> None:
    rows = {row["rung"]: row for row in beside_published(chapters(run))}
    assert rows["humming"]["here"] == "Humming needs an NVIDIA GPU; this machine runs on its CPU"
    assert rows["all_three"]["here"] == "fp8_head_nextn in 05_mtp_nextn, without humming"
    assert (rows["all_three"]["published ms"], rows["all_three"]["gain"]) == ("9.72", "2.85 ×")
    assert rows["all_three"]["accept length"] == "3.00 (there 3.90)"
    assert serve_command(chapters(run)) == "sparkmoe serve fp8_head_nextn"


def test_an_arm_with_a_token_map_can_be_served_too(tmp_path: Path) -> None:
    found = chapters(synthetic_run.make(tmp_path))
    plan = found[1].run.manifest["plan"]
    plan["arms"]["fp8_head_nextn"]["hot_vocab"] = "/maps/my hot.pt"
    found[1].run.update(plan=plan)
    assert serve_command(chapters(tmp_path / "run")) == "sparkmoe serve fp8_head_nextn --hot-vocab '/maps/my hot.pt'"


def test_accuracy_has_its_published_pair(run: Path) -> None:
    ours, published = accuracy(chapters(run))
    assert (ours["benchmark"], published["benchmark"]) == ("sums", "GSM8K")
    assert "fp8_head_nextn against baseline on sums (06_gsm8k)" in (run / "report.html").read_text()
    assert ours["right (new, base)"] == "93, 96 of 100"
    assert ours["decode rate"] == "1.76 ×"
    assert published["right (new, base)"] == "1277, 1278 of 1319"
    assert (published["decode rate"], published["decode time"]) == ("1.43 ×", "1.33 × less")
    assert published["a loss of a point"].startswith("ruled out")


def test_what_is_missing_is_said(run: Path, tmp_path: Path) -> None:
    gone = not_shown(chapters(run))
    assert {"00_preflight", "Humming kernels", "other boots"} <= set(gone)
    assert "accuracy" not in gone
    assert set(STORY[:-1]) <= set(not_shown([]))
    alone = Run.create(tmp_path, run_id="alone", notebook="00_preflight")
    text = report(alone).read_text()
    assert "No arm was timed in this run" in text
    assert "no two arms answered the same problems" in text


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No run at nowhere"):
        report("nowhere", root=tmp_path)


# In a browser


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page without a network whose errors fail the test."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    width = getattr(request, "param", 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": width, "height": 800}, offline=True, accept_downloads=True)
        opened, wrong = context.new_page(), list[str]()
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        opened.on("request", lambda asked: wrong.append(asked.url) if asked.url.startswith("http") else None)
        yield opened
        browser.close()
        assert wrong == []


def visible_traces(page: Page, figure: str) -> list[Any]:
    script = f"[...document.querySelector('[data-figure=\"{figure}\"]').data].map(t => t.visible ?? true)"
    return list(page.evaluate(script))


def test_it_clicks_through(run: Path, page: Page, tmp_path: Path) -> None:
    page.goto((run / "report.html").as_uri())
    assert page.locator("#state").inner_text() == "Every check holds."
    assert page.locator(".js-plotly-plot .main-svg").count() >= 3
    # a figure is live: a click into its legend hides the ceiling
    page.locator('[data-figure="ladder"] .legendtoggle').nth(1).click()
    page.wait_for_timeout(700)  # Plotly waits for a second click
    assert visible_traces(page, "ladder") == [True, "legendonly"]
    # the navigation leads to a section
    page.locator("nav").get_by_text("05_mtp_nextn").click()
    assert page.evaluate("location.hash") == "#05_mtp_nextn"
    # a folded answer opens
    page.get_by_text("questions that one arm alone solved").click()
    assert page.get_by_text("right: 129, by base").first.is_visible()
    # raw data comes out as it went in
    with page.expect_download() as download:
        page.get_by_text("05_mtp_nextn-samples.jsonl.gz").click()
    download.value.save_as(tmp_path / "samples.jsonl.gz")
    raw = (run / "05_mtp_nextn" / "samples.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "samples.jsonl.gz").read_bytes()) == raw
    with page.expect_download() as download:
        page.get_by_text("02_baseline-samples.csv").click()
    download.value.save_as(tmp_path / "samples.csv")
    with (tmp_path / "samples.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 12


@pytest.mark.parametrize("page", [390], indirect=True)
def test_it_fits_a_phone_and_prints(run: Path, page: Page, tmp_path: Path) -> None:
    page.goto((run / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    widths = page.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().width)")
    assert max(widths) <= 390
    page.set_viewport_size({"width": 720, "height": 1000})
    page.emulate_media(media="print")
    assert page.evaluate("Math.max(...[...document.querySelectorAll('table')].map(t => t.scrollWidth))") <= 720
    page.emulate_media(media="screen")
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert page.evaluate("[...document.querySelectorAll('details')].every(d => !d.open)"), "folded again after printing"
    assert (tmp_path / "report.pdf").stat().st_size > 20_000


def test_what_need_not_hold_and_does_not_is_named_at_the_top(tmp_path: Path, page: Page) -> None:
    path = synthetic_run.make(tmp_path)
    kept = path / "05_mtp_nextn" / "checks.json"
    content = json.loads(kept.read_text())
    content["checks"][0] |= {"what": "the gain is told apart", "ok": False, "required": False, "advice": "ask more"}
    kept.write_text(json.dumps(content))
    page.goto(report(path).as_uri())
    assert page.locator("#state").inner_text() == "Every check holds that must."
    (line,) = page.locator("#looks li").all_inner_texts()
    assert line.startswith("Worth a look in 05_mtp_nextn: the gain is told apart: found ")
    assert line.endswith("(ask more)")


def test_a_lever_that_is_off_is_red_at_the_top_and_alone(tmp_path: Path, page: Page) -> None:
    path = synthetic_run.make(tmp_path, disengaged="fp8_head_nextn")
    page.goto(report(path).as_uri())
    state = page.locator("#state").inner_text()
    assert "1 checks failed" in state
    assert "05_mtp_nextn: fp8_head_nextn is engaged: found bf16, expected fp8" in state
    assert page.locator("tr.fail").count() == 1
    assert json.loads((path / "run.json").read_text())["ok"] is False
