"""The levers at Ling-3.0-flash's full size on a GPU, with random weights, over as many stays as it takes.

Each arm (`arms.py`) is one boot of a server: how its start spent its time, proof that the recipe is engaged, that
logits are finite and that routing spreads as the roofline assumes; then times per token at two contexts, under several
simulated accept lengths that are switched in the running server; and of the main arms, where a step's time goes.
Beside every measured time stands the predicted one: the bytes ÷ the bandwidth measured here, plus what the plain arm
spends beyond that. The first arms serve the trained miniature in its FP4 form instead, for accuracy and accept length.

An arm's result is on disk as soon as it is known. A call ends before it would be cut off, and the next one, also on
another machine, goes on at the next arm. README.md has the commands. Without a GPU the same runs in miniature.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from arms import DRY, GPU, HOT_ROWS, Arm, arms
from boot import Bench
from join import join
from stay import Clock, pack_caches, pack_run, prebuild, unpack
from table import recipe_of, sound, states, table

from sparkmoe import hot_vocab, inventory
from sparkmoe.conditions import clocks, environment
from sparkmoe.machine import Machine
from sparkmoe.nano import random_checkpoint, tokenizer
from sparkmoe.results import Run

MODEL = "ling-3.0-flash-fp4"
PROBE_BYTES = 4 << 30


def model_folder(path: Path, config: Mapping[str, Any]) -> Path:
    """A model of a shape alone: its config, a tokenizer of bytes, and a weight file without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(config)))
    tokenizer.save(tokenizer.bytes_only(), path)
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


def shape_config(machine: Machine) -> dict[str, Any]:
    if machine.profile == "cpu":
        limits = {f"{kind}_swiglu_limit_list": [0.0] * 2 + [0.5] * 2 for kind in ("expert", "share_expert")}
        return random_checkpoint.BASE | {"num_hidden_layers": 4} | limits
    return json.loads((resources.files("sparkmoe") / "models" / f"{MODEL}.json").read_text())


def hot_map(work: Path) -> Path:
    return work / "hot.pt"


def open_run(results: Path) -> Run:
    earlier = sorted(path.parent for path in results.glob("*/manifest.json"))
    return Run.open(earlier[-1]) if earlier else Run.create(results, name="full-shape")


def measure(bench: Bench, known: Mapping[str, Arm], todo: Iterable[Arm], out: Path) -> Iterator[str]:
    """Measure what is not done yet, as far as the time allows; yields an arm's name when its result is packed."""
    planned = {name: arm.recipe for name, arm in known.items()}
    for arm in todo:
        state = states(bench.run).get(arm.name, {}).get("status")
        if state in ("done", "failed"):
            continue
        if not bench.clock.enough():
            return
        begun, at = time.monotonic(), time.time()
        try:
            facts = bench.boot(arm)
            facts |= {"call": bench.call, "status": "done" if facts.get("complete", True) else "partial"}
        except Exception as error:  # the next arm may be luckier, and a stay is short
            status = "failed" if bench.clock.left_s() > 0 else "partial"
            facts = {"arm": arm.name, "recipe": asdict(arm.recipe), "status": status, "error": str(error)}
            facts |= {"traceback": traceback.format_exc(), "call": bench.call, "at_unix_s": at}
        bench.clock.took(time.monotonic() - begun)
        bench.run.write_json(f"arms/{arm.name}.json", facts)
        # A run that came from a machine with more GPUs has an arm that this one does not plan.
        recipes = planned | {name: recipe_of(state) for name, state in states(bench.run).items() if name not in planned}
        compared = table(bench.run, recipes, bench.weights, bench.machine)
        bench.run.write_json("table.json", compared)
        pack_run(bench.run.path, out)
        yield arm.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder whose files outlive the stay")
    parser.add_argument("--carried", type=Path, help="folder with what an earlier call left in --out")
    parser.add_argument("--join", type=Path, help="the results folder of another --work: take over what it measured")
    parser.add_argument("--no-caches", action="store_true", help="do not pack the compilers' caches")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "full-shape")
    parser.add_argument("--home", type=Path, default=Path.home(), help="where compilers keep their caches")
    parser.add_argument("--arms", help="comma-separated names, in this order (default: all)")
    parser.add_argument("--again", help="comma-separated names: forget these arms' results first")
    parser.add_argument("--commit", help="of this checkout, where it is a copy without git")
    parser.add_argument("--stop-after-s", type=float, default=520.0, help="begin no arm that would not end by then")
    parser.add_argument("--first-arm-s", type=float, default=150.0, help="what the first arm is expected to take")
    parser.add_argument("--later-arm-s", type=float, help="and each later one (default: the longer of the last two)")
    args = parser.parse_args()
    clock = Clock(args.stop_after_s, args.first_arm_s, args.later_arm_s)
    brought = unpack(args.carried, args.work / "results", args.home) if args.carried else []
    machine = Machine.detect()
    config = shape_config(machine)
    model = model_folder(args.work / "models" / MODEL, config)
    if not hot_map(model.parent).exists():
        rows_kept = min(HOT_ROWS, config["vocab_size"])
        hot_vocab.save(hot_map(model.parent), hot_vocab.choose({0: 1}, rows_kept, config["vocab_size"]))
    known = {arm.name: arm for arm in arms(machine, hot_map(model.parent))}
    wanted = args.arms.split(",") if args.arms else list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"there is no arm {unknown[0]}; known: {', '.join(known)}")
    run = open_run(args.work / "results")
    others = sorted(args.join.glob("*/manifest.json")) if args.join else []
    if args.join and not others:
        parser.error(f"there is no run in {args.join}")
    for other in others:
        join(run, Run.open(other.parent))
    for name in filter(None, (args.again or "").split(",")):
        (run.path / "arms" / f"{name}.json").unlink(missing_ok=True)
    # The buffer is a hundred times a GPU's last-level cache; on a CPU the default is large enough.
    gb_s = machine.probe_bandwidth(*([] if machine.profile == "cpu" else [PROBE_BYTES]))
    shape, builds = DRY, []
    if machine.profile != "cpu":
        torch.cuda.empty_cache()  # the buffer back to the servers
        missing = {known[name].recipe.moe for name in wanted if states(run).get(name, {}).get("status") != "done"}
        shape, builds = GPU, prebuild() if "marlin" in missing else []
    call = f"{time.time():.0f}-{os.getpid()}"
    bench = Bench(run, machine, model, inventory.from_config(config), shape, gb_s, clock, builds, call)
    conditions = {"machine": machine, "gb_s": gb_s, "commit": args.commit}
    facts = environment() | conditions | {"argv": sys.argv, "brought": brought, "clocks": clocks()}
    run.write_json(f"calls/{call}.json", facts)
    if "gb_s" not in run.manifest:
        run.update(model=f"{MODEL}, random weights", **conditions)
    done = []
    for name in measure(bench, known, [known[name] for name in wanted], args.out):
        done.append(name)
        if len(done) == 1 and machine.profile != "cpu" and not args.no_caches:
            pack_caches(args.home, args.out)  # in case this call is cut off
    run.close()
    for build in builds:
        build.terminate()
    pack_run(run.path, args.out)
    kept = {} if args.no_caches else pack_caches(args.home, args.out)
    doubts = {True: "", False: ", in doubt"}
    found = {name: state["status"] + doubts[sound(state)] for name, state in states(run).items()}
    print(json.dumps({"run": run.id, "measured": done, "arms": found, "gb_s": gb_s, "caches": kept}))  # noqa: T201


if __name__ == "__main__":
    main()
