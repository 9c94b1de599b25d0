"""Build FlashInfer's fused MoE for the GB10 before any weights are loaded: `sparkmoe precompile`.

SGLang's first start on a Spark compiles 96 CUDA files while 60 GB of weights stream into the same memory, with as many
compilers at once as there are cores. Several gigabytes each, they take the last of it, and the machine hangs or the
kernel kills `cudafe++`. Built beforehand, with jobs counted by memory, the same objects are found by the server.

FlashInfer writes the build file itself, with the flags it will ask for when it serves, and ninja builds what is
missing: an interrupted build goes on where it stopped. Found again they are only under the same compiler, ninja and
list of architectures, so these are kept in `build_environment`, which servers are started with from then on. The
compiler is the lock's own nvcc; its package is laid out like a toolkit by links (`toolkit`), because the linker looks
for `lib64`.

No GPU is needed. The whole build and the use of its result have not been run on a Spark.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import psutil

from sparkmoe.errors import MachineError
from sparkmoe.gpus import read_gpu
from sparkmoe.machine import GIB, available_bytes, home

ARCH = "12.1a"
JOB_BYTES = 7 * GIB  # what one compiler is given; four of them were seen at 27 GB
FLOOR_BYTES = 2 * GIB
# PyTorch pins the CUDA 13.0 headers, and the lock's nvcc is 13.5: the same major version, which CCCL does not accept
# unless told to.
_NVCC_FLAGS = "-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
_LIBRARIES = ("libcudart.so", "libnvrtc.so")


@dataclass(frozen=True)
class Built:
    """One object: how long it took, and the most memory (RSS) that its compiler's processes held together."""

    name: str
    seconds: float
    peak_bytes: int


def toolkit(root: Path | None = None) -> Path:
    """A `CUDA_HOME` from the lock's packages. Raises MachineError where they are not installed."""
    package = Path(psutil.__file__).parents[1] / "nvidia" / "cu13"
    if not (package / "bin" / "nvcc").is_file():
        raise MachineError(f"there is no nvcc in {package}; install the lock (make run does)")
    root = root or home() / "cuda"
    (root / "lib64").mkdir(parents=True, exist_ok=True)
    links = {root / name: package / name for name in ("bin", "include", "nvvm")}
    for name in _LIBRARIES:
        versioned = sorted((package / "lib").glob(f"{name}.*"))
        links |= {root / "lib64" / name: versioned[0]} if versioned else {}
    for link, target in links.items():
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)
    return root


def build_environment(arch: str = ARCH) -> dict[str, str]:
    """What FlashInfer's build depends on; {} where nothing was precompiled."""
    root = home() / "cuda"
    found = {"CUDA_HOME": str(root), "FLASHINFER_CUDA_ARCH_LIST": arch, "NVCC_APPEND_FLAGS": _NVCC_FLAGS}
    return found if root.is_dir() else {}


def plan() -> Path:
    """Have FlashInfer write its build file; returns the path of `build.ninja`. Takes the seconds of importing torch.

    Raises MachineError on a machine with another GPU, whose servers must not be started with this build's environment.
    """
    gpu = read_gpu()
    if gpu is not None and gpu["compute_capability"] != (12, 1):
        raise MachineError(f"these kernels are for a GB10 (sm_121a); this machine has {gpu['gpu_name']}")
    toolkit()
    # The module's name holds 120 for every GPU of compute capability 12.x; the architecture list makes it sm_121a.
    code = (
        "from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm120_module as spec\n"
        "made = spec(); made.write_ninja(); print(made.ninja_path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | build_environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise MachineError(f"FlashInfer cannot plan its build: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip().splitlines()[-1])


def objects(ninja: Path) -> list[Path]:
    """All objects of a build file, in its order."""
    return [Path(name) for name in re.findall(r"^build (\S+\.o):", ninja.read_text(), re.M)]


def missing(ninja: Path) -> list[Path]:
    """Objects that ninja would build now, also because their source or flags changed."""
    words = [*_ninja(ninja), "-n", "-v", *map(str, objects(ninja))]
    planned = subprocess.run(words, capture_output=True, text=True).stdout
    return [path for path in objects(ninja) if f"-o {path} " in planned]


