"""House rules of the notebooks: short, typed parameters first, no outputs, nothing hidden."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MAX_CELLS, MAX_LINES = 25, 15


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded = nbformat.reads(request.param.read_text(), as_version=4)
    nbformat.validate(loaded)
    return dict(loaded)


def test_there_are_notebooks_and_their_names_are_in_order() -> None:
    assert NOTEBOOKS
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in NOTEBOOKS)


def test_size(notebook: dict[str, Any]) -> None:
    assert len(notebook["cells"]) <= MAX_CELLS
    assert all(cell["source"].strip() for cell in notebook["cells"]), "an empty cell"
    lines = [cell["source"].splitlines() for cell in code_cells(notebook)]
    long = [cell[0] for cell in lines if len(cell) > MAX_LINES]
    assert long == []


def test_prose_outweighs_code(notebook: dict[str, Any]) -> None:
    prose = sum(len(cell["source"].split()) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    code = sum(len(cell["source"].split()) for cell in code_cells(notebook))
    assert prose >= code


def test_no_outputs(notebook: dict[str, Any]) -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code_cells(notebook))


def test_the_first_code_cell_holds_typed_plain_parameters(notebook: dict[str, Any]) -> None:
    first, *rest = code_cells(notebook)
    assert "parameters" in first["metadata"].get("tags", [])
    assert all("parameters" not in cell["metadata"].get("tags", []) for cell in rest)
    for statement in ast.parse(first["source"]).body:
        assert isinstance(statement, ast.AnnAssign), ast.unparse(statement)
        ast.literal_eval(statement.value or "")  # a plain value, or this raises


def test_no_shell_no_sleep_no_print_debugging(notebook: dict[str, Any]) -> None:
    for cell in code_cells(notebook):
        tree = ast.parse(cell["source"])  # `!cmd` and `%magic` are no Python
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not called & {"time.sleep", "sleep", "os.system", "subprocess.run", "subprocess.Popen"}


def test_the_last_cell_is_the_table_of_checks(notebook: dict[str, Any]) -> None:
    assert "checks.finish(" in code_cells(notebook)[-1]["source"]
    assert "next" in notebook["cells"][-1]["source"].lower()


def test_metadata_is_lean(notebook: dict[str, Any]) -> None:
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert len(json.dumps(notebook["metadata"])) < 400
