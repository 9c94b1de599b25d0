"""An evaluation keeps every answer, asks nothing twice, and says what makes it unfit for comparison."""

import json
import multiprocessing
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_server import Behaviour, FakeServer
from sparkmoe.client import Client, RequestFailed, Sample
from sparkmoe.compare import compare as compare_runs
from sparkmoe.engine import Engine
from sparkmoe.errors import DataError, EngineError, StoreError
from sparkmoe.gsm8k import GREEDY, PUBLISHED, Question, miniature
from sparkmoe.gsm8k_run import Progress, Record, check, evaluate, read, show
from sparkmoe.results import Run

QUESTIONS = [
    Question(i, f"What is {i} + {i}?", f"It is {i}+{i}=<<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}") for i in range(300)
]


def sample(text: str, **fields: Any) -> Sample:
    common = {"prompt_hash": "p", "started_unix_s": 1.0, "completion_tokens": 10, "finish_reason": "stop"}
    times = {"ttft_ms": 5.0, "tpot_ms": 1.0, "latency_ms": 14.0, "chunk_times_ms": (5.0, 14.0), "chunk_tokens": (1, 9)}
    return Sample(**common | times | {"text": text} | fields)


class Solver:
    """Answers every question rightly unless `answers` says otherwise; an exception among them is raised."""

    def __init__(self, answers: dict[int, list[Sample | Exception]] | None = None) -> None:
        self.answers = {index: list(script) for index, script in (answers or {}).items()}
        self.asked: list[int] = []
        self.calls: list[dict[str, Any]] = []

    def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Sample:
        index = int(re.search(r"\d+", messages[-1]["content"])[0])  # type: ignore[index]
        self.asked.append(index)
        self.calls.append({"messages": list(messages), **sampling})
        answer = self.answers[index].pop(0) if self.answers.get(index) else sample(f"#### {2 * index}")
        if isinstance(answer, Exception):
            raise answer
        return answer


def dropped() -> RequestFailed:
    return RequestFailed("dropped", "connection lost", sample("", error="dropped: connection lost", finish_reason=None))


def all_of(run: Run, client: Any, count: int = 10, **options: Any) -> list[Progress]:
    return list(
        evaluate(QUESTIONS[:count], client, run, **{"arm": "a", "sampling": GREEDY, "backoff_s": 0.0} | options)
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, run_id="r")


def test_a_record_holds_what_was_asked_and_answered(run: Run) -> None:
    answer = sample("#### 6 apples", reasoning="3 and 3", accept_length=2.5, accept_histogram=(1, 2, 3, 4))
    all_of(run, Solver({3: [answer]}))
    record = read(run, "a")[3]
    assert record.sample == answer
    assert (record.problem, record.question, record.reference) == (QUESTIONS[3].key, "What is 3 + 3?", "6")
    assert (record.status, record.correct, record.extracted, record.rule) == ("right", True, "6", "####")
    assert (record.attempt, record.seed, record.concurrency, record.boot) == (1, QUESTIONS[3].seed(0), 1, 0)
    [line] = [json.loads(line) for line in run.samples_path.read_text().splitlines() if '"request":3,' in line]
    assert line["sample"]["prompt_hash"] == "p"
    assert line["sample"]["reasoning"] == "3 and 3"


def test_every_arm_gets_the_same_prompts_and_seeds_and_no_stop_strings(run: Run) -> None:
    solvers = [Solver(), Solver()]
    for arm, solver in zip("ab", solvers, strict=True):
        all_of(run, solver, arm=arm, sampling=PUBLISHED, shots=QUESTIONS[200:205])
    assert solvers[0].calls == solvers[1].calls
    call = solvers[0].calls[0]
    assert len(call["messages"]) == 11
    assert {key: call[key] for key in ("temperature", "top_p", "top_k", "max_new_tokens", "thinking")} == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 29, "max_new_tokens": 32768, "thinking": True
    }  # fmt: skip
    assert set(call) == {"messages", "temperature", "top_p", "top_k", "max_new_tokens", "thinking", "seed"}
    assert len({call["seed"] for call in solvers[0].calls}) == 10


