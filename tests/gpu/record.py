"""A run of the full shape as one record that ships with the package: `record.py RUN_FOLDER OUT.json`.

RUN_FOLDER is what `run.tar.gz` holds. Notebooks show the record on machines without such a GPU (`sparkmoe.recorded`),
so it has every figure of the table, how a start and a step spend their time, and what was proven, and no raw sample.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from table import sound, states

from sparkmoe.results import Run

COMMAND = "tests/gpu/full_shape.sh --out OUT --carried CARRIED"
_PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "humming-kernels")
_STEP = ("verdict", "accept_length", "step_ms", "busy_ms", "host_gap_ms", "launch_gap_ms", "calls", "named_share")
_PART = ("part", "ms", "share", "calls", "gb_s")


def record(run: Run) -> dict[str, Any]:
    """The record of a run, floats to four digits."""
    manifest, found = run.manifest, states(run)
    done = {name: state for name, state in found.items() if state["status"] == "done"}
    machine, versions = manifest["machine"], manifest["packages"]
    conditions = {
        "machine": f"{machine['gpu_count']} × {machine['gpu_name']}" if machine["gpu_name"] else "a CPU, dry run",
        "date": time.strftime("%Y-%m-%d", time.gmtime(manifest["created_unix_s"])),
        "versions": {name: versions[name] for name in _PACKAGES if name in versions},
        "driver": manifest["driver"],
        "commit": manifest.get("commit") or manifest["source"]["commit"],
        "run": run.id,
        "command": COMMAND,
    }
    routing = next((state["routing"] for state in done.values() if "routing" in state), {})
    findings = {
        "gb_s": manifest["gb_s"],
        "arms": {name: _arm(state) for name, state in found.items()},
        "rows": json.loads((run.path / "table.json").read_text()),
        "routing": {key: routing[key] for key in ("expected", "mean") if key in routing},
        "profiles": {name: _steps(state["profiles"]) for name, state in done.items() if "profiles" in state},
        "miniature": {name: state["miniature"] for name, state in done.items() if "miniature" in state},
    }
    what = f"{manifest['model']}: time per token by lever, context and simulated accept length, one boot an arm"
    return {"schema": "sparkmoe.recorded/1", "what": what, "conditions": conditions, "findings": rounded(findings)}


def _arm(state: Mapping[str, Any]) -> dict[str, Any]:
    if state["status"] != "done":
        return {"status": state["status"], "error": str(state.get("error", ""))[:300]}
    failed = [row["check"] for row in state["checks"] if row["result"] == "FAILED"]
    kept = {"ready_s": state["ready_s"], "weight_bytes": state.get("weight_bytes")} | state["spent_s"]
    return {"status": "done", "sound": sound(state), "failed_checks": failed} | kept


def _steps(profiles: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for context, step in profiles.items():
        if "error" not in step:
            parts = [{column: part[column] for column in _PART} for part in step["parts"]]
            found[context] = {key: step[key] for key in _STEP} | {"parts": parts}
    return found


def rounded(value: Any) -> Any:
    """Floats to four significant digits, everywhere."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(record(Run.open(sys.argv[1])), ensure_ascii=False) + "\n")
