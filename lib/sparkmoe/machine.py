"""What machine is this, and what can it do?

A recipe that is right on one machine is impossible on another: Humming needs an NVIDIA GPU, the CUTLASS dense kernels a
Blackwell desktop part, and on a GB10 the GPU has no memory of its own, so a server that takes 75 % of "GPU memory"
takes it from the desktop too. Everything downstream asks a `Machine` instead of asking "is there CUDA?" for itself.

Three profiles cover what the cookbook runs on: `spark` (GB10, compute capability 12.1, one pool of memory for CPU and
GPU), `hopper` (a discrete NVIDIA GPU: H200 and its kin) and `cpu` (nothing but cores). Detection reads psutil and NVML
and never imports torch, because that costs seconds. NVML answers "not supported" to memory questions on a GB10: that
is a fact about the machine here (`unified_memory`), not an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from sparkmoe.errors import MachineError
from sparkmoe.gpus import read_gpu

Profile = Literal["spark", "hopper", "cpu"]
GIB = 1 << 30

_PACKAGES = ("sparkmoe", "sglang", "torch", "triton", "transformers", "flashinfer-python", "humming-kernels")
# Per profile: seconds until the first token, seconds between SIGTERM and SIGKILL, requests at once. SGLang looks for
# SIGTERM every 5 s, to drain requests and give a GPU's memory back; a measurement's own server on a CPU has neither.
_START_DEADLINE_S = {"spark": 1500.0, "hopper": 900.0, "cpu": 300.0}
_STOP_GRACE_S = {"spark": 60.0, "hopper": 60.0, "cpu": 0.5}
_MAX_CONCURRENCY = {"spark": 8, "hopper": 32, "cpu": 8}
_NO_GPU: dict[str, Any] = {
    "gpu_name": None,
    "gpu_count": 0,
    "compute_capability": None,
    "gpu_memory_bytes": None,
    "unified_memory": False,
    "nominal_gb_s": None,
}
_REFERENCE: dict[str, dict[str, Any]] = {
    "spark": {
        "name": "DGX Spark (reference)",
        "arch": "aarch64",
        "cores": 20,
        "gpu_name": "NVIDIA GB10",
        "gpu_count": 1,
        "compute_capability": (12, 1),
        "gpu_memory_bytes": None,
        "unified_memory": True,
        "nominal_gb_s": 273.0,
        "mem_total_bytes": 120 * GIB,
        "mem_available_bytes": 112 * GIB,
    },
    "hopper": {
        "name": "H200 (reference)",
        "arch": "x86_64",
        "cores": 16,
        "gpu_name": "NVIDIA H200",
        "gpu_count": 1,
        "compute_capability": (9, 0),
        "gpu_memory_bytes": 139 * GIB,
        "unified_memory": False,
        "nominal_gb_s": 4800.0,
        "mem_total_bytes": 128 * GIB,
        "mem_available_bytes": 120 * GIB,
    },
}
SPARK_MODEL = "Ling-3.0-flash-fp4"
NANO_LING = Path(__file__).parent / "nano" / "bundle" / "fp4"


@dataclass(frozen=True)
class Machine:
    """One machine as a recipe sees it. `mem_available_bytes` is from the moment of detection; the rest is lasting."""

    profile: Profile
    name: str
    arch: str
    cores: int
    mem_total_bytes: int
    mem_available_bytes: int
    gpu_name: str | None = None
    gpu_count: int = 0
    compute_capability: tuple[int, int] | None = None
    gpu_memory_bytes: int | None = None
    unified_memory: bool = False
    nominal_gb_s: float | None = None
    start_deadline_s: float = 300.0
    stop_grace_s: float = 12.0
    max_concurrency: int = 8
    default_model: Path | None = None
    versions: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def detect(cls, nvml: Any = None) -> Machine:
        """This machine. `SPARKMOE_MACHINE=cpu` (or spark, hopper) overrides the profile; `nvml` is for tests.

        Raises MachineError for an unknown profile in `SPARKMOE_MACHINE`.
        """
        memory = psutil.virtual_memory()
        gpu = read_gpu(nvml)
        profile: Profile = "cpu" if gpu is None else "spark" if gpu["compute_capability"] == (12, 1) else "hopper"
        name = platform.node() or "this machine"
        here = cls(
            profile=profile, name=name, arch=platform.machine(), cores=_usable_cores(),
            mem_total_bytes=memory.total, mem_available_bytes=available_bytes(), versions=_versions(), **(gpu or {}),
        )  # fmt: skip
        wanted = os.environ.get("SPARKMOE_MACHINE", "auto")
        return here._with_profile(profile if wanted in ("", "auto") else _profile(wanted))

    @classmethod
    def named(cls, name: str) -> Machine:
        """`"auto"` detects; a profile name gives that profile, with this machine's cores and memory under `cpu`.

        `spark` and `hopper` away from such a machine describe the reference one (GB10, H200), to show a command with.
        """
        if name == "auto":
            return cls.detect()
        profile = _profile(name)
        here = cls.detect()
        if here.profile == profile:
            return here
        if profile == "cpu":
            return replace(here, **_NO_GPU)._with_profile("cpu")
        return replace(here, **_REFERENCE[profile])._with_profile(profile)

    def _with_profile(self, profile: Profile) -> Machine:
        return replace(
            self,
            profile=profile,
            start_deadline_s=_START_DEADLINE_S[profile],
            stop_grace_s=_STOP_GRACE_S[profile],
            max_concurrency=_MAX_CONCURRENCY[profile],
            default_model=_default_model(profile),
        )

    def can(self, what: str) -> bool:
        """Whether this machine can run `what`: a MoE backend, `fp8_head`, `nextn`, `dspark` or `cuda_graphs`."""
        return self.why_not(what) is None

    def why_not(self, what: str) -> str | None:
        """One line that says why `what` cannot run here, or None if it can. Raises MachineError for unknown names."""
        if what not in _NEEDS:
            raise MachineError(f"no such capability: {what!r} (known: {', '.join(sorted(_NEEDS))})")
        need = _NEEDS[what]
        if need is None:
            return None
        label, majors = need
        if self.profile == "cpu" or self.compute_capability is None:
            return f"{label} needs an NVIDIA GPU; this machine runs on its CPU"
        if self.compute_capability[0] not in majors and self.compute_capability not in majors:
            found = ".".join(map(str, self.compute_capability))
            return f"{label} has no kernels for compute capability {found} ({self.gpu_name})"
        return None

    def probe_bandwidth(self, bytes: int = 256 << 20, *, repeats: int = 5) -> float:
        """Read bandwidth of the memory that decoding reads, in GB/s: the best of `repeats` passes over one buffer.

        On a GPU torch sums the buffer on the device; on a CPU a dot product of the buffer with itself reads it once,
        on the cores that the BLAS uses. A buffer smaller than the last-level cache measures the cache.
        """
        if self.profile == "cpu":
            import numpy as np

            buffer = np.ones(bytes // 4, dtype=np.float32)
            seconds = min(_seconds(lambda: np.dot(buffer, buffer)) for _ in range(repeats + 1))
        else:
            import torch

            device = torch.ones(bytes // 4, dtype=torch.float32, device="cuda")

            def once() -> None:
                device.sum()
                torch.cuda.synchronize()

            once()
            seconds = min(_seconds(once) for _ in range(repeats))
        return bytes / seconds / 1e9

    def version(self, package: str) -> str | None:
        """Installed version of one of the packages that decide a measurement, None if it is not installed."""
        return dict(self.versions).get(package)

    def describe(self) -> str:
        """One line for a notebook's head or a log."""
        memory = f"{self.mem_total_bytes / GIB:.0f} GiB" + (" shared with the GPU" if self.unified_memory else "")
        gpu = f"{self.gpu_count} × {self.gpu_name}, " if self.gpu_name else "no GPU, "
        return f"{self.profile}: {gpu}{self.cores} cores ({self.arch}), {memory}"


