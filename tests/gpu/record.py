"""A run of the full shape as one record that ships with the package: `record.py RUN_FOLDER OUT.json [ARCHIVE.tar.gz]`.

RUN_FOLDER is what `run.tar.gz` holds. Notebooks show the record on machines without such a GPU (`sparkmoe.recorded`),
so it has every figure of the table, how a start and a step spend their time, and what was proven, and no raw sample.
All of it is made from the kept samples, traces and logs, by today's rules. ARCHIVE receives the run.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from full_shape import MODEL
from table import bandwidth, call_of, calls, recipe_of, sound, states, table

from sparkmoe import breakdown, hot_vocab, inventory, roofline, serverlog, trace
from sparkmoe.inventory import Inventory
from sparkmoe.machine import Machine
from sparkmoe.profiling import Dissection, load_of
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run, write_atomic
from sparkmoe.trace import Trace

COMMAND = "tests/gpu/full_shape.sh --out OUT --carried CARRIED"
_PACKAGES = ("sglang", "torch", "triton", "flashinfer-python", "humming-kernels")
_PART = ("part", "ms", "share", "calls", "gb_s")
_TOP, _NAME = 20, 100  # how many kernels by time, and how much of a C++ name


def record(run: Run) -> dict[str, Any]:
    """The record of a run."""
    manifest, found = run.manifest, states(run)
    done = {name: state for name, state in found.items() if "checks" in state}  # measured, in part at least
    machine, versions = manifest["machine"], manifest["packages"]
    recipes = {name: _recipe(run, state) for name, state in found.items()}
    weights, gb_s, made = inventory.from_config(MODEL), bandwidth(run), calls(run)
    commits = [_commit(call_of(state, made) or manifest) for state in done.values()] or [_commit(manifest)]
    device = machine["gpu_name"]
    several = "".join(f", {recipes[name].tp} for {name}" for name in done if recipes[name].tp > 1)
    conditions = {
        "machine": f"{machine['gpu_count']} × {device} an arm{several}" if device else "a CPU, dry run",
        "date": time.strftime("%Y-%m-%d", time.gmtime(manifest["created_unix_s"])),
        "versions": {name: versions[name] for name in _PACKAGES if name in versions},
        "driver": manifest["driver"],
        "commit": ", ".join(sorted(set(commits))),
        "run": run.id,
        "command": COMMAND,
    }
    routing = next((state["routing"] for state in done.values() if "routing" in state), {})
    findings = {
        "gb_s": gb_s,
        "arms": {name: _arm(run, name, state, call_of(state, made)) for name, state in found.items()},
        "rows": table(run, recipes, weights, Machine.named("hopper")),
        "routing": {key: routing[key] for key in ("expected", "mean") if key in routing},
        "profiles": {
            name: _steps(run, state, recipes[name], weights, gb_s)
            for name, state in done.items()
            if "profiles" in state
        },
        "miniature": {name: state["miniature"] for name, state in done.items() if "miniature" in state},
    }
    what = f"{manifest['model']}: time per token by lever, context and simulated accept length, one boot an arm"
    return {"schema": "sparkmoe.recorded/1", "what": what, "conditions": conditions, "findings": rounded(findings)}


def _commit(conditions: Mapping[str, Any]) -> str:
    return str(conditions.get("commit") or conditions["source"]["commit"])


def _arm(run: Run, name: str, state: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    log = _log(run, name)
    if "checks" not in state:
        cause = serverlog.likely_cause(log) or str(state.get("error", ""))[:300]
        return {"status": state["status"], "error": cause}
    failed = [row["check"] for row in state["checks"] if row["result"] == "FAILED"]
    kept = {"ready_s": state["ready_s"], "weight_bytes": state.get("weight_bytes")} | serverlog.seconds_spent(log)
    if call:
        kept |= {"gb_s": call["gb_s"], "commit": _commit(call), "at_unix_s": round(state.get("at_unix_s", 0.0))}
    return {"status": state["status"], "sound": sound(state), "failed_checks": failed} | kept


def _log(run: Run, name: str) -> list[str]:
    """The last log of an arm's server, by lines."""
    logs = sorted(path for path in run.path.glob("logs/*.log") if path.stem.split("-")[2] == name)
    return logs[-1].read_text(errors="replace").splitlines() if logs else []


