"""How a CPU server starts its processes: forked from one thread, spawned otherwise."""

import subprocess
import sys

import pytest

CODE = """
import multiprocessing, threading, time
from sparkmoe.sglang_plugin.torch_cpu.forking import prefer_fork
multiprocessing.set_start_method("spawn", force=True)
if {busy}:
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
prefer_fork(None, None)
print(multiprocessing.get_start_method())
"""


@pytest.mark.parametrize(("busy", "method"), [(False, "fork"), (True, "spawn")])
def test_only_a_process_with_one_thread_forks(busy: bool, method: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(busy=busy)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [method], done.stderr
