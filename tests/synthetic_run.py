"""A run as `sparkmoe run` leaves it, made in milliseconds: two timed notebooks, a graded one, and known figures."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparkmoe import notebook, plots
from sparkmoe.engagement import Check as Proof
from sparkmoe.machine import Machine
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run, jsonable
from sparkmoe.sample import Sample

MACHINE = Machine.named("cpu")
TPOT_MS = {"baseline": 12.0, "fp8_head": 12.0, "nextn": 7.0, "fp8_head_nextn": 6.8}
ACCEPT = {"nextn": 3.0, "fp8_head_nextn": 3.0}


def sample(tpot_ms: float, accept: float | None, seed: int, text: str = "129") -> Sample:
    """An answer of 92 tokens that took `tpot_ms` a token."""
    return Sample(
        f"prompt-{seed}", 1_795_990_417.0 + seed, text=text, token_ids=(1, 2, 3), prompt_tokens=41,
        completion_tokens=92, cached_tokens=0, ttft_ms=60.0, tpot_ms=tpot_ms, latency_ms=60 + 91 * tpot_ms,
        chunk_times_ms=(60.0, 60 + 91 * tpot_ms), chunk_tokens=(1, 91), finish_reason="stop",
        accept_length=accept, spec_verify_ct=30 if accept else None,
        accept_histogram=(0, 0, 30, 0) if accept else None,
    )  # fmt: skip


def make(
    root: Path,
    run_id: str = "run",
    *,
    slower: dict[str, float] | None = None,
    machine_slower: float = 1.0,
    bandwidth_gb_s: float = 12.0,
    accept: dict[str, float] | None = None,
    wrong: int = 0,
    disengaged: str | None = None,
    memory_bytes: float = 1.5e9,
    ready_s: float = 17.0,
    boots: int = 1,
    disturbed: str | None = None,
    seed: int = 0,
    **conditions: Any,
) -> Path:
    """A run of 02, 05 and 06 under `root`. `slower` multiplies an arm's TPOT, `machine_slower` everybody's;
    `disengaged` names an arm whose lever is off, which ends its notebook there; `disturbed` one that other programs
    kept from computing now and then."""
    run = Run.create(root, run_id=run_id, notebooks=["02_baseline", "05_mtp_nextn", "06_gsm8k"], quick=True)
    rng = np.random.default_rng(seed)
    accepted = ACCEPT | (accept or {})
    done = []
    for name, arms in (("02_baseline", ("baseline", "fp8_head")), ("05_mtp_nextn", tuple(TPOT_MS))):
        folder = Run.create(run.path, run_id=name, notebook=name, machine=MACHINE, model="nano", **conditions)
        recipes = {arm: Recipe.named(arm) for arm in arms}
        folder.update(plan={"arms": recipes}, commands=dict.fromkeys(arms, "python -m sglang.launch_server"))
        checks = notebook.Checks(folder, name)
        broken = disengaged if disengaged in arms else None
        for arm in arms:
            proof = Proof("head", "fp8", "bf16" if arm == broken else "fp8", "evidence.target.head", arm != broken)
            checks.add(f"{arm} is engaged", proof.ok, proof.found, proof.expected, "a variable did not arrive")
            if arm == broken:
                break
            base = TPOT_MS[arm] * machine_slower * (slower or {}).get(arm, 1.0)
            for boot, request in product(range(boots), range(6)):
                late = (1.0, 4.0, 9.0)[request % 3] if arm == disturbed else 1.0
                took = base * late * float(np.exp(0.004 * rng.standard_normal()))
                one = sample(took, accepted.get(arm), request)
                line = {"arm": arm, "boot": boot, "request": request, "spoiled": [], "sample": one, "concurrency": 1}
                folder.append(jsonable(line))
            facts = {"arm": arm, "boot": 0, "bandwidth_before_gb_s": bandwidth_gb_s}
            folder.write_json(f"boots/{arm}-0-1.json", facts | {"bandwidth_after_gb_s": bandwidth_gb_s})
            servers = folder.manifest.get("servers", {})
            folder.update(
                servers=servers | {arm: [{"ready_s": ready_s * machine_slower, "memory_bytes": memory_bytes}]}
            )
        folder.close()
        if not broken:
            checks.add("samples kept", True, "12 of 12", "at most one in ten spoiled")
            notebook.expect(folder, "baseline", ceiling_tok_s=dict.fromkeys(arms, 400.0), predicted_gain={"nextn": 1.8})
            measured = notebook.Measured(folder)
            figure = plots.ladder({arm: measured.speed(arm) for arm in arms}, title=f"Speed in {name}")
            notebook.show_figure(folder, "ladder", figure)
            folder.update(verdict=f"{arms[-1]} against baseline: {measured.gain(arms[-1], 'baseline').text()} ×")
            checks.not_shown("Humming kernels", "they need an NVIDIA GPU")
            checks.finish()
        error = f"In [7]: NotEngaged: recipe {broken} is not engaged: head: bf16, expected fp8" if broken else None
        done.append({"name": name, "ok": not broken, "seconds": 60.0, "output": f"{name}.ipynb", "error": error})
    graded = Run.create(
        run.path, run_id="06_gsm8k", notebook="06_gsm8k", machine=MACHINE, model="nano", benchmark="sums"
    )
    checks = notebook.Checks(graded, "06_gsm8k")
    for arm in ("baseline", "fp8_head_nextn"):
        for request in range(100):
            right = not (arm == "baseline" and request < 4) and not (arm != "baseline" and request < 4 + wrong)
            one = sample(TPOT_MS[arm] * machine_slower, accepted.get(arm), request, "129" if right else "7")
            graded.append(jsonable(question(arm, request, right, one)))
    graded.close()
    checks.add("every question answered", True, "100 of 100", "100")
    checks.finish()
    done.append({"name": "06_gsm8k", "ok": True, "seconds": 90.0, "output": "06_gsm8k.ipynb", "error": None})
    run.write_json("run.json", {"run": str(run.path), "ok": not disengaged, "seconds": 210.0, "notebooks": done})
    return run.path


def question(arm: str, request: int, right: bool, one: Sample) -> dict[str, Any]:
    """A line of `gsm8k_run`."""
    return {
        "arm": arm, "boot": 0, "request": request, "problem": f"q{request}", "question": "6 * 7?", "reference": "129",
        "status": "right" if right else "wrong", "correct": right, "extracted": one.text, "rule": "marked",
        "attempt": 1, "seed": request, "concurrency": 1, "spoiled": [], "sample": one,
    }  # fmt: skip