def test_the_reasoning_is_not_read_for_the_answer(run: Run) -> None:
    all_of(run, Solver({0: [sample("I am done.", reasoning="#### 0")], 1: [sample("2", reasoning="#### 7")]}))
    records = read(run, "a")
    assert (records[0].status, records[0].extracted) == ("wrong", None)
    assert records[1].status == "right"


def test_done_questions_are_never_asked_again(run: Run) -> None:
    first, second, third = Solver(), Solver(), Solver()
    all_of(run, first, 4)
    reports = all_of(run, second)
    assert (first.asked, second.asked) == ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    assert (reports[0].done, reports[0].resumed, reports[0].record) == (4, 4, None)
    [report] = all_of(run, third)
    assert third.asked == []
    assert (report.done, report.total, report.accuracy) == (10, 10, 1.0)


def test_arms_and_boots_are_apart(run: Run) -> None:
    for options in ({}, {"arm": "b"}, {"boot": 1}):
        solver = Solver()
        all_of(run, solver, 3, **options)
        assert solver.asked == [0, 1, 2]
    assert [len(read(run, *which)) for which in (("a", 0), ("b", 0), ("a", 1), ("b", 1))] == [3, 3, 3, 0]


def test_a_half_written_line_is_asked_again(run: Run) -> None:
    all_of(run, Solver(), 5)
    whole = run.samples_path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (start + 1, (start + len(whole)) // 2, len(whole) - 1):
        run.samples_path.write_bytes(whole[:cut])
        solver = Solver()
        all_of(run, solver, 5)
        assert solver.asked == [4]
        assert [record.request for record in read(run, "a")] == [0, 1, 2, 3, 4]


def test_a_passing_failure_is_retried_and_counted(run: Run) -> None:
    solver = Solver({2: [dropped(), dropped()]})
    reports = all_of(run, solver)
    assert solver.asked[2:5] == [2, 2, 2]
    assert [record.attempt for record in read(run, "a")] == [1, 1, 3] + [1] * 7
    assert reports[-1].counts["right"] == 10


def test_an_aborted_answer_is_no_answer(run: Run) -> None:
    solver = Solver({2: [sample("#### 5", finish_reason="abort")]})
    all_of(run, solver)
    assert solver.asked.count(2) == 2
    assert (read(run, "a")[2].status, read(run, "a")[2].attempt) == ("right", 2)


def test_a_failed_question_is_counted_apart_and_asked_again_later(run: Run) -> None:
    with pytest.raises(EngineError, match="1 of 10 questions got no answer, one because dropped: connection lost; run"):
        all_of(run, Solver({2: [dropped()] * 3}))
    failed = read(run, "a")[2]
    assert (failed.status, failed.correct, failed.attempt) == ("failed", False, 3)
    assert failed.spoiled == ("dropped: connection lost",)
    solver = Solver()
    all_of(run, solver)
    assert solver.asked == [2]
    assert (read(run, "a")[2].status, read(run, "a")[2].attempt) == ("right", 4)


def test_a_refused_request_is_not_sent_again(run: Run) -> None:
    solver = Solver({2: [RequestFailed("rejected", "too long")]})
    with pytest.raises(EngineError, match="rejected: too long"):
        all_of(run, solver)
    assert solver.asked.count(2) == 1


def test_a_dead_server_stops_the_run(run: Run) -> None:
    solver = Solver({index: [dropped()] * 3 for index in range(3, 10)})
    with pytest.raises(EngineError, match=r"2 questions in a row got no answer.* 3 of 10 are answered and kept in"):
        all_of(run, solver, give_up_after=2)
    assert max(solver.asked) == 4


def test_waiting_between_attempts_doubles(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout: waited.append(timeout))
    all_of(run, Solver({2: [dropped()] * 3}), attempts=4, backoff_s=0.5)
    assert waited == [0.5, 1.0, 2.0]


def test_truncated_answers_are_counted_apart_and_too_many_fail_the_run(run: Run) -> None:
    cut = {index: [sample(f"#### {2 * index}", finish_reason="length")] for index in range(2)}
    with pytest.raises(DataError, match=r"2 of 300 answers were cut off at the token limit, more than 0.5 %"):
        all_of(run, Solver(cut), 300)
    assert [record.status for record in read(run, "a")[:3]] == ["truncated", "truncated", "right"]
    check(read(run, "a")[1:])


def test_reasoning_in_the_content_fails_the_run(run: Run) -> None:
    with pytest.raises(DataError, match="1 of 10 answers hold their reasoning in the content"):
        all_of(run, Solver({1: [sample("one and one</think>#### 2")]}))


def test_a_run_cannot_go_on_under_other_conditions(run: Run) -> None:
    all_of(run, Solver(), 3, conditions={"recipe": "all_three"})
    all_of(run, Solver(), 4, conditions={"recipe": "all_three"})
    for changed in (
        {"conditions": {"recipe": "baseline"}},
        {"sampling": PUBLISHED},
        {"seed": 1},
        {"shots": QUESTIONS[:1]},
    ):
        solver = Solver()
        with pytest.raises(StoreError, match=f"holds answers of a/0 under another {next(iter(changed))}"):
            all_of(run, solver, 5, **{"conditions": {"recipe": "all_three"}} | changed)
        assert solver.asked == []


@pytest.mark.parametrize("options", [{"limit": 0}, {"concurrency": 0}, {"attempts": 0}, {"give_up_after": 0}])
def test_nothing_to_do_is_an_error(run: Run, options: dict[str, int]) -> None:
    with pytest.raises(DataError, match="each must be at least 1"):
        all_of(run, Solver(), **options)


def test_progress_tells_accuracy_and_time_left(run: Run) -> None:
    reports = all_of(run, Solver({1: [sample("#### 5")]}), limit=4)
    assert [report.done for report in reports] == [0, 1, 2, 3, 4]
    assert [report.accuracy for report in reports] == [None, 1.0, 0.5, 2 / 3, 0.75]
    assert (reports[0].left_s, reports[-1].left_s) == (None, 0.0)
    half = Progress(None, 6, reports[2].counts, 0, 7200.0)
    assert half.left_s == 14400.0
    assert half.text() == "2 of 6, 50.0 % right, 4 h 0 min left"
    assert reports[0].text() == "0 of 4"


def test_as_many_questions_under_way_as_asked_for(run: Run) -> None:
    class Slow(Solver):
        def __init__(self) -> None:
            super().__init__()
            self.under_way, self.most, self.lock = 0, 0, threading.Lock()

        def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> Sample:
            with self.lock:
                self.under_way += 1
                self.most = max(self.most, self.under_way)
            time.sleep(0.005)
            with self.lock:
                self.under_way -= 1
            return super().chat(messages, **sampling)

    slow = Slow()
    all_of(run, slow, 40, concurrency=4)
    assert slow.most == 4
    assert sorted(slow.asked) == list(range(40))
    assert {record.concurrency for record in read(run, "a")} == {4}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_leaving_the_loop_gives_up_the_store_and_loses_nothing(run: Run, concurrency: int) -> None:
    solver = Solver()
    for report in evaluate(QUESTIONS[:40], solver, run, arm="a", sampling=GREEDY, concurrency=concurrency):
        if report.done == 7:
            break
    again = Solver()
    other = Run.open(run.path)
    kept = {record.request for record in read(other, "a")}
    assert len(kept) == 7
    all_of(other, again, 40)
    assert set(again.asked) == set(range(40)) - kept


def test_show_runs_to_the_end_and_tells_the_last_state(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    show(evaluate(QUESTIONS[:5], Solver({1: [sample("no idea")]}), run, arm="a", sampling=GREEDY))
    assert "5 of 5, 80.0 % right" in capsys.readouterr().err
    assert len(read(run, "a")) == 5


def test_the_run_stores_own_comparison_reads_the_verdicts(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, run_id=name) for name in ("first", "second")]
    all_of(runs[0], Solver({1: [sample("no idea")]}))
    all_of(runs[1], Solver({2: [sample("no idea")], 4: [dropped()]}))
    found = compare_runs(*runs)
    assert found.accuracy["a"]["table"] == {"both": 8, "only_base": 1, "only_new": 1, "neither": 0}
    assert [row.metric for row in found.rows] == ["tpot_ms", "ttft_ms", "latency_ms", "completion_tokens"]


@pytest.mark.server
def test_a_live_server_is_asked_with_thinking_and_its_answers_are_kept(run: Run, serve: Callable[..., Engine]) -> None:
    """Random weights never end an answer, so every one is cut off, and the run says so."""
    engine = serve("nextn")
    client, asked = Client(engine.url, engine.api_key), miniature("instances", 3)
    options: dict[str, Any] = {"arm": "nextn", "sampling": replace(PUBLISHED, max_new_tokens=24)}
    with pytest.raises(DataError, match="3 of 3 answers were cut off at the token limit"):
        show(evaluate(asked, client, run, **options))
    records = read(run, "nextn")
    assert [(record.status, record.sample.completion_tokens) for record in records] == [("truncated", 24)] * 3
    assert all(record.sample.latency_ms and record.sample.accept_length for record in records)
    before = run.samples_path.read_bytes()
    with pytest.raises(DataError, match="3 of 3 answers were cut off"):
        show(evaluate(asked, client, run, **options))
    assert run.samples_path.read_bytes() == before


class SolvingServer(FakeServer):
    """Answers with the number after `####`, in exactly as many tokens as asked for."""

    def answer(self, prompt: list[int], n: int) -> list[int]:
        index = int(re.findall(r"What is (\d+) ", "".join(map(chr, prompt)))[-1])
        return [ord(c) for c in f"#### {2 * index}".ljust(n)]


def _work(url: str, path: Path) -> None:
    for _ in evaluate(QUESTIONS, Client(url), Run.open(path), arm="a", sampling=GREEDY, concurrency=2):
        pass


def _child(server: FakeServer, run: Run) -> Any:
    context = multiprocessing.get_context("forkserver")  # forks from a process that has imported all this once
    child = context.Process(target=_work, args=(server.url, run.path))
    child.start()
    return child


def test_killed_ten_times_at_random_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    preload = ["sparkmoe.gsm8k_run", "sparkmoe.compare", "sparkmoe.engine", "pytest"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    behaviour = Behaviour(first_ms=8, tokens_per_event=(4,), stop_at=12, prefix_cache=False)
    dice, answered = random.Random(7), []
    with SolvingServer(behaviour) as server:
        killed, whole = (Run.create(tmp_path, run_id=name) for name in ("killed", "whole"))
        for _ in range(10):
            before = {record.request for record in read(killed, "a")}
            asked_before = len(server.requests)
            child = _child(server, killed)
            enough = asked_before + dice.randint(0, 25)
            while len(server.requests) < enough and child.is_alive():
                time.sleep(0.001)
            time.sleep(dice.uniform(0.0, 0.02))
            assert child.is_alive()
            child.kill()
            child.join()
            asked = {_index(body) for body in server.requests[asked_before:]}
            assert not asked & before
            answered.append(len(before))
        child = _child(server, killed)
        child.join(60)
        assert child.exitcode == 0
        child = _child(server, whole)
        child.join(60)
    assert answered[0] == 0 < answered[-1] < len(QUESTIONS)
    view: Callable[[Record], tuple[Any, ...]] = lambda r: (r.problem, r.status, r.extracted, r.sample.text, r.seed)  # noqa: E731
    assert [view(record) for record in read(killed, "a")] == [view(record) for record in read(whole, "a")]
    assert len(killed.samples_path.read_text().splitlines()) == len(QUESTIONS)


def _index(body: dict[str, Any]) -> int:
    return int(re.findall(r"What is (\d+) ", body["messages"][-1]["content"])[-1])
