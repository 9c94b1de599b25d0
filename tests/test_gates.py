"""Guards, each shown to fire by a simulated condition: too little memory on paper, memory that is eaten under a running
server, and a disk that is full. (NVML that answers nothing: test_machine, test_preflight. A stuck server: test_engine,
test_keeper. A wrong key: test_keeper.)"""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from lifetimes import until
from sparkmoe import gates
from sparkmoe.checkpoint import Checkpoint
from sparkmoe.errors import MachineError
from sparkmoe.gates import check_memory, memory_need, pool_need, propose_fraction
from sparkmoe.machine import GIB, Machine, available_bytes
from sparkmoe.processes import Identity, Record, group, servers
from sparkmoe.recipe import RECIPES, Recipe

SPARK = Machine.named("spark")
CONFIG = Path(gates.__file__).parent / "models" / "ling-3.0-flash-fp4.json"
FLASH = Checkpoint(Path("/models/Ling-3.0-flash-fp4"), json.loads(CONFIG.read_text()), 66_000_000_000, 1, {})


def test_the_pool_of_flash_from_its_inventory() -> None:
    need = pool_need(Recipe("one", max_running_requests=1), SPARK, FLASH)
    assert need["KV cache"] == 262_144 * 2 * 576 * 7
    state = 35 * (4 * 32 * 128 * 128 + 2 * 3 * 32 * 128 * 3)
    assert need["recurrent states"] == state
    drafting = pool_need(Recipe("one", max_running_requests=1, draft_steps=3), SPARK, FLASH)
    assert drafting["KV cache"] == 262_144 * 2 * 576 * 8
    assert drafting["recurrent states"] == 5 * state


def test_a_fraction_is_proposed_from_the_inventory_and_never_above_the_safe_one() -> None:
    assert propose_fraction(RECIPES["all_three"], SPARK, FLASH, 112 * GIB) == 0.68  # 8 requests of 262,144 tokens
    short = Recipe("short", draft_steps=3, context_length=32_768)
    fraction = propose_fraction(short, SPARK, FLASH, 112 * GIB)
    assert fraction == pytest.approx(sum(pool_need(short, SPARK, FLASH).values()) / (112 * GIB), abs=0.01)
    assert 0.56 < fraction < 0.65
    assert propose_fraction(short, SPARK, FLASH, 80 * GIB) is None  # 0.68 of that is less than the weights


def test_what_must_be_available_for_a_fraction_to_hold_the_weights() -> None:
    """SGLang takes 0.68 of what is available when it starts, not of the machine."""
    one = Recipe("one", context_length=32_768, max_running_requests=1)
    need = memory_need(one, SPARK, FLASH)
    assert sum(need.values()) == pytest.approx(66e9 / 0.68, rel=0.002)
    assert need["left alone by mem_fraction 0.68"] > 0
    assert sum(memory_need(one.with_(mem_fraction=0.72), SPARK, FLASH).values()) == pytest.approx(
        66e9 / 0.72, rel=0.002
    )


def test_a_start_is_refused_with_its_sum_and_a_fraction_that_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "available_bytes", lambda: 92 * GIB)
    low = Recipe("low", context_length=32_768, max_running_requests=1, mem_fraction=0.6)
    with pytest.raises(MachineError) as refused:
        check_memory(low, SPARK, FLASH, [])
    assert str(refused.value) == (
        "not enough memory for recipe low: 102.5 GiB needed (weights 61.5 + a tenth of the KV cache and states 0.0 + "
        "server processes 8.0 + floor 4.0 + left alone by mem_fraction 0.6 29.0), 92.0 GiB available; it would fit "
        "with mem_fraction=0.68"
    )
    check_memory(low.with_(mem_fraction=0.68), SPARK, FLASH, [])
    monkeypatch.setattr(gates, "available_bytes", lambda: 60 * GIB)
    with pytest.raises(MachineError, match=r"60.0 GiB available$"):
        check_memory(low, SPARK, FLASH, [])


def test_a_fraction_that_can_wedge_the_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "available_bytes", lambda: 118 * GIB)
    with pytest.raises(MachineError, match=r"mem_fraction=0.8: at 0.75 and more .* 0.68 is safe"):
        check_memory(Recipe("greedy", mem_fraction=0.8), SPARK, FLASH, [])
    check_memory(Recipe("daring", mem_fraction=0.72), SPARK, FLASH, [])


def supervised(code: str, *words: str, floor_bytes: int, log_path: str) -> subprocess.Popen[bytes]:
    record = Record(
        fingerprint="0123456789ab", recipe={"name": "fake"}, profile="spark", model="/models/fake", host="127.0.0.1",
        port=1, api_key="secret", log_path=log_path, evidence_path="", grace_s=5.0, floor_bytes=floor_bytes,
        argv=[sys.executable, "-c", textwrap.dedent(code), *words],
    )  # fmt: skip
    record.write()
    record.sign_in(Identity.of(os.getpid()))
    return subprocess.Popen([sys.executable, "-m", "sparkmoe.supervisor", str(record.path)], start_new_session=True)


EATER = """
    import resource, time
    resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))
    eaten = []
    while True:
        try:
            eaten.append(b"x" * (128 << 20))
        except MemoryError:
            print("ate it all", flush=True)
            time.sleep(60)
        time.sleep(0.05)
    """


def test_a_server_that_eats_the_machines_memory_is_stopped_and_no_other(own_home: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    log = servers() / "test.log"
    floor = available_bytes() - GIB
    watchdog = supervised(EATER, floor_bytes=floor, log_path=str(log))
    try:
        assert watchdog.wait(timeout=30) == 128 + 15
        said = log.read_text()
        assert "sparkmoe: stopped: available memory fell to" in said
        assert f"below the floor of {floor / GIB:.1f} GiB" in said
        assert "ate it all" not in said
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_full_disk_does_not_keep_a_server_from_being_ended(own_home: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    watchdog = supervised(code, str(pid_file), floor_bytes=0, log_path="/dev/full")
    until(lambda: pid_file.exists() and pid_file.read_text())
    pid = int(pid_file.read_text())
    time.sleep(0.2)
    watchdog.terminate()
    assert watchdog.wait(timeout=10) == 128 + 15
    assert group(pid) == []
    assert not psutil.pid_exists(pid)
