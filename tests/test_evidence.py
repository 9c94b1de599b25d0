import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkmoe.sglang_plugin import evidence, findings, hooks, humming_clamp
from sparkmoe.sglang_plugin.draft_head import build
from sparkmoe.sglang_plugin.fp8_lm_head import Fp8HeadMethod

N, K = 64, 32


def model(*, fp8: bool = False, fp32: bool = False) -> Any:
    made: Any = torch.nn.Module()
    made.lm_head = torch.nn.Module()
    made.lm_head.weight = torch.nn.Parameter(torch.randn(N, K).to(torch.bfloat16), requires_grad=False)
    made.logits_processor = SimpleNamespace(use_fp32_lm_head=fp32)
    if fp8:
        Fp8HeadMethod().process_weights_after_loading(made.lm_head)
    return made


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[hooks.Hook]:
    """What counts as registered in this process, to be filled by the test."""
    known: list[hooks.Hook] = []
    monkeypatch.setattr(hooks, "_registered", known)
    return known


def test_the_format_of_a_head_comes_from_its_tensors() -> None:
    bf16 = findings.head(model())
    assert bf16 is not None
    assert (bf16["dtype"], bf16["scales"], bf16["bytes"], bf16["fp32_logits"]) == ("bfloat16", "none", N * K * 2, False)
    fp32 = findings.head(model(fp32=True))
    assert fp32 is not None
    assert fp32["fp32_logits"]
    fp8 = findings.head(model(fp8=True, fp32=True))
    assert fp8 is not None
    assert (fp8["dtype"], fp8["scales"], fp8["bytes"]) == ("float8_e4m3fn", "channel", N * K + 4 * N)
    assert (fp8["rows"], fp8["columns"]) == (N, K)
    assert not fp8["fp32_logits"]  # an FP8 head ignores the flag
    assert findings.head(torch.nn.Module()) is None


def test_the_draft_s_head_is_compared_by_identity() -> None:
    target, draft = model(fp8=True), model()
    draft.lm_head = target.lm_head
    shared = findings.draft_head(draft, target)
    assert (shared["is_target_module"], shared["shares_weight"], shared["extra_bytes"]) == (True, True, 0)
    weight_only = model()
    weight_only.lm_head.weight = target.lm_head.weight  # what SGLang does by itself
    found = findings.draft_head(weight_only, target)
    assert (found["is_target_module"], found["shares_weight"], found["scales"]) == (False, True, "none")
    own = model()
    own.lm_head = build(model().lm_head, "fp8", torch.arange(16))
    found = findings.draft_head(own, target)
    assert (found["is_target_module"], found["extra_bytes"], found["rows"]) == (False, 16 * K + 64, 16)


def test_the_worker_that_drafts_is_found() -> None:
    inner = SimpleNamespace(draft_runner=SimpleNamespace(model=model()), hot_token_id=None, topk=1)
    inner.speculative_algorithm, inner.speculative_num_steps = SimpleNamespace(name="EAGLE"), 3
    inner.speculative_num_draft_tokens = 4
    nextn = SimpleNamespace(draft_worker=inner)
    assert evidence.drafting(None) is None
    assert evidence.drafting(nextn) is inner
    assert evidence.speculative(inner) == {"algorithm": "EAGLE", "steps": 3, "topk": 1, "draft_tokens": 4}
    target = model(fp8=True)
    drafter = model()
    drafter.lm_head = target.lm_head
    dspark = SimpleNamespace(draft_worker=object(), draft_model=drafter, gamma=5, speculative_num_draft_tokens=6)
    assert evidence.drafting(dspark) is dspark
    assert evidence.speculative(dspark) == {"algorithm": "DSPARK", "steps": 5, "topk": 1, "draft_tokens": 6}
    found = evidence.draft(dspark, target)
    assert (found["moe"], found["hot_vocabulary"], found["head"]["is_target_module"]) == ([], None, True)


def test_dspark_s_worker_still_has_what_the_evidence_reads() -> None:
    file = "sglang/srt/speculative/dspark_components/dspark_worker_v2.py"
    source = Path(str(importlib.metadata.distribution("sglang").locate_file(file))).read_text()
    for name in ("gamma", "draft_model", "speculative_num_draft_tokens"):
        assert f"        self.{name} = " in source


