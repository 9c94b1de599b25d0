"""install.sh from a wheel folder: no index is asked, and a folder without wheels is named."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from sparkmoe.cli import app

ROOT = Path(__file__).parents[1]
# A wheel that is also the build backend of the project around it, so that nothing but it is needed.
BACKEND = """
import zipfile
def build_editable(folder, config=None, metadata=None):
    name = "here-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr("here-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: here\\nVersion: 1\\n")
        wheel.writestr("here-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("here-1.dist-info/RECORD", "")
    return name
"""


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A project whose lock asks for one package, and a wheel folder that has it."""
    (tmp_path / "a stick").mkdir()
    wheel = tmp_path / "a stick" / "backend_of_a_room-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("backend_of_a_room.py", BACKEND)
        about = "backend_of_a_room-1.dist-info"
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: backend-of-a-room\nVersion: 1\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(BACKEND.encode()).digest()).decode().rstrip("=")
        file.writestr(f"{about}/RECORD", f"backend_of_a_room.py,sha256={digest},{len(BACKEND)}\n")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "lock").write_text(f"backend-of-a-room==1 \\\n    --hash=sha256:{sha256}\n")
    build = '[build-system]\nrequires = ["backend-of-a-room"]\nbuild-backend = "backend_of_a_room"\n'
    (tmp_path / "pyproject.toml").write_text(build)
    return tmp_path


def install(room: Path, free_gb: int = 20, **variables: str) -> subprocess.CompletedProcess[str]:
    """install.sh with an index that nobody answers at, on a disk of which `df` says that `free_gb` are free."""
    (room / "bin").mkdir()
    (room / "bin" / "df").write_text(f"#!/bin/sh\necho header\necho disk 0 0 {free_gb << 20} 0% /\n")
    (room / "bin" / "df").chmod(0o755)
    dead = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0"}
    dead |= {"PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    dead["PATH"] = f"{room / 'bin'}:{os.environ['PATH']}"
    argv = ["sh", str(ROOT / "env" / "install.sh"), "venv", "lock"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")} | dead | variables
    return subprocess.run(argv, cwd=room, env=environment, capture_output=True, text=True, timeout=120)


def test_a_room_installs_without_a_network(room: Path) -> None:
    done = install(room, WHEELHOUSE="a stick")
    assert done.returncode == 0, done.stderr
    assert "from a stick" in done.stdout
    listed = subprocess.run([room / "venv/bin/python", "-m", "pip", "list"], capture_output=True, text=True).stdout
    assert re.search(r"^backend-of-a-room +1$", listed.replace("_", "-"), re.M)
    assert re.search(r"^here +1 ", listed, re.M)


def test_without_the_folder_it_asks_the_index_and_fails(room: Path) -> None:
    done = install(room)
    assert done.returncode == 1
    assert "the installation failed" in done.stderr


def test_too_small_a_disk_is_refused_before_anything_is_written(room: Path) -> None:
    done = install(room, free_gb=9, WHEELHOUSE="a stick")
    assert (done.returncode, done.stderr) == (2, "error: the installation needs 12 GB, 9 GB are free here\n")
    assert not (room / "venv").exists()


def test_a_folder_without_wheels_is_named(room: Path) -> None:
    done = install(room, WHEELHOUSE="nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("error: no wheels in nowhere")


def test_the_workflow_is_yaml_and_calls_commands_that_exist() -> None:
    text = (ROOT / "env" / "ci" / "github-workflow.yml").read_text()
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    called = {word for step in steps for word in re.findall(r"bin/sparkmoe (\S+)", step.get("run", ""))}
    assert called == {"gate", "doctor"}
    assert called <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {word for step in steps for word in re.findall(r"make (\w+)", step.get("run", ""))} <= targets
