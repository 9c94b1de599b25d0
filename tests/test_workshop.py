"""A seat is checked by a real server, works on copies, and is put back without losing anybody's edits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from lifetimes import listening, until
from sparkmoe import notebook, workshop
from sparkmoe.findings import Finding
from sparkmoe.machine import GIB, Machine

MACHINE = Machine.named("cpu")


def test_a_seat_gets_copies_and_reset_keeps_what_was_edited(tmp_path: Path) -> None:
    first = workshop.lay_out(tmp_path)
    assert first[0] == "00_preflight.ipynb"
    assert workshop.lay_out(tmp_path) == []
    edited = tmp_path / first[1]
    edited.write_text("mine")
    assert workshop.lay_out(tmp_path, reset=True) == [first[1]]
    (kept,) = tmp_path.glob("kept-*/*.ipynb")
    assert (kept.name, kept.read_text()) == (first[1], "mine")
    assert json.loads(edited.read_text())["cells"]


def test_a_seat_that_is_too_small_is_told_so_before_a_server_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "available_bytes", lambda: 3 * GIB)
    monkeypatch.setattr(workshop, "examine", lambda *_, **__: [])
    findings = workshop.examine_seat(replace(MACHINE, cores=1), results=tmp_path)
    failed = {f.what: f for f in findings if f.state == "fail"}
    assert set(failed) == {"seat: cores", "seat: memory"}
    assert failed["seat: memory"].found == "3.0 GiB free"
    assert "seat: a server answers" not in {f.what for f in findings}


def test_a_server_that_does_not_answer_fails_the_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "examine", lambda *_, **__: [])
    dead = Finding("seat: a server answers", "fail", "it died")
    assert workshop.examine_seat(MACHINE, results=tmp_path, try_server=lambda _: dead)[-1] == dead


@pytest.mark.server
def test_a_real_server_answers() -> None:
    found = workshop.answers(MACHINE)
    assert found.state == "ok", found
    assert found.found.startswith("16 tokens after")


def test_jupyterlab_opens_on_the_first_notebook(tmp_path: Path) -> None:
    workshop.lay_out(tmp_path)
    argv = [*workshop.lab_command(tmp_path, browser=False), "--IdentityProvider.token=t", "--allow-root"]
    assert "--LabApp.default_url=/lab/tree/00_preflight.ipynb" in argv
    log = tmp_path / "lab.log"
    with log.open("wb") as stream:
        lab = subprocess.Popen(
            argv, stdout=stream, stderr=stream, env=os.environ | {"JUPYTER_RUNTIME_DIR": str(tmp_path)}
        )
    try:
        until(lambda: list(tmp_path.glob("jpserver-*.json")) != [], 60)
        (server,) = tmp_path.glob("jpserver-*.json")
        seen = json.loads(server.read_text())
        until(lambda: listening(seen["port"]), 60)  # the file may come before the port
        with urllib.request.urlopen(f"{seen['url']}api/contents/00_preflight.ipynb?content=0&token=t") as answer:
            assert json.load(answer)["type"] == "notebook"
    finally:
        lab.send_signal(signal.SIGTERM)
        lab.wait(timeout=30)


def test_reset_by_command(tmp_path: Path) -> None:
    environment = os.environ | {"SPARKMOE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", "from sparkmoe.cli import main; main()", "workshop", "--reset"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert (done.returncode, said["stopped"], said["seat"]) == (0, 0, str(tmp_path / "workshop"))
    assert "00_preflight.ipynb" in said["laid_out"]


def test_an_exercise_knows_a_right_answer() -> None:
    assert notebook.self_check(None, 2.0).startswith("no answer yet")
    assert notebook.self_check(2.1, 2.0) == "right: 2"
    assert notebook.self_check(2.5, 2.0) == "2.5 is too large"
    assert notebook.self_check(1.0, 2.0) == "1 is too small"
