"""The driver against a server that plays SGLang's profiler, the scopes without a server, and both on a real one."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_server import Behaviour, FakeServer
from sparkmoe import hot_vocab, inventory, profiling, workload
from sparkmoe.client import Client
from sparkmoe.engine import Engine
from sparkmoe.errors import DataError
from sparkmoe.inventory import PARTS
from sparkmoe.machine import Machine
from sparkmoe.nano import bundle
from sparkmoe.recipe import Recipe
from sparkmoe.sample import RequestFailed
from test_trace import Writer, cpu_trace

NAMED = 0.95  # of the operators' time
BESIDE = ("scheduling", "sampling", "verification")  # parts that hold no weights


def packed(writer: Writer, tmp_path: Path) -> bytes:
    return writer.save(tmp_path / "source.json.gz").read_bytes()


def test_one_request_is_profiled_and_its_steps_are_found(tmp_path: Path) -> None:
    with FakeServer(Behaviour(trace=packed(cpu_trace(), tmp_path))) as server:
        seen, steps = profiling.record(Client(server.url), "one", tmp_path / "traces", gpu=True, output_tokens=8)
        assert server.profile["activities"] == ["CPU", "GPU"]
        assert server.profile["with_stack"] is False
        assert (
            server.requests[-1]["sampling_params"] | {"max_new_tokens": 8, "ignore_eos": True}
            == (server.requests[-1]["sampling_params"])
        )
    assert Path(seen.path).parent == tmp_path / "traces"
    assert len(steps) == 3


def test_a_profile_without_decode_steps_or_without_a_file_is_refused(tmp_path: Path) -> None:
    prefill = Writer()
    prefill.add("user_annotation", "step[EXTEND bs=1 toks=9]", 0, 10)
    prefill.add("cpu_op", "aten::mm", 1, 5)
    for content, message in ((packed(prefill, tmp_path), "holds no decode step"), (None, "left no decode-")):
        with FakeServer(Behaviour(trace=content)) as server, pytest.raises(DataError, match=message):
            profiling.record(Client(server.url), "one", tmp_path / "traces")


def test_the_profiler_is_stopped_where_the_request_fails(tmp_path: Path) -> None:
    content = packed(cpu_trace(), tmp_path)
    with FakeServer(Behaviour(trace=content, drop_after=1)) as server, pytest.raises(RequestFailed):
        profiling.record(Client(server.url), "one", tmp_path / "traces")
    assert len(list((tmp_path / "traces").glob("*.trace.json.gz"))) == 1


def test_the_load_of_a_recipe(tmp_path: Path) -> None:
    cpu, spark = Machine.named("cpu"), Machine.named("spark")
    plain = profiling.load_of(Recipe.named("fp8_head"), spark, 100)
    assert (plain.head, plain.drafts, plain.dtype, plain.cache_bytes, plain.draft_head) == ("fp8", 0, "stored", 2, None)
    hot_vocab.save(tmp_path / "hot.pt", hot_vocab.choose({7: 1}, 64, 2048))
    own = Recipe.named("draft_fp8_head").with_(hot_vocab=str(tmp_path / "hot.pt"))
    drafting = profiling.load_of(own, cpu, 100)
    assert (drafting.head, drafting.draft_head, drafting.hot_tokens) == ("bf16", "fp8", 64)
    assert (drafting.dtype, drafting.cache_bytes) == ("float32", 4)
    with pytest.raises(DataError, match="not that of recipe dspark"):
        profiling.load_of(Recipe.named("nextn").with_(name="dspark", draft_model="d"), spark, 100)


def test_scopes_wrap_while_a_profiler_runs_and_leave_no_trace() -> None:
    from sparkmoe.sglang_plugin.torch_cpu import scopes

    before = [pkgutil.resolve_name(scope.target) for scope in scopes.SCOPES]
    scopes.open_scopes()
    wrapped = [pkgutil.resolve_name(scope.target) for scope in scopes.SCOPES]
    scopes.open_scopes()
    assert [pkgutil.resolve_name(scope.target) for scope in scopes.SCOPES] == wrapped
    assert not set(wrapped) & set(before)
    scopes.close_scopes()
    assert [pkgutil.resolve_name(scope.target) for scope in scopes.SCOPES] == before
    assert {scope.part for scope in scopes.SCOPES} <= {*PARTS, *BESIDE}


def test_a_scope_whose_function_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparkmoe.sglang_plugin.torch_cpu import moe, scopes

    gone = scopes.Scope("sparkmoe.sglang_plugin.torch_cpu.moe.Router.renamed", "router")
    kept = next(scope for scope in scopes.SCOPES if scope.target.endswith("Experts.__call__"))
    monkeypatch.setattr(scopes, "SCOPES", (gone, kept))
    before = moe.Experts.__call__
    scopes.open_scopes()
    assert moe.Experts.__call__ is not before
    scopes.close_scopes()
    assert moe.Experts.__call__ is before
    assert not hasattr(moe.Router, "renamed")


@pytest.mark.server
@pytest.mark.parametrize("recipe", ["nextn", "baseline"])
def test_nearly_all_operator_time_of_a_real_step_has_a_name(
    serve: Callable[..., Engine], tmp_path: Path, recipe: str
) -> None:
    """Plain and NEXTN on the CPU: parts of target and draft, weights that bytes stand beside, and no scope left."""
    engine = serve("nextn", model=bundle.folder("bf16")) if recipe == "nextn" else serve(recipe)
    client, weights = engine.client(), inventory.from_folder(engine.model)
    prompt = workload.miniature(client, n=1)[0].token_ids if recipe == "nextn" else "Two plus two"
    load = profiling.load_of(engine.recipe, engine.machine, 64)
    before = client.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids
    seen = profiling.dissect(client, [prompt], tmp_path, weights, 10.0, load, output_tokens=24)
    assert seen.found.named_share >= NAMED
    assert {"kda", "mla", "dense", "shared", "experts", "router", "norms", "head", "embedding"} <= set(seen.found.parts)
    drafted = {part for part in seen.found.parts if part.startswith("draft ")}
    if recipe == "nextn":
        assert {"draft mla", "draft experts", "draft head", "draft draft input", "verification"} <= set(
            seen.found.parts
        )
        assert seen.accept_length > 1.2
    else:
        assert not drafted
        assert "sampling" in seen.found.parts
    assert sum(seen.parts_ms().values()) == pytest.approx(seen.found.step_ms, rel=0.02)
    timed = seen.table().set_index("part")
    assert (timed.loc[["kda", "mla", "experts", "head"], "gb_s"] > 0).all()
    assert client.generate(prompt, max_new_tokens=24, ignore_eos=True).token_ids == before
