"""Keep every number together with the conditions it was measured under.

A figure in a report is worth what can be asked of it a month later: which commit, which driver, which clocks, which
prompts? So a run is a folder. `manifest.json` holds the conditions, `samples.jsonl` every raw sample, one JSON object
per line, and next to them lie `logs/`, `evidence/` and `figures/`. Tables and charts are made from these files and from
nothing else.

A bench that takes hours will be killed one day. A sample is therefore one line, appended with one write and flushed
to the disk before the next request starts, so a crash costs at most the line being written: readers drop a
half-written last line, and the next writer cuts it off before appending. Everything else is written to a temporary
name and renamed, so a reader sees the old file or the new one and never half of either.

A record is `{"arm", "boot", "request", "spoiled", "sample", …}`: `spoiled` lists the reasons for which the sample
must not count (empty for a good one), `sample` holds the fields of `client.Sample`. Further keys (`workload`,
`problem`, `correct`, …) are the caller's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparkmoe.conditions import clocks, environment
from sparkmoe.errors import StoreError

log = logging.getLogger(__name__)

SCHEMA = "sparkmoe.run/1"
Record = dict[str, Any]


def jsonable(value: Any) -> Any:
    """`value` as strict JSON can hold it: dataclasses and arrays opened, paths as text, NaN and ±∞ as None."""
    if is_dataclass(value) and not isinstance(value, type):
        return jsonable(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


@contextlib.contextmanager
def _named(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into one sentence."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(f"Cannot {action} {path}: {why}. Choose another results folder or free it.") from error


def write_atomic(path: Path, data: bytes | str) -> Path:
    """Write a whole file so that no reader and no crash ever sees half of it. Raises StoreError."""
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _named("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --------------------------------------------------------------------------------------------------------- the run


class Run:
    """One run's folder. `Run.create` starts one, `Run.open` reads one or goes on with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    @property
    def id(self) -> str:
        return self.path.name

    @classmethod
    def create(
        cls, root: Path | str = "results", *, name: str = "run", run_id: str | None = None, **conditions: Any
    ) -> Run:
        """Make a new folder under `root` with its manifest.

        `conditions` go into the manifest beside what `environment()` finds; the usual ones are `machine`, `model`,
        `arms` (name → recipe), `argv`, `prompt_hash`, `seeds`. Raises StoreError where the folder cannot be made or
        exists.
        """
        started = time.time()
        run = cls(Path(root) / (run_id or time.strftime(f"%Y%m%d-%H%M%S-{name}", time.gmtime(started))))
        with _named("make a run in", run.path.parent):
            run.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                run.path.mkdir()
            except FileExistsError:
                # A folder without anything in it is what a kill between the folder and its manifest leaves.
                if not run.path.is_dir() or any(not p.name.startswith(".manifest.json.") for p in run.path.iterdir()):
                    raise StoreError(
                        f"The run {run.path} exists already. Open it to go on with it, or name another."
                    ) from None
        manifest = {
            "schema": SCHEMA,
            "run": run.id,
            "created_unix_s": started,
            "argv": sys.argv,
            "clocks_before": clocks(),
        }
        run.write_json("manifest.json", manifest | environment() | conditions)
        return run

    @classmethod
    def open(cls, run: Path | str, *, root: Path | str = "results") -> Run:
        """An existing run, by folder or by id under `root`. Raises StoreError on a missing one or an unknown schema."""
        candidates = [Path(run), Path(root) / run]
        found = next((c for c in candidates if (c / "manifest.json").is_file()), None)
        if found is None:
            known = sorted(p.parent.name for p in Path(root).glob("*/manifest.json"))[-3:]
            raise StoreError(
                f"No run at {run}: no manifest.json there. The latest under {root}: {', '.join(known) or 'none'}."
            )
        opened = cls(found)
        _ = opened.manifest
        return opened

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        with _named("read", path):
            text = path.read_text()
        try:
            content = json.loads(text)
            schema = content["schema"]
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{path} is no manifest of a run: it holds no JSON object with a schema.") from None
        if schema != SCHEMA:
            raise StoreError(
                f"{path} has schema {schema!r}; this version reads {SCHEMA!r}. Use the version that wrote it."
            )
        return dict(content)

    def update(self, **fields: Any) -> None:
        """Add or replace fields of the manifest, atomically."""
        self.write_json("manifest.json", self.manifest | fields)

    def write_json(self, name: str, content: Any) -> Path:
        """Write `content` under the run (`evidence/all_three-0.json`, …), atomically."""
        return write_atomic(self.path / name, json.dumps(jsonable(content), indent=1, allow_nan=False) + "\n")

    def folder(self, name: str) -> Path:
        """A subfolder (`logs`, `evidence`, `figures`), made if need be."""
        path = self.path / name
        with _named("make", path):
            path.mkdir(parents=True, exist_ok=True)
        return path

    # -- samples

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record and return when it is on the disk. One writer at a time: a second one gets a StoreError."""
        missing = [key for key in ("arm", "boot", "request") if key not in record]
        if missing:
            raise StoreError(f"A record must say {', '.join(missing)}: without that it belongs to no arm and no boot.")
        line = json.dumps(jsonable(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with _named("append to", self.samples_path):
            handle = self._handle if self._handle is not None else self._open_for_append()
            try:
                if os.write(handle, line) != len(line):
                    raise OSError(0, "the disk took only part of a sample; is it full?")
                os.fsync(handle)
            except OSError:
                self.close()  # the next append opens the file again and cuts the torn line off
                raise

    def _open_for_append(self) -> int:
        handle = os.open(self.samples_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise StoreError(
                f"{self.samples_path} is being written by another process. Wait for it, or start a new run."
            ) from None
        sound = sum(len(line) for line in _lines(self.samples_path))
        if sound < os.fstat(handle).st_size:
            os.ftruncate(handle, sound)
        _sync_folder(self.path)
        self._handle = handle
        return handle

    def close(self) -> None:
        """Give up the writer's lock. Reading and a later `append` still work."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def records(self) -> Iterator[Record]:
        """Every record in the order of measurement, spoiled ones included. A half-written last line is left out."""
        for line in _lines(self.samples_path):
            yield json.loads(line)

    def done(self) -> set[tuple[str, int, int]]:
        """(arm, boot, request) of every record, for going on after a crash."""
        return {(r["arm"], r["boot"], r["request"]) for r in self.records()}

    def table(self) -> pd.DataFrame:
        """One row per record; the fields of `sample` become columns beside arm, boot and request."""
        return pd.DataFrame([flat(r) | {"run": self.id} for r in self.records()])

    def export(self, path: Path | str) -> Path:
        """Write the table as CSV or Parquet, by the ending of `path`; lists become JSON text in CSV."""
        target, table = Path(path), self.table()
        if target.suffix not in (".csv", ".parquet"):
            raise StoreError(f"Cannot export to {target.name}: the name must end in .csv or .parquet.")
        if table.empty:
            raise StoreError(f"The run {self.id} holds no sample yet: there is nothing to export.")
        with _named("write", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.suffix == ".parquet":
                table.to_parquet(target, index=False)
            else:
                table.map(lambda v: json.dumps(v) if isinstance(v, (list, dict)) else v).to_csv(target, index=False)
        return target


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines of a JSON-lines file; the last one is dropped when it was cut off, an earlier one is an error."""
    if not path.exists():
        return
    with _named("read", path), path.open("rb") as file:
        held: tuple[int, bytes] | None = None
        for number, line in enumerate(file, 1):
            if held is not None:
                raise StoreError(
                    f"{path}, line {held[0]}, is damaged: {held[1][:60]!r}. Restore the file, or remove that line."
                )
            try:
                json.loads(line)
                sound = line.endswith(b"\n")
            except ValueError:
                sound = False
            if sound:
                yield line
            else:
                held = (number, line)
        if held is not None:
            log.warning("%s ends in a half-written line (%d bytes), which is left out", path, len(held[1]))


def flat(record: Mapping[str, Any]) -> Record:
    """A record with the fields of its sample beside its own (its own win)."""
    return {**(record.get("sample") or {}), **{k: v for k, v in record.items() if k != "sample"}}


def by_boot(records: Iterable[Mapping[str, Any]], arm: str, metric: str) -> tuple[list[list[float]], int]:
    """(values of `metric` grouped by boot, number of spoiled samples left out) of one arm, as `stats` wants them."""
    boots: dict[int, list[float]] = {}
    spoiled = 0
    for record in records:
        if record["arm"] != arm:
            continue
        if record.get("spoiled"):
            spoiled += 1
        elif (value := flat(record).get(metric)) is not None:
            boots.setdefault(record["boot"], []).append(float(value))
    return [boots[b] for b in sorted(boots)], spoiled


def arms(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the arms in the order of their first sample."""
    return list(dict.fromkeys(r["arm"] for r in records))
