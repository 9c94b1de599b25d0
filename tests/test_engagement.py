import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkmoe.engagement import (
    MIN_ACCEPT_LENGTH,
    Check,
    accept_length,
    examine,
    prove,
    read_evidence,
    require,
    rows,
    verify,
)
from sparkmoe.engine import Engine
from sparkmoe.errors import EngineError, NotEngaged
from sparkmoe.hot_vocab import choose, save
from sparkmoe.recipe import RECIPES, Recipe
from sparkmoe.sample import Sample

N, K = 1024, 64
Serve = Callable[..., Engine]


def head(precision: str, *, scales: str = "channel") -> dict[str, Any]:
    fp8 = precision == "fp8"
    size = N * K * (1 if fp8 else 2) + (4 * N if fp8 else 0)
    return {
        "class": "ParallelLMHead",
        "method": "Fp8HeadMethod" if fp8 else "UnquantizedEmbeddingMethod",
        "dtype": "float8_e4m3fn" if fp8 else "bfloat16",
        "scales": scales if fp8 else "none",
        "rows": N,
        "columns": K,
        "bytes": size,
        "fp32_logits": precision == "fp32",
    }


def layer(number: int, runner: str, limit: float | None = None, clamp: float | None = None) -> dict[str, Any]:
    activation = "bfloat16"
    return {
        "name": f"model.layers.{number}.mlp.experts",
        "runner": runner,
        "limit": limit,
        "clamp": clamp,
        "activation_dtype": activation,
    }


def healthy(recipe: Recipe, *, gpu: bool = True) -> dict[str, Any]:
    """What the server of a fully engaged recipe writes."""
    runner = {"auto": "flashinfer_mxfp4", "native": "triton"}.get(recipe.moe, recipe.moe) if gpu else "native"
    names = ["Scheduler.__init__", "Scheduler.process_batch_result", "EagleDraftWorker.init_lm_head"]
    names += ["loader._initialize_model"] if recipe.head == "fp8" else []
    draft = None
    if recipe.draft_steps:
        shared = head(recipe.head) | {"is_target_module": True, "shares_weight": True, "extra_bytes": 0}
        own = head("fp8") | {"is_target_module": False, "shares_weight": False, "extra_bytes": N * K + 4 * N}
        draft = {"class": "NextN", "moe": [layer(0, runner)], "hot_vocabulary": None, "hot_rows": None}
        draft["head"] = own if recipe.draft_head == "fp8" else shared
    return {
        "schema": 1,
        "stage": "served",
        "pid": 1,
        "device": {"capability": [9, 0] if gpu else None},
        "hooks": [{"target": f"sglang.{name}"} for name in names],
        "target": {
            "moe": [layer(3, runner), layer(35, runner, 4.0, 4.0)],
            "head": head(recipe.head),
            "attention": [] if not gpu else ["FlashInferMLAAttnBackend"],
            "replayssm": {"decode": False, "verify": False, "cache_len": 16},
        },
        "draft": draft,
        "speculative": {"steps": recipe.draft_steps, "topk": 1} if recipe.draft_steps else None,
        "graphs": {"decode": [1, 2], "draft_decode": [1], "draft_extend": [1]} if gpu else {"decode": []},
        "argv": ["python", "-m", "sglang.launch_server"],
    }


def sample(tokens: int = 32, steps: int | None = None, tpot_ms: float = 1.0) -> Sample:
    return Sample("h", 0.0, completion_tokens=tokens, spec_verify_ct=steps, tpot_ms=tpot_ms)


def answers(recipe: Recipe) -> list[Sample]:
    return [sample(steps=12 if recipe.draft_steps else None)] * 5


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.required and not check.ok]


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "cpu"])
def test_an_engaged_recipe_passes_every_check(name: str, gpu: bool) -> None:
    recipe = RECIPES[name]
    checks = require(recipe, healthy(recipe, gpu=gpu), answers(recipe))
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    assert {"plugin", "served", "hooks", "moe", "clamp", "head", "head_bytes", "draft"} <= set(names)
    assert ("accept_length" in names) == bool(recipe.draft_steps)
    assert ("graphs" in names) == gpu


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(evidence: dict[str, Any]) -> None:
        *way, last = path.split(".")
        place: Any = evidence
        for step in way:
            place = place[int(step) if step.isdigit() else step]
        place[int(last) if last.isdigit() else last] = value

    return apply