def _steps(run: Run, state: Mapping[str, Any], recipe: Recipe, weights: Inventory, gb_s: float) -> dict[str, Any]:
    """A step by context, its parts in ms of kernels; these overlap, so they sum up to more than the busy time."""
    found = {}
    for context, step in state["profiles"].items():
        if "error" in step:
            continue
        whole = roofline.step_bytes(weights, load_of(recipe, Machine.named("hopper"), int(context)))
        size = roofline.split(whole, recipe.tp)
        seen = trace.read(run.path / "traces" / step["trace"])
        watched = breakdown.break_down(seen, trace.steps(seen)).unwatched(step["step_ms"])
        verdict = breakdown.verdict(watched, size.total, gb_s)
        parts = Dissection(Path(seen.path), watched, (), 1.0, size, verdict).table().to_dict("records")
        top = sorted(watched.top.items(), key=lambda kernel: -kernel[1][0])[:_TOP]
        found[context] = {
            "verdict": verdict.sentence,
            "accept_length": step["accept_length"],
            "step_ms": watched.step_ms,
            "busy_ms": watched.busy_ms,
            "host_gap_ms": watched.host_gap_ms,
            "launch_gap_ms": watched.launch_gap_ms,
            "calls": watched.calls,
            "named_share": watched.named_share,
            "parts": [{column: part[column] for column in _PART} for part in parts],
            "top": [
                {"kernel": name[:_NAME], "ms": ms, "calls": calls, "median_us": _median_us(seen, name)}
                for name, (ms, calls) in top
            ],
        }
    return found


def _median_us(seen: Trace, kernel: str) -> float:
    """One call of a kernel; unlike the mean it is not that of a few in which a GPU waits for another one."""
    calls = seen.work[seen.name[seen.work] == seen.names.index(kernel)]
    return float(np.median(seen.duration_us[calls]))


def _recipe(run: Run, state: Mapping[str, Any]) -> Recipe:
    """An arm's recipe. Its token map stayed on the machine: one of as many tokens takes its place."""
    recipe = recipe_of(state)
    if recipe.hot_vocab and "booted" in state:
        evidence = json.loads((run.path / "evidence" / f"{state['booted']}.json").read_text())
        held = Path(tempfile.gettempdir()) / f"hot-{evidence['draft']['hot_vocabulary']}.pt"
        hot_vocab.save(
            held, hot_vocab.choose({0: 1}, evidence["draft"]["hot_vocabulary"], evidence["target"]["vocabulary"])
        )
        return recipe.with_(name=recipe.name, hot_vocab=str(held))
    return recipe


def archive(run: Run, path: Path) -> None:
    """The run as one file, without the paths of the checkouts that it was made from, and without the servers' keys."""
    drivers = [run.manifest["argv"][0], *(call["argv"][0] for call in calls(run).values() if "argv" in call)]
    checkouts = {driver.removesuffix("tests/gpu/full_shape.py").encode() for driver in drivers}
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for file in sorted(run.path.rglob("*")):
            inside = file.relative_to(run.path)
            if file.is_dir() or (inside.parts[0] == "logs" and file.suffix != ".log"):  # evidence is there twice
                continue
            content = file.read_bytes()
            if file.suffix in (".json", ".jsonl", ".log"):
                content = re.sub(rb"('api_key': ')[^']+", rb"\1", content)
                for checkout in checkouts:
                    content = content.replace(checkout, b"") if checkout.endswith(b"/") else content
            entry = tarfile.TarInfo(f"{run.id}/{inside}")
            entry.size, entry.mtime = len(content), int(run.manifest["created_unix_s"])
            tar.addfile(entry, io.BytesIO(content))
    write_atomic(path, held.getvalue())


def rounded(value: Any) -> Any:
    """Floats to six significant digits, everywhere; what is not a number is None."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def write_table(run: Run) -> None:
    """The run's own table, by today's rules."""
    recipes = {name: _recipe(run, state) for name, state in states(run).items()}
    run.write_json("table.json", table(run, recipes, inventory.from_config(MODEL), Machine.named("hopper")))


if __name__ == "__main__":
    opened = Run.open(sys.argv[1])
    write_table(opened)
    Path(sys.argv[2]).write_text(json.dumps(record(opened), ensure_ascii=False) + "\n")
    for target in sys.argv[3:]:
        archive(opened, Path(target))
