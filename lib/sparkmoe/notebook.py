"""What the notebooks share: where their data goes, and a table of checks at the end that cannot be overlooked.

A notebook that ran through has shown little: a lever may have been off, a server may have answered from its cache. So a
notebook collects `Check`s as it goes, and its last cell shows them, writes them beside its data, and raises
`ChecksFailed` where one failed. The same table then turns up in `sparkmoe run`, in the report and in the gate.

Data of one notebook is one run folder: inside the run under `sparkmoe run`, otherwise in `results/` of the checkout.
`chapters` reads what lies there, for the report and the gate; so what they need has one place each, and the functions
here put it there: checks and refusals (`Checks`), what was expected (`expect`), what servers cost (`Checks.prove`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sparkmoe import engagement, stats
from sparkmoe.errors import NotEngaged, SparkmoeError
from sparkmoe.judge import spoiled_by
from sparkmoe.machine import Machine
from sparkmoe.notebooks_run import RUN_ENV
from sparkmoe.results import Run, by_boot, write_atomic
from sparkmoe.sample import Sample, accept_length, accepted
from sparkmoe.stats import Interval

if TYPE_CHECKING:
    from sparkmoe.engine import Engine

CHECKS_SCHEMA = "sparkmoe.checks/1"
_RENDERER = "plotly_mimetype+notebook"
pd.set_option("display.max_colwidth", None)  # advice that ends in dots is none


class ChecksFailed(SparkmoeError):
    """At least one check of a notebook did not hold."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold: what was expected, what was found, and what to do where they differ.

    `required=False` marks a time that a busy machine may spoil in a quick run: worth a look, no failure.
    """

    what: str
    ok: bool
    found: str
    expected: str
    advice: str = ""
    required: bool = True

    @property
    def state(self) -> str:
        return "✔ pass" if self.ok else "✘ FAIL" if self.required else "◯ look"


class Checks:
    """The checks of one notebook, in the order in which they were made."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.checks: list[Check] = []
        self._not_shown: dict[str, str] = {}

    def add(
        self, what: str, ok: bool, found: object, expected: object, advice: str = "", *, required: bool = True
    ) -> bool:
        """Note one check, on disk too, and return whether it holds. A repeated `what` (a cell run twice) replaces the
        earlier one."""
        check = Check(what, bool(ok), str(found), str(expected), "" if ok else advice, required)
        self.checks = [c for c in self.checks if c.what != what] + [check]
        self._write(finished=False)
        return check.ok

    def not_shown(self, what: str, why: str) -> str:
        """Note what this machine or this run could not show, and return it as one line."""
        self._not_shown[what] = why
        self._write(finished=False)
        return f"{what}: not shown here, {why}"

    def prove(self, server: Engine, samples: Sequence[Sample] | None = None) -> None:
        """The `check` of `bench`, or by itself: one check `<arm> is engaged`, and what the server costs.

        `samples` are answers of this server; without them it is probed. Raises NotEngaged where a lever is not on,
        with the checks so far shown, since nothing may be measured then.
        """
        from IPython.display import display

        recipe, answers = server.recipe, engagement.probe(server.client()) if samples is None else samples
        proofs = engagement.verify(recipe, engagement.read_evidence(server.evidence_path), answers)
        missing = [proof for proof in proofs if proof.required and not proof.ok]
        listed = "; ".join(f"{proof.name}: {proof.found}, expected {proof.expected}" for proof in missing)
        told = "; ".join(f"worth knowing: {proof.cause}" for proof in proofs if not proof.required and not proof.ok)
        found = listed or "; ".join(filter(None, (f"{len(proofs)} of {len(proofs)} proofs", told)))
        advice = f"usual cause: {missing[0].cause}" if missing else ""
        self.add(f"{recipe.name} is engaged", not missing, found, "every lever of the recipe is on", advice)
        servers = self.run.manifest.get("servers", {})
        facts = {"ready_s": server.ready_s, "memory_bytes": server.memory_bytes()}
        self.run.update(servers=servers | {recipe.name: [*servers.get(recipe.name, []), facts]})
        if missing:
            display(self._table())
            raise NotEngaged(f"recipe {recipe.name} is not engaged: {listed}. {advice.capitalize()}")

    def samples_kept(self, measured: Measured) -> bool:
        """At most one sample in ten was spoiled; says how many and why."""
        why = ", ".join(f"{count} × {reason}" for reason, count in measured.spoiled.items()) or "none spoiled"
        total = len(measured.records) + measured.left_out
        found = f"{len(measured.records)} of {total} ({why})"
        advice = "let the machine rest and repeat"
        return self.add("samples kept", measured.left_out <= total // 10, found, "at most one in ten spoiled", advice)

    def finish(self) -> pd.DataFrame:
        """Write the checks to the run and return them as a table; it is shown before ChecksFailed where one failed."""
        from IPython.display import display

        failed = [check for check in self.checks if check.required and not check.ok]
        if not self.checks:
            raise ChecksFailed(f"{self.name} made no check: run its cells from the top")
        self._write(finished=True)
        if failed:
            display(self._table())
            listed = "; ".join(f"{c.what}: found {c.found}, expected {c.expected}" for c in failed)
            raise ChecksFailed(f"{len(failed)} of {len(self.checks)} checks failed: {listed}")
        return self._table()

    def _write(self, *, finished: bool) -> None:
        rows = [asdict(check) for check in self.checks]
        content = {"schema": CHECKS_SCHEMA, "notebook": self.name, "finished": finished, "checks": rows}
        self.run.write_json("checks.json", content | {"not_shown": self._not_shown})

    def _table(self) -> pd.DataFrame:
        rows = [(c.state, c.what, c.found, c.expected, c.advice) for c in self.checks]
        return pd.DataFrame(rows, columns=["", "check", "found", "expected", "what to do"]).set_index("")


class Measured:
    """What a finished bench says about its arms, asked one request at a time; spoiled samples are left out and counted.

    What several users got at once is another question: see `bench.levels`.
    """

    def __init__(self, run: Run) -> None:
        everything = [record for record in run.records() if record.get("concurrency", 1) == 1]
        self.records = [record for record in everything if not record.get("spoiled")]
        self.left_out = len(everything) - len(self.records)
        self.spoiled = spoiled_by(everything)

    def values(self, arm: str, metric: str) -> list[list[float]]:
        """One metric of an arm (`tpot_ms`, `ttft_ms`, …), grouped by boot."""
        return by_boot(self.records, arm, metric)[0]

    def interval(self, arm: str, metric: str = "tpot_ms") -> Interval:
        return stats.summarize(self.values(arm, metric))

    def speed(self, arm: str) -> Interval:
        """Decoding speed in tok/s: 1000 ÷ TPOT of every sample."""
        return stats.summarize([[1000 / ms for ms in boot] for boot in self.values(arm, "tpot_ms")])

    def gain(self, new: str, base: str) -> Interval:
        """How many times faster `new` decodes than `base`: the ratio of their TPOT."""
        return stats.ratio(self.values(base, "tpot_ms"), self.values(new, "tpot_ms"))

    def gaps_ms(self, arm: str) -> list[float]:
        """Every gap between two events of the stream, of all samples of an arm, ascending."""
        samples = [Sample.from_json(r["sample"]) for r in self.records if r["arm"] == arm]
        return sorted(gap for sample in samples for gap in sample.gaps_ms)

    def accepted(self, arm: str) -> list[int]:
        """Verify steps that accepted exactly 0, 1, … drafts, over all samples of an arm."""
        return accepted(r["sample"]["accept_histogram"] for r in self.records if r["arm"] == arm)

    def accept_length(self, arm: str) -> float:
        """Tokens a verify step yields on average, the target's own included."""
        return accept_length(r["sample"]["accept_histogram"] for r in self.records if r["arm"] == arm)

    def equal_answers(self, arm: str, base: str) -> tuple[int, int]:
        """(answers of `arm` that equal `base`'s token by token, answers compared)."""
        mine, theirs = (
            {(r["boot"], r["request"]): r["sample"]["token_ids"] for r in self.records if r["arm"] == name}
            for name in (arm, base)
        )
        shared = mine.keys() & theirs.keys()
        return sum(mine[key] == theirs[key] for key in shared), len(shared)


def results_root() -> Path:
    """Where runs are kept: inside the current `sparkmoe run`, else `results/` beside the notebooks of the checkout."""
    if inside := os.environ.get(RUN_ENV):
        return Path(inside)
    checkout = Path(__file__).parents[2]
    return (checkout if (checkout / "notebooks").is_dir() else Path.cwd()) / "results"


def open_run(name: str, machine: Machine, **conditions: Any) -> Run:
    """A new run folder for one notebook, with its manifest. `conditions` go into the manifest (model, seeds, …)."""
    run_id = name if os.environ.get(RUN_ENV) else time.strftime(f"%Y%m%d-%H%M%S-{name}", time.gmtime())
    return Run.create(results_root(), run_id=run_id, notebook=name, machine=machine, **conditions)


def open_part(run: Run, name: str, **conditions: Any) -> Run:
    """A run folder inside a notebook's own, for each further bench: one run holds the arms of one bench."""
    kept = {key: run.manifest[key] for key in ("machine", "seeds") if key in run.manifest}
    return Run.create(run.path, run_id=name, notebook=run.manifest.get("notebook", run.id), **kept | conditions)


def expect(
    run: Run,
    reference: str,
    *,
    ceiling_tok_s: Mapping[str, float] | None = None,
    predicted_gain: Mapping[str, float] | None = None,
) -> None:
    """Write down what the arms of `run` are held against: the arm that the others are compared with, and by arm the
    ceiling (tok/s) and the predicted TPOT of the reference ÷ TPOT of the arm."""
    run.update(reference=reference, ceiling_tok_s=ceiling_tok_s or {}, predicted_gain=predicted_gain or {})


def show_figure(run: Run, name: str, figure: Any) -> Any:
    """Keep a Plotly figure in the run (`figures/<name>.json`) and return it, so that the cell shows it.

    The first one brings Plotly's own script along, so that an executed copy shows its figures without a network. To
    name the renderer is what embeds those 5 MB, so it is named once.
    """
    import plotly.io

    if plotly.io.renderers.default != _RENDERER:
        plotly.io.renderers.default = _RENDERER
    write_atomic(run.folder("figures") / f"{name}.json", figure.to_json())
    if name not in (known := run.manifest.get("figures", [])):
        run.update(figures=[*known, name])
    return figure


def self_check(mine: float | None, right: float, within: float = 0.1) -> str:
    """What an exercise says to an answer: right to a fraction `within`, too small or too large; None is no answer."""
    if mine is None:
        return "no answer yet: put a number in and run the cell again"
    if abs(mine - right) <= within * abs(right):
        return f"right: {right:.3g}"
    return f"{mine:.3g} is too {'small' if mine < right else 'large'}"


def command(text: str) -> Any:
    """A shell command as a block that can be copied."""
    from IPython.display import Markdown

    return Markdown(f"```sh\n{text}\n```")


def table(rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A mapping as two columns, or a list of mappings as a table, for the end of a cell."""
    if isinstance(rows, Mapping):
        return pd.DataFrame({"": list(rows), "value": [str(v) for v in rows.values()]}).set_index("")
    return pd.DataFrame(list(rows)).set_index(next(iter(rows[0]))) if rows else pd.DataFrame()
