"""The CPU platform in live servers: loader, scheduler, radix cache, NEXTN, sampling, profiler."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from scipy import stats

from sparkmoe.nano.model import load_checkpoint
from sparkmoe.nano.random_checkpoint import make
from sparkmoe.sample import RequestFailed
from sparkmoe.sglang_plugin import hooks

ENV = os.environ | {
    "SGLANG_PLATFORM": "torch_cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
PROMPTS, LENGTH = 20, 200


def post(engine: Any, path: str, **body: Any) -> Any:
    reply = requests.post(
        engine.url + path, json=body, headers={"Authorization": f"Bearer {engine.api_key}"}, timeout=240
    )
    reply.raise_for_status()
    return reply


def generate(engine: Any, ids: list[int], n: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True} | more.pop("sampling", {})
    return post(engine, "/generate", input_ids=ids, sampling_params=sampling, **more).json()


def side_by_side(engine: Any, prompts: list[list[int]], n: int, **more: Any) -> list[dict[str, Any]]:
    """Requests in flight together, eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda ids: generate(engine, ids, n, **more), prompts))


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(3, 90))] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(serve):
    return lambda: serve("baseline", radix_cache=True)


@pytest.fixture(scope="module")
def greedy(plain) -> list[list[int]]:
    """What plain greedy decoding says to PROMPTS prompts."""
    return [r["output_ids"] for r in side_by_side(plain(), prompts(PROMPTS, seed=1), LENGTH)]


