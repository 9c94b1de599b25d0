"""What outlives a stay on a borrowed machine: one file with the run, a few with what its compilers made.

Such a machine is bare when it comes and wiped when it goes, and only a few files of limited size travel. So the run
folder is packed anew after each arm, and the kernel caches (Triton's, and `~/.cache`: minutes of compilation) once a
call; whoever brings these files along the next time goes on at the next arm, with warm caches.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkmoe.results import write_atomic

RUN = "run.tar.gz"
PART_BYTES, MOST_PARTS = 12 << 20, 3  # beside a checkout of 21 MB
_LEFT_OUT = {"sparkmoe", "huggingface", "pip", "uv"}


_MARLIN = """
import sys, torch
from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module as build
build(torch.bfloat16, False, False, True, sys.argv[1] == "down", True)
"""


def prebuild() -> list[subprocess.Popen[bytes]]:
    """Begin to compile Marlin's two expert kernels, one core each for minutes, so that the first Marlin arm finds them.

    SGLang keeps them by the machine's own compilers, so they cannot be made elsewhere. Whoever calls this ends what is
    still running when it leaves.
    """
    argv = ["nice", "-n", "19", sys.executable, "-c", _MARLIN]
    return [subprocess.Popen([*argv, which], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for which in ("gate_up", "down")]  # fmt: skip


class Clock:
    """The wall-clock budget of a call: an arm is begun only if it would end before `stop_after_s`.

    The first one is expected to take `first_arm_s`; a later one `later_arm_s`, without that the longer of the last two.
    """

    def __init__(self, stop_after_s: float, first_arm_s: float, later_arm_s: float | None = None) -> None:
        self.begun, self.stop_after_s = time.monotonic(), stop_after_s
        self.later_arm_s = later_arm_s
        self._arms_s = [first_arm_s]

    def left_s(self) -> float:
        return self.stop_after_s - (time.monotonic() - self.begun)

    def took(self, seconds: float) -> None:
        self._arms_s.append(seconds)

    def enough(self) -> bool:
        known = self.later_arm_s is not None and len(self._arms_s) > 1
        return self.left_s() > (self.later_arm_s if known else max(self._arms_s[-2:]))


def pack_run(run: Path, out: Path) -> int:
    """The run folder as one file in `out`; its bytes."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        tar.add(run, arcname=run.name)
    out.mkdir(parents=True, exist_ok=True)
    return write_atomic(out / RUN, held.getvalue()).stat().st_size


def unpack(carried: Path, work: Path, home: Path) -> list[str]:
    """Bring back what an earlier stay packed, where it is not there already; what was found, by name."""
    found = []
    if (carried / RUN).is_file() and not work.exists():
        with tarfile.open(carried / RUN) as tar:
            tar.extractall(work, filter="data")
        found.append(RUN)
    parts = sorted(carried.glob("cache.*"))
    if parts:
        raw = io.BytesIO(b"".join(part.read_bytes() for part in parts))
        with tarfile.open(fileobj=raw, mode="r:gz", ignore_zeros=True) as tar:  # an archive for each cache
            tar.extractall(home, filter="tar")
        found += [part.name for part in parts]
    return found


def pack_caches(home: Path, out: Path) -> dict[str, Any]:
    """Compilers' caches below `home` as `cache.0`, `cache.1`, … in `out`: what was kept, what was left out as too much
    to travel, in bytes packed. Triton's comes first, then the smallest."""
    packed = {str(folder.relative_to(home)): _packed(folder, home) for folder in _caches(home)}
    order = sorted(packed, key=lambda name: (not name.startswith(".triton"), len(packed[name])))
    kept, raw = [], b""
    for name in order:
        if len(raw) + len(packed[name]) <= PART_BYTES * MOST_PARTS:
            kept.append(name)
            raw += packed[name]
    for old in out.glob("cache.*"):
        old.unlink()
    for number, at in enumerate(range(0, len(raw), PART_BYTES)):
        write_atomic(out / f"cache.{number}", raw[at : at + PART_BYTES])
    return {
        "kept": {name: len(packed[name]) for name in kept},
        "left_out": {name: len(packed[name]) for name in order if name not in kept},
    }


def _packed(folder: Path, home: Path) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz", compresslevel=6) as tar:
        tar.add(folder, arcname=str(folder.relative_to(home)))
    return held.getvalue()


def _caches(home: Path) -> Iterator[Path]:
    if (home / ".triton/cache").is_dir():
        yield home / ".triton/cache"
    if (home / ".cache").is_dir():
        yield from sorted(path for path in (home / ".cache").iterdir() if path.name not in _LEFT_OUT)
