"""What a gate found, row by row, for a person, a pull request and a CI system."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["pass", "look", "fail", "skip"]


@dataclass(frozen=True)
class Row:
    """One comparison: what it found, what the baseline and the limit expect, and why it is not simply a pass."""

    notebook: str
    metric: str
    what: str
    state: State
    found: str
    expected: str
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """All rows of a run against a baseline. `machine` says how the machine's speed compares."""

    run: str
    baseline: str
    machine: str
    rows: list[Row]

    @property
    def ok(self) -> bool:
        return not any(row.state == "fail" for row in self.rows)

    def count(self, state: State) -> int:
        return sum(row.state == state for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """For the last line of the command: counts, and every row that is not a pass."""
        counts = {state: self.count(state) for state in ("pass", "look", "fail", "skip")}  # type: ignore[arg-type]
        rows = [asdict(row) for row in self.rows if row.state in ("fail", "look")]
        return {
            "ok": self.ok,
            "run": self.run,
            "baseline": self.baseline,
            **counts,
            "machine": self.machine,
            "rows": rows,
        }

    def markdown(self) -> str:
        """A summary for a pull request: the verdict, what is not a pass as a table, the rest folded."""
        marks = {"pass": "✔ pass", "look": "◯ look", "fail": "✘ FAIL", "skip": "– skip"}
        head = ["| | notebook | metric | what | found | expected | note |", "|---|---|---|---|---|---|---|"]

        def lines(states: tuple[State, ...]) -> list[str]:
            shown = sorted((row for row in self.rows if row.state in states), key=lambda row: states.index(row.state))
            cells = [(marks[r.state], r.notebook, r.metric, r.what, r.found, r.expected, r.note) for r in shown]
            return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]

        verdict = "**Nothing got worse.**" if self.ok else f"**{self.count('fail')} metrics got worse.**"
        text = [f"## {self.run} against {self.baseline}", "", f"{verdict} {self.machine}", ""]
        text += [*head, *urgent, ""] if (urgent := lines(("fail", "look"))) else []
        rest = lines(("skip", "pass"))
        text += [f"<details><summary>{len(rest)} more</summary>", "", *head, *rest, "", "</details>"] if rest else []
        return "\n".join(text) + "\n"

    def junit(self) -> bytes:
        """JUnit XML: a suite per notebook, a case per row."""
        root = ElementTree.Element("testsuites", name="sparkmoe gate")
        for notebook in dict.fromkeys(row.notebook for row in self.rows):
            rows = [row for row in self.rows if row.notebook == notebook]
            tally = {"tests": len(rows), "failures": sum(r.state == "fail" for r in rows)}
            tally["skipped"] = sum(r.state == "skip" for r in rows)
            counts = {key: str(value) for key, value in tally.items()}
            suite = ElementTree.SubElement(root, "testsuite", {"name": notebook, **counts})
            for row in rows:
                case = ElementTree.SubElement(suite, "testcase", classname=f"{notebook}.{row.metric}", name=row.what)
                text = f"found {row.found}, expected {row.expected}" + (f": {row.note}" if row.note else "")
                if row.state == "fail":
                    ElementTree.SubElement(case, "failure", message=text)
                elif row.state == "skip":
                    ElementTree.SubElement(case, "skipped", message=row.note)
                else:
                    ElementTree.SubElement(case, "system-out").text = text
        ElementTree.indent(root)
        return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