ALL = RECIPES["all_three"]
SABOTAGE = [
    # what was done, recipe, how the evidence differs, checks that must fail, words that the message must hold
    ("unset variable", ALL, change("target.head", head("bf16")), {"head", "head_bytes"}, "SGLANG_ENABLE_FP8_LM_HEAD"),
    ("a variable left behind", RECIPES["baseline"], change("target.head", head("fp8")), {"head", "head_bytes"}, "fp8"),
    ("fp32 flag forgotten", RECIPES["baseline"], change("target.head", head("bf16")), {"head"}, "expected fp32"),
    (
        "hook renamed and skipped",
        ALL,
        change("hooks", [{"target": "x.process_batch_result"}]),
        {"hooks"},
        "init_lm_head",
    ),
    ("wrong backend", ALL, change("target.moe.0.runner", "marlin"), {"moe", "draft_moe"}, "humming, marlin"),
    ("draft on another backend", ALL, change("draft.moe.0.runner", "triton"), {"draft_moe"}, "found triton"),
    ("clamp dropped", ALL, change("target.moe.1.clamp", None), {"clamp"}, "model.layers.35.mlp.experts"),
    (
        "weight-only sharing",
        ALL,
        change("draft.head", head("fp8", scales="none") | {"is_target_module": False, "extra_bytes": 0}),
        {"draft_head"},
        "without its scales",
    ),
    ("no draft", ALL, lambda e: e.update(draft=None, speculative=None), {"draft"}, "found none"),
    ("other K", ALL, change("speculative.steps", 2), {"draft"}, "2 steps"),
    ("an uninvited draft", RECIPES["baseline"], change("speculative", {"steps": 3, "topk": 1}), {"draft"}, "3 steps"),
    ("graphs off", ALL, change("graphs.decode", []), {"graphs"}, "captured: draft_decode, draft_extend"),
    ("inert ring length", ALL, change("argv", ["--linear-replayssm-cache-len", "8"]), {"inert"}, "no ring"),
    ("no request yet", ALL, change("stage", "loaded"), {"served"}, "found loaded"),
    ("a half-quantized head", ALL, change("target.head.bytes", 7), {"head_bytes"}, "found 7"),
]


@pytest.mark.parametrize(
    ("recipe", "sabotage", "names", "words"), [s[1:] for s in SABOTAGE], ids=[s[0] for s in SABOTAGE]
)
def test_sabotage_is_named(recipe: Recipe, sabotage: Any, names: set[str], words: str) -> None:
    evidence = healthy(recipe)
    sabotage(evidence)
    assert set(failed(verify(recipe, evidence, answers(recipe)))) == names
    with pytest.raises(NotEngaged) as caught:
        require(recipe, evidence, answers(recipe))
    message = str(caught.value)
    assert f"recipe {recipe.name} is not engaged, check `" in message
    assert words in message
    assert "Usual cause: " in message


def test_no_evidence_means_no_plugin() -> None:
    with pytest.raises(NotEngaged, match=r"check `plugin`.*SGLANG_PLUGINS leaves `sparkmoe` out or is misspelt"):
        require(ALL, None, [])


def test_a_misspelt_plugin_name_is_quoted() -> None:
    recipe = ALL.with_(extra_env=(("SGLANG_PLUGINS", "sparkmo,torch_cpu"),))
    (check,) = verify(recipe, None, [])
    assert "SGLANG_PLUGINS=sparkmo,torch_cpu leaves out sparkmoe" in check.found


def test_evidence_that_failed_or_is_foreign() -> None:
    assert failed(verify(ALL, {"schema": 1, "error": "Traceback\nKeyError: 'x'\n"}, [])) == ["evidence"]
    assert failed(verify(ALL, healthy(ALL) | {"schema": 2}, [])) == ["evidence"]


def test_a_draft_that_is_never_accepted_is_caught() -> None:
    assert failed(verify(ALL, healthy(ALL), [sample(steps=32)] * 5)) == ["accept_length"]
    assert failed(verify(ALL, healthy(ALL), [])) == ["accept_length"]
    assert accept_length([sample(30, 10), sample(10, 10), sample(5)]) == 2.0
    assert accept_length([sample(5)]) is None


def test_a_flag_with_its_switch_is_not_inert() -> None:
    evidence = healthy(ALL)
    evidence["argv"] += ["--linear-replayssm-cache-len", "8", "--enable-linear-replayssm"]
    evidence["target"]["replayssm"]["decode"] = True
    assert failed(verify(ALL, evidence, answers(ALL))) == []


