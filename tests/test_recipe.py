import argparse
import itertools
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkmoe.checkpoint import Checkpoint, inspect
from sparkmoe.errors import RecipeError
from sparkmoe.gates import pool_need
from sparkmoe.machine import Machine
from sparkmoe.recipe import DRAFT_HEAD_ENV, EVIDENCE_ENV, FP8_HEAD_ENV, RECIPES, Recipe

MACHINES = {name: Machine.named(name) for name in ("cpu", "spark", "hopper")}
RUNNABLE = [
    (recipe, machine) for recipe in RECIPES.values() for machine in MACHINES.values() if recipe.why_not(machine) is None
]
# Read by PyTorch, OpenMP, Hugging Face's hub or our plugin; SGLang's own registry does not know them.
FOREIGN_ENV = {
    "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
    "THP_MEM_ALLOC_ENABLE", "TORCH_COMPILE_DISABLE", FP8_HEAD_ENV, EVIDENCE_ENV, DRAFT_HEAD_ENV,
}  # fmt: skip


def flags(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    return recipe.command(machine, model="/models/ling", port=30000).argv


@pytest.fixture(scope="module")
def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize(("recipe", "machine"), RUNNABLE, ids=lambda x: x.name if isinstance(x, Recipe) else x.profile)
def test_sglang_takes_every_flag(sglang_parser: argparse.ArgumentParser, recipe: Recipe, machine: Machine) -> None:
    full = recipe.with_(
        context_length=4096, kv_cache_dtype="fp8_e4m3", max_total_tokens=9000, radix_cache=False, metrics=True
    )
    for steps in range(1, 6) if recipe.draft_steps else [0]:
        for variant in (recipe.with_(draft_steps=steps), full.with_(draft_steps=steps)):
            argv = variant.command(machine, model="/models/ling", port=30001, api_key="k").argv
            parsed, left = sglang_parser.parse_known_args(list(argv[3:]))
            assert left == []
            assert (parsed.port, parsed.api_key, parsed.model_path) == (30001, "k", "/models/ling")
            assert parsed.speculative_num_steps == (steps or None)
            assert parsed.speculative_num_draft_tokens == (steps + 1 if steps else None)


@pytest.mark.parametrize(("recipe", "machine"), RUNNABLE, ids=lambda x: x.name if isinstance(x, Recipe) else x.profile)
def test_sglang_knows_every_variable(recipe: Recipe, machine: Machine) -> None:
    from sglang.srt.environ import envs

    with_all = recipe.with_(moe_activation="fp8") if recipe.moe == "humming" else recipe
    names = set(with_all.command(machine, model="/m", port=1, evidence=Path("/e")).env) - FOREIGN_ENV
    assert {name for name in names if not hasattr(envs, name)} == set()


def test_ours_is_unknown_to_sglang() -> None:
    """The day SGLang has a variable of this name it means something else than our plugin does."""
    from sglang.srt.environ import envs

    assert not hasattr(envs, FP8_HEAD_ENV)


def test_the_key_can_travel_in_a_config_file(tmp_path: Path) -> None:
    from sglang.srt.server_args import prepare_server_args

    config = tmp_path / "key.yaml"
    config.write_text('{"api-key": "secret"}')
    argv = RECIPES["baseline"].command(MACHINES["hopper"], model="/models/ling", port=30001, config=config).argv
    assert "secret" not in " ".join(argv)
    assert prepare_server_args(list(argv[3:])).api_key == "secret"


def test_one_head_flag_at_most() -> None:
    for recipe, machine in RUNNABLE:
        command = recipe.command(machine, model="/m", port=1)
        assert ("--enable-fp32-lm-head" in command.argv) is (recipe.head == "fp32")
        assert (command.env.get(FP8_HEAD_ENV) == "1") is (recipe.head == "fp8")


def test_the_published_recipe_on_a_spark() -> None:
    argv = " ".join(flags(RECIPES["all_three"], MACHINES["spark"]))
    for part in (
        "--moe-runner-backend humming",
        "--speculative-moe-runner-backend humming",
        "--fp8-gemm-backend cutlass",
        "--mem-fraction-static 0.68",
        "--host 127.0.0.1",
        "--reasoning-parser ling3 --tool-call-parser ling3",
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
    ):
        assert part in argv
    assert "trust-remote-code" not in argv
    baseline = " ".join(flags(RECIPES["baseline"], MACHINES["spark"]))
    assert "--moe-runner-backend flashinfer_mxfp4" in baseline
    assert "--enable-fp32-lm-head" in baseline


def test_cutlass_dense_is_for_the_spark_alone() -> None:
    for name in ("cpu", "hopper"):
        assert "--fp8-gemm-backend" not in flags(RECIPES["baseline"], MACHINES[name])


def test_the_shell_text_runs_the_same_command(tmp_path: Path) -> None:
    """Pasted into a shell, with the program replaced by one that shows what it gets."""
    recipe = RECIPES["nextn"].with_(
        extra_env=(("A_WORD", "two words; $HOME 'q'"),), extra_args=("--served-model-name", "a b")
    )
    command = recipe.command(MACHINES["cpu"], model=tmp_path / "my model", port=30000)
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nprintf "%s\\n" "$A_WORD" "$SGLANG_PLATFORM" "$@"\n')
    show.chmod(0o755)
    text = command.shell().replace(shlex.quote(command.argv[0]), str(show))
    out = subprocess.run(
        ["sh", "-c", text], capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}
    )
    assert out.stdout.splitlines() == ["two words; $HOME 'q'", "torch_cpu", *command.argv[1:]]


