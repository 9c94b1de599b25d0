"""Every combination of head, draft and hot vocabulary of the bundled miniature on a live CPU server: it serves, it is
proven to be what it says, and its greedy answers are those of the same head without a draft, token by token.

`make test` runs a choice that holds every head with and without hot vocabulary and every K; `make matrix` runs all and
writes `results/matrix.json` (elsewhere: SPARKMOE_MATRIX_RECORD).
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkmoe import recorded
from sparkmoe.engagement import PROBE_PROMPTS, accept_length, read_evidence, require
from sparkmoe.engine import Engine
from sparkmoe.hot_vocab import choose, count, save
from sparkmoe.nano import bundle
from sparkmoe.recipe import Recipe
from sparkmoe.sample import Sample

pytestmark = pytest.mark.server
Serve = Callable[..., Engine]
HEADS: dict[str, dict[str, str]] = {"bf16": {"head": "bf16"}, "fp8": {"head": "fp8"}}
HEADS["draft_fp8"] = {"head": "bf16", "draft_head": "fp8"}
CHOICE = {("bf16", 1, True), ("fp8", 2, False), ("draft_fp8", 3, True), ("bf16", 4, False)}
ALL = [(head, steps, hot) for head in HEADS for steps in (1, 2, 3, 4) for hot in (False, True)]
TOKENS = 48


def ask(engine: Engine) -> list[Sample]:
    client = engine.client()
    return [client.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True) for prompt in PROBE_PROMPTS]


@pytest.fixture(scope="session")
def plain(serve: Serve) -> Callable[[str], list[Sample]]:
    """Answers of a head without a draft, each asked for once."""
    known: dict[str, list[Sample]] = {}

    def answers(precision: str) -> list[Sample]:
        if precision not in known:
            recipe = Recipe(f"plain_{precision}", head=precision)  # type: ignore[arg-type]
            engine = serve(recipe, model=bundle.folder())
            known[precision] = ask(engine)
            require(recipe, read_evidence(engine.evidence_path), known[precision])
        return known[precision]

    return answers


@pytest.fixture(scope="session")
def hot_map(plain: Callable[[str], list[Sample]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The most frequent third of what the plain model says: some tokens cannot be drafted, most can."""
    counts = count(list(s.token_ids or ()) for s in plain("bf16"))
    path = tmp_path_factory.mktemp("hot") / "hot.pt"
    vocabulary = json.loads((bundle.folder() / "config.json").read_text())["vocab_size"]
    save(path, choose(counts, max(16, len(counts) // 3), vocabulary))
    return path


@pytest.fixture(scope="session")
def record() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    yield found
    if len(found) > len(CHOICE):
        path = Path(os.environ.get("SPARKMOE_MATRIX_RECORD", "results/matrix.json"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"written_unix_s": time.time(), "cells": found}, indent=1) + "\n")


@pytest.mark.parametrize(
    ("head", "steps", "hot"),
    [pytest.param(*cell, marks=() if cell in CHOICE else pytest.mark.slow) for cell in ALL],
)
def test_a_draft_changes_no_greedy_token(
    head: str, steps: int, hot: bool, serve: Serve, plain: Any, hot_map: Path, record: list[dict[str, Any]]
) -> None:
    changes: dict[str, Any] = HEADS[head] | {"hot_vocab": str(hot_map)} if hot else dict(HEADS[head])
    recipe = Recipe(f"{head}_k{steps}{'_hot' if hot else ''}", draft_steps=steps, **changes)
    engine = serve(recipe, model=bundle.folder())
    samples = ask(engine)
    evidence = read_evidence(engine.evidence_path)
    assert evidence is not None
    reference = plain(recipe.head)
    same = [a.token_ids == b.token_ids for a, b in zip(samples, reference, strict=True)]
    record.append(
        {
            "head": head,
            "draft_steps": steps,
            "hot_vocabulary": evidence["draft"]["hot_vocabulary"],
            "accept_length": accept_length(samples),
            "tpot_ms": statistics.median(s.tpot_ms for s in samples if s.tpot_ms),
            "plain_tpot_ms": statistics.median(s.tpot_ms for s in reference if s.tpot_ms),
            "target_head_bytes": evidence["target"]["head"]["bytes"],
            "draft_head_extra_bytes": evidence["draft"]["head"]["extra_bytes"],
            "equal_answers": sum(same),
            "answers": len(same),
        }
    )
    require(recipe, evidence, samples)
    assert all(same)


def test_the_recorded_matrix_is_whole() -> None:
    cells = recorded.load("matrix-cpu").findings["cells"]
    assert len(cells) == len(ALL) == len({(c["head"], c["draft_steps"], c["hot_vocabulary"]) for c in cells})
    assert all(cell["equal_answers"] == cell["answers"] for cell in cells)