def jobs(available: int, cores: int) -> int:
    """How many compilers fit side by side into `available` bytes, above the floor."""
    return max(1, min(cores, (available - FLOOR_BYTES) // JOB_BYTES))


def kind(name: str) -> str:
    """Objects of one kind cost alike: kernels generated for one family of GPUs, hand-written GEMMs, the rest."""
    if generated := re.match(r"\d+_cutlass_kernel_file_.*?sm(\d+)", name):
        return f"generated for sm_{generated[1]}"
    return "moe_gemm" if name.startswith("moe_gemm_moe_gemm_kernels") else "other"


def sample(paths: Sequence[Path], count: int) -> list[Path]:
    """`count` objects that stand for the whole: of every kind in turn, at equal distances."""
    kinds: dict[str, list[Path]] = {}
    for path in paths:
        kinds.setdefault(kind(path.name), []).append(path)
    each = math.ceil(count / max(1, len(kinds)))
    picked = [[group[i * len(group) // each] for i in range(min(each, len(group)))] for group in kinds.values()]
    return [path for turn in zip_longest(*picked) for path in turn if path is not None][:count]


def build(ninja: Path, targets: Iterable[Path] = (), *, at_once: int = 1) -> Iterator[Built]:
    """Build `targets` (default: the whole module) and yield each object once it is done.

    Raises MachineError where a compiler fails or memory runs short; what was built stays. Closing the generator ends
    the compilers.
    """
    words = [*_ninja(ninja), "-j", str(at_once), *map(str, targets)]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | build_environment() | {"NINJA_STATUS": "[%f/%t] "},
    )  # fmt: skip
    watch = _Watch(process.pid)
    said: list[str] = []
    try:
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if line.startswith("[") and (found := re.search(r" -o (\S+\.o)\b", line)):
                said.clear()
                yield watch.built(found[1])
        code = process.wait()
    finally:
        watch.done.set()
        _end(process.pid)
        process.wait()
    if watch.short:
        raise MachineError(f"{watch.short}; run it again with fewer jobs: what is built stays")
    if code:
        if any("cannot find -lcuda" in line for line in said):
            raise MachineError("all objects are built, but to link them the driver's libcuda.so is needed")
        reason = next((line for line in said if "error" in line.lower()), said[-1] if said else "ninja said nothing")
        raise MachineError(f"building FlashInfer's fused MoE failed: {reason[:300]}")


def project(built: Sequence[Built], paths: Sequence[Path], cores: int, available: int) -> dict[str, float]:
    """What all of `paths` would take on `cores` cores as fast as those that built a `sample`: work and wall-clock
    time in s. Each kind counts with the mean of its sample. Raises MachineError for a kind of which nothing was built.
    """
    seconds: dict[str, list[float]] = {}
    for each in built:
        seconds.setdefault(kind(each.name), []).append(each.seconds)
    kinds = Counter(kind(path.name) for path in paths)
    if unknown := set(kinds) - set(seconds):
        raise MachineError(f"nothing was built of {', '.join(sorted(unknown))}: no projection")
    work_s = sum(count * sum(seconds[name]) / len(seconds[name]) for name, count in kinds.items())
    side_by_side = jobs(available, cores)
    wall_s = max(work_s / side_by_side, *(each.seconds for each in built))
    return {"objects": len(paths), "work_s": round(work_s), "jobs": side_by_side, "wall_s": round(wall_s)}


class _Watch(threading.Thread):
    """Samples the compilers' memory by object, and ends the build before the machine's is gone."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.done, self.short = pid, threading.Event(), ""
        self.begun: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def built(self, name: str) -> Built:
        """What was seen of an object that is done now; of one that took less than 0.1 s that may be nothing."""
        now = time.time()
        return Built(Path(name).name, round(now - self.begun.get(name, now), 2), self.peaks.get(name, 0))

    def run(self) -> None:
        while not self.done.wait(0.1):
            for name, (begun, held) in _held(self.pid).items():
                self.begun[name] = begun
                self.peaks[name] = max(held, self.peaks.get(name, 0))
            if (left := available_bytes()) < FLOOR_BYTES:
                self.short = f"only {left / GIB:.1f} GiB of memory were left, the compilers were ended"
                _end(self.pid)
                return


def _end(pid: int) -> None:
    """SIGTERM to ninja, which ends its compilers and removes what they left half done; SIGKILL to what stays."""
    try:
        ninja = psutil.Process(pid)
        tree = [ninja, *ninja.children(recursive=True)]  # each compiler leads a process group of its own
        ninja.terminate()
    except psutil.NoSuchProcess:
        return
    for process in psutil.wait_procs(tree, timeout=5.0)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _held(pid: int) -> dict[str, tuple[float, int]]:
    """Object → when it was begun, and the RSS of the processes under ninja that work on it (nvcc and its own)."""
    held: dict[str, tuple[float, int]] = {}
    try:
        for job in psutil.Process(pid).children():
            tree = [job, *job.children(recursive=True)]
            if found := re.search(r" -o (\S+\.o)\b", " ".join(job.cmdline())):
                held[found[1]] = (job.create_time(), sum(_rss(process) for process in tree))
    except psutil.Error:
        pass
    return held


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _ninja(ninja: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("ninja")), "-C", str(ninja.parent), "-f", str(ninja)]
