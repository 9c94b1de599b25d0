"""The driver of a GPU stay, without a GPU: its plan, what outlives a stay, a dry run that is killed and resumed."""

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkmoe import fullsize, inventory, processes, recorded, trace
from sparkmoe.errors import DataError
from sparkmoe.judge import LogTail
from sparkmoe.machine import Machine
from sparkmoe.nano import evaluate, random_checkpoint
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run
from sparkmoe.sample import Sample

GPU = Path(__file__).parent / "gpu"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.syspath_prepend(str(GPU))
    names = ("arms", "boot", "full_shape", "join", "record", "stay", "table")
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in names:
        sys.modules.pop(name)


# ----------------------------------------------------------------------------------------------------------------- plan


def test_a_gpu_has_at_most_fourteen_arms_that_it_can_run(modules: SimpleNamespace, tmp_path: Path) -> None:
    machine, hot = Machine.named("hopper"), tmp_path / "hot.pt"
    hot.touch()
    planned = modules.arms.arms(machine, hot)
    assert len({arm.name for arm in planned}) == len(planned) == 14
    assert all(arm.nano for arm in planned[:2])
    for arm in planned:
        command = arm.recipe.command(machine, model=tmp_path, port=1)
        assert ("dummy" in command.argv) == ("SPARKMOE_RANDOM_WEIGHTS" in command.env) == (not arm.nano)
        assert command.env["SGLANG_ENABLE_JIT_DEEPGEMM"] == "0"
        assert (command.env.get("SPARKMOE_SWIGLU_CLAMP") == "0") == (arm.fails == ("clamp",))
    (*single, two) = modules.arms.arms(replace(machine, gpu_count=2), hot)
    assert [arm.name for arm in single] == [arm.name for arm in planned]
    assert (two.name, two.recipe.tp) == ("all_three_tp2", 2)


def test_fewer_drafts_of_the_same_quality_accept_less(modules: SimpleNamespace) -> None:
    lengths = modules.arms.accept_lengths
    assert lengths(0) == ()
    assert lengths(3) == (2.68, 3.9, 1.0)
    assert lengths(3, 2) == (3, 4, 1)
    assert lengths(1, 2) == (2, 1)
    assert 1.7 < lengths(1)[0] < 1.8 < lengths(2)[0] < 2.68
    assert all(1 <= length <= k + 1 for k in (1, 2, 3) for length in lengths(k))


# ----------------------------------------------------------------------------------------------------------------- stay


