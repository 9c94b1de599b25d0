"""Under what conditions is this measured? The part of a manifest that a program can find out by itself.

The same recipe on the same machine gives another number after a driver update, with a dirty checkout, or on a GPU whose
clock hangs at 500 MHz. None of that shows in a time per token, so it is written down before and after every run. What
cannot be found out is left out or None, never guessed.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from sparkmoe.gpus import nvml_facts

PACKAGES = ("sparkmoe", "sglang", "torch", "flashinfer-python", "humming-kernels", "transformers", "triton", "numpy")


def environment() -> dict[str, Any]:
    """What this machine and installation are, as a manifest records it (see also `machine.Machine`)."""
    memory = psutil.virtual_memory()
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "driver": nvml_facts().get("driver"),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "source": source_state(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def source_state(folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """Commit and dirtiness of the checkout that this code runs from; both None when it is not a checkout of it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "errors.py")  # an installed copy may lie inside somebody else's repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def clocks() -> dict[str, Any]:
    """Clocks now, to be recorded before and after: GPUs through NVML, and the mean CPU clock in MHz where known."""
    frequency = psutil.cpu_freq()
    return {
        "at_unix_s": time.time(),
        "cpu_mhz": frequency.current if frequency else None,
        "gpus": nvml_facts().get("gpus", []),
    }
