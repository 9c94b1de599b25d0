"""Run all in JupyterLab in a real browser, as a reader does it: nothing red, and every figure drawn.

The last notebook needs no server and is always tried, as a part of a run. `pytest tests/test_jupyterlab.py -m slow`
does every notebook of the folder by itself, against live servers, twice in a row; what they measure stays in
`results/`, where the last one finds it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

import synthetic_run
from lifetimes import until
from sparkmoe import workshop
from sparkmoe.notebook import results_root
from sparkmoe.notebooks_run import minutes
from sparkmoe.results import Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NOTEBOOKS = workshop.select([], workshop.folder())


@dataclass
class Lab:
    """A JupyterLab on copies of the notebooks, and a page in it."""

    address: str
    page: Page
    cells: int = 0  # code cells of the open notebook; a page that is still drawing shows fewer

    def open(self, name: str) -> None:
        source = json.loads((workshop.folder() / f"{name}.ipynb").read_text())
        self.cells = sum(cell["cell_type"] == "code" for cell in source["cells"])
        self.page.goto(f"{self.address}lab/tree/{name}.ipynb?token=t&reset")
        self.page.locator(".jp-Notebook").wait_for(timeout=60_000)
        self.page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)

    def run_all(self, timeout_s: float, *, restart: bool = False) -> None:
        """Run all cells from the menu; fails on a traceback."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        if restart:
            self.page.get_by_text("Restart Kernel and Run All Cells…").click()
            self.page.locator(".jp-Dialog-button.jp-mod-accept").click()
        else:
            self.page.get_by_text("Run All Cells", exact=True).click()
        code = self.page.locator(".jp-CodeCell")
        self.page.locator(".jp-InputPrompt:text-is('[*]:')").first.wait_for(timeout=60_000, state="attached")
        last = code.last.locator(f".jp-InputPrompt:text-is('[{self.cells}]:')")
        failed = self.page.locator(".jp-OutputArea-output:has-text('Traceback')")
        last.or_(failed).first.wait_for(timeout=timeout_s * 1000, state="attached")
        assert failed.count() == 0, failed.first.inner_text()

    def figures(self) -> int:
        """Figures drawn, of a size that can be seen."""
        boxes = [plot.bounding_box() for plot in self.page.locator(".jp-Notebook .js-plotly-plot:has(.main-svg)").all()]
        return sum(box is not None and box["width"] > 200 and box["height"] > 100 for box in boxes)


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """`request.param`: variables for JupyterLab and its kernels."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    seat, run = tmp_path / "seat", synthetic_run.make(tmp_path)
    workshop.lay_out(seat)
    argv = [*workshop.lab_command(seat, browser=False), "--IdentityProvider.token=t", "--allow-root"]
    inside = {"SPARKMOE_RUN": str(run)} if request.param else {}
    environment = os.environ | {"JUPYTER_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"} | inside
    with (tmp_path / "lab.log").open("wb") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log, env=environment)
    try:
        until(lambda: list(tmp_path.glob("jpserver-*.json")) != [], 60)
        address = json.loads(next(tmp_path.glob("jpserver-*.json")).read_text())["url"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            yield Lab(address, browser.new_page(viewport={"width": 1200, "height": 20_000}))
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.parametrize("lab", [True], indirect=True, ids=["in-a-run"])
def test_the_last_notebook(lab: Lab) -> None:
    lab.open("08_report")
    lab.run_all(90)
    assert lab.figures() == 1


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lab", [False], indirect=True, ids=["alone"])
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_alone_and_twice(lab: Lab, notebook: Path) -> None:
    patience_s = 300 + 4 * 60 * minutes([notebook], quick=True)
    lab.open(notebook.stem)
    shown = []
    for again in (False, True):
        lab.run_all(patience_s, restart=again)
        run = Run.open(max(results_root().glob(f"*-{notebook.stem}")))
        assert json.loads((run.path / "checks.json").read_text())["finished"]
        assert lab.figures() == len(run.manifest.get("figures", []))
        shown.append((run.id, lab.figures()))
    assert shown[0][0] != shown[1][0], "the second time began a run of its own"
    if notebook.stem != "08_report":  # which has a figure if something was timed before
        assert (shown[1][1] > 0) == ("show_figure(" in notebook.read_text())
