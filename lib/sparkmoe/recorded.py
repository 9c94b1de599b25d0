"""Measurements that somebody made elsewhere, with everything needed to judge them.

A step that this machine cannot run still has something to show: what it gave on a machine that could. And our own
figures say more beside the published ones. Both come as data, never as prose: a record holds the figures and the
conditions they were taken under, and `line()` says machine, versions and date in the sentence that every notebook
prints above such a figure.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkmoe.errors import DataError

FOLDER = Path(__file__).parent / "data"
SCHEMAS = ("sparkmoe.levers/1", "sparkmoe.recorded/1")


@dataclass(frozen=True)
class Recorded:
    """One record. `findings` are the figures, `conditions` at least machine, date, versions and source or command."""

    name: str
    what: str
    conditions: dict[str, Any]
    findings: dict[str, Any]

    def line(self) -> str:
        """Where the figures come from, in one line."""
        seen = self.conditions
        versions = ", ".join(f"{package} {version}" for package, version in seen["versions"].items())
        source = f"from {seen['source']}" if "source" in seen else f"by {seen['command']}"
        return f"recorded measurement: {seen['machine']}, {seen['date'] or 'no date given'}; {versions}; {source}"


def names() -> list[str]:
    """The records that come with the package."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    return [name for name, content in found.items() if isinstance(content, dict) and content.get("schema") in SCHEMAS]


def load(name: str) -> Recorded:
    """A record by name: `spark-published`, `levers-h200`. Raises DataError that names near ones."""
    if name not in (known := names()):
        near = difflib.get_close_matches(name, known, n=1)
        raise DataError(
            f"no record {name!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
        )
    content = json.loads((FOLDER / f"{name}.json").read_text())
    return Recorded(name, content["what"], content["conditions"], content["findings"])
