"""Two runs that went on from the same point become one: `join.py RUN OTHER` takes over what OTHER has beyond RUN.

On a machine with several GPUs one driver a GPU measures (`lanes.sh`), each with a folder of its own, because a run has
one writer. Nothing is lost: files that RUN lacks are copied, samples that it lacks are appended, and of an arm that
both know the result that was measured stands, or of two the later one.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from table import states

from sparkmoe.results import Run


def join(run: Run, other: Run) -> list[str]:
    """Take over from `other`; returns the names of the arms whose results came from there. ValueError for a run of
    another model."""
    if run.manifest.get("model") != other.manifest.get("model"):
        raise ValueError(f"{other.path} measured {other.manifest.get('model')}, {run.path} {run.manifest.get('model')}")
    for folder in ("calls", "evidence", "logs", "traces"):
        for file in sorted((other.path / folder).glob("*")):
            if not (held := run.folder(folder) / file.name).exists():
                shutil.copy2(file, held)
    known = {_key(record) for record in run.records()}
    for record in other.records():
        if _key(record) not in known:
            run.append(record)
    mine, theirs = states(run), states(other)
    taken = [name for name, state in theirs.items() if name not in mine or _worth(state) > _worth(mine[name])]
    for name in taken:
        run.write_json(f"arms/{name}.json", theirs[name])
    return taken


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["arm"], record.get("booted"), record["request"]


def _worth(state: Mapping[str, Any]) -> tuple[int, float]:
    return ("failed", "partial", "done").index(state["status"]), state.get("at_unix_s", 0.0)


if __name__ == "__main__":
    with Run.open(sys.argv[1]) as opened:
        print(json.dumps({"run": opened.id, "taken": join(opened, Run.open(sys.argv[2]))}))  # noqa: T201
