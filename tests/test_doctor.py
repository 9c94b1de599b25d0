import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from sparkmoe import doctor, spark_facts
from sparkmoe.doctor import examine
from sparkmoe.findings import Finding
from sparkmoe.machine import GIB, Machine


@pytest.fixture
def healthy(miniature: Path) -> Machine:
    return replace(Machine.named("cpu"), default_model=miniature, cores=2)


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {f.what: f for f in findings if f.what}


def test_a_healthy_machine(healthy: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("SGLANG_")]:
        monkeypatch.delenv(name)
    findings = examine(healthy, results=tmp_path / "results")
    assert [f for f in findings if f.state == "fail"] == []
    assert "baseline" in by_name(findings)["recipes"].found
    assert any("cannot: humming, humming_fp8, all_three (Humming needs" in f.found for f in findings)


def test_what_would_fail_is_failed(healthy: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tuple((k, "0.5.9" if k == "sglang" else v) for k, v in healthy.versions)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path / "file"))
    found = by_name(examine(replace(healthy, versions=old, default_model=tmp_path), results=tmp_path))
    assert {what for what, f in found.items() if f.state == "fail"} == {"sglang", "state", "model"}
    assert found["sglang"].expected == "0.5.23"
    assert "has no config.json" in found["model"].found
    assert "set SPARKMOE_HOME" in found["state"].found


def test_too_little_memory_fails_with_the_number(
    healthy: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: GIB)
    memory = by_name(examine(healthy, results=tmp_path))["memory"]
    assert (memory.state, memory.found, memory.expected) == ("fail", "1.0 GiB available", "3.5 GiB")


def test_a_left_over_variable_is_a_warning(healthy: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    environment = by_name(examine(healthy, results=tmp_path))["environment"]
    assert (environment.state, environment.found) == ("warn", "SGLANG_PLATFORM=other")


def test_a_stray_scheduler_is_named(healthy: Machine, tmp_path: Path) -> None:
    stray = subprocess.Popen(["sglang::scheduler", "60"], executable="/bin/sleep")
    try:
        time.sleep(0.2)
        assert str(stray.pid) in by_name(examine(healthy, results=tmp_path))["other SGLang"].found
    finally:
        stray.kill()
        stray.wait()


def test_a_spark_without_a_model_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARKMOE_MODEL", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    model = by_name(examine(Machine.named("spark"), results=tmp_path))["model"]
    assert model.state == "fail"
    assert "none found for a spark machine" in model.found


def test_on_a_spark_its_own_checks_are_rows_of_the_table(
    healthy: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spark = replace(Machine.named("spark"), default_model=healthy.default_model)
    away = by_name(examine(spark, results=tmp_path))["DGX Spark"]
    assert (away.state, away.found.split(":")[0]) == ("ok", "not this machine")
    monkeypatch.setattr(Machine, "detect", lambda: spark)
    monkeypatch.setattr(spark_facts, "ask", lambda *words, timeout_s=0.0: f"{words[0]}: no answer in 15 s")
    found = by_name(examine(spark, results=tmp_path))
    assert found["driver answers"].state == "fail"
    assert found["config"].state == "warn"  # the miniature is no Ling-3.0-flash


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", "from sparkmoe.cli import main; main()", *words]
    return subprocess.run(argv, env=os.environ | environment, capture_output=True, text=True)


def test_the_command_ends_with_a_verdict(miniature: Path, tmp_path: Path) -> None:
    fine = run("doctor", "--machine", "cpu", "--results", str(tmp_path), SPARKMOE_MODEL=str(miniature))
    assert fine.returncode == 0, fine.stdout
    assert json.loads(fine.stdout.splitlines()[-1])["ok"] is True
    bad = run("doctor", "--machine", "cpu", "--results", str(tmp_path), SPARKMOE_MODEL=str(tmp_path))
    assert bad.returncode == 1
    assert json.loads(bad.stdout.splitlines()[-1])["failed"] == ["model"]
    assert "a run would fail: model: model folder" in bad.stderr


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_the_installed_sglang_all_fit() -> None:
    findings = doctor.examine_sglang()
    assert len(findings) > 5
    assert [f for f in findings if f.state == "fail"] == []
