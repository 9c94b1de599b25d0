"""The CPU platform's layers against the independent reference, phase by phase, without a server.

The layers are built from stand-ins that carry the reference's weights in the fused layout that SGLang's loader
produces, over small pools. What the loader itself does is tested on live models (test_torch_cpu_server.py).
"""

from __future__ import annotations

from types import SimpleNamespace as Stub

import pytest
import torch

from sparkmoe.nano.model import MLA, Ling, LingConfig
from sparkmoe.nano.random_checkpoint import BASE, make
from sparkmoe.sglang_plugin.torch_cpu import model as cpu
from sparkmoe.sglang_plugin.torch_cpu.attention import Rows
from sparkmoe.sglang_plugin.torch_cpu.layers import KdaLayer, Pass

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "v_head_dim": 32,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "expert_swiglu_limit_list": [0.0, 0.0, 0.3, 0.3],
    "share_expert_swiglu_limit_list": [0.0, 0.0, 0.4, 0.4],
}
VARIANTS = {
    "default": {},
    "q_lora": {"q_lora_rank": 20},
    "kda_lora": {"no_kda_lora": False},
    "no_safe_gate": {"kda_safe_gate": False},
    "element_wise_gate": {"gated_attention_proj_granularity_type": "element_wise"},
    "no_gate": {"gated_attention_proj_granularity_type": None},
    "no_rope": {"use_mla_nope": True},
    "no_limits": {"expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None},
    "groups": {"n_group": 4, "topk_group": 2},
    "no_renormalization": {"norm_topk_prob": False, "routed_scaling_factor": 1.3},
    "no_shared_expert": {"moe_shared_expert_intermediate_size": 0},
}
SLOTS = 256


def weight(t: torch.Tensor) -> Stub:
    return Stub(weight=Stub(data=t.detach()))


def norm(module) -> Stub:
    return Stub(weight=Stub(data=module.weight.detach()), variance_epsilon=module.eps, eps=module.eps)


def attention_stub(a, c: LingConfig, layer: int) -> Stub:
    if isinstance(a, MLA):
        kc, vc = (
            a.kv_b_proj.weight.detach()
            .unflatten(0, (c.num_attention_heads, -1))
            .split([c.qk_nope_head_dim, c.v_head_dim], 1)
        )
        angle = torch.arange(4096)[:, None] * c.rope_theta ** (
            -torch.arange(0, c.qk_rope_head_dim, 2, dtype=torch.float32) / c.qk_rope_head_dim
        )
        stub = Stub(
            layer_id=layer, num_local_heads=c.num_attention_heads, kv_lora_rank=c.kv_lora_rank,
            qk_rope_head_dim=c.qk_rope_head_dim, qk_nope_head_dim=c.qk_nope_head_dim, q_lora_rank=c.q_lora_rank,
            gated_attention_proj_granularity_type=c.gated_attention_proj_granularity_type,
            kv_a_layernorm=norm(a.kv_a_layernorm), o_proj=weight(a.dense.weight),
            g_proj=None if a.g_proj is None else weight(a.g_proj.weight),
            w_kc=Stub(data=kc), w_vc=Stub(data=vc.transpose(1, 2)),
            scaling=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5,
            rotary_emb=None if c.use_mla_nope else Stub(
                cos_sin_cache=torch.cat([angle.cos(), angle.sin()], -1), is_neox_style=False
            ),
        )  # fmt: skip
        if c.q_lora_rank:
            stub.fused_qkv_a_proj_with_mqa = weight(torch.cat([a.q_a_proj.weight, a.kv_a_proj_with_mqa.weight]))
            stub.q_a_layernorm, stub.q_b_proj = norm(a.q_a_layernorm), weight(a.q_b_proj.weight)
        else:
            stub.q_proj, stub.kv_a_proj_with_mqa = weight(a.q_proj.weight), weight(a.kv_a_proj_with_mqa.weight)
        return stub
    qkvb = [a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.b_proj.weight]
    stub = Stub(
        layer_idx=layer, local_num_heads=a.heads, head_dim=a.dim, no_kda_lora=not a.lora, fuse_no_lora_beta=True,
        qkv_conv1d=weight(torch.cat([a.q_conv1d.weight, a.k_conv1d.weight, a.v_conv1d.weight])), lower_bound=a.bound,
        A_log=Stub(data=a.A_log.detach().view(1, 1, -1, 1)), dt_bias=Stub(data=a.dt_bias.detach()),
        o_norm=norm(a.o_norm), o_proj=weight(a.dense.weight),
    )  # fmt: skip
    if a.lora:
        stub.fused_qkvbfg_a_proj = weight(torch.cat([*qkvb, a.f_a_proj.weight, a.g_a_proj.weight]))
        stub.fused_fg_b_proj = weight(torch.stack([a.f_b_proj.weight, a.g_b_proj.weight]))
    else:
        stub.fused_qkvbfg_proj = weight(torch.cat([*qkvb, a.f_proj.weight, a.g_proj.weight]))
    return stub


def mlp_stub(m) -> Stub:
    return Stub(
        gate_up_proj=weight(torch.cat([m.gate_proj.weight, m.up_proj.weight])),
        down_proj=weight(m.down_proj.weight),
        swiglu_limit=m.limit,
    )


def block_stub(block, c: LingConfig, layer: int) -> Stub:
    sparse = hasattr(block.mlp, "experts")
    if sparse:
        m = block.mlp
        mlp = Stub(
            multi_gate=False, num_fused_shared_experts=0, top_k=c.num_experts_per_tok, num_expert_group=c.n_group,
            topk_group=c.topk_group, norm_expert_prob=c.norm_topk_prob, routed_scaling_factor=c.routed_scaling_factor,
            gate=Stub(weight=Stub(data=m.gate.weight.detach()), expert_bias=Stub(data=m.gate.expert_bias)),
            experts=Stub(
                w13_weight=Stub(data=torch.cat([m.experts.gate_proj, m.experts.up_proj], 1).detach()),
                w2_weight=Stub(data=m.experts.down_proj.detach()),
            ),
            expert_swiglu_limit=m.experts.limit,
            shared_experts=None if m.shared_experts is None else mlp_stub(m.shared_experts),
        )  # fmt: skip
    else:
        mlp = mlp_stub(block.mlp)
    return Stub(
        attention=attention_stub(block.attention, c, layer),
        attention_type=int(isinstance(block.attention, MLA)),
        mlp=mlp,
        is_layer_sparse=sparse,
        input_layernorm=norm(block.input_layernorm),
        post_attention_layernorm=norm(block.post_attention_layernorm),
    )


class Machine:
    """A network with pools for two requests, whose cache slots are scattered on purpose."""

    def __init__(self, ling: Ling) -> None:
        c = ling.config
        self.ling, self.network = (
            ling,
            cpu.Network([block_stub(b, c, i) for i, b in enumerate(ling.model.layers[: c.num_hidden_layers])]),
        )
        kv = {i: torch.zeros(SLOTS, 1, c.kv_lora_rank + c.qk_rope_head_dim) for i in range(c.num_hidden_layers)}
        self.kv_pool = Stub(get_key_buffer=kv.__getitem__)
        width = c.num_attention_heads * c.head_dim
        state = {
            i: Stub(
                conv=[torch.full((4, c.short_conv_kernel_size - 1, 3 * width), 9.0)],  # old content must not matter
                temporal=torch.full((4, c.num_attention_heads, c.head_dim, c.head_dim), 9.0),
            )
            for i in range(c.num_hidden_layers)
        }
        self.state_pool = Stub(mamba2_layer_cache=state.__getitem__)
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
        self.table = order.view(2, -1)
        self.length = [0, 0]

    @torch.inference_mode()
    def run(self, tokens: list[list[int]], *, requests=(0,), decode=False, verify=0, ends=False) -> torch.Tensor:
        """Feed tokens per request; returns log-probabilities [N, V]. A verified batch moves nothing until `commit`.

        `ends`: only the last token of each request will be read.
        """
        rows, positions, start = [], [], 0
        for r, ids in zip(requests, tokens, strict=True):
            done = self.length[r]
            rows.append(Rows.of(start, start + len(ids), self.table[r, : done + len(ids)]))
            positions += range(done, done + len(ids))
            start += len(ids)
            if not verify:
                self.length[r] += len(ids)
        p = Pass(
            rows, torch.tensor(positions), torch.cat([r.slots[-(r.stop - r.start) :] for r in rows]), self.kv_pool,
            self.state_pool, [r + 1 for r in requests], decode=decode, verify=verify,
            ends=torch.tensor([r.stop - 1 for r in rows]) if ends else None,
        )  # fmt: skip
        x = self.ling.model.word_embeddings(torch.tensor([t for ids in tokens for t in ids])).clone()
        return self.ling.lm_head(self.ling.model.norm(self.network(x, p))).log_softmax(-1)

    @torch.inference_mode()
    def commit(self, accepted: list[int], requests=(0,)) -> None:
        owner = Stub(model=Stub(**{cpu.ATTRIBUTE: self.network}))
        cpu.commit(None, torch.tensor(accepted) - 1, None, None, owner)
        for r, n in zip(requests, accepted, strict=True):
            self.length[r] += n


@pytest.fixture(scope="module")
def lings(tmp_path_factory):
    from sparkmoe.nano.model import load_checkpoint

    built: dict[str, Ling] = {}

    def get(name: str) -> Ling:
        if name not in built:
            folder = make(tmp_path_factory.mktemp(name), alpha=1.5, **(SMALL | VARIANTS[name]))
            built[name] = load_checkpoint(folder)
        return built[name]

    return get


def tokens(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, BASE["vocab_size"], (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected(ling: Ling, ids: list[int]) -> torch.Tensor:
    return ling(torch.tensor([ids]))[0].log_softmax(-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_of_which_only_the_last_token_is_read(lings, name):
    ling, first, second = lings(name), tokens(45), tokens(9, seed=1)
    machine = Machine(ling)
    machine.run([first[:20]], ends=True)
    got = machine.run([first[20:41], second[:8]], requests=(0, 1), ends=True)  # one has a prefix in the cache
    want = torch.stack([expected(ling, first)[40], expected(ling, second)[7]])
    torch.testing.assert_close(got[[20, 28]], want, atol=1e-3, rtol=0)
    others = [i for i in range(29) if i not in (20, 28)]
    assert got[others].isnan().all()  # whoever read them would notice
    got = torch.cat([machine.run([[t]], decode=True) for t in first[41:]])  # keys and states of all tokens are there
    torch.testing.assert_close(got, expected(ling, first)[41:], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_phase_equals_the_reference(lings, name):
    ling, ids = lings(name), tokens(75)
    want = expected(ling, ids)
    machine = Machine(ling)
    got = [machine.run([ids[:41]]), machine.run([ids[41:60]])]  # the second part meets a cached prefix
    got += [machine.run([[t]], decode=True) for t in ids[60:63]]
    got.append(machine.run([ids[63:67]], verify=4)[:3])
    machine.commit([3])
    got.append(machine.run([ids[66:71]], verify=5)[:1])
    machine.commit([1])
    got += [machine.run([[t]], decode=True) for t in ids[67:]]
    torch.testing.assert_close(torch.cat(got), want, atol=1e-3, rtol=0)
    assert (torch.cat(got) - want).abs().mean() < 5e-5


def test_prefill_equals_token_by_token_decode(lings):
    ling, ids = lings("default"), tokens(70, seed=2)
    whole = Machine(ling).run([ids])
    machine = Machine(ling)
    steps = [machine.run([ids[:1]])] + [machine.run([[t]], decode=True) for t in ids[1:]]
    torch.testing.assert_close(torch.cat(steps), whole, atol=2e-4, rtol=0)


def test_requests_of_a_batch_do_not_meet(lings):
    ling = lings("default")
    a, b = tokens(30, seed=3), tokens(50, seed=4)
    want_a, want_b = expected(ling, a), expected(ling, b)
    machine, both = Machine(ling), (0, 1)
    prefill = machine.run([a[:20], b[:41]], requests=both)
    one = machine.run([a[20:21], b[41:42]], requests=both, decode=True)
    four = machine.run([a[21:25], b[42:46]], requests=both, verify=4)
    machine.commit([4, 2], requests=both)
    last = machine.run([a[25:26], b[44:45]], requests=both, decode=True)
    for got, want in (
        (prefill[:20], want_a[:20]), (prefill[20:], want_b[:41]), (one[0], want_a[20]), (one[1], want_b[41]),
        (four[:4], want_a[21:25]), (four[4:], want_b[42:46]), (last[0], want_a[25]), (last[1], want_b[44]),
    ):  # fmt: skip
        torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_every_way_of_computing_experts(lings, count):
    """1 token: vectors; a few that want most experts: all at once; many: sorted."""
    ling = lings("default")
    layer = 3
    block = Machine(ling).network.blocks[layer]
    x = torch.randn(count, ling.config.hidden_size, generator=torch.Generator().manual_seed(count))
    with torch.inference_mode():
        want = ling.model.layers[layer].mlp(x)
        torch.testing.assert_close(block.mlp(x), want, atol=1e-5, rtol=1e-5)
        free = block.mlp.experts.limit
        block.mlp.experts.limit = None
        assert (block.mlp(x) - want).abs().max() > 1e-3  # the limit is felt
        block.mlp.experts.limit = free


def test_commit_without_verification_is_refused(lings):
    machine = Machine(lings("default"))
    machine.run([tokens(5)])
    with pytest.raises(RuntimeError, match="without a verified batch"):
        machine.commit([1])


def test_kda_layers_share_the_loaded_weights(lings):
    """No second copy of the big projections."""
    machine = Machine(lings("default"))
    layer = next(b.mixer for b in machine.network.blocks if isinstance(b.mixer, KdaLayer))
    experts = machine.network.blocks[-1].mlp.experts
    assert layer.weight.shape[0] == 5 * 64 + 2
    assert experts.each[0][0].data_ptr() == experts.w13.data_ptr()


@pytest.mark.parametrize(
    ("rows", "idle", "expected"),
    [(1, 7, 1), (4, 7, 2), (4, 0, 1), (64, 1, 2), (1024, 7, 8), (1024, 3, 4), (1024, 0, 1)],
)
def test_threads_go_only_to_cores_that_nobody_wants(monkeypatch, rows, idle, expected):
    monkeypatch.setattr(cpu, "idle_cores", lambda: idle)
    cpu._recently_idle.clear()
    assert cpu.threads(rows) == expected


def test_a_moment_of_work_elsewhere_costs_no_thread_and_a_neighbour_does(monkeypatch):
    cpu._recently_idle.clear()
    for idle in (0, 1, 0):
        monkeypatch.setattr(cpu, "idle_cores", lambda idle=idle: idle)
        cpu.threads(1)
    assert cpu.threads(4) == 2
    assert [cpu.threads(4) for _ in range(8)][-1] == 1


def test_a_busy_process_makes_one_core_fewer_idle(monkeypatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: range(10_000))
    before = cpu.idle_cores()
    assert 0 < before < 10_000  # this process at least is running
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda _: range(1))
    assert cpu.idle_cores() == 0


def batch(mode: str, capture: str, **changes: object) -> Stub:
    """What `describe` reads of SGLang's batch: two requests, of three tokens and of one."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    fields = {
        "forward_mode": ForwardMode[mode], "capture_hidden_mode": CaptureHiddenMode[capture], "batch_size": 2,
        "positions": torch.tensor([0, 1, 2, 4]), "req_pool_indices": torch.tensor([1, 0]),
        "extend_seq_lens": torch.tensor([3, 1]), "out_cache_loc": torch.arange(4), "token_to_kv_pool": None,
        "return_logprob": False, "is_prefill_only": False, "spec_info": Stub(draft_token_num=2),
    }  # fmt: skip
    return Stub(**(fields | changes))


@pytest.mark.parametrize(
    ("mode", "capture", "changes", "trimmed"),
    [
        ("EXTEND", "NULL", {}, True),
        ("MIXED", "NULL", {}, True),
        ("EXTEND", "LAST", {}, True),  # a draft reads its prompt
        ("EXTEND", "FULL", {}, False),  # the target's states for a draft, or a client's `return_hidden_states`
        ("EXTEND", "NULL", {"return_logprob": True}, False),
        ("EXTEND", "NULL", {"is_prefill_only": True}, False),
        ("DRAFT_EXTEND_V2", "FULL", {}, False),
        ("DRAFT_EXTEND_V2", "LAST", {}, False),  # reads the last accepted token, which need not be the last
        ("TARGET_VERIFY", "FULL", {"positions": torch.tensor([0, 1, 4, 5])}, False),
        ("DECODE", "NULL", {"positions": torch.tensor([3, 4])}, False),
    ],
)
def test_only_a_prompt_whose_other_rows_nobody_reads_is_cut_short(monkeypatch, mode, capture, changes, trimmed):
    from sglang.srt.model_executor import forward_context

    table = Stub(req_to_token=torch.arange(20).view(2, 10))
    backend = Stub(req_to_token_pool=table, token_to_kv_pool=None)
    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: backend)
    ends = cpu.describe(batch(mode, capture, **changes)).ends
    assert ends is None if not trimmed else ends.tolist() == [2, 3]
