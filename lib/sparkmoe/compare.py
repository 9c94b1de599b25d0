"""Put two runs side by side: did it get faster, and were the two runs comparable at all?

Two numbers may be divided by each other only if what stood around them was the same. So a comparison starts with the
conditions that differ (machine, driver, model, packages, commit, prompts) and only then gives, per arm and metric, both
values and their ratio, each with its interval over boots. An interval of the ratio that holds 1 means: not told apart.
Where both runs graded the same problems, accuracy is compared problem by problem.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkmoe import paired, stats
from sparkmoe.errors import DataError
from sparkmoe.results import Record, Run, arms, by_boot, flat, jsonable

# metric → (unit, digits)
METRICS = {
    "tpot_ms": ("ms", 2),
    "ttft_ms": ("ms", 1),
    "latency_ms": ("ms", 0),
    "accept_length": ("tokens", 2),
    "completion_tokens": ("tokens", 0),
}
CONDITIONS = ("machine", "model", "driver", "kernel", "packages", "source", "prompt_hash", "seeds")
_MOVING = {"mem_available_bytes", "memory_available_bytes", "dirty"}


@dataclass(frozen=True)
class Row:
    """One metric of one arm: run A, run B, and B ÷ A."""

    arm: str
    metric: str
    a: stats.Interval
    b: stats.Interval
    ratio: stats.Interval | None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `differing` lists (condition, value in A, value in B); `accuracy` is per arm."""

    run_a: str
    run_b: str
    differing: list[tuple[str, Any, Any]]
    rows: list[Row]
    accuracy: dict[str, dict[str, Any]]
    spoiled: dict[str, tuple[int, int]]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for one line of JSON."""
        rows = [
            {
                "arm": r.arm,
                "metric": r.metric,
                "a": r.a.as_dict(),
                "b": r.b.as_dict(),
                "ratio": r.ratio and r.ratio.as_dict(),
            }
            for r in self.rows
        ]
        return {
            "run_a": self.run_a,
            "run_b": self.run_b,
            "differing": [list(d) for d in self.differing],
            "rows": rows,
            "accuracy": self.accuracy,
            "spoiled": self.spoiled,
        }

    def text(self) -> str:
        """A Markdown table, the conditions that differ above it, notes below it."""
        lines = [f"A = {self.run_a}, B = {self.run_b}; intervals are 95 %."]
        lines += [f"differs: {name}: {_short(a)} → {_short(b)}" for name, a, b in self.differing] + [""]
        cells = [["arm", "metric", "A", "B", "B ÷ A", "told apart"]]
        notes: dict[str, None] = {}
        for row in self.rows:
            unit, digits = METRICS[row.metric]
            apart = "–" if row.ratio is None or not row.ratio.known else "yes" if row.ratio.excludes(1) else "no"
            ratio = row.ratio.text(3) if row.ratio else "–"
            cells.append([row.arm, f"{row.metric} ({unit})", row.a.text(digits), row.b.text(digits), ratio, apart])
            notes.update(dict.fromkeys(i.note for i in (row.a, row.b, row.ratio) if i and i.note))
        widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
        cells.insert(1, ["-" * w for w in widths])
        lines += ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells] + [
            ""
        ]
        for arm, found in self.accuracy.items():
            change, low, high = (100 * found["difference"][k] for k in ("estimate", "low", "high"))
            lines.append(
                f"{arm}: accuracy {100 * found['a']:.2f} % → {100 * found['b']:.2f} % on {found['n']} shared problems, "
                f"difference {change:+.2f} points [{low:+.2f}, {high:+.2f}], McNemar p = {found['mcnemar_p']:.3g}"
            )
        lines += [f"{arm}: left out as spoiled: {a} in A, {b} in B" for arm, (a, b) in self.spoiled.items() if a or b]
        return "\n".join(lines + [f"note: {note}" for note in notes]).rstrip() + "\n"


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def differing(a: Any, b: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(path, value in a, value in b) of every leaf in which two manifests differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [k for k in dict.fromkeys([*a, *b]) if k not in _MOVING]
        return [d for k in keys for d in differing(a.get(k), b.get(k), f"{name}.{k}" if name else k)]
    return [] if a == b else [(name, a, b)]


def compare(run_a: Run, run_b: Run) -> Comparison:
    """Compare arms of the same name; where each run has just one arm, these two. Raises DataError if none can be."""
    records_a, records_b = list(run_a.records()), list(run_b.records())
    names_a, names_b = arms(records_a), arms(records_b)
    pairs = [(name, name) for name in names_a if name in names_b]
    if not pairs and len(names_a) == len(names_b) == 1:
        pairs = [(names_a[0], names_b[0])]
    if not pairs:
        found = (
            f"{run_a.id} has {', '.join(names_a) or 'no sample'}; {run_b.id} has {', '.join(names_b) or 'no sample'}"
        )
        raise DataError(f"The two runs share no arm to compare: {found}.")
    stood_a, stood_b = ({k: run.manifest.get(k) for k in CONDITIONS} for run in (run_a, run_b))
    rows: list[Row] = []
    accuracy: dict[str, dict[str, Any]] = {}
    spoiled: dict[str, tuple[int, int]] = {}
    for a, b in pairs:
        label = a if a == b else f"{a} → {b}"
        for metric in METRICS:
            values_a, out_a = by_boot(records_a, a, metric)
            values_b, out_b = by_boot(records_b, b, metric)
            spoiled[label] = (out_a, out_b)
            if values_a and values_b:
                positive = min(min(map(min, values_a)), min(map(min, values_b))) > 0
                ratio = stats.ratio(values_b, values_a) if positive else None
                rows.append(Row(label, metric, stats.summarize(values_a), stats.summarize(values_b), ratio))
        graded = _graded(records_a, a), _graded(records_b, b)
        if shared := [p for p in graded[0] if p in graded[1]]:
            accuracy[label] = _accuracy(shared, *graded)
    return Comparison(run_a.id, run_b.id, differing(stood_a, stood_b), rows, accuracy, spoiled)


def _graded(records: list[Record], arm: str) -> dict[Any, bool]:
    mine = (flat(r) for r in records if r["arm"] == arm and not r.get("spoiled"))
    return {
        r["problem"]: bool(r["correct"]) for r in mine if r.get("problem") is not None and r.get("correct") is not None
    }


def _accuracy(shared: list[Any], a: dict[Any, bool], b: dict[Any, bool]) -> dict[str, Any]:
    table = paired.PairedTable.of([a[p] for p in shared], [b[p] for p in shared])
    return {
        "n": table.n,
        "a": (table.both + table.only_base) / table.n,
        "b": (table.both + table.only_new) / table.n,
        "table": jsonable(table),
        "mcnemar_p": paired.mcnemar_p(table),
        "difference": paired.difference(table).as_dict(),
    }


def compare_command(a: Path | str, b: Path | str, *, root: Path | str = "results") -> str:
    """What `sparkmoe compare A B` prints: the table, then everything as one JSON line, which is the last."""
    found = compare(Run.open(a, root=root), Run.open(b, root=root))
    return found.text() + "\n" + json.dumps(jsonable(found.as_dict()), allow_nan=False)
