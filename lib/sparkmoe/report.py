"""One file that says what a run found, and holds everything it says it from.

A report is read where the run is not: on a phone, in a meeting, next year. So it is one HTML file without a network:
Plotly's script is in it once, every figure is live, and each table has its raw samples beside it as a download. Nothing
is computed here that is not computed by `chapters`, and nothing is said that is not in the run: a notebook that is
missing, a lever that could not run, an interval over one boot are named as what was not shown.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparkmoe import gsm8k_compare, plots, recorded
from sparkmoe.chapters import STORY, Arm, Chapter, chapters, keep, ladder, nearest, verdicts
from sparkmoe.errors import DataError
from sparkmoe.gsm8k_compare import Comparison
from sparkmoe.machine import Machine
from sparkmoe.notebooks_run import RUN_ENV
from sparkmoe.paired import PairedTable, difference, non_inferiority
from sparkmoe.recipe import RECIPES, Recipe
from sparkmoe.results import Run, jsonable, write_atomic

RUNGS = ("baseline", "humming", "humming_fp8", "all_three")
NAME = "report.html"
_LONG = ("text", "reasoning", "token_ids", "logprobs", "log", "question", "chunk_times_ms", "chunk_tokens")


def report(run: Run | Path | str, *, root: Path | str = "results") -> Path:
    """Write `report.html` into a run's folder and return its path. StoreError where there is no such run."""
    opened = run if isinstance(run, Run) else Run.open(run, root=root)
    found, path = chapters(opened), opened.path / NAME
    if [chapter.name for chapter in found] == [STORY[-1]] and path.exists():
        return path  # the last notebook alone has written it, on other runs' data
    return write(found, path, opened)


def write(found: Sequence[Chapter], path: Path, run: Run) -> Path:
    """The report on some chapters as one HTML file at `path`; `run` gives it name and date."""
    from jinja2 import Environment, PackageLoader
    from plotly.offline import get_plotlyjs

    templates = Environment(loader=PackageLoader("sparkmoe"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    figures: dict[str, Any] = {}
    if ladder(found):
        figures["ladder"] = json.loads(ladder_figure(found).to_json())
    for chapter in found:
        figures |= {f"{chapter.name}-{name}": drawn for name, drawn in chapter.figures.items()}
    html = templates.get_template("report.html.jinja").render(
        run=run.id,
        created=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(run.manifest["created_unix_s"]))),
        chapters=found,
        red=[(chapter, check) for chapter in found for check in chapter.failed],
        looks=[(chapter, c) for chapter in found for c in chapter.checks if not c.ok and not c.required],
        broken=[chapter for chapter in found if not chapter.ok and not chapter.failed and chapter.name != STORY[-1]],
        published=beside_published(found),
        source=recorded.load("spark-published").line(),
        accuracy=accuracy(found),
        arms={chapter.name: _own_arms(chapter) for chapter in found},
        graded=[(*found_one, flips(found_one[3])) for found_one in verdicts(found)],
        keep=keep(found),
        serve=serve_command(found),
        missing=not_shown(found),
        conditions=conditions(found),
        commands={arm.name: told for chapter in found for arm in chapter.arms() if (told := command(found, arm))},
        downloads={chapter.name: downloads(chapter) for chapter in found},
        figures=figures,
        plotly=get_plotlyjs(),
    )
    return write_atomic(path, html)


def ladder_figure(found: Sequence[Chapter]) -> Any:
    """The rungs with intervals and ceilings, of one bench."""
    rungs = ladder(found)
    if not rungs:
        raise DataError("no arm was timed in these notebooks: there is no ladder to draw")
    ceilings = {arm.name: arm.ceiling_tok_s for arm in rungs if arm.ceiling_tok_s}
    title = f"Decoding speed, measured side by side in {rungs[0].chapter}"
    return plots.ladder({arm.name: arm.tok_s for arm in rungs}, ceilings, title=title)


