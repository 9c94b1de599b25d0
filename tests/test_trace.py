"""Traces are written here event by event, so every millisecond that comes out is known beforehand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkmoe import placing, roofline, trace
from sparkmoe.breakdown import break_down, verdict
from sparkmoe.errors import DataError
from sparkmoe.inventory import PARTS, from_config
from sparkmoe.placing import by_place, classify


class Writer:
    """Builds the events of a trace."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]
        self.correlation = 0

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def launch(self, call: str, ts: float, kernels: list[tuple[str, float, float]]) -> None:
        self.correlation += 1
        self.add("cuda_runtime", call, ts, 2, correlation=self.correlation)
        for name, begin, length in kernels:
            self.add("kernel", name, begin, length, tid=7, correlation=self.correlation, stream=7)

    def save(self, path: Path, cut: int | None = None) -> Path:
        text = json.dumps({"schemaVersion": 1, "traceEvents": self.events, "traceName": "t"}, indent=1)
        data = text.encode()[:cut]
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


# One layer of each kind, as a CUDA graph would replay it: (name, µs).
LAYERS = [
    ("indexSelectSmallIndex", 2), ("rms_norm_kernel", 2),
    ("nvjet_tst_64x8_gemm", 20), ("causal_conv1d_update", 3), ("fused_recurrent_kda_fwd", 6), ("rms_norm_kernel", 2),
    ("sm90_xmma_gemm_bf16", 7), ("fused_add_rmsnorm", 2),
    ("nvjet_tst_64x8_gemm", 9), ("silu_and_mul", 1), ("nvjet_tst_64x8_gemm", 5), ("fused_add_rmsnorm", 2),
    ("nvjet_tst_64x8_gemm", 4), ("_fwd_grouped_kernel_stage1_mla", 8), ("sm90_xmma_gemm_bf16", 4),
    ("fused_add_rmsnorm", 2),
    ("sm90_router_gemm", 3), ("biased_grouped_topk", 2), ("humming_moe_gemm", 10), ("silu_and_mul", 1),
    ("humming_moe_gemm", 6), ("nvjet_tst_64x8_gemm", 3), ("fused_add_rmsnorm", 2),
    ("nvjet_tst_128x8_gemm", 30), ("argmax_kernel", 2),
]  # fmt: skip
EXPECTED_US = {
    "kda": 2 + 2 + 20 + 3 + 6 + 2 + 7, "norms": 8, "dense": 15, "mla": 16, "router": 5, "experts": 17, "shared": 3,
    "head": 30, "sampling": 2,
}  # fmt: skip


