"""Run by test_torch_cpu_kernels.py with TRITON_INTERPRET=1: the stock Triton kernels against their stand-ins.

Prints a line "equal NAME" for each; an unequal pair ends it with a traceback.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.attention.fla import fused_norm_gate, fused_recurrent
from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent
from sglang.kernels.ops.mamba import causal_conv1d_triton as conv
from sglang.kernels.ops.sampling import renorm_triton
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.srt.mem_cache import allocation

from sparkmoe.sglang_plugin.torch_cpu import kda, ops, sampling, speculative


@triton.jit
def _exp(x):
    return tl.exp(x)


for module in (fused_recurrent, fused_sigmoid_gating_recurrent):
    if hasattr(module, "exp"):
        module.exp = _exp  # an alias of tl.exp, which the interpreter does not see through

B, H, K, T, SLOTS, TAPS = 2, 2, 16, 3, 4, 4
WIDTH = 3 * H * K
gen = torch.Generator().manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen)


def equal(name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for got, want in pairs:
        torch.testing.assert_close(got, want.to(got.dtype), atol=2e-6, rtol=2e-6)
    sys.stdout.write(f"equal {name}\n")


weight, slots = rand(WIDTH, TAPS), torch.tensor([2, 1], dtype=torch.int32)
taps = weight.t().contiguous()

# one token
state, x = rand(SLOTS, WIDTH, TAPS - 1), rand(B, WIDTH)
window = torch.cat([state[slots.long()].transpose(1, 2), x[:, None]], 1)
want = conv.causal_conv1d_update(x.clone(), state, weight, activation="silu", conv_state_indices=slots)
equal(
    "conv, decode",
    (ops.short_conv(window, taps, 1)[:, 0], want),
    (window[:, 1:], state[slots.long()].transpose(1, 2)),
)

# drafted tokens, with the window after each of them
state, x = rand(SLOTS, WIDTH, TAPS - 1), rand(B, WIDTH, T)
window = torch.cat([state[slots.long()].transpose(1, 2), x.transpose(1, 2)], 1)
windows = torch.zeros(SLOTS, T, WIDTH, TAPS - 1)
want = conv.causal_conv1d_update(
    x.clone(), state, weight, activation="silu", conv_state_indices=slots, intermediate_conv_window=windows,
    intermediate_state_indices=torch.arange(B, dtype=torch.int32),
)  # fmt: skip
after = torch.stack([window[:, i + 1 : i + TAPS].transpose(1, 2) for i in range(T)], 1)
equal("conv, verify", (ops.short_conv(window, taps, T).transpose(1, 2), want), (after, windows[:B]))

# prompts: one goes on, one is new
lengths, x = [5, 4], rand(WIDTH, 9)
state = rand(SLOTS, WIDTH, TAPS - 1)
before = [state[2].t().clone(), torch.zeros(TAPS - 1, WIDTH)]
want = conv.causal_conv1d_fn(
    x.clone(), weight, None, state, torch.tensor([0, 5, 9], dtype=torch.int32), lengths, cache_indices=slots,
    has_initial_state=torch.tensor([True, False]),
)  # fmt: skip
windows = [torch.cat([b, part.t()]) for b, part in zip(before, x.split(lengths, 1), strict=True)]
got = torch.cat([ops.short_conv_prompt(b, w[TAPS - 1 :], taps) for b, w in zip(before, windows, strict=True)])
equal("conv, prompt", (got.t(), want), (torch.stack([w[1 - TAPS :].t() for w in windows]), state[slots.long()]))


def mixed(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[N, 3 H K] → q, k, v [N, H, K] as the layers prepare them."""
    q, k, v = qkv.view(-1, 3, H, K).unbind(1)
    return ops.l2_normalize(q, torch.tensor(K**-0.5)), ops.l2_normalize(k, torch.tensor(1.0)), v


for bound in (-5.0, None):
    kind = "safe gate" if bound else "open gate"
    a_log, bias, raw, beta = rand(H), rand(H * K), rand(B, H * K), rand(B, H)
    a = a_log.exp().repeat_interleave(K)
    qkv, pool = rand(B, WIDTH), rand(SLOTS, H, K, K)
    mine, want = pool[slots.long()].flatten(0, 1), torch.zeros(B, 1, H, K)
    fused_recurrent.fused_recurrent_kda_packed_decode(
        qkv, raw, beta, a_log, bias, K**-0.5, pool, want, slots, use_qk_l2norm_in_kernel=True, lower_bound=bound
    )
    q, k, v = (t.flatten(0, 1) for t in mixed(qkv))
    g = kda.log_decay(raw, a, a * bias, bound).view(-1, K)
    out = kda.step(q, k, v, g, beta.sigmoid().flatten(), mine)
    equal(f"KDA, decode, {kind}", (out.view(B, 1, H, K), want), (mine.view(B, H, K, K), pool[slots.long()]))

    qkv, raw, beta, pool = rand(B * T, WIDTH), rand(B * T, H * K), rand(B * T, H), rand(SLOTS, H, K, K)
    scratch = torch.zeros(SLOTS, T, H, K, K)
    sq, sk, sv = (t.reshape(1, B * T, H, K) for t in qkv.view(B * T, 3, H, K).unbind(1))
    want = fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update(
        A_log=a_log, a=raw, dt_bias=bias, softplus_beta=1.0, softplus_threshold=20.0, q=sq, k=sk, v=sv,
        b=beta.unsqueeze(0), initial_state_source=pool, initial_state_indices=slots, scale=K**-0.5,
        use_qk_l2norm_in_kernel=True, cu_seqlens=torch.arange(0, B * T + 1, T, dtype=torch.int32), is_kda=True,
        lower_bound=bound, disable_state_update=True, intermediate_states_buffer=scratch,
        intermediate_state_indices=torch.arange(B, dtype=torch.int32), cache_steps=T,
    )  # fmt: skip
    q, k, v = (t.view(B, T, H, K).transpose(1, 2).reshape(-1, T, K) for t in mixed(qkv))
    g = kda.log_decay(raw, a, a * bias, bound).view(B, T, H, K).transpose(1, 2).reshape(-1, T, K)
    state = pool[slots.long()].flatten(0, 1)
    strength = beta.sigmoid().view(B, T, H).transpose(1, 2).reshape(-1, T)
    out, u, total = kda.verify(torch.stack([q, k], 1), v, g, strength.unsqueeze(-1), state)
    replayed = torch.stack([kda.replay(state, k, u, total, n + 1).view(B, H, K, K) for n in range(T)], 1)
    equal(
        f"KDA, verify, {kind}",
        (out.view(B, H, T, K).transpose(1, 2).reshape(1, B * T, H, K), want),
        (replayed, scratch[:B]),
    )