def arm_rows(found: Sequence[Chapter]) -> list[dict[str, str]]:
    """Every timed arm: time and rate with intervals, its gain over the reference, what was predicted, the ceiling."""
    return [
        {
            "arm": arm.name,
            "measured in": " ".join(filter(None, (arm.chapter, arm.bench))),
            "TPOT (ms)": arm.tpot_ms.text(),
            "tok/s": arm.tok_s.text(1),
            "of ceiling": f"{arm.tok_s.estimate / arm.ceiling_tok_s:.1%}" if arm.ceiling_tok_s else "–",
            "gain": f"{arm.gain.text()} ×" if arm.gain else "reference",
            "predicted": f"{arm.predicted_gain:.2f} ×" if arm.predicted_gain else "–",
            "accept length": f"{arm.accept_length:.2f}" if arm.accept_length else "–",
            "samples": f"{arm.samples} in {arm.boots} boot{'s' if arm.boots > 1 else ''}"
            + (f", {arm.spoiled} spoiled" if arm.spoiled else ""),
        }
        for chapter in found
        for arm in chapter.arms()
    ]


def _own_arms(chapter: Chapter) -> list[dict[str, str]]:
    """A chapter's rows; where they were measured is said only if there is more than one place."""
    rows = arm_rows([chapter])
    several = len(chapter.benches) > 1
    return [{key: value for key, value in row.items() if several or key != "measured in"} for row in rows]


def beside_published(found: Sequence[Chapter]) -> list[dict[str, str]]:
    """Each published rung with what stands for it here: the same levers, as far as this machine can switch them on."""
    figures = recorded.load("spark-published").findings["synthetic_32k_2k"]
    machine, base, rows = machine_of(found), figures["baseline"]["tpot_ms"], []
    for name in RUNGS:
        recipe, there = Recipe.named(name), figures[name]
        same = not recipe.nearest(machine).diff(recipe)
        row = {"rung": name, "published ms": f"{there['tpot_ms']:.2f}", "gain": f"{base / there['tpot_ms']:.2f} ×"}
        arm = nearest(found, recipe, machine) if same or recipe.head == "fp8" else None
        if arm is None:
            missing = f"{recipe.nearest(machine).name}: not measured in this run"
            why = (None if recipe.head == "fp8" else machine.why_not(recipe.moe)) or missing
            rows.append(row | {"here": why, "here ms": "–", "gain here": "–", "accept length": "–"})
            continue
        gain = f"{arm.gain.text()} × {arm.reference}" if arm.gain else "the reference"
        length = "–" if arm.accept_length is None else f"{arm.accept_length:.2f}"
        length += f" (there {there['accept_length']:.2f})" if "accept_length" in there else ""
        here = f"{arm.name} in {arm.chapter}" + ("" if same else f", without {recipe.moe}")
        rows.append(row | {"here": here, "here ms": arm.tpot_ms.text(), "gain here": gain, "accept length": length})
    return rows


def accuracy(found: Sequence[Chapter]) -> list[dict[str, str]]:
    """Each graded pair of arms as a row, and the published pair below; [] where none was graded."""
    rows = []
    for chapter, base, new, seen in verdicts(found):
        timed = any(measure.name == "decode rate" for measure in seen.measures)
        known = gsm8k_compare.totals(seen) if timed else None
        rows.append(
            _accuracy(f"{new} against {base}, {chapter.name}", chapter.benchmark or "not named", seen.table, known)
        )
    published = gsm8k_compare.PUBLISHED
    row = _accuracy("published: all three against baseline", "GSM8K", published.table, published)
    return [*rows, row] if rows else []


def _accuracy(what: str, benchmark: str, table: PairedTable, seen: gsm8k_compare.Totals | None) -> dict[str, str]:
    proven = non_inferiority(table, gsm8k_compare.MARGIN)
    return {
        "pair": what,
        "benchmark": benchmark,
        "right (new, base)": f"{table.both + table.only_new}, {table.both + table.only_base} of {table.n}",
        "difference (points)": difference(table).text(2, 100),
        "a loss of a point": f"{'ruled out' if proven.shown else 'not ruled out'} (p = {proven.p_value:.2g})",
        "decode rate": f"{seen.rate_gain:.2f} ×" if seen else "–",
        "tokens": f"{seen.length_ratio:.3f} ×" if seen else "–",
        "decode time": f"{seen.time_gain:.2f} × less" if seen else "–",
    }


def place(run: Run) -> Path:
    """Where a notebook's report belongs: into the run it is part of, or into its own folder."""
    return (run.path.parent if os.environ.get(RUN_ENV) else run.path) / NAME


def machine_of(found: Sequence[Chapter]) -> Machine:
    """The machine that the notebooks ran on, as far as its recipes are concerned."""
    seen = next((chapter.manifest["machine"] for chapter in found if "machine" in chapter.manifest), None)
    return Machine.named(seen["profile"]) if seen else Machine.detect()


