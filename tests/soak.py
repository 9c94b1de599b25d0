"""Hours of use in one command: `python tests/soak.py OUT.json --minutes 90 --requests 20000 --kills 20`.

`sparkmoe serve nextn --keep` serves nano Ling on this machine's CPU. Each problem is asked once, alone, and its greedy
answer kept; then two clients ask them over and over, both cores busy, and every answer must be those tokens again.
Meanwhile the server is killed: its leader and its scheduler in turns, spread over the first two thirds of the time. A
request that the kill cut off is asked again, as a client would; it may come late, never wrong. Recovery is the time
from the kill to the first whole answer that was asked for after it. In the last third nobody is killed, and the memory
of the server (PSS of its processes) must stand still. At the end SIGTERM meets a request that is being answered.

The last line is the record that is also written to OUT.json; exit code 1 where something of it should not be.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sparkmoe.client import Client
from sparkmoe.conditions import environment
from sparkmoe.gates import free_port
from sparkmoe.nano import problems
from sparkmoe.processes import Record
from sparkmoe.sample import RequestFailed

MAX_RECOVERY_S, MAX_GROWTH = 40.0, 0.02
CLIENTS = 2
WARM_S = 60.0


@dataclass
class Seen:
    """What happened, filled in by the threads."""

    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    cut_off: Counter[str] = field(default_factory=Counter)
    recovered_s: list[float] = field(default_factory=list)
    pss_bytes: list[tuple[float, int]] = field(default_factory=list)  # of the last server, with its age in s
    drained_tokens: int = 0


class Soak:
    def __init__(self, home: Path, minutes: float, requests: int, kills: int, questions: int = 40) -> None:
        self.home, self.minutes, self.requests, self.kills = home, minutes, requests, kills
        self.asked = [p.question for p in problems.split("instances", questions, seed=9)]
        self.seen, self.stop = Seen(), threading.Event()
        self.key_file, self.port = home / "key", free_port()
        self.last_kill_s = self.last_start_s = 0.0
        self.waiting = False  # for the first answer after a kill
        self.lock = threading.Lock()

    def run(self, check: Callable[[Client, str], None] = lambda client, key: None) -> dict[str, Any]:
        """`check` is called with a client and the key once the server answers, before the load begins."""
        words = ["serve", "nextn", "--machine", "cpu", "--keep", "--port", str(self.port)]
        words += ["--key-file", str(self.key_file), "--patience-s", "60"]
        argv = [sys.executable, "-c", "from sparkmoe.cli import main; main()", *words]
        log = (self.home / "serve.log").open("ab")
        serve = subprocess.Popen(argv, env=os.environ | {"SPARKMOE_HOME": str(self.home)}, stdout=log, stderr=log)
        try:
            self.wait_for_answer(serve)
            check(self.client(), self.key_file.read_text().strip())
            self.answers = [self.ask(question) for question in self.asked]
            self.load()
            self.drain(serve)
            code = serve.wait(timeout=90)
        finally:
            self.stop.set()
            serve.terminate()
            serve.wait(timeout=120)
        return self.record(code)

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", self.key_file.read_text().strip(), timeout_s=60.0)

    def ask(self, question: str) -> list[int]:
        rendered = self.client().chat([{"role": "user", "content": question}], max_new_tokens=320)
        return list(rendered.token_ids)

    def wait_for_answer(self, serve: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + 300
        while True:
            try:
                self.ask(self.asked[0])
                return
            except (RequestFailed, OSError):
                if serve.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.5)

    def load(self) -> None:
        self.last_start_s = begun = time.monotonic()
        threads = [threading.Thread(target=self.ask_on, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        length = self.minutes * 60
        kill_at = [begun + length * 2 / 3 * (n + 0.3) / self.kills for n in range(self.kills)]
        while (time.monotonic() - begun < length and self.seen.asked < self.requests) or kill_at or self.recovering():
            time.sleep(0.5)
            if kill_at and time.monotonic() >= kill_at[0] and not self.recovering():
                self.kill(len(kill_at) % 2 == 0)
                kill_at.pop(0)
            elif not self.waiting and int(time.monotonic()) % 5 == 0:
                self.seen.pss_bytes.append((time.monotonic() - self.last_start_s, self.pss()))
        self.stop.set()
        for thread in threads:
            thread.join(timeout=120)

    def recovering(self) -> bool:
        """Whether the first answer after a kill is still awaited; three times the limit is enough to see it fail."""
        return self.waiting and time.monotonic() - self.last_kill_s < 3 * MAX_RECOVERY_S

    def ask_on(self, number: int) -> None:
        rng = random.Random(number)
        for _ in itertools.count():
            index = rng.randrange(len(self.asked))
            while not self.stop.is_set():
                begun = time.monotonic()
                try:
                    found = self.ask(self.asked[index])
                except RequestFailed as error:
                    self.seen.cut_off[error.kind] += 1
                    time.sleep(0.25)
                    continue
                self.note(index, found, begun)
                break
            if self.stop.is_set():
                return

    def note(self, index: int, found: list[int], begun: float) -> None:
        with self.lock:
            self.seen.asked += 1
            if found != self.answers[index]:
                self.seen.wrong.append(f"{self.asked[index]}: {found} instead of {self.answers[index]}")
            if self.waiting and begun > self.last_kill_s:
                self.waiting, self.last_start_s = False, time.monotonic()
                self.seen.pss_bytes.clear()
                self.seen.recovered_s.append(self.last_start_s - self.last_kill_s)

    def kill(self, leader: bool) -> None:
        server = self.server()
        schedulers = [p for p in server.members() if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline())]
        victim = server.server[0] if leader or not schedulers else schedulers[0].pid  # type: ignore[index]
        with self.lock:
            os.kill(victim, signal.SIGKILL)
            self.waiting, self.last_kill_s = True, time.monotonic()

    def server(self) -> Record:
        return next(r for p in (self.home / "servers").glob("*.json") if (r := Record.read(p)) and r.server)

    def pss(self) -> int:
        total = 0
        for process in self.server().members():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    def drain(self, serve: subprocess.Popen[bytes]) -> None:
        """SIGTERM while an answer is on its way: it must come whole."""
        prompt = [5 + n % 500 for n in range(64)]
        wait = self.client().start_generate

        def long() -> None:
            sample = wait(prompt, max_new_tokens=200, ignore_eos=True)()
            self.seen.drained_tokens = sample.completion_tokens

        thread = threading.Thread(target=long)
        thread.start()
        time.sleep(0.7)
        serve.send_signal(signal.SIGTERM)
        thread.join(timeout=90)

    def record(self, code: int) -> dict[str, Any]:
        seen = self.seen
        warm = [size for age_s, size in seen.pss_bytes if age_s >= WARM_S]
        growth = warm[-1] / warm[0] - 1 if len(warm) > 1 else None
        checks = {
            "no answer was wrong": not seen.wrong,
            "every kill was recovered from": len(seen.recovered_s) == self.kills,
            f"recovery within {MAX_RECOVERY_S:.0f} s": max(seen.recovered_s, default=0.0) <= MAX_RECOVERY_S,
            "memory stands still": growth is None or growth <= MAX_GROWTH,
            "a running request was answered at the end": seen.drained_tokens == 200,
            "it ended properly": code == 0,
        }
        return {
            "schema": "sparkmoe.soak/1", "ok": all(checks.values()), "checks": checks, "minutes": self.minutes,
            "requests": seen.asked, "wrong": seen.wrong[:5], "cut_off_and_asked_again": dict(seen.cut_off),
            "kills": self.kills, "recovered_s": [round(s, 1) for s in seen.recovered_s],
            "pss_gib": [round(size / 2**30, 3) for size in (*warm[:1], *warm[-1:])], "pss_growth": growth,
            "environment": environment(),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["SPARKMOE_HOME"] = home
        record = Soak(Path(home), given.minutes, given.requests, given.kills).run()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(json.dumps(record) + "\n")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
