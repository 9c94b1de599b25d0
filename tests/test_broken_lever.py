"""A lever that is off on a live server turns its check red in notebook, report and gate, and no other check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SPARKMOE = [sys.executable, "-c", "from sparkmoe.cli import main; main()"]
CELLS = """
from sparkmoe import notebook
from sparkmoe.engine import Engine
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
machine = Machine.named("cpu")
run = notebook.open_run("04_fp8_lm_head", machine)
checks = notebook.Checks(run, "04_fp8_lm_head")
checks.add("something that holds", True, 1, 1)
###
recipe = Recipe.named("fp8_head").with_(name="fp8_head", extra_env=(("SGLANG_ENABLE_FP8_LM_HEAD", "0"),))
with Engine(recipe, machine, {model!r}, show=False) as engine:
    checks.prove(engine)
###
checks.finish()
"""


@pytest.mark.server
def test_the_head_that_is_not_fp8(tmp_path: Path, miniature: Path) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS.format(model=str(miniature)).split("###")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    (tmp_path / "notebooks").mkdir()
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks" / "04_fp8_lm_head.ipynb"
    )
    environment = os.environ | {"SPARKMOE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def sparkmoe(*words: str) -> tuple[int, dict]:
        argv = [*SPARKMOE, *words]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    code, said = sparkmoe("run")
    assert code == 1
    assert "NotEngaged: recipe fp8_head is not engaged: " in said["notebooks"][0]["error"]
    run = tmp_path / said["run"]
    assert "✘ FAIL" in (run / "04_fp8_lm_head.ipynb").read_text()
    html = (run / "report.html").read_text()
    assert html.count('<tr class="fail">') == 1
    assert "1 checks failed" in html
    code, outcome = sparkmoe("gate", run.name, "--baseline", run.name)
    assert (code, outcome["fail"], outcome["skip"]) == (1, 1, 0)
    assert (outcome["rows"][0]["metric"], outcome["rows"][0]["what"]) == ("engagement", "fp8_head is engaged")
