"""Fetch 66 GB once: `sparkmoe download`.

Three things spoil such a download: the disk is full at the end, the connection breaks in the middle, and a file that
arrived is not the file that was sent. So the sum is compared with the free space before the first byte, an interrupted
download goes on where it stopped (`huggingface_hub` keeps partial files), and every file is hashed afterwards and
compared with what the repository lists: SHA-256 for the large ones, Git's own hash for the small. Hashing reads the
66 GB once more; what was verified is noted, and not read again while its size and time stay the same.

Weights, configuration and tokenizer are fetched, and no Python: nothing from the repository is executed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sparkmoe import checkpoint
from sparkmoe.errors import DataError, MachineError
from sparkmoe.machine import GIB, SPARK_MODEL, home

logger = logging.getLogger(__name__)
REPOSITORY = f"inclusionAI/{SPARK_MODEL}"
WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*")
SPARE_BYTES = 2 * GIB  # left on the disk for logs and kernels
NOTE = ".sparkmoe-verified.json"


@dataclass(frozen=True)
class File:
    """One file as the repository lists it. `sha256` is None for small ones, which have `git_sha1` alone."""

    name: str
    size: int
    git_sha1: str
    sha256: str | None

    def matches(self, path: Path) -> bool:
        """Whether the file at `path` is this one, byte by byte."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size)
        with path.open("rb") as file:
            while piece := file.read(8 << 20):
                digest.update(piece)
        return digest.hexdigest() == (self.sha256 or self.git_sha1)


def default_folder(repository: str = REPOSITORY) -> Path:
    """Where the `spark` profile looks for its model."""
    return home() / "models" / repository.rsplit("/", 1)[-1]


def listing(repository: str, revision: str = "main", endpoint: str | None = None) -> tuple[str, list[File]]:
    """The commit that `revision` names now, and its files that are wanted. Raises DataError where it cannot be had."""
    from huggingface_hub import HfApi

    try:
        seen = HfApi(endpoint=endpoint).model_info(repository, revision=revision, files_metadata=True, timeout=30.0)
    except Exception as error:  # the hub's errors, httpx's, and OSError share no base
        reason = str(error).strip().split("\n")[0][:200]
        raise DataError(f"cannot list {repository} at {revision}: {reason} ({type(error).__name__})") from None
    files = [
        File(s.rfilename, int(s.size or 0), str(s.blob_id), s.lfs.sha256 if s.lfs else None)
        for s in seen.siblings or ()
        if any(fnmatch(s.rfilename, pattern) for pattern in WANTED) and "/" not in s.rfilename
    ]
    if not any(f.name.endswith(".safetensors") for f in files):
        raise DataError(f"{repository} at {revision} holds no *.safetensors file; is it the right repository?")
    return str(seen.sha), files


def check_space(folder: Path, files: list[File]) -> int:
    """Bytes still to come. Raises MachineError, with the sum, where the disk has no room for them."""
    partial = sum(p.stat().st_size for p in folder.glob(".cache/huggingface/download/*.incomplete"))
    here = sum(f.size for f in files if (p := folder / f.name).is_file() and p.stat().st_size == f.size)
    missing = max(0, sum(f.size for f in files) - here - partial)
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if missing and missing + SPARE_BYTES > free:
        raise MachineError(
            f"not enough room in {folder}: {missing / GIB:.1f} GiB to come + {SPARE_BYTES / GIB:.0f} GiB to spare, "
            f"{free / GIB:.1f} GiB free; make room or choose another folder with --to"
        )
    return missing


def download(
    repository: str = REPOSITORY, folder: Path | None = None, *, revision: str = "main", endpoint: str | None = None
) -> checkpoint.Checkpoint:
    """The whole, verified model in `folder`. Raises DataError, MachineError, ModelError."""
    from huggingface_hub import snapshot_download

    folder = folder or default_folder(repository)
    commit, files = listing(repository, revision, endpoint)
    for _ in (1, 2):
        check_space(folder, files)
        try:
            snapshot_download(
                repository, revision=commit, local_dir=folder, endpoint=endpoint,
                allow_patterns=[f.name for f in files], max_workers=4,
            )  # fmt: skip
        except Exception as error:  # as above
            reason = str(error).strip().split("\n")[0][:200]
            raise DataError(f"the download broke off ({reason}); the same command goes on where it stopped") from None
        damaged = [file for file in verify(folder, files, commit) if file is not None]
        if not damaged:
            return checkpoint.inspect(folder)
        names = ", ".join(f.name for f in damaged)
        logger.warning("not what the repository holds, fetching again: %s", names)
        for file in damaged:
            (folder / file.name).unlink(missing_ok=True)
            (folder / ".cache/huggingface/download" / f"{file.name}.metadata").unlink(missing_ok=True)
    raise DataError(f"{names}: twice not the bytes that {repository} lists at {commit[:12]}; is a proxy in between?")


def verify(folder: Path, files: list[File], commit: str) -> Iterator[File | None]:
    """Hash each file; yields it where it is damaged, None where it is right. What was right before is not read."""
    note = folder / NOTE
    try:
        known: dict[str, Any] = json.loads(note.read_text())
    except (OSError, ValueError):
        known = {}
    for file in files:
        path = folder / file.name
        stamp = [file.sha256 or file.git_sha1, path.stat().st_mtime_ns if path.is_file() else None]
        if known.get(file.name) == stamp or file.matches(path):
            known[file.name] = stamp
            yield None
        else:
            known.pop(file.name, None)
            yield file
    note.write_text(json.dumps(known | {"commit": commit}, indent=1) + "\n")
