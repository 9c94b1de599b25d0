"""The CPU platform's arithmetic against its definition written out in FP64, its bookkeeping against plain loops."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sparkmoe.sglang_plugin.torch_cpu import attention, kda, ops, sampling, speculative


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def delta_rule(q, k, v, g, beta, state):
    """The recurrence as the module's docstring has it, FP64. Returns outputs [G, T, V] and each token's state."""
    q, k, v, g, beta, s = (x.double() for x in (q, k, v, g, beta, state))
    out, states = [], []
    for t in range(q.shape[1]):
        s = s * g[:, t, None].exp()
        u = beta[:, t, None] * (v[:, t] - (s @ k[:, t, :, None]).squeeze(-1))
        s = s + u[:, :, None] * k[:, t, None]
        out.append((s @ q[:, t, :, None]).squeeze(-1))
        states.append(s)
    return torch.stack(out, 1), states


def problem(groups: int, length: int, size: int, lowest: float, seed: int = 0):
    q, k, v = (rand(groups, length, size, seed=seed + i) for i in range(3))
    q, k = ops.l2_normalize(q, torch.tensor(size**-0.5)), ops.l2_normalize(k, torch.tensor(1.0))
    g = lowest * torch.rand(groups, length, size, generator=torch.Generator().manual_seed(seed))
    beta = rand(groups, length, seed=seed).sigmoid()
    return q, k, v, g, beta, rand(groups, size, size, seed=seed + 9)


def time_first(args):
    return (*(x.transpose(0, 1) for x in args[:5]), args[5])


@pytest.mark.parametrize("lowest", [-5.0, -0.01, 0.0])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 97])
def test_chunked_is_the_recurrence(length, lowest):
    args = problem(3, length, 16, lowest)
    want, states = delta_rule(*args)
    out, state = kda.chunked(*time_first(args), True)
    torch.testing.assert_close(out.transpose(0, 1).double(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state.double(), states[-1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("flips", [False, True])
def test_chunked_with_keys_that_repeat(flips):
    """The triangular system is furthest from the identity where a chunk writes to one key again and again."""
    q, k, v, g, beta, state = problem(3, 64, 16, 0.0)
    signs = torch.where(rand(3, 64, 1, seed=5) < 0, -1.0, 1.0) if flips else 1.0
    args = (q, k[:, :1] * signs * torch.ones_like(k), v, g, torch.full_like(beta, 0.999), state)
    want, states = delta_rule(*args)
    for bounded in (True, False):
        out, after = kda.chunked(*time_first(args), bounded)
        torch.testing.assert_close(out.transpose(0, 1).double(), want, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(after.double(), states[-1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lowest", [-1.0, -30.0, -2000.0])
def test_chunked_with_an_unbounded_gate(lowest):
    args = problem(2, 70, 16, lowest)
    want, states = delta_rule(*args)
    out, state = kda.chunked(*time_first(args), False)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.transpose(0, 1).double(), want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state.double(), states[-1], atol=2e-5, rtol=1e-4)


def test_step_is_the_recurrence():
    q, k, v, g, beta, state = problem(3, 6, 16, -5.0)
    want, states = delta_rule(q, k, v, g, beta, state)
    for t in range(6):
        out = kda.step(q[:, t], k[:, t], v[:, t], g[:, t].clone(), beta[:, t], state)
        torch.testing.assert_close(out.double(), want[:, t], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state.double(), states[t], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lowest", [-5.0, -2000.0])
@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_verify_and_replay_are_the_recurrence(length, lowest):
    q, k, v, g, beta, state = problem(3, length, 16, lowest)
    want, states = delta_rule(q, k, v, g, beta, state)
    before = state.clone()
    out, u, total = kda.verify(torch.stack([q, k], 1), v, g, beta.unsqueeze(2), state)
    assert torch.equal(state, before)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-4)
    for count in range(1, length + 1):
        torch.testing.assert_close(
            kda.replay(state, k, u, total, count).double(), states[count - 1], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("bound", [-5.0, None])
def test_log_decay(bound):
    raw, a_log, bias = 3 * rand(7, 12), rand(3), rand(12)
    a = a_log.exp().repeat_interleave(4)
    got = kda.log_decay(raw, a, a * bias, bound)
    x, rate = (raw + bias).double(), a.double()
    want = bound / (1 + (-rate * x).exp()) if bound is not None else -rate * torch.log1p(x.exp())
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert bool((got <= 0).all())


def test_norms_in_fp64():
    x, gate, w = rand(5, 3, 32), rand(5, 3, 32, seed=1), rand(32)
    xd = x.double()
    want = xd / (xd.square().mean(-1, keepdim=True) + 1e-2).sqrt() * w.double()  # eps large enough to be felt
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-2).double(), want, atol=1e-5, rtol=1e-5)
    assert ops.rms_norm(x.bfloat16(), w, 1e-2).dtype is torch.bfloat16
    gated = want / (1 + (-gate.double()).exp())
    torch.testing.assert_close(ops.rms_norm_gated(x, gate, w, 1e-2).double(), gated, atol=1e-5, rtol=1e-5)
    unit = xd / (xd.square().sum(-1, keepdim=True) + 1e-2).sqrt() * 0.5
    torch.testing.assert_close(ops.l2_normalize(x, torch.tensor(0.5), 1e-2).double(), unit, atol=1e-5, rtol=1e-5)
    assert torch.equal(ops.l2_normalize(torch.zeros(1, 4), torch.tensor(1.0)), torch.zeros(1, 4))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_conv_in_fp64(length):
    window, weight = rand(2, 3 + length, 6), rand(4, 6)
    out = torch.zeros(2, length, 6, dtype=torch.float64)
    for t in range(length):
        for tap in range(4):
            out[:, t] += window[:, t + tap].double() * weight[tap].double()
    want = out / (1 + (-out).exp())
    torch.testing.assert_close(ops.short_conv(window, weight, length).double(), want, atol=1e-5, rtol=1e-5)
    prompt = ops.short_conv_prompt(window[0, :3], window[0, 3:], weight)
    torch.testing.assert_close(prompt.double(), want[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_swiglu_in_fp64(limit):
    x = 4 * rand(9, 20)
    gate, up = x.double().chunk(2, -1)
    gate = gate / (1 + (-gate).exp())
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    torch.testing.assert_close(ops.swiglu(x, limit).double(), gate * up, atol=1e-5, rtol=1e-5)


def test_rotation_of_pairs():
    table = ops.rotary_table(torch.tensor([[0.6, 0.0, 0.8, 1.0]]))  # cosines, then sines
    got = ops.rotate(torch.tensor([[[1.0, 0.0, 2.0, 3.0]]]), table[torch.tensor([0])].unsqueeze(1))
    torch.testing.assert_close(got, torch.tensor([[[0.6, 0.8, -3.0, 2.0]]]))


# ------------------------------------------------------------------------------------------ bookkeeping
def chain(batch: int, n: int):
    index = torch.arange(batch * n).view(batch, n)
    step = torch.arange(1, n + 1)
    step[-1] = -1
    return index, step.expand(batch, n).clone(), torch.full((batch, n), -1)


def test_chain_tree():
    batch, n = 3, 4
    seq = torch.tensor([5, 9, 2])
    positions = torch.zeros(batch * n, dtype=torch.int64)
    index, nxt, sibling = (torch.zeros(batch, n, dtype=torch.int64) for _ in range(3))
    speculative.build_tree_kernel_efficient_func(None, None, seq, None, positions, index, nxt, sibling, 1, 3, n, 0)
    want_index, want_next, want_sibling = chain(batch, n)
    assert positions.view(batch, n).tolist() == [[s + i for i in range(n)] for s in seq.tolist()]
    assert torch.equal(index, want_index)
    assert torch.equal(nxt, want_next)
    assert torch.equal(sibling, want_sibling)
    with pytest.raises(NotImplementedError, match="eagle-topk 1"):
        speculative.build_tree_kernel_efficient_func(None, None, seq, None, positions, index, nxt, sibling, 2, 3, n, 0)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_greedy_verification(data):
    batch, n = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 6))
    token = st.integers(0, 2)
    candidates = torch.tensor(
        data.draw(st.lists(st.lists(token, min_size=n, max_size=n), min_size=batch, max_size=batch))
    )
    target = torch.tensor(data.draw(st.lists(st.lists(token, min_size=n, max_size=n), min_size=batch, max_size=batch)))
    index, nxt, sibling = chain(batch, n)
    predicts = torch.zeros(batch * n, dtype=torch.int32)
    accept_index = torch.full((batch, n), -1, dtype=torch.int32)
    count = torch.zeros(batch, dtype=torch.int32)
    speculative.verify_tree_greedy_func(predicts, accept_index, count, candidates, index, nxt, sibling, target, 1)
    for b in range(batch):
        want = [int(target[b, 0])]  # what plain greedy decoding would have produced
        while len(want) < n and int(candidates[b, len(want)]) == want[-1]:
            want.append(int(target[b, len(want)]))
        places = [i for i in accept_index[b].tolist() if i >= 0]
        assert places == list(range(b * n, b * n + len(want)))
        assert predicts[places].tolist() == want
        assert int(count[b]) == len(want) - 1


@pytest.mark.parametrize("prefix", [0, 5])
@pytest.mark.parametrize("count", [1, 64, attention._QUERY_BLOCK, 2 * attention._QUERY_BLOCK + 3])
def test_latent_attention_in_fp64(count, prefix):
    """Two requests in one batch, the second's slots scattered over the cache."""
    heads, latent, rope, total = 3, 16, 4, prefix + count
    query, cache = torch.randn(2 * count, heads, latent + rope), torch.randn(3 * total + 7, latent + rope)
    slots = [torch.arange(7, 7 + total), torch.randperm(3 * total)[:total]]
    rows = [attention.Rows.of(k * count, (k + 1) * count, slots[k]) for k in (0, 1)]
    found = attention.latent_attention(query, cache, rows, latent)
    for row in rows:
        keys = cache[row.slots].double()
        scores = torch.einsum("nhc,sc->hns", query[row.start : row.stop].double(), keys)
        later = torch.arange(total) > prefix + torch.arange(count).unsqueeze(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        exact = torch.einsum("hns,sc->nhc", weights, keys[:, :latent])
        assert (found[row.start : row.stop] - exact).abs().max() < 1e-4


def test_cache_slots():
    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    requests, start, end = torch.tensor([2, 0]), torch.tensor([3, 5]), torch.tensor([6, 7])
    got = speculative.extend_cache_locs(
        req_pool_indices=requests, req_to_token=table, start_offset=start, end_offset=end, batch_size=2,
        draft_token_num=3, device="cpu",
    )  # fmt: skip
    assert got.tolist() == [43, 44, 45, 5, 6]
    assert got.dtype is torch.int64
    out, positions = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    speculative.assign_draft_cache_locs_contiguous_func(requests, table, start, out, 1, 2, positions)
    assert out.tolist() == [43, 44, 5, 6]
    assert positions.tolist() == [3, 5]
    speculative.assign_req_to_token_pool_func(requests, table, start, end, torch.arange(100, 105), 2)
    assert table[2, 3:6].tolist() == [100, 101, 102]
    assert table[0, 4:8].tolist() == [4, 103, 104, 7]


def test_bonus_tokens():
    bonus = torch.zeros(2, dtype=torch.int32)
    speculative.fill_bonus_tokens_func(torch.tensor([7, 8, 0, 5, 0, 0]), torch.tensor([2, 1]), bonus, 3, 2)
    assert bonus.tolist() == [8, 5]


# ------------------------------------------------------------------------------------------ sampled verification
def test_sampled_verification_keeps_the_targets_distribution():
    """The tokens that come out of drafting and verifying are distributed as those of plain sampling.

    A vocabulary of 6, two drafts, target probabilities that depend on the token before. 40,000 rounds; chi-square
    over the first and over the second token (given the first), each against the target itself.
    """
    rounds, vocab, n = 40_000, 6, 3
    gen = torch.Generator().manual_seed(5)
    table = torch.rand(vocab, vocab, generator=gen).pow(2)
    table[2, 4] = table[0, 1] = 0.0
    table = table.double() / table.double().sum(-1, keepdim=True)
    start, drafts = 2, (1, 3)  # drafts: somebody's argmax, not the target's
    candidates = torch.tensor([[start, *drafts]]).expand(rounds, n)
    probs = table[candidates]  # row i: target after candidate i
    index, nxt, sibling = chain(rounds, n)
    predicts = torch.zeros(rounds * n, dtype=torch.int32)
    accept_index = torch.full((rounds, n), -1, dtype=torch.int32)
    count = torch.zeros(rounds, dtype=torch.int32)
    sampling.tree_speculative_sampling_target_only(
        predicts, accept_index, count, candidates, index, nxt, sibling, torch.rand(rounds, n, generator=gen),
        torch.rand(rounds, generator=gen), probs, torch.zeros_like(probs),
    )  # fmt: skip
    tokens = predicts.view(rounds, n)
    assert accept_index[:, 0].tolist() == list(range(0, rounds * n, n))
    first = torch.bincount(tokens[:, 0], minlength=vocab).double().numpy()
    want = rounds * table[start].numpy()
    assert first[want == 0].sum() == 0
    assert stats.chisquare(first[want > 0], want[want > 0]).pvalue > 1e-3
    went_on = tokens[count >= 1]
    assert set(went_on[:, 0].tolist()) == {drafts[0]}
    second = torch.bincount(went_on[:, 1], minlength=vocab).double().numpy()
    want = len(went_on) * table[drafts[0]].numpy()
    assert stats.chisquare(second[want > 0], want[want > 0]).pvalue > 1e-3
    both = count == 2
    assert set(tokens[both, 1].tolist()) == {drafts[1]}
    assert abs(both.double().mean() - table[start, drafts[0]] * table[drafts[0], drafts[1]]) < 0.01


def test_sampled_verification_at_the_edges():
    """A draw of almost 1 where the tail is zero still gives a possible token; certain drafts are accepted."""
    probs = torch.tensor([[[0.0, 1.0, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0]]])
    index, nxt, sibling = chain(1, 2)
    predicts, accept = torch.zeros(2, dtype=torch.int32), torch.full((1, 2), -1, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    almost = 1.0 - 2**-24
    sampling.tree_speculative_sampling_target_only(
        predicts, accept, count, torch.tensor([[3, 1]]), index, nxt, sibling, torch.full((1, 2), almost),
        torch.tensor([almost]), probs, torch.zeros_like(probs),
    )  # fmt: skip
    assert predicts.tolist() == [1, 1]
    assert count.tolist() == [1]


def test_renormalizations():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]])
    top_k = sampling.top_k_renorm_prob(probs, torch.tensor([2, 1 << 30]))
    torch.testing.assert_close(top_k, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7], [0.1, 0.4, 0.2, 0.3]]))
    top_p = sampling.top_p_renorm_prob(probs, torch.tensor([0.6, 1.0]))
    torch.testing.assert_close(top_p, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7], [0.1, 0.4, 0.2, 0.3]]))
    assert sampling.top_p_renorm_prob(probs, torch.tensor([0.0001, 0.4]))[0].tolist() == [0.0, 1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------ Triton's interpreter
def test_against_the_stock_triton_kernels():
    """The kernels that these functions stand in for, run by Triton's interpreter (a process of its own: the switch is
    read at
    import)."""
    script = Path(__file__).with_name("triton_reference.py")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "SGLANG_PLATFORM": "torch_cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    checked = [line for line in done.stdout.splitlines() if line.startswith("equal ")]
    assert len(checked) == 15, done.stdout