def test_a_run_and_caches_outlive_a_stay(modules: SimpleNamespace, tmp_path: Path) -> None:
    stay, home, out = modules.stay, tmp_path / "home", tmp_path / "out"
    for name in (".triton/cache/k/kernel.cubin", ".cache/flashinfer/a.so", ".cache/sparkmoe/model", ".ssh/key"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    with Run.create(tmp_path / "work/results", run_id="r") as run:
        run.append({"arm": "a", "boot": 0, "request": 0})
        stay.pack_run(run.path, out)
    assert set(stay.pack_caches(home, out)["kept"]) == {".triton/cache", ".cache/flashinfer"}
    again, bare = tmp_path / "again", tmp_path / "bare"
    assert stay.unpack(out, again / "results", bare) == ["run.tar.gz", "cache.0"]
    assert modules.full_shape.open_run(again / "results").done() == {("a", 0, 0)}
    kept = sorted(str(path.relative_to(bare)) for path in bare.rglob("*") if path.is_file())
    assert kept == [".cache/flashinfer/a.so", ".triton/cache/k/kernel.cubin"]
    assert stay.unpack(out, again / "results", bare) == ["cache.0"]  # what a warm machine has is newer


def test_caches_travel_in_parts_and_the_largest_stay_behind(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay, home, out = modules.stay, tmp_path / "home", tmp_path / "out"
    monkeypatch.setattr(stay, "PART_BYTES", 1000)
    for name, size in ((".triton/cache", 1500), (".cache/large", 1400), (".cache/small", 200)):
        (home / name).mkdir(parents=True)
        (home / name / "noise").write_bytes(os.urandom(size))
    found = stay.pack_caches(home, out)
    assert list(found["kept"]) == [".triton/cache", ".cache/small"]
    assert list(found["left_out"]) == [".cache/large"]
    assert sorted(path.name for path in out.iterdir()) == ["cache.0", "cache.1", "cache.2"]
    stay.unpack(out, tmp_path / "work", tmp_path / "bare")
    for name in found["kept"]:
        assert (tmp_path / "bare" / name / "noise").read_bytes() == (home / name / "noise").read_bytes()


def test_no_arm_is_begun_that_would_be_cut_off(modules: SimpleNamespace) -> None:
    clock = modules.stay.Clock(stop_after_s=100.0, first_arm_s=90.0)
    assert clock.enough()
    clock.took(150.0)
    assert not clock.enough()
    clock.took(80.0)
    assert not clock.enough()  # the one before it took too long
    clock.took(60.0)
    assert clock.enough()
    told = modules.stay.Clock(stop_after_s=100.0, first_arm_s=110.0, later_arm_s=70.0)
    assert not told.enough()
    told.took(300.0)  # it compiled, the next one will not
    assert told.enough()
    told.stop_after_s = 60.0
    assert not told.enough()


# ----------------------------------------------------------------------------------------------------------------- boot


class FakeClient:
    """A server that takes 5 ms a token, and remembers what it was asked and under which accept length."""

    def __init__(self) -> None:
        self.asked: list[tuple[float | None, int, int, int]] = []
        self.length: float | None = None

    def simulate_accept_length(self, tokens: float) -> None:
        self.length = tokens

    def flush_cache(self) -> None:
        pass

    def generate(self, ids: Sequence[int], *, max_new_tokens: int, ignore_eos: bool) -> Sample:
        self.asked.append((self.length, len(ids), max_new_tokens, ids[0]))
        return Sample("", 0.0, completion_tokens=max_new_tokens, cached_tokens=0, tpot_ms=5.0)


def test_every_context_is_measured_under_every_accept_length(modules: SimpleNamespace, tmp_path: Path) -> None:
    weights, clock = inventory.from_config(random_checkpoint.BASE), modules.stay.Clock(100.0, 1.0)
    arm, client = modules.arms.Arm(Recipe("a", draft_steps=3)), FakeClient()
    with Run.create(tmp_path, run_id="r") as run:
        bench = modules.boot.Bench(run, Machine.named("cpu"), tmp_path, weights, modules.arms.DRY, 10.0, clock)
        assert bench.times(arm, client, LogTail(tmp_path / "log"), (2.68, 1.0), "b")
        records = list(run.records())
        counts = Counter((r["context"], r["accept"], r["output"]) for r in records)
        short, long = modules.arms.DRY.contexts
        wanted = [(short, 2.68, 16), (short, 2.68, 32), (short, 1.0, 16), (long, 2.68, 16), (long, 1.0, 16)]
        assert counts == dict.fromkeys(wanted, modules.arms.DRY.repeats)
        assert all(r["spoiled"] == [] and r["booted"] == "b" for r in records)
        # Before anything is measured at a context, and where an accept length first occurs, two answers agree.
        asked = Counter((length, context) for length, context, *_ in client.asked)
        assert asked == {(2.68, short): 6, (1.0, short): 4, (2.68, long): 4, (1.0, long): 2}
        firsts = {request[3] for request in client.asked}
        assert len(firsts) == len(records) + 3
        clock.stop_after_s = 0.0
        assert not bench.times(arm, client, LogTail(tmp_path / "log"), (2.68,), "b")
        assert len(list(run.records())) == len(records)


def test_the_miniature_is_compared_with_the_cpu_problem_by_problem(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"instances": 1.0, "combinations": 0.9}
    monkeypatch.setattr(evaluate, "accuracy", lambda client, split, *_: {"accuracy": right[split], "truncated": 0.0})
    monkeypatch.setattr(evaluate, "accept_length", lambda client, prompts, tokens: float(len(prompts)))
    weights, shape = inventory.from_config(random_checkpoint.BASE), replace(modules.arms.GPU, problems=200)
    client = SimpleNamespace(render=lambda messages, thinking: [1])
    with Run.create(tmp_path, run_id="r") as run:
        bench = modules.boot.Bench(run, Machine.named("hopper"), tmp_path, weights, shape, 10.0, None)
        found = bench.miniature(client)
    assert found["instances"]["minus_cpu"]["estimate"] == 0.0
    assert found["instances"]["minus_cpu"]["low"] < 0 < found["instances"]["minus_cpu"]["high"]
    assert found["combinations"]["minus_cpu"]["estimate"] == pytest.approx(-0.1)
    assert found["combinations"]["minus_cpu"]["high"] < 0  # told apart
    assert found["accept_length_greedy"] == 100.0  # as many prompts as the CPU's figure stands for
    assert found["cpu"]["accept_length"]["problems_greedy"] == pytest.approx(3.876, abs=0.001)


# ---------------------------------------------------------------------------------------------------------------- table


def test_the_table_sets_the_prediction_beside_the_measurement(modules: SimpleNamespace, tmp_path: Path) -> None:
    machine, weights = Machine.named("hopper"), inventory.from_config("ling-3.0-flash-fp4")
    recipes = {arm.name: arm.recipe for arm in modules.arms.arms(machine, tmp_path / "hot.pt")}
    with Run.create(tmp_path, run_id="r", gb_s=4000.0) as run:
        for request, (arm, booted, accept, tpot, steps) in enumerate(
            [("all_three", "now", 2.68, 4.0, 48), ("humming_bf16", "now", None, 6.7, None),
             ("humming_bf16", "earlier", None, 99.0, None), ("humming_fp8", "now", None, 6.6, None)]
        ):  # fmt: skip
            sample = {"prompt_hash": "", "started_unix_s": 0, "tpot_ms": tpot, "completion_tokens": 128}
            record = {"arm": arm, "boot": 0, "request": request, "booted": booted, "spoiled": [], "context": 512}
            run.append(record | {"output": 128, "accept": accept, "sample": sample | {"spec_verify_ct": steps}})
        for arm in ("humming_bf16", "humming_fp8", "all_three"):
            run.write_json(f"arms/{arm}.json", {"booted": "now", "engaged": arm != "humming_fp8"})
        every, plain, fp8 = modules.table.table(run, recipes, weights, machine)
        for number, gb_s in enumerate((1000.0, 2000.0, 4000.0)):
            run.write_json(f"calls/{number}.json", {"gb_s": gb_s, "clocks": {"at_unix_s": number}})
        slow = modules.table.table(run, recipes, weights, machine)[0]
    assert [row["sound"] for row in (plain, fp8, every)] == [True, False, True]
    assert plain["tpot_ms"] == 6.7
    assert plain["predicted_ms"] == pytest.approx(6.7)
    assert plain["gb_s"] == pytest.approx(4.82 / 6.7 * 1e3, rel=0.01)
    assert fp8["predicted_ms"] == pytest.approx(6.7 - 0.402 / 4, abs=0.003)
    assert fp8["residual_ms"] == pytest.approx(6.6 - fp8["predicted_ms"])
    assert every["accept_length"] == pytest.approx(128 / 48)
    assert every["floor_ms"] == pytest.approx(8.78 / 4 / (128 / 48), rel=0.01)
    assert every["gain"] == pytest.approx(6.7 / 4)
    assert slow["floor_ms"] == pytest.approx(2 * every["floor_ms"])  # the median of three calls is half the bandwidth
    spent = plain["tpot_ms"] - plain["floor_ms"]
    assert every["predicted_ms"] == pytest.approx(every["floor_ms"] + spent * (1 + 3 / 42) / (128 / 48))


def test_an_arm_belongs_to_its_call_or_to_the_latest_before_it(modules: SimpleNamespace, tmp_path: Path) -> None:
    with Run.create(tmp_path, run_id="r") as run:
        for name, at in (("late", 20.0), ("early", 10.0)):
            run.write_json(f"calls/{name}.json", {"name": name, "clocks": {"at_unix_s": at}})
        made = modules.table.calls(run)
    asked = ({"call": "early", "at_unix_s": 25.0}, {"at_unix_s": 15.0}, {"at_unix_s": 25.0}, {"at_unix_s": 5.0})
    names = [modules.table.call_of(state, made).get("name") for state in asked]
    assert names == ["early", "early", "late", None]


def test_runs_of_two_gpus_become_one(modules: SimpleNamespace, tmp_path: Path) -> None:
    def measured(folder: str, *arms: tuple[str, str, str, float]) -> Run:
        run = Run.create(tmp_path / folder, run_id="r")
        for number, (arm, status, booted, at) in enumerate(arms):
            run.write_json(f"arms/{arm}.json", {"arm": arm, "status": status, "booted": booted, "at_unix_s": at})
            run.write_json(f"evidence/{booted}.json", {"where": folder})
            run.append({"arm": arm, "boot": 0, "request": number, "booted": booted})
        run.write_json(f"calls/{folder}.json", {})
        run.close()
        return run

    shared = ("a", "done", "a-1", 1.0)
    one = measured("one", shared, ("b", "failed", "b-2", 2.0), ("c", "done", "c-2", 9.0))
    two = measured("two", shared, ("b", "done", "b-1", 1.0), ("c", "done", "c-1", 3.0), ("d", "partial", "d-1", 4.0))
    assert modules.join.join(one, two) == ["b", "d"]
    assert {name: state["booted"] for name, state in modules.table.states(one).items()} == {
        "a": "a-1", "b": "b-1", "c": "c-2", "d": "d-1"}  # fmt: skip
    assert [record["booted"] for record in one.records()] == ["a-1", "b-2", "c-2", "b-1", "c-1", "d-1"]
    assert json.loads((one.path / "evidence/a-1.json").read_text()) == {"where": "one"}
    assert sorted(path.stem for path in (one.path / "calls").iterdir()) == ["one", "two"]
    assert modules.join.join(one, two) == []
    assert len(list(one.records())) == 6
    one.close()


def test_a_run_becomes_a_record_that_the_package_reads(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"status": "done", "engaged": False, "checks": [{"check": "head", "result": "FAILED"}], "ready_s": 55.5555}
    state |= {"weight_bytes": 123_456_789, "profiles": {"32768": {"error": "no"}}}
    state |= {"routing": {"expected": {"1": 8.0}, "mean": {"1": 7.98765432}, "layers": {"2": {}}}}
    with Run.create(tmp_path, run_id="r", machine=Machine.named("hopper"), model="m", gb_s=4.0, commit="abc") as run:
        recipe = asdict(Recipe("a"))
        run.write_json("arms/a.json", state | {"recipe": recipe})
        run.write_json("arms/b.json", {"status": "failed", "error": "died", "recipe": recipe})
        run.write_json("arms/c.json", {"status": "failed", "error": "died; likely cause: unknown", "recipe": recipe})
        (run.folder("logs") / "20261130-071021-c-2.log").write_text("OSError: [Errno 28] No space left on device\n")
        made = modules.record.record(run)
    assert made["findings"]["rows"] == []
    assert made["findings"]["routing"] == {"expected": {"1": 8.0}, "mean": {"1": 7.98765}}
    assert made["findings"]["profiles"] == {"a": {}}
    one, other, third = made["findings"]["arms"].values()
    assert (one["sound"], one["failed_checks"], one["weight_bytes"]) == (False, ["head"], 123_456_789)
    assert other == {"status": "failed", "error": "died"}
    assert third["error"] == "the disk or /dev/shm is full"
    (tmp_path / "full.json").write_text(json.dumps(made))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    assert "NVIDIA H200" in recorded.load("full").line()


def test_the_shipped_record_is_what_the_kept_run_gives(modules: SimpleNamespace, tmp_path: Path) -> None:
    """Every figure comes from the run; the traces are read anew, by today's rules, and their kernels have names."""
    with tarfile.open(GPU / "recorded" / f"{fullsize.RECORD}.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    run, shipped = Run.open(folder), fullsize.load()
    made = json.loads(json.dumps(modules.record.record(run), allow_nan=False))
    assert made == json.loads((recorded.FOLDER / f"{fullsize.RECORD}.json").read_text())
    arms = shipped.findings["arms"]
    assert len(arms) == 15  # Marlin's last one lacks its last accept length at the long context
    assert {name for name, arm in arms.items() if arm["status"] != "done"} == {"marlin_all_three"}
    for name, arm in arms.items():
        assert arm["sound"]
        assert arm["graphs"] > 2
        assert arm["failed_checks"] == (["clamp"] if name.endswith("unclamped") else [])
    assert all(state["engaged"] for state in modules.record.states(run).values())
    steps = [step for arm in made["findings"]["profiles"].values() for step in arm.values()]
    assert len(steps) == 11
    assert min(step["named_share"] for step in steps) > 0.99
    # What a part reads at more than the GPU's bandwidth was put into the wrong part.
    assert all((part["gb_s"] or 0.0) < 4800 for step in steps for part in step["parts"])
    shown = json.loads((run.path / "table.json").read_text())
    assert modules.record.rounded(shown) == made["findings"]["rows"]
    modules.record.archive(run, tmp_path / "again.tar.gz")
    with tarfile.open(tmp_path / "again.tar.gz") as again, tarfile.open(tar.name) as kept:
        assert again.getnames() == kept.getnames()
        for member in again:
            assert again.extractfile(member).read() == kept.extractfile(member.name).read()  # type: ignore[union-attr]


def test_tables_of_the_full_size() -> None:
    first, *_ = shown = fullsize.rows("humming_bf16", "all_three", contexts=(512, 32768), against="humming_fp8")
    assert len(shown) == 2 + 6
    assert (first["accept length"], first["predicted"]) == ("1.00", first["measured"].split()[0])
    assert first["gain"] == f"{fullsize.ms_per_token('humming_fp8') / fullsize.ms_per_token('humming_bf16'):.2f} ×"
    hot = fullsize.rows("all_three", "all_three_hot", against="all_three")
    assert [row["gain"] for row in hot[:3]] == ["1.00 ×"] * 3
    assert all(1.0 < float(row["gain"].split()[0]) < 1.1 for row in hot[3:])
    marlin, fp32 = fullsize.rows("marlin_bf16", "marlin_fp32")
    assert marlin["predicted"] == fp32["predicted"] == marlin["measured"].split()[0]
    parts = {row["ms of kernels a step"]: row for row in fullsize.parts("humming_fp8", "all_three")}
    assert float(parts["draft mla"]["humming_fp8"]) == 0 < float(parts["draft mla"]["all_three"])
    assert list(parts)[-3:] == ["the rest", "at least one kernel runs", "the whole step"]
    busy, whole = (float(row["all_three"]) for row in list(parts.values())[-2:])
    assert busy < whole < 1.1 * busy
    *hooked, bare = fullsize.limits()
    assert {row["runner"] for row in hooked} == {"Humming", "Humming, grouped", "Marlin"}
    assert all(float(row["to Ling's formula"].rstrip("%")) < 0.6 for row in hooked)
    assert float(bare["to no clamp"].rstrip("%")) < 0.6 < 200 < float(bare["to Ling's formula"].rstrip("%"))
    right = [row["new numbers, right"] for row in fullsize.miniature()]
    assert right == ["100.0%", "100.0%", "69.2%"]
    assert fullsize.floor_ms("humming_fp8") < fullsize.ms_per_token("humming_fp8")
    for wrong in (lambda: fullsize.rows("humming_fp4"), lambda: fullsize.parts("marlin_fp32"),
                  lambda: fullsize.ms_per_token("all_three", 512, 9.9)):  # fmt: skip
        with pytest.raises(DataError, match="full-shape-h200 has no"):
            wrong()


def test_lanes_need_lists_and_their_end() -> None:
    for words in ([], ["out"], ["out", "a,b", "c"], ["out", "--"]):
        done = subprocess.run([GPU / "lanes.sh", *words], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- dry run


def drive(out: Path, work: Path, *more: str) -> subprocess.Popen[str]:
    argv = [sys.executable, str(GPU / "full_shape.py"), "--out", str(out), "--work", str(work), "--first-arm-s", "20"]
    env = os.environ | {"SPARKMOE_MACHINE": "cpu", "OMP_NUM_THREADS": "1"}
    argv += ["--home", str(work), "--arms", "bf16_head,all_three", *more]
    return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow  # a minute; the parts are tested above
@pytest.mark.server
@pytest.mark.timeout(240)
def test_a_killed_stay_goes_on_at_the_next_arm(own_home: Path, tmp_path: Path, modules: SimpleNamespace) -> None:
    first = drive(tmp_path / "out", tmp_path / "work")
    deadline = time.monotonic() + 120
    while not (tmp_path / "out/run.tar.gz").exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (tmp_path / "out/run.tar.gz").exists()
    second = drive(tmp_path / "out2", tmp_path / "work2", "--carried", str(tmp_path / "out"))
    told, _ = second.communicate(timeout=150)
    assert second.returncode == 0
    end = json.loads(told.splitlines()[-1])
    assert end["arms"] == {"all_three": "done", "bf16_head": "done"}, told
    assert end["measured"] == ["all_three"]
    assert not processes.records()
    run = modules.full_shape.open_run(tmp_path / "work2/results")
    examine(run, modules)


def examine(run: Run, modules: SimpleNamespace) -> None:
    found: dict[str, Any] = modules.table.states(run)
    for name, facts in found.items():
        assert facts["logits_finite"], name
        assert facts["engaged"], name
        assert all(row["result"] in ("ok", "yes", "no") for row in facts["checks"])
        assert facts["weight_bytes"] > 10e6
        assert facts["spent_s"]["load"] > 0
        assert facts["stages_at_s"]["load"] < facts["stages_at_s"]["ready"] <= facts["ready_s"] + 1
    # The switch was obeyed between two requests: each accept length is what was asked for then.
    samples: dict[Any, list[Any]] = {}
    for record in run.records():
        if record["arm"] == "all_three":
            samples.setdefault((record["context"], record["accept"]), []).append(record["sample"])
    for context in modules.arms.DRY.contexts:
        one, some, most = (
            statistics.mean(sample["accept_length"] for sample in samples[context, asked]) for asked in (1.0, 2.68, 3.9)
        )
        assert one < 1.2 < 1.9 < some < most
    # On a busy machine some samples are spoiled, so not every row need be there.
    rows = json.loads((run.path / "table.json").read_text())
    assert {row["arm"] for row in rows} <= set(found)
    assert all(row["floor_ms"] > 0 and row["gain"] > 0 < row["predicted_ms"] for row in rows if "predicted_ms" in row)
    profiles = found["all_three"]["profiles"]
    assert set(profiles) == {str(context) for context in modules.arms.DRY.contexts}
    for profile in profiles.values():
        kept = run.path / "traces" / profile["trace"]
        assert kept.stat().st_size < modules.boot.TRACE_BYTES
        assert len(trace.steps(trace.read(kept), skip=0)) > 0
        assert profile["named_share"] > 0.9