def test_a_draft_only_fp8_head_must_be_the_draft_s_own() -> None:
    recipe = RECIPES["draft_fp8_head"]
    evidence = healthy(recipe)
    evidence["draft"]["head"] = head("bf16") | {"is_target_module": True, "extra_bytes": 0}
    assert failed(verify(recipe, evidence, answers(recipe))) == ["draft_head"]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_hot_vocabulary_is_counted(precision: Any, tmp_path: Path) -> None:
    save(tmp_path / "hot.pt", choose(dict.fromkeys(range(32), 1), 32, N))
    recipe = Recipe("hot", head=precision, draft_steps=3, hot_vocab=str(tmp_path / "hot.pt"))
    evidence = healthy(recipe)
    evidence["draft"]["head"] = head(precision) | {"is_target_module": False, "extra_bytes": 32 * K}
    evidence["draft"]["hot_vocabulary"] = 32
    assert failed(verify(recipe, evidence, answers(recipe))) == []
    other = copy.deepcopy(evidence)
    other["draft"]["hot_vocabulary"] = None
    assert failed(verify(recipe, other, answers(recipe))) == ["hot_vocabulary"]
    other = copy.deepcopy(evidence)
    other["draft"]["head"] |= {"scales": "none", "method": None, "dtype": "float8_e4m3fn"}
    assert failed(verify(recipe, other, answers(recipe))) == ["draft_head"]


def test_dspark_is_told_from_the_model_s_own_draft() -> None:
    recipe = RECIPES["all_three"].with_(name="dspark", draft_model="/models/draft")
    evidence = healthy(recipe)
    evidence["draft"]["moe"] = []  # a dense draft
    assert failed(verify(recipe, evidence, answers(recipe))) == ["draft"]
    evidence["speculative"]["algorithm"] = "DSPARK"
    assert failed(verify(recipe, evidence, answers(recipe))) == []
    assert failed(verify(RECIPES["all_three"], evidence, answers(recipe))) == ["draft"]


def test_the_direction_of_tpot_is_noted_and_not_required() -> None:
    mine, theirs = [sample(steps=12, tpot_ms=2.0)], [sample(tpot_ms=1.0)]
    check = verify(ALL, healthy(ALL), mine, baseline=theirs)[-1]
    assert (check.name, check.ok, check.required) == ("tpot", False, False)
    assert rows([check])[0]["result"] == "no"
    assert verify(ALL, healthy(ALL), theirs, baseline=mine)[-1].ok


@pytest.mark.parametrize(("name", "found"), [("all_three", "no"), ("humming", None)])
def test_drafts_under_triton_attention_are_told_of_a_long_context(name: str, found: str | None) -> None:
    evidence = healthy(RECIPES[name])
    evidence["target"]["attention"] = ["TritonAttnBackend"]
    checks = require(RECIPES[name], evidence, answers(RECIPES[name]))  # a direction worth knowing, no lack of proof
    told = {row["check"]: row["result"] for row in rows(checks)}
    assert told.get("long_context") == found
    assert all("--attention flashinfer" in check.cause for check in checks if check.name == "long_context")
    evidence["target"]["attention"] = ["FlashInferMLAAttnBackend"]
    told = {row["check"]: row["result"] for row in rows(require(RECIPES[name], evidence, answers(RECIPES[name])))}
    assert told.get("long_context") == (found and "yes")


@pytest.mark.parametrize(
    ("asked", "classes", "told"),
    [
        ("flashinfer", ["FlashInferMLAAttnBackend"], "yes"),
        ("flashinfer", ["TritonAttnBackend", "FlashInferMLAAttnBackend"], "no"),
        ("fa3", ["FlashAttentionBackend"], "yes"),
        ("triton", [], "no"),
        ("auto", ["TritonAttnBackend"], None),
    ],
)
def test_the_backend_that_attends_is_told(asked: str, classes: list[str], told: str | None) -> None:
    recipe = ALL.with_(attention=asked)
    evidence = healthy(recipe)
    evidence["target"]["attention"] = classes
    found = {row["check"]: row["result"] for row in rows(require(recipe, evidence, answers(recipe)))}
    assert found.get("attention") == told


def test_one_draft_needs_no_graph_of_its_own() -> None:
    recipe = ALL.with_(draft_steps=1)
    evidence = healthy(recipe)
    evidence["graphs"]["draft_decode"] = []
    found = {row["check"]: row["result"] for row in rows(verify(recipe, evidence, answers(recipe)))}
    assert found["draft_graphs"] == "yes"
    evidence["speculative"]["steps"] = 2
    found = {row["check"]: row["result"] for row in rows(verify(recipe, evidence, answers(recipe)))}
    assert found["draft_graphs"] == "no"


