"""Nano Ling on a live server: it solves problems, its drafts are accepted, and it is the reference model."""

import random
from collections.abc import Callable

import pytest

from sparkmoe.engine import Engine
from sparkmoe.nano import bundle, evaluate, problems
from sparkmoe.nano.model import load_checkpoint

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def engine(serve: Callable[..., Engine]) -> Engine:
    return serve("nextn", model=bundle.folder("bf16"))


def test_accuracy_of_unseen_instances_and_combinations(engine: Engine) -> None:
    for split in ("instances", "combinations"):
        marks = evaluate.accuracy(engine.client(), split, 12, parallel=4)
        assert marks["accuracy"] >= 11 / 12, split
        assert marks["truncated"] == 0, split


def test_drafts_are_accepted_on_problems_and_not_on_noise(engine: Engine) -> None:
    client, rng = engine.client(), random.Random(0)
    asked = problems.split("instances", 8, seed=2)
    prompts = [client.render([{"role": "user", "content": p.question}], thinking=True) for p in asked]
    noise = [[rng.randrange(2036) for _ in range(64)] for _ in range(4)]
    known = evaluate.accept_length(client, prompts, 200, temperature=0.6)
    unknown = evaluate.accept_length(client, noise, 64, temperature=0.6, ignore_eos=True)
    assert known >= 2.8
    assert unknown < known - 0.5


def test_server_and_reference_are_one_model(engine: Engine) -> None:
    client = engine.client()
    asked = problems.split("combinations", 4, seed=6)
    prompts = [client.render([{"role": "user", "content": p.question}], thinking=True) for p in asked]
    served = [evaluate.generate(engine, p) for p in prompts]
    model = load_checkpoint(bundle.folder("bf16"))
    found = evaluate.agreement(model, served, draft_steps=3)
    assert found["argmax_agreement"] >= 0.999
    assert found["largest_logprob_difference"] <= 1e-3
    assert found["accept_histograms_equal"] == 1
    without = evaluate.worth_of_limits(model, served)
    assert without["mean_logprob_change"] > 0.02