def test_humming_on_a_cpu_says_why_and_what_instead() -> None:
    with pytest.raises(RecipeError) as error:
        flags(RECIPES["all_three"], MACHINES["cpu"])
    assert str(error.value) == (
        "recipe all_three cannot run here: Humming needs an NVIDIA GPU; this machine runs on its CPU; "
        "nearest that runs here: fp8_head_nextn (without humming)"
    )


@pytest.mark.parametrize(
    ("recipe", "nearest"),
    [("humming", "baseline"), ("humming_fp8", "fp8_head"), ("all_three", "fp8_head_nextn"), ("nextn", "nextn")],
)
def test_the_nearest_recipe_drops_one_lever_and_is_named(recipe: str, nearest: str) -> None:
    assert RECIPES[recipe].nearest(MACHINES["cpu"]) == RECIPES[nearest]


def test_the_nearest_of_an_unnamed_recipe_says_what_it_lacks() -> None:
    near = RECIPES["all_three"].with_(draft_steps=5, name="five").nearest(MACHINES["cpu"])
    assert (near.name, near.moe, near.draft_steps, near.head) == ("five_without_humming", "auto", 5, "fp8")


@pytest.mark.parametrize(
    ("name", "near"),
    [("all_tree", "all_three"), ("base_line", "baseline"), ("fp8", "fp8_head"), ("hummming", "humming")],
)
def test_near_names_are_suggested(name: str, near: str) -> None:
    with pytest.raises(RecipeError, match=rf"no recipe named '{name}'; did you mean .*{near}"):
        Recipe.named(name)