def gpu_trace(
    steps: int = 6, *, spans: bool = True, gap: float = 1.0, wait: float = 50.0, draft: bool = False
) -> Writer:
    """Steps of one graph launch; `gap` µs between kernels, the launch `wait` µs after the previous step's end."""
    w, now = Writer(), 1000.0
    for k in range(steps):
        if spans:
            w.add("user_annotation", "step[DECODE bs=1]", now, 20)
        kernels, at = [], now + 10
        for name, length in LAYERS:
            kernels.append((name, at, float(length)))
            at += length + gap
        w.launch("cudaGraphLaunch", now + 5, kernels)
        if draft:
            w.launch("cudaGraphLaunch", at, [("nvjet_gemm", at + 5, 4.0), ("mla_decode", at + 9, 2.0)])
            at += 11 + gap
        now = at - gap + wait
        if k == 2:
            w.add("user_annotation", "step[EXTEND bs=1 toks=64]", now - wait / 2, 5)
    return w


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", ["t.trace.json", "t.trace.json.gz"])
def test_reads_plain_and_packed(tmp_path: Path, name: str) -> None:
    seen = trace.read(gpu_trace().save(tmp_path / name))
    assert seen.on_gpu
    assert seen.work.size == 6 * len(LAYERS)
    assert np.all(np.diff(seen.start_us) >= 0)
    assert {seen.names[n] for n in seen.name[seen.launched_by]} == {"cudaGraphLaunch"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"traceEvents": [', r"is not a profiler trace"),
        (b"not json", r"is not a profiler trace"),
        (b'{"schemaVersion": 1}', r"holds no operator"),
        (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', r"holds no operator"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        trace.read(tmp_path / "x.json")


def test_missing_and_cut_off_traces_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no trace at"):
        trace.read(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match=r"cut off or damaged after \d+ events"):
        trace.read(gpu_trace().save(tmp_path / "cut.json", cut=9000))
    packed = gpu_trace(60).save(tmp_path / "cut.json.gz")
    packed.write_bytes(packed.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"cut off or damaged after \d+ events"):
        trace.read(packed)


def test_scope_names_round_trip() -> None:
    for part in (*PARTS, "sampling"):
        assert trace.scope_part(trace.scope_name(part)) == part
        assert trace.scope_part(trace.scope_name(part, draft=True)) == f"draft {part}"
    assert trace.scope_part("step[DECODE bs=1]") is None


# ---------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize(("spans", "how"), [(True, "step spans"), (False, "largest CUDA graph")])
def test_steps_are_found_without_the_first_and_without_prefills(tmp_path: Path, spans: bool, how: str) -> None:
    found = trace.steps(trace.read(gpu_trace(8, spans=spans, draft=True).save(tmp_path / "t.json")))
    # 8 target passes are 7 intervals, one holds a prefill, the first is skipped.
    assert len(found) == 5
    assert how in found.how


@pytest.mark.parametrize("spans", [True, False])
def test_a_trimmed_trace_is_small_and_gives_the_same_step(tmp_path: Path, spans: bool) -> None:
    seen = trace.read(gpu_trace(40, draft=True, spans=spans).save(tmp_path / "whole.json.gz"))
    found = trace.steps(seen, skip=4)
    small = trace.read(trace.trim(seen, found, tmp_path / "kept/small.json.gz", count=3))
    again = trace.steps(small, skip=0)
    assert len(again) == 3
    assert len(small) < len(seen) / 8
    whole, part = break_down(seen, found), break_down(small, again)
    assert part.parts.keys() == whole.parts.keys()
    assert [ms for ms, _ in part.parts.values()] == pytest.approx([ms for ms, _ in whole.parts.values()])
    assert part.step_ms == pytest.approx(whole.step_ms)
    assert part.launch_gap_ms == pytest.approx(whole.launch_gap_ms)


def test_a_trace_without_decode_steps_says_what_it_holds(tmp_path: Path) -> None:
    w = Writer()
    w.add("user_annotation", "step[EXTEND bs=1 toks=9]", 0, 10)
    w.add("cpu_op", "aten::mm", 1, 5)
    with pytest.raises(DataError, match=r"no decode step: 2 events, 0 target passes.*step\[EXTEND"):
        trace.steps(trace.read(w.save(tmp_path / "t.json")))


# ---------------------------------------------------------------------------------------------------------------- parts


def test_gemms_are_placed_by_their_neighbours(tmp_path: Path) -> None:
    seen = trace.read(gpu_trace().save(tmp_path / "t.json"))
    found = break_down(seen, trace.steps(seen))
    assert {part: round(1000 * ms, 6) for part, (ms, _) in found.parts.items()} == EXPECTED_US
    assert found.named_share == 1
    assert found.calls == len(LAYERS)
    assert next(iter(found.top.items())) == ("nvjet_tst_64x8_gemm", pytest.approx((0.041, 5)))


def test_drafts_are_the_smaller_graphs(tmp_path: Path) -> None:
    seen = trace.read(gpu_trace(draft=True).save(tmp_path / "t.json"))
    parts = break_down(seen, trace.steps(seen)).parts
    assert parts["draft mla"] == pytest.approx((0.006, 2))
    assert parts["kda"][0] == pytest.approx(EXPECTED_US["kda"] / 1000)


def test_unknown_kernels_are_listed_not_hidden(tmp_path: Path) -> None:
    w = gpu_trace()
    launches = [e for e in w.events if e.get("cat") == "cuda_runtime"]
    for e in launches:
        w.add("kernel", "strange_thing", e["ts"] + 400, 8, tid=7, correlation=e["args"]["correlation"])
    seen = trace.read(w.save(tmp_path / "t.json"))
    found = break_down(seen, trace.steps(seen))
    assert found.unknown == {"strange_thing": pytest.approx((0.008, 1))}
    assert found.named_share == pytest.approx(1 - 8 / (sum(EXPECTED_US.values()) + 8))
    extended = break_down(seen, trace.steps(seen), ((r"strange", "experts"), *placing.RULES))
    assert not extended.unknown


def test_by_place_on_short_sequences() -> None:
    assert by_place([]) == []
    assert by_place(["GEMM", "RESIDUAL NORM", "GEMM", "RESIDUAL NORM", "GEMM", "sampling"]) == [
        "embedding", "norms", "dense", "norms", "head", "sampling",
    ]  # fmt: skip


def test_the_choice_of_a_token_divides_two_passes() -> None:
    one = ["NORM", "GEMM", "mla", "GEMM", "RESIDUAL NORM", "GEMM", "ROUTING", "experts", "RESIDUAL NORM", "SMALL"]
    labels = [*one, "GEMM", "verification", "SMALL", *one, "GEMM"]
    again = ["mla", "mla", "mla", "mla", "norms", "router", "router", "experts", "norms", "head"]
    assert by_place(labels) == [*again, "head", "verification", *["mla"], *again, "head"]


def test_a_pass_that_no_graph_holds_is_the_drafts() -> None:
    one = ["NORM", "GEMM", "mla", "RESIDUAL NORM", "GEMM", "ROUTING", "experts", "RESIDUAL NORM", "GEMM"]
    labels = [*one, *one, "sampling", "SMALL", *one, "SMALL"]
    cause = np.array([1] * 18 + list(range(100, 112)))
    parts = placing.place_step(labels, cause, cause == 1)
    assert parts[18:20] == ["sampling", "between graphs"]
    drafted = ["mla", "mla", "mla", "norms", "router", "router", "experts", "norms", "head"]
    assert parts[20:] == [*(f"draft {part}" for part in drafted), "between graphs"]
    assert not any(part.startswith("draft") for part in parts[:18])
    bare = placing.place_step([*one, "sampling", "SMALL"], np.array([1] * 9 + [7, 8]), np.arange(11) < 9)
    assert bare[-2:] == ["sampling", "between graphs"]


# Names as SGLang, FlashInfer, Humming and the CUDA libraries give them.
KERNELS = {
    "kda": """fused_recurrent_kda_packed_decode_kernel _causal_conv1d_update_kernel l2norm_fwd_kernel
        fused_kda_conv_gating_verify_kernel fused_sigmoid_gating_delta_rule_update_kernel _rms_norm_gate_fwd_kernel
        _fused_conv_window_scatter_with_mask_kernel layer_norm_gated_fwd_kernel""",
    "mla": """_fwd_grouped_kernel_stage1_rope _fwd_kernel_stage2 _verify_mla_prefix_stage1 set_mla_kv_buffer_kernel
        flashinfer::BatchDecodeWithPagedKVCacheKernelMLA flash_fwd_splitkv_mla_kernel concat_and_cast_mha_k_kernel""",
    "ROUTING": """deepseek_v3_topk_kernel topkGatingSigmoid moe_fused_gate_kernel _router_gemv_kernel
        biased_grouped_topk _sigmoid_gate_topk_renorm_kernel""",
    "experts": """humming fused_moe_kernel _moe_sum_reduce_kernel moe_align_block_size_kernel finalizeMoeRoutingKernel
        cutlass::gemm::GroupProblemShape<Shape> _grouped_gemm_kernel post_reorder_triton_kernel""",
    "RESIDUAL NORM": """flashinfer::norm::FusedAddRMSNormKernel fused_add_rmsnorm_kernel
        _gemma_rmsnorm_residual_kernel""",
    "NORM": "flashinfer::norm::RMSNormKernel _rmsnorm_fp32_kernel",
    "sampling": """flashinfer::sampling::TopKTopPSamplingFromProbKernel AirTopPRenormRadixKernel
        _argmax_final_kernel""",
    "verification": "verify_tree_greedy_kernel_triton sgl_build_tree_kernel_efficient_triton fill_bonus_tokens",
    "GEMM": """nvjet_tst_64x8_64x16_4x1_v_bz_TNT _w8a8_block_fp8_matmul_hopper cutlass::device_kernel gemvNSP_kernel
        cublasLt::splitKreduce_kernel aten::addmm""",
    "SMALL": "at::native::vectorized_elementwise_kernel<4> _per_token_group_quant_8bit act_and_mul_kernel",
    "communication": "ncclDevKernel_AllReduce",
    placing.UNKNOWN: "quux",
}


@pytest.mark.parametrize("label", KERNELS)
def test_kernels_are_known_by_name(label: str) -> None:
    names = KERNELS[label].split()
    assert {name: classify(name) for name in names} == dict.fromkeys(names, label)


def cpu_trace(steps: int = 5) -> Writer:
    """A host step of 100 µs: 30 in kda, 20 in experts nested in a wider scope, 10 without scope, the rest Python."""
    w = Writer()
    for k in range(steps):
        t = 100.0 * k
        w.add("user_annotation", "step[DECODE bs=1]", t, 90)
        w.add("user_annotation", trace.scope_name("kda"), t + 5, 40)
        w.add("cpu_op", "aten::linear", t + 6, 30)
        w.add("cpu_op", "aten::mm", t + 7, 28)  # inside aten::linear
        w.add("user_annotation", trace.scope_name("shared"), t + 50, 30)
        w.add("user_annotation", trace.scope_name("experts"), t + 52, 25)
        w.add("cpu_op", "aten::bmm", t + 55, 20)
        w.add("cpu_op", "aten::quux", t + 85, 10)
        w.add("cpu_op", "aten::quux", t + 20, 50, tid=2)  # another thread, at the same time as the scope
    return w


def test_cpu_operators_land_in_the_innermost_scope_of_their_thread(tmp_path: Path) -> None:
    seen = trace.read(cpu_trace().save(tmp_path / "t.json"))
    assert not seen.on_gpu
    found = break_down(seen, trace.steps(seen))
    assert found.parts == {
        "unknown": pytest.approx((0.060, 2)),
        "kda": pytest.approx((0.030, 1)),
        "experts": pytest.approx((0.020, 1)),
    }
    assert list(found.unknown) == ["aten::quux"]


def test_a_scope_opened_as_an_operator_is_a_scope(tmp_path: Path) -> None:
    w = cpu_trace()
    for event in w.events:
        if event["name"].startswith(trace.SCOPE):
            event["cat"] = "cpu_op"
    seen = trace.read(w.save(tmp_path / "t.json"))
    assert break_down(seen, trace.steps(seen)).parts["kda"] == pytest.approx((0.030, 1))


def test_a_step_that_nobody_watched_is_shorter(tmp_path: Path) -> None:
    seen = trace.read(cpu_trace().save(tmp_path / "cpu.json"))
    watched = break_down(seen, trace.steps(seen))
    assert watched.step_ms == pytest.approx(0.1)
    found = watched.unwatched(0.05)
    assert (found.step_ms, found.busy_ms) == pytest.approx((0.05, watched.busy_ms / 2))
    assert found.host_gap_ms == pytest.approx(watched.host_gap_ms / 2)
    assert found.parts["kda"] == pytest.approx((0.015, 1))
    seen = trace.read(gpu_trace().save(tmp_path / "gpu.json"))
    watched = break_down(seen, trace.steps(seen))
    found = watched.unwatched(watched.step_ms - 0.04)
    assert found.parts == watched.parts
    assert found.host_gap_ms == pytest.approx(watched.host_gap_ms - 0.04)
    found = watched.unwatched(watched.busy_ms + watched.launch_gap_ms / 2)
    assert (found.host_gap_ms, found.launch_gap_ms) == pytest.approx((0.0, watched.launch_gap_ms / 2))


# --------------------------------------------------------------------------------------------------- gaps and verdict


def test_gaps_are_split_into_launch_and_host(tmp_path: Path) -> None:
    seen = trace.read(gpu_trace(gap=3.0, wait=50.0).save(tmp_path / "t.json"))
    found = break_down(seen, trace.steps(seen))
    busy = sum(EXPECTED_US.values())
    assert found.busy_ms == pytest.approx(busy / 1000)
    assert found.launch_gap_ms == pytest.approx(3 * (len(LAYERS) - 1) / 1000)
    assert found.host_gap_ms == pytest.approx((50 + 10) / 1000)
    assert found.step_ms == pytest.approx((busy + 3 * (len(LAYERS) - 1) + 60) / 1000)


def test_a_kernel_launched_late_leaves_a_host_gap(tmp_path: Path) -> None:
    w = Writer()
    for k in range(5):
        t = 1000.0 * k
        w.add("user_annotation", "step[DECODE bs=1]", t, 20)
        w.launch("cudaLaunchKernel", t, [("kda_a", t + 10, 100)])
        w.launch("cudaLaunchKernel", t + 300, [("kda_b", t + 305, 100)])  # 190 µs of waiting for the host, 5 of launch
    seen = trace.read(w.save(tmp_path / "t.json"))
    found = break_down(seen, trace.steps(seen))
    assert found.launch_gap_ms == pytest.approx(0.005)
    assert found.host_gap_ms == pytest.approx(1 - 0.2 - 0.005)


@pytest.mark.parametrize(
    ("step_bytes", "gb_s", "wait", "peak", "bound"),
    [
        (100e3, 1.0, 10.0, None, "memory"),
        (1e3, 4300.0, 10.0, None, "launch"),
        (1e3, 4300.0, 2000.0, None, "host"),
        (1e3, 4300.0, 10.0, 1.2, "compute"),
    ],
)
def test_verdict(tmp_path: Path, step_bytes: float, gb_s: float, wait: float, peak: float | None, bound: str) -> None:
    seen = trace.read(gpu_trace(gap=0.5, wait=wait).save(tmp_path / "t.json"))
    found = verdict(break_down(seen, trace.steps(seen)), step_bytes, gb_s, step_operations=150e6, peak_tflops=peak)
    assert found.bound == bound
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.sentence.startswith(f"{bound}-bound: of {found.step_ms:.2f} ms")


def test_on_a_cpu_everything_beyond_the_floor_is_the_host(tmp_path: Path) -> None:
    seen = trace.read(cpu_trace().save(tmp_path / "t.json"))
    found = verdict(break_down(seen, trace.steps(seen)), 20e3, 10)
    assert found.bound == "host"
    assert found.shares == pytest.approx({"memory": 0.02, "launch": 0, "host": 0.98})
    assert "CUDA" not in found.sentence


def test_gb_s_per_part_stands_beside_the_time(tmp_path: Path) -> None:
    seen = trace.read(gpu_trace(draft=True).save(tmp_path / "t.json"))
    load = roofline.Load(context=1000, drafts=1)
    sizes = roofline.step_bytes(from_config("ling-3.0-flash-fp4"), load).by_part()
    table = break_down(seen, trace.steps(seen)).table(sizes).set_index("part")
    assert table.loc["kda", "bytes"] == pytest.approx(sizes["kda"] + sizes["KDA state"])
    assert table.loc["mla", "bytes"] == pytest.approx(sizes["mla"] + sizes["KV cache"])
    assert table.loc["draft mla", "bytes"] == pytest.approx(sizes["draft mla"] + sizes["draft KV cache"])
    assert table.loc["head", "gb_s"] == pytest.approx(sizes["head"] / 30e-6 / 1e9)
    assert table["share"].sum() == pytest.approx(1)


def test_a_trace_of_the_installed_torch(tmp_path: Path) -> None:
    """Not a trace written by this file: spans, scopes and operators as the real profiler writes them."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    a = torch.randn(192, 192)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(6):
            with record_function("step[DECODE bs=1]"):
                with record_function(trace.scope_name("kda")):
                    b = torch.nn.functional.linear(a, a)
                with record_function(trace.scope_name("experts", draft=True)):
                    (b @ a).softmax(-1)
    profiler.export_chrome_trace(str(tmp_path / "real.json.gz"))
    seen = trace.read(tmp_path / "real.json.gz")
    found = break_down(seen, trace.steps(seen))
    assert found.steps == 4
    assert set(found.parts) == {"kda", "draft experts"}
    assert found.parts["kda"][1] == 1  # aten::linear; the aten::t and aten::mm inside it are not counted again
    assert found.parts["draft experts"][1] == 2
    assert 0 < found.busy_ms < found.step_ms
    assert verdict(found, a.nbytes * 2, 10).bound == "host"
