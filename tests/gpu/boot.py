"""One arm, from the start of its server to its end: everything that is asked of it, written down as it comes."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arms import Arm, Shape, accept_lengths
from stay import Clock

from sparkmoe import paired, profiling, recorded, roofline, trace
from sparkmoe.boot import AGREE, MAX_WARMUPS
from sparkmoe.client import Client
from sparkmoe.conditions import clocks
from sparkmoe.engagement import probe, read_evidence, rows, verify
from sparkmoe.engine import Engine
from sparkmoe.errors import SparkmoeError
from sparkmoe.inventory import Inventory
from sparkmoe.judge import LogTail, compile_lines, machine_alarms, reasons_spoiled
from sparkmoe.machine import Machine
from sparkmoe.nano import bundle, evaluate, problems
from sparkmoe.profiling import load_of
from sparkmoe.results import Run
from sparkmoe.serverlog import Progress, seconds_spent
from sparkmoe.workload import Prompt

TRACE_BYTES = 5_000_000


@dataclass
class Bench:
    """Everything that arms share."""

    run: Run
    machine: Machine
    model: Path
    weights: Inventory
    shape: Shape
    gb_s: float
    clock: Clock
    builds: Sequence[subprocess.Popen[bytes]] = ()
    call: str = ""

    @property
    def vocabulary(self) -> int:
        return self.weights.shape.vocab

    def prompt(self, number: int, context: int, output: int) -> Prompt:
        """Random tokens, the first one unlike any other prompt's."""
        rng = random.Random(f"{number} {context}")
        ids = (1 + number, *(rng.randrange(self.vocabulary) for _ in range(context - 1)))
        return Prompt(f"random-{context}-{number}", "synthetic", "", ids, output, ignore_eos=True)

    def boot(self, arm: Arm) -> dict[str, Any]:
        """One arm from start to end. Raises SparkmoeError where it cannot be measured.

        What is not engaged, or not finite, is measured all the same and says so: a stay is short, and a check may err.
        """
        begun = time.monotonic()
        facts: dict[str, Any] = {
            "arm": arm.name,
            "booted": f"{arm.name}-{time.time():.0f}",
            "recipe": asdict(arm.recipe),
        }
        facts |= {"clocks_before": clocks(), "at_unix_s": time.time()}
        stages: dict[str, float] = {}

        def heard(now: Progress) -> None:
            stages.setdefault(now.stage, time.monotonic() - begun)

        model = bundle.folder("bf16" if self.machine.profile == "cpu" else "fp4") if arm.nano else self.model
        engine = Engine(arm.recipe, self.machine, model, log_dir=self.run.folder("logs"), show=False,
                        deadline_s=max(self.clock.left_s(), 60.0), grace_s=1.0)  # fmt: skip
        with engine.start(heard):
            facts |= {"ready_s": engine.ready_s, "stages_at_s": stages, "command": engine.record.argv}
            client = engine.client(timeout_s=max(self.clock.left_s(), 60.0))  # a first long prompt compiles for minutes
            lengths = () if arm.nano else accept_lengths(arm.recipe.draft_steps, arm.recipe.tp)
            if lengths:
                client.simulate_accept_length(lengths[0])
            self.prove(arm, engine, client, facts)
            if arm.nano:
                facts["miniature"] = self.miniature(client)
            else:
                facts |= {"routing": self.routing(client), "logits_finite": self.finite(client)}
                facts["complete"] = self.times(arm, client, LogTail(engine.log_path), lengths, facts["booted"])
                if arm.profiled and facts["complete"]:
                    facts["profiles"] = self.profiles(arm, client, lengths, facts["booted"])
            facts["spent_s"] = seconds_spent(engine.log_path.read_text(errors="replace").splitlines())
        facts["compiled_beside"] = any(build.poll() is None for build in self.builds)
        return facts | {"clocks_after": clocks(), "seconds": time.monotonic() - begun}

    def prove(self, arm: Arm, engine: Engine, client: Client, facts: dict[str, Any]) -> None:
        evidence = read_evidence(engine.evidence_path)
        checks = verify(arm.recipe, evidence, probe(client))
        evidence = read_evidence(engine.evidence_path)
        self.run.write_json(f"evidence/{facts['booted']}.json", evidence)
        facts["checks"] = rows(checks)
        if evidence and "target" in evidence:
            facts |= {"weight_bytes": evidence["target"]["weight_bytes"], "memory": evidence["memory"]}
        failed = tuple(check.name for check in checks if check.required and not check.ok)
        facts["engaged"] = failed == arm.fails

    def finite(self, client: Client) -> bool:
        prompt = self.prompt(0, 64, 8).token_ids
        sample = client.generate(prompt, max_new_tokens=8, ignore_eos=True, return_logprob=True)
        return bool(sample.logprobs) and all(x is not None and math.isfinite(x) for x in sample.logprobs or ())

    def routing(self, client: Client) -> dict[str, Any]:
        """Different experts that 1, 2, … neighbouring tokens of a prompt chose, by layer, and what is expected."""
        client.generate(self.prompt(0, 512, 2).token_ids, max_new_tokens=2, ignore_eos=True)
        found = client.server_info()["internal_states"][0].get("sparkmoe_routing", {})
        shape = self.weights.shape
        counts = sorted({int(n) for layer in found.values() for n in layer if n.isdigit()})
        expected = {str(n): roofline.expected_distinct(shape.experts, shape.top_k, n) for n in counts}
        means = {str(n): statistics.mean(layer[str(n)] for layer in found.values()) for n in counts}
        return {"expected": expected, "mean": means, "layers": found}

    def times(self, arm: Arm, client: Client, tail: LogTail, lengths: tuple[float, ...], booted: str) -> bool:
        """Every context, accept length and output length; False where the time ran out before the last."""
        number = itertools.count()
        for context, (position, length) in itertools.product(self.shape.contexts, enumerate(lengths or (None,))):
            at_first = context == self.shape.contexts[0]
            if length is not None:
                client.simulate_accept_length(length)
            if at_first or position == 0:  # a number of accepted tokens is a kernel of its own when it first occurs
                self.settle(client, tail, self.prompt(next(number), context, self.shape.outputs[0]))
            for output in self.shape.outputs if at_first and position == 0 else self.shape.outputs[:1]:
                for _ in range(self.shape.repeats):
                    if self.clock.left_s() < 0:
                        return False
                    prompt = self.prompt(index := next(number), context, output)
                    asked = {"context": context, "accept": length, "output": output}
                    self.take(arm, client, tail, prompt, asked | {"request": index, "booted": booted})
        return True

    def take(self, arm: Arm, client: Client, tail: LogTail, prompt: Prompt, record: dict[str, Any]) -> None:
        client.flush_cache()
        tail.new()
        sample = client.generate(prompt.token_ids, max_new_tokens=prompt.max_new_tokens, ignore_eos=True)
        lines = tail.new()
        spoiled = reasons_spoiled(sample, prompt, lines) + machine_alarms(self.machine, gpus=arm.recipe.tp)
        self.run.append({"arm": arm.name, "boot": 0, **record, "spoiled": spoiled, "sample": sample.to_json()})

    def settle(self, client: Client, tail: LogTail, prompt: Prompt) -> None:
        """Ask the same until nothing compiles and two steps in a row took the same time."""
        steps: list[float] = []
        for _ in range(MAX_WARMUPS):
            client.flush_cache()
            tail.new()
            sample = client.generate(prompt.token_ids, max_new_tokens=prompt.max_new_tokens, ignore_eos=True)
            steps.append((sample.tpot_ms or 0.0) * (sample.accept_length or 1.0))
            agree = len(steps) > 1 and abs(steps[-1] - steps[-2]) <= AGREE * min(steps[-2:])
            if agree and not compile_lines(tail.new()):
                return

    def profiles(self, arm: Arm, client: Client, lengths: tuple[float, ...], booted: str) -> dict[str, Any]:
        """A step taken apart at each context; a profile that fails costs no measurement."""
        found: dict[str, Any] = {}
        for context in self.shape.contexts:
            if self.clock.left_s() < 0:
                break
            try:
                if lengths:
                    client.simulate_accept_length(lengths[0])
                found[str(context)] = self.profile(arm, client, context, f"{booted}-{context}.json.gz")
            except SparkmoeError as error:
                found[str(context)] = {"error": str(error)}
        return found

    def profile(self, arm: Arm, client: Client, context: int, name: str) -> dict[str, Any]:
        """The step's parts, and its trace cut to what can be kept."""
        kept, tokens = self.run.folder("traces") / name, self.shape.profiled_tokens
        with tempfile.TemporaryDirectory() as scratch:
            load, gpu = load_of(arm.recipe, self.machine, context), self.machine.profile != "cpu"
            prompts = [self.prompt(0, context, tokens).token_ids]
            seen = profiling.dissect(client, prompts, scratch, self.weights, self.gb_s, load, gpu=gpu,
                                     output_tokens=tokens, tp=arm.recipe.tp)  # fmt: skip
            whole = trace.read(seen.path)
            for count in (8, 4, 2, 1):
                if trace.trim(whole, trace.steps(whole), kept, count=count).stat().st_size <= TRACE_BYTES:
                    break
        step = seen.found
        return {
            "verdict": seen.verdict.sentence,
            "shares": seen.verdict.shares,
            "slowdown": seen.slowdown,
            "accept_length": seen.accept_length,
            "step_ms": step.step_ms,
            "busy_ms": step.busy_ms,
            "host_gap_ms": step.host_gap_ms,
            "launch_gap_ms": step.launch_gap_ms,
            "calls": step.calls,
            "named_share": step.named_share,
            "parts": seen.table().to_dict("records"),
            "top": dict(itertools.islice(step.top.items(), 30)),
            "unknown": step.unknown,
            "trace": kept.name,
        }

    def miniature(self, client: Client) -> dict[str, Any]:
        """Accuracy and accept length of the trained miniature, and the CPU's, which solved every problem of both."""
        cpu = recorded.load("nano-evaluate").findings
        found: dict[str, Any] = {}
        for split in ("instances", "combinations"):
            count = self.shape.problems
            mark = evaluate.accuracy(client, split, count, self.shape.parallel)
            right = round(mark["accuracy"] * count)
            if cpu[split]["accuracy"] == 1.0:
                lost = paired.PairedTable(right, count - right, 0, 0)
                mark["minus_cpu"] = paired.difference(lost).as_dict()
            found[split] = mark
        asked = problems.split("instances", min(100, self.shape.problems), seed=2)
        prompts = [client.render([{"role": "user", "content": p.question}], thinking=True) for p in asked]
        found["accept_length_greedy"] = evaluate.accept_length(client, prompts, evaluate.MAX_NEW_TOKENS)
        return found | {"cpu": {key: cpu[key] for key in ("instances", "combinations", "accept_length")}}
