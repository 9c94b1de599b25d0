"""What a later run is held against: the numbers of a good run, in one file small enough for a repository.

It holds numbers per boot instead of means, because a ratio needs an interval; right and wrong per problem, because
accuracy is compared problem by problem; and the conditions, because another machine, model or set of prompts makes a
comparison void. A baseline is never written on the side: `sparkmoe gate --update` is the one way to move it, and only
to a run without a failed check.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkmoe.chapters import Bench, Chapter, chapters
from sparkmoe.errors import DataError, StoreError
from sparkmoe.results import Run, jsonable, write_atomic

SCHEMA = "sparkmoe.baseline/1"


def summary(run: Run, found: Sequence[Chapter] | None = None) -> dict[str, Any]:
    """A run's numbers as a baseline holds them."""
    found = chapters(run) if found is None else found
    seen = next((chapter.manifest for chapter in found if chapter.benches), run.manifest)
    machine = seen.get("machine") or {}
    probes = [
        fact[key]
        for chapter in found
        for bench in chapter.benches
        for arm in bench.arms
        for fact in bench.boot_facts(arm)
        for key in ("bandwidth_before_gb_s", "bandwidth_after_gb_s")
        if fact.get(key)
    ]
    content = {
        "schema": SCHEMA,
        "run": run.id,
        "created_unix_s": run.manifest["created_unix_s"],
        "machine": {key: machine.get(key) for key in ("profile", "gpu_name", "gpu_count", "cores", "arch")},
        "model": Path(str(seen.get("model", ""))).name,
        "quick": run.manifest.get("quick"),
        "packages": seen.get("packages"),
        "commit": (seen.get("source") or {}).get("commit"),
        "bandwidth_gb_s": statistics.median(probes) if probes else None,
        "notebooks": {chapter.name: _notebook(chapter) for chapter in found},
    }
    return dict(jsonable(content))


def _notebook(chapter: Chapter) -> dict[str, Any]:
    servers: dict[str, dict[str, float | None]] = {}
    for arm, boots in chapter.manifest.get("servers", {}).items():
        servers[arm] = {key: _middle([boot.get(key) for boot in boots]) for key in ("ready_s", "memory_bytes")}
    held = [check.what for check in chapter.checks if check.required and check.ok]
    return {
        "checks": held,
        "servers": servers,
        "benches": {bench.name: _bench(bench) for bench in chapter.benches},
    }


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _bench(bench: Bench) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    for arm in bench.arms:
        graded = {r["problem"]: bool(r["correct"]) for r in bench.records if r["arm"] == arm and r.get("problem")}
        arms[arm] = {metric: bench.values(arm, metric) for metric in ("tpot_ms", "accept_length")}
        arms[arm] |= {"correct": graded}
    return {"reference": bench.reference, "prompts": bench.run.manifest.get("prompt_hash"), "arms": arms}


def load(path: Path | str, *, root: Path | str = "results") -> dict[str, Any]:
    """A baseline from its file, or from a run's folder or id. StoreError for what is neither, or of another schema."""
    file = Path(path)
    if not file.is_file():
        return summary(Run.open(path, root=root))
    try:
        content = json.loads(file.read_text())
        schema = content["schema"]
    except (ValueError, KeyError, TypeError, OSError):
        raise StoreError(
            f"{file} is no baseline: it holds no JSON object with a schema. Make one with --update."
        ) from None
    if schema != SCHEMA:
        raise StoreError(f"{file} has schema {schema!r}; this version reads {SCHEMA!r}. Make a new one with --update.")
    return dict(content)


def update(run: Run, path: Path | str) -> dict[str, Any]:
    """Write a run's numbers to `path` as the new baseline and return them. DataError where a check of it failed."""
    found, file = chapters(run), Path(path)
    bad = [f"{chapter.name}: {check.what}" for chapter in found for check in chapter.failed]
    bad += [
        f"{chapter.name}: did not reach its last cell" for chapter in found if not chapter.ok and not chapter.failed
    ]
    if bad:
        raise DataError(f"the run {run.id} is no baseline, it has failures ({'; '.join(bad)}); make a run without")
    if file.is_dir():
        raise DataError(f"--update writes a baseline file, and {file} is a folder; name a file such as baseline.json")
    content = summary(run, found)
    write_atomic(file, json.dumps(content, indent=None, separators=(",", ":")) + "\n")
    return content
