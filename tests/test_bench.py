"""The bench against stand-in engines: order, warm-up, spoiled samples, and going on after a kill at any moment."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import standin
from fake_server import Behaviour
from sparkmoe import judge
from sparkmoe.bench import Progress, bench, levels, show
from sparkmoe.client import Sample
from sparkmoe.errors import DataError, EngineError, MachineError, NotEngaged, RecipeError, StoreError
from sparkmoe.judge import LogTail, machine_alarms, reasons_spoiled, spoiled_by
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run, by_boot
from sparkmoe.workload import Prompt
from standin import ARMS, MACHINE, StandIn, boot_with, prompts


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run.create(tmp_path, run_id="run") as made:
        yield made


def go(
    run: Run, arms: Any = ARMS, *, behaviour: Any = None, started: Any = None, n: int = 4, **more: Any
) -> list[Progress]:
    start = boot_with(run.path / "logs", *([behaviour] if behaviour else []), started=started)
    workload = more.pop("workload", None) or prompts(run.path.parent, n)
    return list(bench(run, arms, workload, machine=MACHINE, boot_with=start, **{"boots": 2} | more))


def identity(record: dict[str, Any]) -> tuple[Any, ...]:
    """What two runs of one plan must have in common; times are not, nor what a busy machine does to them."""
    sample = record["sample"]
    same = ("arm", "boot", "request", "wave", "concurrency", "prompt")
    spoiled = [reason for reason in record["spoiled"] if not reason.startswith("unread")]
    return (*(json.dumps(record[k]) for k in same), *spoiled, sample["prompt_hash"], tuple(sample["token_ids"]))


def test_every_arm_boot_and_request_is_measured_once(run: Run) -> None:
    started: list[StandIn] = []
    seen = go(run, started=started)
    records = list(run.records())
    assert {(r["arm"], r["boot"], r["request"]) for r in records} == {
        (a, b, n) for a in ARMS for b in (0, 1) for n in range(4)
    }
    assert len(records) == 24
    assert not any(r["spoiled"] for r in records)
    assert len(started) == 6
    assert [len(values) for values in by_boot(records, "nextn", "tpot_ms")[0]] == [4, 4]
    assert all(r["sample"]["cached_tokens"] == 0 for r in records)
    assert (seen[-1].done, seen[-1].total) == (24, 24)
    assert seen[0].left_s is None
    assert seen[-1].left_s == 0
    assert (seen[-2].left_s or 0) > 0


def test_order_is_interleaved_seeded_and_fair(run: Run, tmp_path: Path) -> None:
    go(run, boots=4)
    records = list(run.records())
    rounds = [list(dict.fromkeys(r["arm"] for r in records if r["boot"] == b)) for b in range(4)]
    assert [r["boot"] for r in records] == sorted(r["boot"] for r in records)  # a round ends before the next begins
    assert all(sorted(order) == sorted(ARMS) for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    asked = {(a, b): [r["prompt"] for r in records if (r["arm"], r["boot"]) == (a, b)] for a in ARMS for b in range(4)}
    assert all(asked[a, b] == asked[ARMS[0], b] for a in ARMS for b in range(4))
    assert len({tuple(asked[ARMS[0], b]) for b in range(4)}) > 1
    with Run.create(tmp_path, run_id="again") as again:
        go(again, boots=4)
        assert sorted(map(identity, again.records())) == sorted(map(identity, records))


def test_a_server_that_is_up_is_its_arm_s_first_boot(run: Run) -> None:
    begun: list[StandIn] = []
    others: list[StandIn] = []

    class Up:
        recipe = Recipe.named("nextn")

        def __init__(self) -> None:
            self.server: Any = boot_with(run.path / "logs", started=begun)(self.recipe)

        def running(self) -> bool:
            return self.server is not None

        def __enter__(self) -> Any:
            return self.server.__enter__()

        def __exit__(self, *exc: Any) -> None:
            self.server.__exit__(*exc)
            self.server = None

    for seed in range(3):  # whatever the order would have been
        with Run.create(run.path, run_id=str(seed)) as one:
            go(one, started=others, seed=seed, running=Up())
            records = list(one.records())
            assert [r["arm"] for r in records[:4]] == ["nextn"] * 4
            assert len(records) == 24
    assert (len(begun), len(others)) == (3, 3 * 5)


def test_a_bench_of_one_file_with_its_hash_and_its_plan(run: Run) -> None:
    workload = prompts(run.path.parent)
    go(run, workload=workload)
    manifest = run.manifest
    assert manifest["prompt_hash"] == manifest["plan"]["prompt_hash"] == workload.sha256
    assert (run.path / "prompts.jsonl").read_bytes() == workload.path.read_bytes()
    assert manifest["plan"]["arms"]["nextn"]["draft_steps"] == 3
    assert "--speculative-num-steps 3" in manifest["commands"]["nextn"]
    assert manifest["machine"]["profile"] == "cpu"
    assert manifest["clocks_before"]["at_unix_s"] < manifest["clocks_after"]["at_unix_s"]
    boots = [json.loads(path.read_text()) for path in (run.path / "boots").iterdir()]
    assert len(boots) == 6
    for boot in boots:
        assert len(boot["warm_ups"]["1"]["tpot_ms"]) >= 2
        assert (boot["bandwidth_before_gb_s"], boot["bandwidth_after_gb_s"]) == (12.5, 12.5)
        assert boot["clocks_before"]["at_unix_s"] < boot["clocks_after"]["at_unix_s"]
    evidence = sorted(path.name for path in (run.path / "evidence").iterdir())
    assert len(evidence) == 6
    assert {r["booted"] for r in run.records()} == {name.removesuffix(".json") for name in evidence}


@pytest.mark.parametrize(
    "change",
    [{"boots": 3}, {"seed": 9}, {"repeats": 2}, {"arms": ARMS[:2]}, {"n": 3}, {"sampling": {"temperature": 0.6}}],
)
def test_a_run_does_not_go_on_with_another_plan(run: Run, change: dict[str, Any]) -> None:
    go(run)
    with pytest.raises(StoreError, match="was begun with another"):
        go(run, **change)
    assert len(list(run.records())) == 24


def test_prompts_changed_on_disk_are_noticed(run: Run) -> None:
    go(run)
    path = run.path / "prompts.jsonl"
    path.write_text(path.read_text().replace("aaaaa", "aaaab"))
    with pytest.raises(DataError, match="not the prompt file of this run"):
        go(run)


def test_warm_up_waits_for_compiling_to_end_and_times_to_agree(run: Run) -> None:
    """The first answers are slow, and a compile line appears with the third."""
    started: list[StandIn] = []

    events = bench(
        run, ["baseline"], prompts(run.path.parent, 2), machine=MACHINE, boots=1,
        boot_with=boot_with(run.path / "logs", lambda _: Behaviour(gap_ms=40, prefix_cache=False), started),
    )  # fmt: skip
    next(events)
    next(events)  # the server is up, the warm-up comes next
    server = started[0]
    log, answer = server.log_path, server.fake.answer

    def answer_and_log(prompt: list[int], n: int) -> list[int]:
        asked = len(server.fake.requests)
        server.fake.behaviour.gap_ms = {1: 40, 2: 20, 3: 5}.get(asked, 5)
        if asked == 4 and not any("compile" in line for line in log.read_text().splitlines()):
            with log.open("a") as file:
                file.write("Triton kernel 'k' took 2.5 s to compile after serving started. Serving-time …\n")
        return answer(prompt, n)

    server.fake.answer = answer_and_log  # type: ignore[method-assign]
    list(events)
    facts = json.loads(next((run.path / "boots").iterdir()).read_text())["warm_ups"]["1"]
    assert facts["settled"]
    assert len(facts["tpot_ms"]) >= 5
    assert facts["compile_lines"][3] == 1
    assert facts["compile_lines"][-1] == 0
    assert not any(r["spoiled"] for r in run.records())


def test_a_server_that_never_settles_is_measured_and_said(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    started: list[StandIn] = []
    events = bench(
        run, ["baseline"], prompts(run.path.parent, 1), machine=MACHINE, boots=1,
        boot_with=boot_with(run.path / "logs", lambda _: Behaviour(gap_ms=1, prefix_cache=False), started),
    )  # fmt: skip
    next(events)
    next(events)
    answer = started[0].fake.answer

    def restless(prompt: list[int], n: int) -> list[int]:
        started[0].fake.behaviour.gap_ms = 2.0 * (len(started[0].fake.requests) % 2) + 1
        return answer(prompt, n)

    started[0].fake.answer = restless  # type: ignore[method-assign]
    list(events)
    facts = json.loads(next((run.path / "boots").iterdir()).read_text())["warm_ups"]["1"]
    assert not facts["settled"]
    assert len(facts["tpot_ms"]) == 12
    assert "no two warm-up answers agreed" in caplog.text
    assert len(list(run.records())) == 1


def test_check_runs_in_every_boot_before_anything_is_measured(run: Run) -> None:
    seen: list[tuple[str, int]] = []

    def check(server: Any, samples: list[Sample]) -> None:
        seen.append((server.url, len(list(run.records()))))
        assert all(s.completion_tokens == 9 for s in samples)

    go(run, ["nextn"], check=check, boots=3)
    assert [n for _, n in seen] == [0, 4, 8]

    def refuse(server: Any, samples: list[Sample]) -> None:
        raise NotEngaged("the draft is not there")

    with Run.create(run.path.parent, run_id="other") as other, pytest.raises(NotEngaged):
        go(other, check=refuse)
    assert list(other.records()) == []


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_a_compile_line_in_the_window_spoils_only_its_sample(run: Run) -> None:
    started: list[StandIn] = []
    events = bench(
        run, ["baseline"], prompts(run.path.parent, 4), machine=MACHINE, boots=1,
        boot_with=boot_with(run.path / "logs", started=started),
    )  # fmt: skip
    for now in events:
        if now.doing == "measure" and now.done == 1:
            fake, log = started[0].fake, started[0].log_path
            answer = fake.answer

            def once(prompt: list[int], n: int, fake: Any = fake, log: Any = log, answer: Any = answer) -> list[int]:
                fake.answer = answer
                with log.open("a") as file:
                    file.write("Triton kernel 'k' took 0.7 s to compile after serving started. …\n")
                return answer(prompt, n)

            fake.answer = once  # type: ignore[method-assign]
    records = list(run.records())
    assert [bool(r["spoiled"]) for r in records] == [False, True, False, False]
    assert records[1]["spoiled"][0].startswith("compile: Triton kernel 'k'")
    assert any("took 0.7 s" in line for line in records[1]["log"])
    assert by_boot(records, "baseline", "tpot_ms")[1] == 1
    assert spoiled_by(records) == {"compile": 1}


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        ({"stop_at": 6}, "length"),
        ({"drop_after": 2}, "error"),
        ({"malformed_after": 2}, "error"),
        ({"error_after": 2}, "error"),
    ],
)
def test_what_goes_wrong_while_measuring_is_kept_and_left_out(run: Run, behaviour: dict[str, int], kind: str) -> None:
    started: list[StandIn] = []
    events = bench(
        run, ["baseline"], prompts(run.path.parent, 3), machine=MACHINE, boots=1,
        boot_with=boot_with(run.path / "logs", started=started),
    )  # fmt: skip
    for now in events:
        if now.doing == "measure":
            good = started[0].fake.behaviour
            started[0].fake.behaviour = replace(good, **behaviour) if now.done == 1 else Behaviour(gap_ms=1)
    records = list(run.records())
    assert [bool(r["spoiled"]) for r in records] == [False, True, False]
    assert records[1]["spoiled"][0].startswith(f"{kind}: ")
    assert records[1]["sample"]["completion_tokens"] in (4, 6)  # what came before the fault
    assert by_boot(records, "baseline", "ttft_ms") == ([[r["sample"]["ttft_ms"] for r in records[::2]]], 1)


@pytest.mark.parametrize("behaviour", [{"die_after": 2}, {"stall_after": 2}])
def test_a_dead_or_silent_server_ends_the_bench_which_then_goes_on(run: Run, behaviour: dict[str, int]) -> None:
    started: list[StandIn] = []

    def start() -> Iterator[Progress]:
        return bench(
            run, ["baseline"], prompts(run.path.parent, 3), machine=MACHINE, boots=1, timeout_s=0.5,
            boot_with=boot_with(run.path / "logs", started=started),
        )  # fmt: skip

    events = start()
    assert [next(events).doing for _ in range(3)][-1] == "measure"
    started[0].fake.behaviour = replace(started[0].fake.behaviour, **behaviour)
    with pytest.raises(EngineError, match=r"boot 0: .*start the bench again to go on"):
        next(events)
    kept = list(run.records())
    assert [bool(r["spoiled"]) for r in kept] == [False, True]
    assert kept[1]["sample"]["chunk_tokens"] == [1, 3]
    list(start())
    records = list(run.records())
    assert records[:2] == kept
    assert [r["request"] for r in records] == [0, 1, 2]
    assert len(started) == 2


def test_reasons_that_spoil_a_sample() -> None:
    good = Sample("hash", 0.0, completion_tokens=8, prompt_tokens=5, cached_tokens=0, tpot_ms=10.0, accept_length=2.0)
    prompt = Prompt("p", "synthetic", "x", (1,), 8, ignore_eos=True)
    assert reasons_spoiled(good, prompt, ["Decode batch, #running-req: 1"], floor_ms=20.0) == []
    assert reasons_spoiled(good, prompt, [], floor_ms=20.1)[0].startswith("ceiling: a step of 20.000 ms")
    assert reasons_spoiled(replace(good, cached_tokens=3), prompt, []) == [
        "cache: 3 of 5 prompt tokens came from the cache"
    ]
    assert reasons_spoiled(replace(good, cached_tokens=None), prompt, [])[0].startswith("cache: the server did not say")
    assert reasons_spoiled(replace(good, completion_tokens=7), prompt, []) == ["length: 7 tokens instead of 8"]
    assert reasons_spoiled(replace(good, completion_tokens=7), replace(prompt, ignore_eos=False), []) == []
    assert reasons_spoiled(replace(good, error="died: x"), prompt, []) == ["error: died: x"]
    heap, steps = (tuple(378.0 + gap * i for i in range(8)) for gap in (0.003, 1.0))
    late = replace(good, ttft_ms=378.0, chunk_times_ms=heap)
    assert reasons_spoiled(late, prompt, [])[0].startswith("unread: the answer came in one heap, 8 pieces")
    assert reasons_spoiled(replace(late, chunk_times_ms=steps), prompt, []) == []


def test_machine_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    spark = replace(MACHINE, profile="spark")
    stuck = {"gpus": [{"sm_mhz": 850, "sm_max_mhz": 3003}]}
    monkeypatch.setattr(judge, "clocks", lambda: stuck)
    assert machine_alarms(spark, judge.psutil.swap_memory().sin) == ["clock: GPU 0 at 850 of 3003 MHz"]
    assert machine_alarms(MACHINE, judge.psutil.swap_memory().sin) == []
    stuck["gpus"].append({"sm_mhz": 345, "sm_max_mhz": 1980})  # the second one idles, unless the server spans both
    assert len(machine_alarms(spark, judge.psutil.swap_memory().sin)) == 1
    assert len(machine_alarms(spark, judge.psutil.swap_memory().sin, gpus=2)) == 2
    monkeypatch.setattr(judge, "clocks", lambda: {"gpus": [{"sm_mhz": 2400, "sm_max_mhz": 3003}, {}]})
    assert machine_alarms(spark, judge.psutil.swap_memory().sin) == []
    little = judge.psutil.virtual_memory()._replace(available=300 << 20)
    monkeypatch.setattr(judge.psutil, "virtual_memory", lambda: little)
    monkeypatch.setattr(judge.psutil, "swap_memory", lambda: type("Swap", (), {"sin": 64 << 20}))
    assert [alarm.split(":")[0] for alarm in machine_alarms(MACHINE, 0)] == ["memory", "memory"]


def test_log_tail_gives_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    assert LogTail(path).new() == []
    path.write_text("old\n")
    tail = LogTail(path)
    with path.open("a") as file:
        file.write("one\ntwo\n")
    assert tail.new() == ["one", "two"]
    assert tail.new() == []


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"arms": []}, DataError, "arms with different names"),
        ({"arms": ["baseline", "baseline"]}, DataError, "arms with different names"),
        ({"arms": ["baselin"]}, RecipeError, "did you mean baseline"),
        ({"arms": ["humming"]}, RecipeError, "cannot run here"),
        ({"boots": 0}, DataError, "at least 1"),
        ({"repeats": 0}, DataError, "at least 1"),
        ({"concurrency": []}, DataError, "at least 1"),
        ({"concurrency": [1, 1]}, DataError, "no level twice"),
        ({"concurrency": [64], "n": 64}, MachineError, "beyond 8"),
        ({"concurrency": [8], "n": 4}, DataError, "as many different prompts; the workload has 4"),
    ],
)
def test_impossible_plans_are_refused_before_the_first_boot(
    run: Run, wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    started: list[StandIn] = []
    with pytest.raises(error, match=says):
        go(run, started=started, **wrong)
    assert started == []
    assert "plan" not in run.manifest


# ---------------------------------------------------------------------------------------------------- concurrency


def test_a_sweep_sends_full_waves_and_sums_them_up(run: Run) -> None:
    started: list[StandIn] = []
    go(run, ["baseline"], behaviour=lambda _: Behaviour(gap_ms=10, tokens_per_event=(1,), drafts=0),
       started=started, n=6, concurrency=(1, 4), boots=1, repeats=2)  # fmt: skip
    records = list(run.records())
    single, four = ([r for r in records if r["concurrency"] == c] for c in (1, 4))
    assert (len(single), len(four)) == (12, 16)  # six prompts at a level of four are filled up to eight
    assert len({r["request"] for r in records}) == 28
    for wave in {r["wave"] for r in four}:
        members = [r for r in four if r["wave"] == wave]
        assert len({r["prompt"] for r in members}) == 4
        starts = [r["sample"]["started_unix_s"] for r in members]
        assert max(starts) - min(starts) < 0.05
    table = levels(records).set_index("concurrency")
    assert list(table["samples"]) == [12, 16]
    assert list(table["spoiled"]) == [0, 0]
    assert 2.5 < table.loc[4, "tok_s"] / table.loc[1, "tok_s"] < 4.2  # type: ignore[operator]
    assert 10 <= table.loc[1, "tpot_ms_p50"] <= table.loc[1, "tpot_ms_p99"]  # type: ignore[operator]
    spoilt = [
        r | {"spoiled": ["cache: x"]} if r["concurrency"] == 4 and r["wave"] == four[0]["wave"] else r for r in records
    ]
    assert list(levels(spoilt)["spoiled"]) == [0, 4]


def test_show_drains_a_bench(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    show(
        bench(
            run,
            ["baseline"],
            prompts(run.path.parent),
            machine=MACHINE,
            boots=1,
            boot_with=boot_with(run.path / "logs"),
        )
    )
    assert len(list(run.records())) == 4
    assert "4/4" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ killed, gone on


def killed_and_whole(folder: Path, share: float, least_kills: int, *model: str) -> None:
    """Measure once without and once with SIGKILLs at random (seeded) moments, each process living at most `share` of
    the time that the whole takes; both must end with the same samples."""

    def start(run: Path) -> subprocess.Popen[str]:
        command = [sys.executable, standin.__file__, str(run), *model]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        return process

    begun = time.monotonic()
    assert start(folder / "whole").wait() == 0
    took_s = time.monotonic() - begun
    wanted = sorted(map(identity, Run.open(folder / "whole").records()))
    assert len(wanted) == 36

    rng, kept, met = random.Random(11), [], []
    while True:
        process = start(folder / "killed")
        try:
            process.wait(timeout=rng.uniform(0.0, share * took_s))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        records = list(Run.open(folder / "killed").records())
        assert records[: len(kept)] == kept  # what was finished stays as it is
        kept = records
        met.append(len(kept))
        assert len(met) < 80, "it makes no progress"
    assert process.returncode == 0
    assert sorted(map(identity, Run.open(folder / "killed").records())) == wanted
    assert len(met) >= least_kills
    assert len(set(met)) >= least_kills // 2  # the kills met it in different places


def test_killed_at_any_moment_and_started_again_it_ends_with_the_same_samples(tmp_path: Path) -> None:
    killed_and_whole(tmp_path, 0.15, 8)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(1800)
def test_killed_with_real_engines_it_ends_with_the_same_samples(tmp_path: Path, miniature: Path) -> None:
    """3 arms × 3 boots of real servers, twice: about ten minutes."""
    killed_and_whole(tmp_path, 0.5, 2, str(miniature))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(miniature) in (p.info["cmdline"] or [])]
