"""Is every lever of the recipe really on?

Each lever can be asked for and be absent, and the server says nothing. So nothing is measured before a list of checks
has passed, each with what was expected, what was found, and where to look. Expectations come from the recipe, findings
from the evidence file that the server's own process writes about its loaded objects
(`sparkmoe.sglang_plugin.evidence`), and from answers: a draft that engages is accepted, which no object can prove.

Checks are positive and negative. A baseline with an FP8 head that a variable left behind is as wrong as an FP8 arm
without one. And there are levers that are set and inert: a ring length without the ring, a draft whose experts run on
another backend than the target's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkmoe import checks as about
from sparkmoe.checks import MIN_ACCEPT_LENGTH as MIN_ACCEPT_LENGTH
from sparkmoe.checks import Check as Check
from sparkmoe.checks import Evidence, same
from sparkmoe.checks import accept_length as accept_length
from sparkmoe.errors import NotEngaged
from sparkmoe.sglang_plugin import blockers

if TYPE_CHECKING:
    from sparkmoe.client import Client
    from sparkmoe.engine import Engine
    from sparkmoe.recipe import Recipe
    from sparkmoe.sample import Sample

SCHEMA = 1
PROBE_PROMPTS = (
    "What is 12 plus 30?",
    "Count: 1, 2, 3, 4, 5, 6, 7,",
    "Tom has 3 apples and buys 4 more. How many apples has he now?",
    "The days of the week are Monday, Tuesday, Wednesday,",
    "Repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox",
)


def read_evidence(path: Path | str) -> dict[str, Any] | None:
    """The evidence file of a server, None if there is none."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None


def probe(client: Client, *, max_new_tokens: int = 32) -> list[Sample]:
    """Greedy answers to `PROBE_PROMPTS`, enough to see whether drafts are accepted."""
    return [client.generate(p, max_new_tokens=max_new_tokens, ignore_eos=True) for p in PROBE_PROMPTS]


def examine(engine: Engine) -> list[Check]:
    """Probe a running server, read its evidence, and return all checks of its recipe."""
    samples = probe(engine.client())
    return verify(engine.recipe, read_evidence(engine.evidence_path), samples)


def prove(engine: Engine) -> list[Check]:
    """`examine`, or NotEngaged as from `require`."""
    samples = probe(engine.client())
    return require(engine.recipe, read_evidence(engine.evidence_path), samples)


def verify(
    recipe: Recipe,
    evidence: Evidence | None,
    samples: Sequence[Sample],
    *,
    baseline: Sequence[Sample] = (),
) -> list[Check]:
    """All checks that apply to `recipe`.

    `samples` are answers of this server to a few prompts (`PROBE_PROMPTS` will do); the accept length is theirs. With
    `baseline`, answers of the arm without the lever, the direction of TPOT is noted too. Nothing is raised: see
    `require`.
    """
    if evidence is None:
        found = "; ".join(["none", *blockers(dict(recipe.extra_env))])
        return [Check("plugin", "an evidence file", found, "SPARKMOE_EVIDENCE", False)]
    if "error" in evidence or evidence.get("schema") != SCHEMA:
        found = str(evidence.get("error") or f"schema {evidence.get('schema')}").strip().splitlines()[-1]
        return [Check("evidence", f"schema {SCHEMA}, no error", found, "evidence.error", False)]
    checks = [
        Check("plugin", "an evidence file", f"written by process {evidence['pid']}", "evidence.pid", True),
        same("served", "served", evidence["stage"], "evidence.stage"),
        about.hooks(recipe, evidence),
        *about.moe(recipe, evidence),
        *about.head(recipe, evidence),
        *about.draft(recipe, evidence, samples),
        *about.inert(evidence),
    ]
    if evidence["device"]["capability"] is not None:
        checks += [*about.graphs(evidence), *about.attention(recipe, evidence)]
    if baseline:
        checks.append(about.tpot(samples, baseline))
    return checks


def require(recipe: Recipe, evidence: Evidence | None, samples: Sequence[Sample]) -> list[Check]:
    """`verify`, or NotEngaged that names the first check that failed, what was found and what usually causes it."""
    checks = verify(recipe, evidence, samples)
    failed = [check for check in checks if check.required and not check.ok]
    if failed:
        first, *others = failed
        more = f" (failed as well: {', '.join(check.name for check in others)})" if others else ""
        raise NotEngaged(
            f"recipe {recipe.name} is not engaged, check `{first.name}`: expected {first.expected}, "
            f"found {first.found} ({first.where}). Usual cause: {first.cause}{more}"
        )
    return checks


def rows(checks: Iterable[Check]) -> list[dict[str, str]]:
    """Checks as table rows for a notebook or a terminal."""
    marks = {(True, True): "ok", (True, False): "FAILED", (False, True): "yes", (False, False): "no"}
    return [
        {
            "check": check.name,
            "expected": check.expected,
            "found": check.found,
            "where": check.where,
            "result": marks[check.required, check.ok],
        }
        for check in checks
    ]