def test_a_draft_pass_that_no_graph_holds_is_told() -> None:
    evidence = healthy(ALL)
    evidence["graphs"]["draft_extend"] = []  # FlashInfer's
    told = {row["check"]: row["result"] for row in rows(require(ALL, evidence, answers(ALL)))}
    assert (told["graphs"], told["draft_graphs"]) == ("ok", "no")
    plain = {row["check"] for row in rows(verify(RECIPES["humming"], healthy(RECIPES["humming"]), [sample()]))}
    assert "draft_graphs" not in plain


def test_rows_for_a_table() -> None:
    table = rows(verify(ALL, healthy(ALL), []))
    assert {row["result"] for row in table} == {"ok", "FAILED", "yes"}
    assert all(set(row) == {"check", "expected", "found", "where", "result"} for row in table)


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert read_evidence(tmp_path / "none.json") is None
    (tmp_path / "e.json").write_text('{"schema": 1}')
    assert read_evidence(tmp_path / "e.json") == {"schema": 1}


def test_a_renamed_target_ends_the_process_with_its_name() -> None:
    code = (
        "import sglang.srt.speculative.eagle_worker_v2 as w\n"
        "w.EagleDraftWorker.init_head = w.EagleDraftWorker.init_lm_head\n"
        "del w.EagleDraftWorker.init_lm_head\n"
        "from sparkmoe.sglang_plugin import draft_head\n"
        "draft_head.register()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head does not fit" in done.stderr
    assert "SGLang 0.5" in done.stderr


@pytest.fixture(scope="session")
def uneven(miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The miniature with head rows of very different size, as training makes them: its scales then matter."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("uneven") / "model"
    shutil.copytree(miniature, folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    weight = tensors["lm_head.weight"].float()
    factors = torch.exp(torch.randn(len(weight), 1, generator=torch.Generator().manual_seed(0)))
    tensors["lm_head.weight"] = (weight * factors).to(torch.bfloat16)
    save_file(tensors, shard, metadata={"format": "pt"})
    return folder


@pytest.mark.server
def test_a_live_server_is_proven_and_another_recipe_is_not(serve: Serve) -> None:
    engine = serve("fp8_head_nextn")
    assert failed(prove(engine)) == []
    found = read_evidence(engine.evidence_path)
    assert found is not None
    assert found["target"]["attention"] == ["TorchCpuAttnBackend"]
    assert found["pid"] != engine.pid  # written by the scheduler, not by the launcher
    for other, name in (("nextn", "head"), ("fp8_head", "draft")):
        with pytest.raises(NotEngaged, match=f"check `{name}`"):
            require(Recipe.named(other), found, [])


@pytest.mark.server
def test_the_command_verifies_a_running_server(
    serve: Serve, miniature: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparkmoe.cli import main

    serve("fp8_head_nextn")
    with pytest.raises(SystemExit) as ended:
        main(["verify", "fp8_head_nextn", "--machine", "cpu", "--model", str(miniature)])
    *table, last = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert json.loads(last) == {"recipe": "fp8_head_nextn", "engaged": True, "failed": []}
    assert any("accept_length" in line and "ok" in line for line in table)


@pytest.mark.server
def test_lost_scales_serve_and_the_accept_length_collapses(serve: Serve, uneven: Path) -> None:
    shared = next(s for s in examine(serve("fp8_head_nextn", model=uneven)) if s.name == "accept_length")
    assert shared.ok, shared.found
    lost = examine(serve("fp8_head_nextn", model=uneven, draft_head="unscaled"))
    assert set(failed(lost)) == {"draft_head", "accept_length"}
    found = next(check.found for check in lost if check.name == "accept_length")
    assert float(found.split()[0]) < MIN_ACCEPT_LENGTH


@pytest.mark.server
@pytest.mark.parametrize(
    ("changes", "name", "cause"),
    [
        ({"draft_head": "weight_only"}, "draft_head", "share an FP8 head without its scales"),
        ({"extra_env": (("SGLANG_PLUGINS", "sparkmo,torch_cpu"),)}, "plugin", "died at stage"),
    ],
    ids=["weight only", "misspelt plugin"],
)
def test_what_kills_a_server_is_explained(
    changes: dict[str, Any], name: str, cause: str, miniature: Path, tmp_path: Path
) -> None:
    engine = Engine(RECIPES["fp8_head_nextn"].with_(**changes), "cpu", miniature, log_dir=tmp_path, show=False)
    with pytest.raises(EngineError, match=cause):
        engine.start()
    written = list(tmp_path.glob("*.evidence.json"))
    evidence = read_evidence(written[0]) if written else None
    assert name in failed(verify(engine.recipe.with_(draft_head="shared"), evidence, []))