def experts(backend: str, *, limit: float | None = 4.0, **method: Any) -> Any:
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    layer: Any = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(torch.zeros(2, 8, 4), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    config = MoeRunnerConfig(
        layer_id=7, gemm1_clamp_limit=limit, params_dtype=torch.bfloat16, routed_scaling_factor=2.5
    )
    layer.moe_runner_config = config
    layer.runner_backend = SimpleNamespace(value=backend)
    layer.quant_method = SimpleNamespace(runner=SimpleNamespace(config=config), **method)
    return layer


def clamp(backend: str, **method: Any) -> float | None:
    return findings.clamp_in_force(backend, experts(backend, **method), 4.0, {})


def test_a_clamp_counts_only_if_its_hook_is_on(registered: list[hooks.Hook]) -> None:
    marlin_told = SimpleNamespace(config=SimpleNamespace(swiglu_limit=-4.0))
    assert clamp("humming") is None
    assert (
        findings.clamp_in_force("marlin", SimpleNamespace(quant_method=SimpleNamespace(runner=marlin_told)), 4.0, {})
        is None
    )
    registered += humming_clamp.HOOKS
    assert clamp("humming") == 4.0
    assert (
        findings.clamp_in_force("marlin", SimpleNamespace(quant_method=SimpleNamespace(runner=marlin_told)), 4.0, {})
        == 4.0
    )
    assert clamp("marlin") is None  # the hooks are on, but nobody told this layer's runner
    assert clamp("triton") is None


def test_the_clamp_of_flashinfer_is_read_from_its_tensor() -> None:
    limit = torch.full((3,), 4.0)
    assert clamp("flashinfer_mxfp4", _use_swiglu_step=True, _swiglu_limit_tensor=limit) == 4.0
    assert clamp("flashinfer_mxfp4", _use_swiglu_step=False, _swiglu_limit_tensor=limit) is None
    assert clamp("flashinfer_mxfp4", _use_swiglu_step=True, _swiglu_limit_tensor=None) is None


def test_on_a_cpu_the_layers_that_run_are_the_platform_s() -> None:
    made: Any = torch.nn.Module()
    made.model = torch.nn.Module()
    made.model.experts, made.model.forgotten = experts("triton"), experts("triton")
    running = SimpleNamespace(w13=made.model.experts.w13_weight.data, limit=4.0)
    blocks = [SimpleNamespace(mlp=SimpleNamespace()), SimpleNamespace(mlp=SimpleNamespace(experts=running))]
    object.__setattr__(made.model, findings.CPU_NETWORK, SimpleNamespace(blocks=blocks))
    first, second = findings.moe(made)
    assert (first["runner"], first["layer"], first["limit"], first["clamp"]) == ("native", 7, 4.0, 4.0)
    assert first["weight_bytes"] == 4 * (64 + 32)
    assert (second["limit"], second["clamp"]) == (4.0, None)


def test_a_gpu_runner_s_formats_come_from_its_metadata(registered: list[hooks.Hook]) -> None:
    layer = experts("humming")
    layer.humming_metas = {"w13": SimpleNamespace(a_dtype="float8e4m3", b_dtype="float4e2m1")}
    found = findings.moe_layer("x", layer, {})
    assert (found["weight_dtype"], found["activation_dtype"]) == ("float4e2m1", "float8e4m3")


def test_shared_storage_is_counted_once() -> None:
    a = torch.nn.Linear(4, 4, bias=False)
    both = torch.nn.ModuleList([a, torch.nn.Linear(4, 4, bias=False)])
    assert findings.model_bytes(both) == 128
    both[1].weight = torch.nn.Parameter(a.weight.data.view(2, 8), requires_grad=False)
    assert findings.model_bytes(both) == 64


def test_the_file_is_replaced_at_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    evidence.write(path, {"stage": "loaded"})
    evidence.write(path, {"stage": "served"})
    assert json.loads(path.read_text()) == {"stage": "served"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["e.json"]


def test_a_fault_is_written_and_does_not_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.runtime_context as context

    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(tp_rank=0, pp_rank=0))
    path = tmp_path / "e.json"
    monkeypatch.setenv(evidence.PATH_ENV, str(path))
    evidence.report(SimpleNamespace(), "loaded")
    found = json.loads(path.read_text())
    assert found["stage"] == "loaded"
    assert "AttributeError" in found["error"]
    path.unlink()
    monkeypatch.setattr(context, "get_parallel", lambda: SimpleNamespace(tp_rank=1, pp_rank=0))
    evidence.report(SimpleNamespace(), "loaded")
    assert not path.exists()


def test_served_is_written_once_after_the_first_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    monkeypatch.setattr(evidence, "report", lambda scheduler, stage: stages.append(stage))
    scheduler = SimpleNamespace()

    def batch(decode: bool) -> Any:
        return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))

    for decode in (False, True, True):
        evidence._after_batch(None, scheduler, batch(decode), None)
    assert stages == ["served"]


def test_secrets_on_the_command_line_are_blanked() -> None:
    code = "import json, sparkmoe.sglang_plugin.evidence as e; print(json.dumps(e.launch_arguments()))"
    words = ["sglang.launch_server", "--model-path", "/m", "--api-key", "secret", "--random-seed", "0"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[-6:] == ["--model-path", "/m", "--api-key", "…", "--random-seed", "0"]
    assert "secret" not in done.stdout


class Paged:
    pass


class Grouped:
    pass


@pytest.mark.parametrize(
    ("runner", "names"),
    [
        (SimpleNamespace(attn_backend=Paged()), ["Paged"]),
        (
            SimpleNamespace(attn_backend=SimpleNamespace(full_attn_backend=Paged(), linear_attn_backend=object())),
            ["Paged"],
        ),
        (
            SimpleNamespace(attn_backend=SimpleNamespace(decode_backend=Grouped(), prefill_backend=Paged())),
            ["Grouped", "Paged"],
        ),
        (SimpleNamespace(attn_backend=SimpleNamespace(decode_backend=Paged(), prefill_backend=Paged())), ["Paged"]),
        (SimpleNamespace(attn_backend=SimpleNamespace(primary=Paged(), children=[])), ["Paged"]),
        (SimpleNamespace(), []),
    ],
    ids=["plain", "beside a recurrent one", "two", "twice the same", "batches that overlap", "unknown"],
)
def test_what_attends_is_named(runner: SimpleNamespace, names: list[str]) -> None:
    assert findings.attention(runner) == names


def test_attributes_of_those_names_that_are_strings_are_no_backends() -> None:
    class FlashInferAttnBackend:
        decode_backend = prefill_backend = "fa2"

    assert findings.attention(SimpleNamespace(attn_backend=FlashInferAttnBackend())) == ["FlashInferAttnBackend"]