@pytest.mark.server
def test_log_probabilities_equal_the_reference(plain, miniature):
    ling = load_checkpoint(miniature)
    asked = prompts(8, seed=2)
    answers = side_by_side(plain(), asked, 30, return_logprob=True, logprob_start_len=0)
    for ids, answer in zip(asked, answers, strict=True):
        meta, whole = answer["meta_info"], ids + answer["output_ids"]
        with torch.inference_mode():
            want = ling(torch.tensor([whole]))[0].log_softmax(-1)
        got = [p[0] for p in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
        told = [float(want[i, token]) for i, token in enumerate(whole[1:])]
        assert max(abs(a - b) for a, b in zip(got, told, strict=True)) < 1e-3


@pytest.mark.server
def test_radix_cache_serves_the_same_answer(plain):
    (ids,) = prompts(1, seed=3)
    ids = (ids * 40)[:400]
    post(plain(), "/flush_cache")
    first, again = (generate(plain(), ids, 20) for _ in range(2))
    longer = generate(plain(), ids + first["output_ids"], 20)
    post(plain(), "/flush_cache")
    fresh = generate(plain(), ids + first["output_ids"], 20)
    assert first["meta_info"]["cached_tokens"] == 0
    assert longer["meta_info"]["cached_tokens"] > 300
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == first["output_ids"]
    assert longer["output_ids"] == fresh["output_ids"]


@pytest.mark.server
@pytest.mark.parametrize("wrong", [[5, 10**6, 7], [5, -1]])
def test_an_id_beyond_the_vocabulary_is_that_requests_error_alone(plain, wrong):
    client = plain().client()
    with pytest.raises(RequestFailed, match=r"the prompt has token id (1000000|-1); the vocabulary's are 0…511"):
        client.generate(wrong, max_new_tokens=2)
    assert client.generate([5, 6, 7], max_new_tokens=2, ignore_eos=True).completion_tokens == 2


@pytest.mark.server
def test_profiler_gives_a_trace_and_the_server_survives(plain, tmp_path):
    post(plain(), "/start_profile", output_dir=str(tmp_path), num_steps=3, activities=["CPU", "GPU"])
    generate(plain(), [1, 2, 3], 8)
    deadline = time.monotonic() + 60
    while not (traces := [p for p in tmp_path.rglob("*trace.json*") if p.stat().st_size]):
        assert time.monotonic() < deadline, "no trace was written"
        time.sleep(0.2)
    assert traces[0].stat().st_size > 1000
    assert len(generate(plain(), [1, 2, 3], 8)["output_ids"]) == 8


@pytest.fixture(scope="module")
def nextn(serve):
    return lambda: serve("baseline", draft_steps=3, radix_cache=True)


@pytest.mark.server
def test_nextn_greedy_equals_plain_greedy(nextn, greedy):
    answers = side_by_side(nextn(), prompts(PROMPTS, seed=1), LENGTH)
    assert [a["output_ids"] for a in answers] == greedy
    accept = [a["meta_info"]["spec_accept_length"] for a in answers]
    assert min(accept) > 1.2  # drafts were accepted, and not all of them
    assert max(accept) < 4


@pytest.mark.server
def test_nextn_with_radix_cache(nextn, greedy):
    for ids, want in zip(prompts(PROMPTS, seed=1)[:4], greedy, strict=False):
        assert generate(nextn(), ids, 60)["output_ids"] == want[:60]
        longer = generate(nextn(), ids + want[:60], 60)
        assert longer["output_ids"] == want[60:120]
        assert longer["meta_info"]["cached_tokens"] > 0


@pytest.mark.server
def test_sampled_nextn_keeps_the_targets_distribution(nextn, miniature):
    """Second sampled token of 600 requests against its exact distribution under the reference (chi-square)."""
    (ids,), count = prompts(1, seed=4), 600
    ling = load_checkpoint(miniature)
    with torch.inference_mode():
        first = ling(torch.tensor([ids]))[0, -1].double().softmax(-1)
        likely = first.topk(200).indices
        rows = torch.tensor([[*ids, int(t)] for t in likely])
        second = (ling(rows)[:, -1].double().softmax(-1) * first[likely].unsqueeze(1)).sum(0)
    answers = side_by_side(nextn(), [ids] * count, 3, sampling={"temperature": 1.0})
    seen = torch.bincount(torch.tensor([a["output_ids"][1] for a in answers]), minlength=len(second)).double()
    bins = second.topk(6).indices
    want = torch.cat([second[bins], (1 - second[bins].sum()).view(1)]) * count
    got = torch.cat([seen[bins], (count - seen[bins].sum()).view(1)])
    keep = want > 5
    want, got = want[keep], got[keep]
    assert stats.chisquare(got.numpy(), (want * got.sum() / want.sum()).numpy()).pvalue > 1e-3


@pytest.mark.server
@pytest.mark.parametrize("steps", [1, 5])
def test_shortest_and_longest_drafts(serve, greedy, steps):
    answers = side_by_side(serve("baseline", draft_steps=steps), prompts(PROMPTS, seed=1)[:8], 100)
    assert [a["output_ids"] for a in answers] == [want[:100] for want in greedy[:8]]
    assert max(a["meta_info"]["spec_accept_length"] for a in answers) <= steps + 1


@pytest.mark.server
def test_hooks_fit_and_one_that_does_not_stops_the_process():
    """SGLang swallows Exceptions of plugins: the process must end all the same, and say why."""
    script = """
from sparkmoe import sglang_plugin
for item in sglang_plugin.report():
    print(item.state.value, item.hook.target, item.detail)
from sglang.srt.models.bailing_moe_v3 import BailingMoELinearModel
BailingMoELinearModel.forward = lambda self, input_ids, positions: None
from sglang.srt.plugins import load_plugins
load_plugins()
print("alive")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=ENV, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if " sglang." in line]
    assert len(lines) > 15, done.stderr[-2000:]
    assert [line for line in lines if line.startswith("does not fit")] == []
    assert done.returncode == 1
    assert "alive" not in done.stdout
    assert "sglang.srt.models.bailing_moe_v3.BailingMoELinearModel.forward does not fit" in done.stderr
    assert f"SGLang {hooks.sglang_version()}" in done.stderr


@pytest.mark.server
def test_loader_of_config_variants(tmp_path):
    """The real loader's layouts for variants, without servers: log-probabilities of a prompt and of decoded tokens."""
    variants: dict[str, dict[str, Any]] = {
        "q_lora": {"q_lora_rank": 48, "gated_attention_proj_granularity_type": "element_wise"},
        "kda_lora": {"no_kda_lora": False, "kv_lora_rank": 96, "qk_nope_head_dim": 48},
        "open_gate": {"kda_safe_gate": False, "n_group": 4, "topk_group": 2},
    }
    folders = [make(tmp_path / name, num_hidden_layers=4, **changes) for name, changes in variants.items()]
    ids = [*prompts(1, seed=5)[0], *range(7)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("model_runner.py")), ",".join(map(str, ids)),
         *map(str, folders)],
        env=ENV, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for folder in folders:
        got = torch.load(folder / "logits.pt").log_softmax(-1)
        with torch.inference_mode():
            want = load_checkpoint(folder)(torch.tensor([ids]))[0].log_softmax(-1)
        torch.testing.assert_close(got, want[-len(got) :], atol=1e-3, rtol=0)