_ANY_GPU = (8, 9, 10, 11, 12)
# What runs where: None everywhere, otherwise (label, major compute capabilities or exact ones).
_NEEDS: dict[str, tuple[str, tuple[int | tuple[int, int], ...]] | None] = {
    "auto": None,
    "native": None,
    "nextn": None,
    "dspark": ("DSpark", _ANY_GPU),
    "humming": ("Humming", _ANY_GPU),
    "marlin": ("Marlin", _ANY_GPU),
    "flashinfer_mxfp4": ("FlashInfer's MXFP4 MoE", (9, 10, 12)),
    "fp8_activations": ("An MoE with FP8 activations", ((8, 9), 9, 10, 11, 12)),
    "cuda_graphs": ("CUDA graphs", _ANY_GPU),
    # On a CPU the FP8 matrix product is computed by casting; on a GPU it needs FP8 tensor cores.
    "fp8_head": None,
}


def home() -> Path:
    """Where sparkmoe keeps state: servers it started and checkpoints it derived (`SPARKMOE_HOME`)."""
    return Path(os.environ.get("SPARKMOE_HOME") or Path.home() / ".cache" / "sparkmoe").expanduser().absolute()


def available_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a new process could get: MemAvailable, or what a container's limit (cgroup v2) leaves, if less.

    Page cache counts as available in both: it is given back when it is needed.
    """
    available = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return available
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
        return max(0, min(available, int(limit) - used))
    except (OSError, ValueError, KeyError):
        return available


def _seconds(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _profile(name: str) -> Profile:
    if name not in _START_DEADLINE_S:
        raise MachineError(f"unknown machine profile {name!r}; known: auto, spark, hopper, cpu")
    return name  # type: ignore[return-value]


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _default_model(profile: Profile) -> Path | None:
    """`SPARKMOE_MODEL` if set. On a CPU the bundled nano Ling; on a GPU the published checkpoint where it has been
    downloaded, else None."""
    if chosen := os.environ.get("SPARKMOE_MODEL"):
        return Path(chosen).expanduser().absolute()
    if profile == "cpu":
        return NANO_LING
    places = [home() / "models" / SPARK_MODEL]
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    places += sorted(hub.glob(f"models--*--{SPARK_MODEL}/snapshots/*"))
    return next((place for place in places if (place / "config.json").is_file()), None)
