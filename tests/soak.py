"""Hours of use in one command: `python tests/soak.py --minutes 90 --requests 20000 --kills 20`.

`sparkmoe serve nextn --keep` serves nano Ling on this machine's CPU. Everything that will be asked is asked once,
alone, and its greedy answer kept: beginnings of problems to be gone on with, problems to be answered at once, and some
to be thought through, so that a batch mixes answers of 4 tokens and of 200. Then eight clients, as many as the server
takes at a time, ask all of it over and over, in any order and company, and every answer must be those tokens again: the
server computes in FP32, where a request's company in the batch is too small a rounding to change one. Meanwhile the
server is killed: its leader and its scheduler in turns, spread over the first two thirds of the way, whether time or
requests end it. It has served for a minute each time: one that dies sooner again and again is a crash loop to the
keeper, which then waits 1, 2, 4 … 60 s before it starts the next, and that pause is not what is measured here. A
request that the kill cut off is asked again, as a client would; it may come late, never wrong. Recovery is the time
from the kill to the first whole answer that was asked for after it.

In the last third nobody is killed, and memory must stand still, that of the server and of what keeps it. Its PSS has a
part that neighbours move: a page of a library is shared out among all that map it, so a program that starts or ends
next door changes it. What only these processes hold (anonymous and shared memory, all that a server can leak) is
therefore counted apart, and judged. At the end SIGTERM meets a request that is being answered.

The run keeps `result.json`, the memory every five seconds, and the keeper's log. The last line is the record; exit code
1 where something of it should not be, and then the run keeps the server's logs as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sparkmoe.client import Client
from sparkmoe.gates import free_port
from sparkmoe.keeper import STABLE_S
from sparkmoe.machine import Machine
from sparkmoe.nano import problems
from sparkmoe.processes import Record
from sparkmoe.results import Run
from sparkmoe.sample import RequestFailed

log = logging.getLogger(__name__)
MAX_RECOVERY_S, MAX_GROWTH = 40.0, 0.02
CLIENTS = Machine.named("cpu").max_concurrency
SHARES = {"gone on with": 0.65, "answered at once": 0.3, "thought through": 0.05}
WARM_S = 60.0  # from a start until the memory counts, and how much of its first and last time is compared
MEMORY_EVERY_S = 5.0


@dataclass(frozen=True)
class Memory:
    """Bytes of each process of the service, by role: PSS, and the part of it that no other program can share."""

    at_s: float
    server: int  # 0 for the first, 1 after the first kill
    age_s: float
    pss: dict[str, int]
    own: dict[str, int]


@dataclass
class Seen:
    """What happened, filled in by the threads."""

    asked: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # without a kill that explains it
    cut_off: Counter[str] = field(default_factory=Counter)
    recovered_s: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    seconds: float = 0.0
    clients: int = 0  # still asking at the end
    drained_tokens: int = 0


class Soak:
    """`spared_s` is how long a server answers before it may be killed."""

    def __init__(
        self, home: Path, minutes: float, requests: int, kills: int, questions: int = 40, spared_s: float = STABLE_S + 5
    ) -> None:
        self.home, self.minutes, self.requests, self.kills, self.spared_s = home, minutes, requests, kills, spared_s
        self.questions = [p.question for p in problems.split("instances", questions, seed=9)]
        self.answers: dict[tuple[str, str], list[int]] = {}
        self.seen, self.stop = Seen(), threading.Event()
        self.key_file, self.port = home / "key", free_port()
        self.begun_s = self.last_kill_s = self.last_start_s = time.monotonic()
        self.waiting = False  # for the first answer after a kill
        self.lock = threading.Lock()

    def run(self, check: Callable[[Client, str], None] = lambda client, key: None) -> dict[str, Any]:
        """`check` is called with a client and the key once the server answers, before the load begins."""
        words = ["serve", "nextn", "--machine", "cpu", "--keep", "--port", str(self.port)]
        words += ["--key-file", str(self.key_file), "--patience-s", "60"]
        argv = [sys.executable, "-c", "from sparkmoe.cli import main; main()", *words]
        out = (self.home / "serve.log").open("ab")
        self.serve = subprocess.Popen(argv, env=os.environ | {"SPARKMOE_HOME": str(self.home)}, stdout=out, stderr=out)
        try:
            self.wait_for_answer()
            check(self.client(), self.key_file.read_text().strip())
            self.answers = {(kind, q): self.ask(kind, q) for kind in SHARES for q in self.questions}
            assert all(self.answers.values()), "an answer without tokens proves nothing"
            log.info("%d answers kept, %d tokens", len(self.answers), sum(map(len, self.answers.values())))
            self.load()
            self.drain()
            code = self.serve.wait(timeout=90)
        finally:
            self.stop.set()
            self.serve.terminate()
            self.serve.wait(timeout=120)
        return self.record(code)

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", self.key_file.read_text().strip(), timeout_s=60.0)

    def ask(self, kind: str, question: str) -> list[int]:
        if kind == "gone on with":
            sample = self.client().generate(question[:40], max_new_tokens=4, ignore_eos=True)
        else:
            message = [{"role": "user", "content": question}]
            sample = self.client().chat(message, max_new_tokens=320, thinking=kind == "thought through")
        return list(sample.token_ids or ())

    def wait_for_answer(self) -> None:
        end = time.monotonic() + 300
        while True:
            try:
                self.ask("answered at once", self.questions[0])
                return
            except (RequestFailed, OSError):
                if self.serve.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def progress(self) -> float:
        """How much of the way is behind us, by time or by requests, whichever will end it."""
        elapsed_s = time.monotonic() - self.begun_s
        return max(elapsed_s / (60 * self.minutes), self.seen.asked.total() / self.requests)

    def load(self) -> None:
        self.last_start_s = self.begun_s = time.monotonic()
        threads = [threading.Thread(target=self.ask_on, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        kill_at = [(n + 0.3) / self.kills * 2 / 3 for n in range(self.kills)]
        measure_at_s = say_at_s = self.begun_s
        while self.progress() < 1 or kill_at or self.recovering() or not self.last_third():
            time.sleep(0.5)
            now = time.monotonic()
            due = kill_at and self.progress() >= kill_at[0] and now >= self.last_start_s + self.spared_s
            if due and not self.recovering():
                self.kill(len(kill_at) % 2 == 0)
                kill_at.pop(0)
            elif not self.waiting and now >= measure_at_s:
                measure_at_s = now + MEMORY_EVERY_S
                self.seen.memory.append(self.memory())
            if now >= say_at_s and self.seen.memory:
                say_at_s, last = now + 60, self.seen.memory[-1]
                log.info(
                    "%.0f s: %d answers, %d wrong, %d recoveries, PSS %.0f MiB",
                    now - self.begun_s, self.seen.asked.total(), len(self.seen.wrong), len(self.seen.recovered_s),
                    _mib(sum(last.pss.values())),
                )  # fmt: skip
        self.seen.seconds = time.monotonic() - self.begun_s
        self.seen.clients = sum(thread.is_alive() for thread in threads)
        self.stop.set()
        for thread in threads:
            thread.join(timeout=120)

    def last_third(self) -> bool:
        """Whether the last server has been left alone for a third of the time."""
        return time.monotonic() - self.last_start_s >= (self.last_start_s - self.begun_s) / 2

    def recovering(self) -> bool:
        """Whether the first answer after a kill is still awaited; three times the limit is enough to see it fail."""
        return self.waiting and time.monotonic() - self.last_kill_s < 3 * MAX_RECOVERY_S

    def ask_on(self, number: int) -> None:
        rng = random.Random(number)
        for _ in itertools.count():
            (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
            question = rng.choice(self.questions)
            while not self.stop.is_set():
                begun = time.monotonic()
                try:
                    found = self.ask(kind, question)
                except RequestFailed as error:
                    if self.waiting or begun < self.last_start_s:
                        self.seen.cut_off[error.kind] += 1
                    else:
                        self.seen.failed.append(f"{kind}: {question}: {error}")
                    time.sleep(0.25)
                    continue
                self.note(kind, question, found, begun)
                break
            if self.stop.is_set():
                return

    def note(self, kind: str, question: str, found: list[int], begun: float) -> None:
        with self.lock:
            self.seen.asked[kind] += 1
            self.seen.tokens += len(found)
            if found != (right := self.answers[kind, question]):
                self.seen.wrong.append(f"{kind}: {question}: {found} instead of {right}")
            if self.waiting and begun > self.last_kill_s:
                self.waiting, self.last_start_s = False, time.monotonic()
                self.seen.recovered_s.append(self.last_start_s - self.last_kill_s)
                log.info("an answer %.1f s after the kill", self.seen.recovered_s[-1])

    def kill(self, leader: bool) -> None:
        server = self.server()
        schedulers = [p for p in server.members() if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline())]
        victim = server.server[0] if leader or not schedulers else schedulers[0].pid  # type: ignore[index]
        with self.lock:
            os.kill(victim, signal.SIGKILL)
            self.waiting, self.last_kill_s = True, time.monotonic()

    def server(self) -> Record:
        return next(r for p in (self.home / "servers").glob("*.json") if (r := Record.read(p)) and r.server)

    def memory(self) -> Memory:
        """Of the keeper and of all that it has started."""
        now, keeper = time.monotonic(), psutil.Process(self.serve.pid)
        seen = Memory(now - self.begun_s, len(self.seen.recovered_s), now - self.last_start_s, {}, {})
        for process in (keeper, *keeper.children(recursive=True)):
            try:
                words = " ".join(process.cmdline())
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            except (psutil.Error, OSError):
                continue
            rollup = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE))
            found = re.search(r"scheduler|detokenizer|supervisor|launch_server", words)
            role = "keeper" if process == keeper else found[0] if found else "other"
            own = int(rollup["Pss_Anon"]) + int(rollup["Pss_Shmem"])
            seen.pss[role] = seen.pss.get(role, 0) + 1024 * int(rollup["Pss"])
            seen.own[role] = seen.own.get(role, 0) + 1024 * own
        return seen

    def drain(self) -> None:
        """SIGTERM while an answer is on its way: it must come whole."""
        prompt = [5 + n % 500 for n in range(64)]
        wait = self.client().start_generate

        def long() -> None:
            sample = wait(prompt, max_new_tokens=200, ignore_eos=True)()
            self.seen.drained_tokens = sample.completion_tokens

        thread = threading.Thread(target=long)
        thread.start()
        time.sleep(0.7)
        self.serve.send_signal(signal.SIGTERM)
        thread.join(timeout=90)

    def record(self, code: int) -> dict[str, Any]:
        seen = self.seen
        memory = self.growth()
        checks = {
            "no answer was wrong": not seen.wrong,
            "no request failed without a kill": not seen.failed,
            "every client asked to the end": seen.clients == CLIENTS,
            "every kill was recovered from": len(seen.recovered_s) == self.kills,
            f"recovery within {MAX_RECOVERY_S:.0f} s": max(seen.recovered_s, default=0.0) <= MAX_RECOVERY_S,
            "memory stands still": memory["own_growth"] <= MAX_GROWTH if memory else self.minutes < 10,
            "a running request was answered at the end": seen.drained_tokens == 200,
            "it ended properly": code == 0,
        }
        return {
            "schema": "sparkmoe.soak/2", "ok": all(checks.values()), "checks": checks, "seconds": round(seen.seconds),
            "requests": seen.asked.total(), "by_kind": dict(seen.asked), "tokens": seen.tokens, "clients": CLIENTS,
            "wrong": len(seen.wrong), "failed": len(seen.failed), "first_of_them": [*seen.wrong[:5], *seen.failed[:5]],
            "cut_off_and_asked_again": dict(seen.cut_off), "kills": self.kills,
            "recovered_s": [round(s, 1) for s in seen.recovered_s], "memory": memory,
        }  # fmt: skip

    def growth(self) -> dict[str, Any]:
        """The last server's memory, from `WARM_S` after its start to the end: medians of the first and the last minute,
        per role too; the keeper's from the first server to the last. Empty where it did not live that long."""
        warm = [m for m in self.seen.memory if m.server == len(self.seen.recovered_s) and m.age_s >= WARM_S]
        if not warm or warm[-1].age_s < 3 * WARM_S:
            return {}
        ends = [m for m in warm if m.age_s <= 2 * WARM_S], [m for m in warm if m.age_s >= warm[-1].age_s - WARM_S]

        def medians(part: Callable[[Memory], float]) -> list[float]:
            return [statistics.median(map(part, end)) for end in ends]

        pss, own = medians(lambda m: sum(m.pss.values())), medians(lambda m: sum(m.own.values()))
        roles = {role: medians(lambda m, role=role: m.own.get(role, 0)) for role in warm[0].own}  # type: ignore[misc]
        keeper = [m.own["keeper"] for m in self.seen.memory]
        return {
            "from_age_s": round(warm[0].age_s), "to_age_s": round(warm[-1].age_s), "samples": len(warm),
            "pss_mib": [*map(_mib, pss)], "pss_growth": round(pss[1] / pss[0] - 1, 4),
            "own_mib": [*map(_mib, own)], "own_growth": round(own[1] / own[0] - 1, 4),
            "own_mib_by_role": {role: [*map(_mib, sizes)] for role, sizes in roles.items()},
            "keeper_own_mib_over_all_servers": [_mib(keeper[0]), _mib(max(keeper)), _mib(keeper[-1])],
        }  # fmt: skip


def _mib(size: float) -> float:
    return round(size / 2**20, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the run's folder is made")
    given = parser.parse_args()
    run = Run.create(given.results, name="soak")
    home = run.folder("home").absolute()
    os.environ["SPARKMOE_HOME"] = str(home)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    soak = Soak(home, given.minutes, given.requests, given.kills)
    record = soak.run()
    run.write_json("result.json", record)
    run.write_json("memory.json", soak.seen.memory)
    shutil.copy(home / "serve.log", run.path)
    if record["ok"]:
        shutil.rmtree(home)
    sys.stdout.write(json.dumps(record | {"run": str(run.path)}) + "\n")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
