"""Ling-3.0-flash's full shape with random weights: start arms one after another, verify each, time it, write it down.

`full_shape.py OUT.json FOLDER [ARM …]`; FOLDER holds config.json and a tokenizer, weights are made up (`--load-format
dummy`). An arm that OUT already holds is skipped, so an interrupted stay goes on where it ended. Random weights accept
nothing, so the accept length of drafting arms is simulated; it is the published one, and recorded as such.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparkmoe.client import Client
from sparkmoe.conditions import clocks, environment
from sparkmoe.engagement import read_evidence, rows, verify
from sparkmoe.engine import free_port
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe

ACCEPT_LENGTH = 2.68
SIMULATED = (("SGLANG_SIMULATE_ACC_LEN", str(ACCEPT_LENGTH)),)
FLAGS = ("--load-format", "dummy", "--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled")
ARMS = {
    "bf16_head": Recipe("bf16_head", moe="humming", head="bf16", max_running_requests=4),
    "fp8_head": Recipe("fp8_head", moe="humming", head="fp8", max_running_requests=4),
    "all_three": Recipe("all_three", moe="humming", head="fp8", draft_steps=3, max_running_requests=4),
    "nextn_bf16": Recipe("nextn_bf16", moe="humming", head="bf16", draft_steps=3, max_running_requests=4),
    "draft_fp8": Recipe(
        "draft_fp8", moe="humming", head="bf16", draft_steps=3, draft_head="fp8", max_running_requests=4
    ),
    "marlin": Recipe("marlin", moe="marlin", head="fp8", draft_steps=3, max_running_requests=4),
}


def measure(recipe: Recipe, folder: Path, log: Path, *, deadline_s: float, requests: int = 5) -> dict[str, Any]:
    machine, port = Machine.detect(), free_port()
    chosen = recipe.with_(name=recipe.name, extra_args=FLAGS, extra_env=SIMULATED if recipe.draft_steps else ())
    evidence = log.with_suffix(".evidence.json")
    command = chosen.command(machine, model=folder, port=port, evidence=evidence)
    begun = time.monotonic()
    with log.open("wb") as out:
        server = subprocess.Popen(
            command.argv, env=os.environ | command.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while b"fired up" not in log.read_bytes():
            if server.poll() is not None or time.monotonic() - begun > deadline_s:
                return {"error": log.read_text(errors="replace")[-2000:], "after_s": time.monotonic() - begun}
            time.sleep(0.5)
        ready_s = time.monotonic() - begun
        client = Client(f"http://127.0.0.1:{port}", timeout_s=300.0)
        prompt = [(7 * i) % 100_000 + 10 for i in range(512)]
        samples = [client.generate([i + 5, *prompt], max_new_tokens=128, ignore_eos=True) for i in range(requests + 2)][
            2:
        ]
        found = read_evidence(evidence)
        return {
            "recipe": asdict(chosen),
            "argv": command.argv,
            "ready_s": ready_s,
            "tpot_ms": statistics.median(s.tpot_ms for s in samples if s.tpot_ms),
            "tpot_all_ms": [s.tpot_ms for s in samples],
            "accept_length": [s.accept_length for s in samples],
            "simulated_accept_length": ACCEPT_LENGTH if recipe.draft_steps else None,
            "checks": rows(verify(chosen, found, samples)),
            "evidence": found,
        }
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def main(out: Path, folder: Path, names: list[str], *, deadline_s: float) -> None:
    done = (
        json.loads(out.read_text()) if out.exists() else {"environment": environment(), "clocks": clocks(), "arms": {}}
    )
    for name in names:
        if "tpot_ms" not in done["arms"].get(name, {}):
            done["arms"][name] = measure(ARMS[name], folder, out.with_name(f"{name}.log"), deadline_s=deadline_s)
            out.write_text(json.dumps(done, indent=1, default=str))


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3:] or list(ARMS),
        deadline_s=float(os.environ.get("ARM_S", "900")),
    )