x, gate, w = rand(1, 5, H, K), rand(1, 5, H, K), rand(K)
want = fused_norm_gate.rms_norm_gated(x.clone(), gate, w, None, activation="sigmoid", eps=1e-6)
equal("gated norm", (ops.rms_norm_gated(x, gate, w, 1e-6), want))

# bookkeeping of chains
n = 4
candidates, target = torch.randint(0, 2, (8, n), generator=gen), torch.randint(0, 2, (8, n), generator=gen)
index, step = torch.arange(8 * n).view(8, n), torch.arange(1, n + 1)
step[-1] = -1
links = index, step.expand(8, n).contiguous(), torch.full((8, n), -1)
results = []
for function in (spec_tree.verify_tree_greedy_triton, speculative.verify_tree_greedy_func):
    predicts, accepted = torch.full((8 * n,), -7, dtype=torch.int32), torch.full((8, n), -1, dtype=torch.int32)
    count = torch.zeros(8, dtype=torch.int32)
    function(predicts, accepted, count, candidates, *links, target)
    used = accepted[accepted >= 0].long()
    results.append((predicts[used], accepted, count))
equal("greedy verification", *zip(results[1], results[0], strict=True))

seq, mask_mode = torch.tensor([5, 9, 2]), spec_tree.TreeMaskMode.QLEN_ONLY
results = []
for function in (spec_tree.sgl_build_tree_kernel_triton, speculative.build_tree_kernel_efficient_func):
    positions, mask = torch.zeros(3 * n, dtype=torch.int64), torch.ones(3 * n * n, dtype=torch.bool)
    index, following, sibling = (torch.full((3, n), -1) for _ in range(3))
    parents, best = torch.arange(-1, n - 2).expand(3, n - 1).contiguous(), torch.arange(n - 1).expand(3, n - 1)
    function(parents, best.contiguous(), seq, mask, positions, index, following, sibling, 1, n - 1, n, mask_mode)
    results.append((positions, index, following, sibling))
equal("chain tree", *zip(results[1], results[0], strict=True))

table = torch.arange(60, dtype=torch.int32).view(3, 20)
requests, start, end = torch.tensor([2, 0]), torch.tensor([3, 5]), torch.tensor([6, 7])
want, got = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
places = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
cache_locs.assign_draft_cache_locs_contiguous[(2,)](
    requests, table, start, want, 20, 1, 2, positions=places[0], mrope=None, BS=2, WRITE_POSITIONS=True,
    WRITE_MROPE=False,
)  # fmt: skip
speculative.assign_draft_cache_locs_contiguous_func(requests, table, start, got, 1, 2, places[1])
equal("draft cache slots", (got, want), places)

tables = table.clone(), table.clone()
new = torch.arange(100, 105)
allocation.assign_req_to_token_pool[(2,)](requests, tables[0], start, end, new, 20, 2)
speculative.assign_req_to_token_pool_func(requests, tables[1], start, end, new, 2)
equal("new cache slots", tables)

tokens, accept = torch.tensor([7, 8, 0, 5, 0, 0], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
bonus = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
eagle.fill_bonus_tokens[(2,)](tokens, accept, bonus[0], 3)
speculative.fill_bonus_tokens_func(tokens, accept, bonus[1], 3, 2)
equal("bonus tokens", bonus)

renorm_triton._prepare_probs = lambda probs: probs.float().contiguous()  # as upstream, without its device check
probs = rand(4, 32).softmax(-1)
probs[1, :8] = probs[1, 8]  # ties with the last kept token stay
probs /= probs.sum(-1, keepdim=True)
top_k, top_p = torch.tensor([1, 5, 31, 40], dtype=torch.int32), torch.tensor([0.2, 0.9, 0.5, 1.0])
equal("top-k", (sampling.top_k_renorm_prob(probs, top_k), renorm_triton.top_k_renorm_probs_triton(probs, top_k)))
equal("top-p", (sampling.top_p_renorm_prob(probs, top_p), renorm_triton.top_p_renorm_probs_triton(probs, top_p)))