def test_k_can_be_part_of_a_name() -> None:
    assert Recipe.named("nextn_k5").draft_steps == 5
    assert Recipe.named("nextn_k5").diff(RECIPES["nextn"]) == {"draft_steps": (5, 3)}
    with pytest.raises(RecipeError):
        Recipe.named("baseline_k2")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"moe": "cutlass"}, "moe='cutlass' is none of"),
        ({"head": "int4"}, "head='int4' is none of"),
        ({"draft_steps": 17}, "draft_steps=17"),
        ({"draft_steps": -1}, "draft_steps=-1"),
        ({"moe_activation": "fp8"}, "only moe='humming'"),
        ({"mem_fraction": 68}, "mem_fraction=68"),
        ({"drafts": 2}, "no field drafts"),
    ],
)
def test_impossible_fields(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        RECIPES["baseline"].with_(**changes)


def test_a_changed_recipe_has_another_name() -> None:
    changed = RECIPES["nextn"].with_(draft_steps=2)
    assert changed.name == "nextn(draft_steps=2)"
    assert RECIPES["nextn"].with_(draft_steps=3) == RECIPES["nextn"]


def test_diff_between_neighbours_is_one_lever() -> None:
    ladder = ["baseline", "humming", "humming_fp8", "all_three"]
    steps = [RECIPES[a].diff(RECIPES[b]) for a, b in itertools.pairwise(ladder)]
    assert steps == [{"moe": ("auto", "humming")}, {"head": ("fp32", "fp8")}, {"draft_steps": (0, 3)}]


def _checkpoint(**config: object) -> Checkpoint:
    return Checkpoint(Path("/models/ling"), {"architectures": ["BailingMoeV3ForCausalLM"], **config}, 1, 1, {})


def test_what_a_model_cannot_do() -> None:
    plain = _checkpoint(max_position_embeddings=4096)
    cpu, hopper = MACHINES["cpu"], MACHINES["hopper"]
    assert "no NEXTN layer" in (RECIPES["nextn"].why_not(cpu, plain) or "")
    assert RECIPES["baseline"].why_not(cpu, plain) is None
    long = RECIPES["baseline"].with_(context_length=8192)
    assert long.why_not(cpu, plain) == "context_length=8,192 is beyond the model's own 4,096 tokens"
    mxfp4 = RECIPES["baseline"].with_(moe="flashinfer_mxfp4")
    assert "needs MXFP4 experts" in (mxfp4.why_not(hopper, plain) or "")
    assert mxfp4.why_not(hopper, _checkpoint(quantization_config={"routed_experts_quant_method": "mxfp4"})) is None


def test_the_fingerprint_is_that_of_what_runs(miniature: Path) -> None:
    seen, cpu = inspect(miniature), MACHINES["cpu"]
    first = RECIPES["nextn"].fingerprint(cpu, seen)
    assert RECIPES["nextn"].with_(name="another name").fingerprint(cpu, seen) == first
    others = {r.fingerprint(cpu, seen) for r in (RECIPES["baseline"], RECIPES["nextn"].with_(draft_steps=2))}
    assert first not in others
    assert RECIPES["nextn"].fingerprint(MACHINES["hopper"], seen) != first


def test_two_sparks_share_one_model(miniature: Path) -> None:
    spark = Machine.named("spark")
    first, second = (Recipe.named("all_three").on_nodes(2, f"{n}/2", "192.168.100.1:20000") for n in (0, 1))
    argv = first.command(spark, model="/m", port=1).argv
    assert " ".join(argv).endswith("--tp-size 2 --nnodes 2 --node-rank 0 --dist-init-addr 192.168.100.1:20000")
    assert list(first.diff(second)) == ["node_rank"]
    alone = Recipe.named("all_three").on_nodes(1, "0/1", None)
    assert "--tp-size" not in alone.command(spark, model="/m", port=1).argv
    assert Recipe.named("baseline").with_(tp=2).why_not(replace(Machine.named("hopper"), gpu_count=2)) is None
    whole, half = (pool_need(recipe, spark, inspect(miniature)) for recipe in (alone, first))
    assert half["weights"] == whole["weights"] // 2
    assert half["KV cache"] == whole["KV cache"]


def test_attention_in_sglang_s_own_words(sglang_parser: argparse.ArgumentParser) -> None:
    for name in ("triton", "flashinfer", "fa3"):
        recipe = RECIPES["all_three"].with_(attention=name)
        parsed, left = sglang_parser.parse_known_args(list(flags(recipe, MACHINES["spark"])[3:]))
        assert (parsed.attention_backend, left) == (name, [])
        assert "the CPU platform attends by itself" in (
            RECIPES["nextn"].with_(attention=name).why_not(MACHINES["cpu"]) or ""
        )
    assert "--attention-backend" not in flags(RECIPES["all_three"], MACHINES["spark"])
    with pytest.raises(RecipeError, match="attention='fa2' is none of auto, triton"):
        RECIPES["all_three"].with_(attention="fa2")


def test_a_dspark_draft_in_sglang_s_own_words(
    sglang_parser: argparse.ArgumentParser, miniature: Path, tmp_path: Path
) -> None:
    spark, draft = MACHINES["spark"], tmp_path / "draft"
    recipe = RECIPES["fp8_head"].with_(name="dspark", draft_steps=5, draft_model=str(draft))
    parsed, left = sglang_parser.parse_known_args(list(flags(recipe, spark)[3:]))
    assert left == []
    assert (parsed.speculative_algorithm, parsed.speculative_draft_model_path) == ("DSPARK", str(draft))
    assert (parsed.speculative_dspark_block_size, parsed.speculative_num_steps) == (5, None)
    assert recipe.why_not(MACHINES["cpu"]) == "DSpark needs an NVIDIA GPU; this machine runs on its CPU"
    seen = inspect(miniature)
    assert (recipe.why_not(spark, seen) or "").startswith(f"there is no draft in {draft}")
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(bytes(1000))
    assert recipe.why_not(spark, replace(seen, config=seen.config | {"num_nextn_predict_layers": 0})) is None
    nextn = recipe.with_(name="nextn", draft_model=None)
    assert pool_need(recipe, spark, seen)["weights"] - pool_need(nextn, spark, seen)["weights"] == 1000
    first = recipe.fingerprint(spark, seen)
    os.utime(draft / "config.json", (1, 1))
    assert recipe.fingerprint(spark, seen) != first


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"draft_model": "d"}, "need a draft, found draft_steps=0"),
        ({"draft_model": "d", "draft_steps": 5, "hot_vocab": "map.pt"}, "scores with the target's head"),
        ({"draft_model": "d", "draft_steps": 5, "draft_head": "fp8", "head": "bf16"}, "scores with the target's head"),
        ({"tp": 3, "nodes": 2, "dist_init_addr": "a:1"}, "cannot be shared evenly by 2 nodes"),
        ({"tp": 2, "nodes": 2}, "need dist_init_addr"),
        ({"tp": 2, "nodes": 2, "dist_init_addr": "a:1", "node_rank": 2}, "not in 0…1"),
        ({"tp": 2, "draft_steps": 3, "hot_vocab": "map.pt"}, "no hot vocabulary with tp=2"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe("several", **changes)
    with pytest.raises(RecipeError, match="something like 0/2"):
        Recipe("several").on_nodes(2, "second", None)


def test_more_gpus_than_there_are_is_a_reason() -> None:
    two = Recipe("two", tp=2)
    assert two.why_not(Machine.named("spark")) == "tp=2 on 1 node(s) needs 2 GPUs each; this machine has 1"
    assert two.why_not(Machine.named("cpu")) == "tp=2 on 1 node(s) needs 2 GPUs each; this machine has 0"
