"""What is left of a server, asked of the system and not of our records."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait for `condition`, or fail."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def processes_of(home: Path) -> list[psutil.Process]:
    """Every living process with this SPARKMOE_HOME: commands, kernels, supervisors, servers and what those left."""
    mine = []
    for process in psutil.process_iter(["environ", "status"]):
        environ = process.info["environ"] or {}
        if process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            mine += [process] if environ.get("SPARKMOE_HOME") == str(home) else []
    return mine
