"""The files under env/spark: not run here, so what can be read of them is held against the code."""

import configparser
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SPARK = ROOT / "env" / "spark"


def printed(words: list[str]) -> str:
    """What `sparkmoe serve …` of a unit or an image would execute."""
    code = "from sparkmoe.cli import main; main()"
    argv = [sys.executable, "-c", code, *words, "--print", "--machine", "spark"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(SPARK / "sparkmoe.service")
    return parser


@pytest.mark.parametrize("where", ["unit", "image"])
def test_what_is_started_is_a_command_that_exists(where: str) -> None:
    if where == "unit":
        words = shlex.split(unit()["Service"]["ExecStart"])[1:]
    else:
        command_line = re.search(r"^CMD (\[.serve.*\])$", (SPARK / "Dockerfile").read_text(), re.M)
        assert command_line is not None
        words = json.loads(command_line[1])
    assert "--keep" in words
    assert "--key-file" in words
    command = printed(words)
    assert "--enable-metrics" in command
    assert "--mem-fraction-static 0.68" in command
    assert "--port 30000" in command
    assert f"--host {'127.0.0.1' if where == 'unit' else '0.0.0.0'}" in command


def test_the_unit_waits_for_the_first_token_and_lets_requests_end() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > 60 + 15 + 30  # drain, the supervisor's patience, the engine's
    assert service["User"] != "root"
    assert "SPARKMOE_HOME=" in service["Environment"]


def test_the_port_of_the_container_is_not_open_to_the_network() -> None:
    service: Any = yaml.safe_load((SPARK / "compose.yaml").read_text())["services"]["sparkmoe"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["platform"] == "linux/arm64"
    assert service["cap_drop"] == ["ALL"]


def test_the_image_is_pinned_unprivileged_and_of_the_lock() -> None:
    lines = (SPARK / "Dockerfile").read_text().splitlines()
    assert any(re.match(r"ARG BASE=\S+:13\.0\S+@sha256:[0-9a-f]{64}$", line) for line in lines)
    assert any(line.startswith("USER ") and line != "USER root" for line in lines)
    install = next(line for line in lines if "requirements.lock" in line and line.startswith("RUN"))
    assert "--require-hashes" in install
    assert "--only-binary :all:" in install


def test_the_proxy_passes_the_api_and_nothing_else() -> None:
    text = (SPARK / "Caddyfile").read_text()
    assert re.findall(r"handle (\S+) \{", text) == ["/v1/*"]
    assert "respond 404" in text


def test_the_readme_names_targets_and_options_that_exist() -> None:
    text, makefile = (SPARK / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (spark-[a-z]+|soak)", text):
        assert f"\n{target}:" in makefile
    help_text = subprocess.run(
        [sys.executable, "-c", "from sparkmoe.cli import main; main(['serve', '--help'])"],
        capture_output=True, text=True, env={"COLUMNS": "200", "PATH": "/usr/bin"},
    ).stdout  # fmt: skip
    for option in re.findall(r"`(--[a-z-]+)`", text):
        assert option in help_text
