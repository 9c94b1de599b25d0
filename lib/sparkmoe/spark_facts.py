"""What a DGX Spark says about itself: the raw answers, and how to read them.

On a GB10 half of what monitoring tools rely on is missing. NVML has no memory of the GPU to report, because the GPU
has none of its own, and no memory clock; `nvidia-smi` prints `[N/A]` or `Not Supported` there. `cudaMemGetInfo` counts
page cache as used. When the driver is wedged `nvidia-smi` does not fail, it hangs. So the answers are kept as the text
they came as (`Recorded`), and reading them is pure functions, which lets a Spark in any trouble be examined on a
machine that has none: `preflight.examine(recorded)` never looks at the machine it runs on.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

# One line a GPU, without units: `NVIDIA GB10, 12.1, 580.95.05, 2418, 3003, 12.5, 45, [N/A]`.
GPU_QUERY = "name,compute_cap,driver_version,clocks.sm,clocks.max.sm,power.draw,temperature.gpu,memory.total"
APPS_QUERY = "pid,process_name,used_memory"
PACKAGES = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "humming-kernels", "triton", "torch")
_NOT_THERE = {"", "n/a", "not supported", "unknown error", "insufficient permissions"}
TIMED_OUT = "no answer"


@dataclass(frozen=True)
class Recorded:
    """Answers as text. An empty one was not asked for or could not be had; `load` is the JSON of `spark_load`."""

    smi: str = ""
    apps: str = ""
    meminfo: str = ""
    swaps: str = ""
    kernel_log: str = ""
    load: str = ""
    cxx: str = ""  # first line of `c++ --version`
    python_h: bool = False
    ptxas: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    objects: tuple[int, int] = (0, 0)  # compiled and all of FlashInfer's fused MoE, (0, 0) where it was never begun
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Gpu:
    """One line of `nvidia-smi --query-gpu`; None stands for what the GPU does not report."""

    name: str
    compute_capability: str | None
    driver: str | None
    sm_mhz: float | None
    sm_max_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    memory_mib: float | None


def read_gpu(text: str) -> Gpu | None:
    """The first GPU of `nvidia-smi --query-gpu=<GPU_QUERY> --format=csv,noheader,nounits`, None for an error text."""
    name, *rest = [_cell(cell) for cell in text.strip().split("\n")[0].split(",")]
    if name is None or len(rest) != len(GPU_QUERY.split(",")) - 1:
        return None
    capability, driver, *numbers = rest
    return Gpu(name, capability, driver, *(_number(cell) for cell in numbers))


def read_apps(text: str) -> dict[int, str]:
    """pid → name of the compute processes (graphics ones, such as the desktop's, are not in this list)."""
    rows = (line.split(",") for line in text.splitlines())
    return {int(row[0]): row[1].strip() for row in rows if len(row) >= 2 and row[0].strip().isdigit()}


def read_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo: bytes for the fields in kB, counts (`HugePages_Total`) as they are."""
    found = re.findall(r"^(\w+(?:\(\w+\))?):\s+(\d+)( kB)?", text, re.M)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in found}


def read_swaps(text: str) -> tuple[int, int]:
    """/proc/swaps: bytes of all swap areas, and bytes in use."""
    rows = [line.split() for line in text.splitlines()[1:] if len(line.split()) >= 5]
    return sum(int(row[2]) for row in rows) * 1024, sum(int(row[3]) for row in rows) * 1024


def read_ptxas(text: str) -> tuple[int, int] | None:
    """CUDA release (major, minor) of `ptxas --version`."""
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def read_load(text: str) -> dict[str, Any]:
    """What `spark_load` measured, {} where it gave no JSON."""
    try:
        seen = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return seen if isinstance(seen, dict) else {}


def _cell(text: str) -> str | None:
    bare = text.strip().strip("[]")
    return None if bare.lower() in _NOT_THERE else bare


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def collect(config: dict[str, Any] | None = None, *, load: bool = True) -> Recorded:
    """Ask this machine. `load` also runs a child that keeps the GPU busy for some 3 s, for clock and bandwidth."""
    return Recorded(
        smi=ask("nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"),
        apps=ask("nvidia-smi", f"--query-compute-apps={APPS_QUERY}", "--format=csv,noheader,nounits"),
        meminfo=_text("/proc/meminfo"),
        swaps=_text("/proc/swaps"),
        kernel_log=ask("journalctl", "--dmesg", "--boot", "--lines=4000", "--output=cat"),
        load=ask(sys.executable, "-m", "sparkmoe.spark_load", timeout_s=120.0) if load else "",
        cxx=ask("c++", "--version").split("\n")[0],
        python_h=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        ptxas={str(path): ask(str(path), "--version") for path in assemblers()},
        packages={name: version for name in PACKAGES if (version := _version(name))},
        objects=compiled_objects(),
        config=config,
    )


def ask(*words: str, timeout_s: float = 15.0) -> str:
    """Output of a command, errors included; says so where it hangs, "" where there is no such command."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"{words[0]}: {TIMED_OUT} in {timeout_s:.0f} s"
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def assemblers() -> list[Path]:
    """Every ptxas that a kernel may be built with here: the lock's, Triton's for Blackwell, the system's."""
    site = Path(psutil.__file__).parents[1]
    places = [site / "nvidia/cu13/bin/ptxas", site / "triton/backends/nvidia/bin/ptxas-blackwell"]
    if system := os.environ.get("TRITON_PTXAS_PATH") or shutil.which("ptxas"):
        places.append(Path(system))
    return [place for place in places if place.is_file()]


def compiled_objects(base: Path | None = None, arch: str = "121a", version: str | None = None) -> tuple[int, int]:
    """Objects of FlashInfer's fused MoE module that lie in its cache, and all that it has; (0, 0) if never begun."""
    version = version or _version("flashinfer-python") or "none"
    base = base or Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    module = base / ".cache" / "flashinfer" / version / arch / "cached_ops" / "fused_moe_120"
    wanted = re.findall(r"^build (\S+\.o):", _text(str(module / "build.ninja")), re.M)
    return sum(Path(path).is_file() for path in wanted), len(wanted)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