def serve_command(found: Sequence[Chapter]) -> str | None:
    """The `sparkmoe serve` line of the arm to keep; None where nothing was timed or its recipe has no name."""
    arm = keep(found)
    if arm is None or not arm.recipe:
        return None
    own = {"--hot-vocab": arm.recipe.get("hot_vocab"), "--draft-model": arm.recipe.get("draft_model")}
    wanted = arm.recipe | {"name": "", "hot_vocab": None, "draft_model": None}
    names, steps = list(RECIPES), arm.recipe["draft_steps"]
    names += [f"{name}_k{steps}" for name, recipe in RECIPES.items() if recipe.draft_steps and steps]
    name = next((name for name in names if jsonable(Recipe.named(name)) | {"name": ""} == wanted), None)
    more = [word for flag, path in own.items() if path for word in (flag, path)]
    return None if name is None else shlex.join(["sparkmoe", "serve", name, *more])


def command(found: Sequence[Chapter], arm: Arm) -> str:
    """The server's own command line of an arm, as its manifest holds it."""
    for chapter in found:
        for bench in chapter.benches:
            if (chapter.name, bench.name) == (arm.chapter, arm.bench):
                return str(bench.run.manifest.get("commands", {}).get(arm.name, ""))
    return ""


def not_shown(found: Sequence[Chapter]) -> dict[str, str]:
    """What this run does not show, and why: missing notebooks, what the machine cannot run, single boots."""
    here = {chapter.name for chapter in found}
    gone = {name: "this notebook left no data here" for name in STORY[:-1] if name not in here}
    gone |= {what: why for chapter in found for what, why in chapter.not_shown.items()}
    if single := sorted({arm.chapter for chapter in found for arm in chapter.arms() if arm.boots == 1}):
        gone["other boots"] = f"one boot an arm in {', '.join(single)}: intervals cover requests to that boot only"
    if not verdicts(found):
        gone["accuracy"] = "no two arms answered the same problems"
    return gone


def conditions(found: Sequence[Chapter]) -> dict[str, str]:
    """Machine, model, versions and commit, from the first notebook that measured."""
    seen = next((c.manifest for c in found if c.benches), found[0].manifest if found else {})
    if not seen:
        return {}
    source, packages = seen.get("source") or {}, seen.get("packages", {})
    state = " with local changes" if source.get("dirty") else ""
    rows = {
        "machine": machine_line(seen.get("machine", {})),
        "model": Path(str(seen.get("model", "–"))).name,
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "kernel and driver": f"Linux {seen.get('kernel')}, driver {seen.get('driver') or 'none'}",
        "commit": f"{source.get('commit') or 'not a checkout'}{state}",
        "seeds": json.dumps(seen.get("seeds", [])),
    }
    return rows


def machine_line(seen: dict[str, Any]) -> str:
    if not seen:
        return "–"
    gpu = f"{seen['gpu_count']} × {seen['gpu_name']}" if seen.get("gpu_name") else "no GPU"
    memory = seen["mem_total_bytes"] / 2**30
    return f"{seen['profile']}: {gpu}, {seen['cores']} cores ({seen['arch']}), {memory:.0f} GiB"


def flips(comparison: Comparison, most: int = 40) -> str:
    """Questions that one arm alone solved, to browse; with more than `most` of them, none (the samples hold them)."""
    return gsm8k_compare.flips_html(comparison) if len(comparison.flips) <= most else ""


def downloads(chapter: Chapter) -> list[tuple[str, str]]:
    """(file name, data URL) of a chapter's raw data: every sample, the same as a table, manifest and checks."""
    files: list[tuple[str, str]] = []
    for bench in chapter.benches:
        stem = "-".join(filter(None, (chapter.name, bench.name)))
        raw = gzip.compress(bench.run.samples_path.read_bytes(), mtime=0)
        table = bench.run.table()
        table = table[[column for column in table.columns if column not in _LONG]]
        files.append((f"{stem}-samples.jsonl.gz", _data_url("application/gzip", raw)))
        files.append((f"{stem}-samples.csv", _data_url("text/csv", table.to_csv(index=False).encode())))
    for name in ("manifest.json", "checks.json"):
        if (path := chapter.run.path / name).is_file():
            files.append((f"{chapter.name}-{name}", _data_url("application/json", path.read_bytes())))
    return files


def _data_url(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"
