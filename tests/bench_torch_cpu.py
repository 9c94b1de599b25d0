"""What the CPU platform is worth on this machine: decode, NEXTN, prefill, memory, start.

    python tests/bench_torch_cpu.py [--prototype FOLDER] [--boots 1] [--repeats 5]

serves a 12-layer random miniature (25 M parameters) whose drafts are accepted about three tokens long, plain and with
NEXTN (K = 3), batch 1, greedy. With --prototype the same arms run on the package `sglang_torch_cpu` in that folder,
measured in turns. The last line of the output is one JSON object: medians per arm, and the targets' figures. A run
keeps every repeat's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import requests

from sparkmoe.machine import Machine
from sparkmoe.nano.random_checkpoint import make
from sparkmoe.recipe import Recipe
from sparkmoe.results import Run

ALPHA = 0.88  # accept length of about 3 at K = 3
PORT = 31990
ENTRY_POINTS = """[sglang.srt.platforms]
torch_cpu_prototype = sglang_torch_cpu:activate
[sglang.srt.plugins]
torch_cpu_kernels = sglang_torch_cpu.hooks:register
"""


def install(prototype: Path, where: Path) -> dict[str, str]:
    """Make the package's entry points visible without installing it; returns the environment that selects it."""
    info = where / "sglang_torch_cpu-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-torch-cpu\nVersion: 0.0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (where / "sglang_torch_cpu").symlink_to(prototype / "sglang_torch_cpu")
    return {
        "PYTHONPATH": str(where),
        "SGLANG_PLATFORM": "torch_cpu_prototype",
        "SGLANG_PLUGINS": "torch_cpu_kernels",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def server(
    recipe: Recipe, model: Path, extra: dict[str, str], port: int, log: Path
) -> Iterator[tuple[str, float, int]]:
    """(URL, seconds until the first generated token, process group) of a running server."""
    command = recipe.command(Machine.named("cpu"), model=model, port=port)
    begun = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command.argv, env=os.environ | command.env | extra, stdout=out, stderr=out, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                generate(url, [1, 2, 3], 1)
                break
            except requests.RequestException:
                if process.poll() is not None or time.monotonic() - begun > 180:
                    sys.exit(f"no server; see {log}\n" + log.read_text()[-2000:])
                time.sleep(0.2)
        yield url, time.monotonic() - begun, process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def generate(url: str, ids: list[int], n: int) -> tuple[float, dict]:
    """Seconds and meta_info of one greedy request."""
    begun = time.perf_counter()
    sampling = {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True}
    reply = requests.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=120)
    reply.raise_for_status()
    return time.perf_counter() - begun, reply.json()["meta_info"]


def group_bytes(group: int) -> int:
    """PSS of a whole process group."""
    total = 0
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group:
                total += process.memory_full_info().pss
        except (psutil.Error, ProcessLookupError):
            continue
    return total


def one_repeat(url: str, rng: random.Random) -> dict[str, float]:
    """Decode rate over 256 tokens after a 64-token prompt, accept length, and prefill rate of 1,024 tokens."""
    ids = [rng.randrange(256) for _ in range(64)]
    first = min(generate(url, ids, 1)[0] for _ in range(2))
    whole, meta = generate(url, ids, 257)
    long = [rng.randrange(256) for _ in range(1024)]
    return {
        "tok_s": 256 / (whole - first),
        "accept_length": meta.get("spec_accept_length") or 1.0,
        "prefill_tok_s": 1024 / generate(url, long, 1)[0],
    }


@contextmanager
def alone(arm: str, running: dict[str, tuple[str, float, int]]) -> Iterator[str]:
    """URL of one arm, while the other arms' processes are stopped: an idle scheduler polls, and takes a core."""
    others = [group for name, (_, _, group) in running.items() if name != arm]
    for group in others:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield running[arm][0]
    finally:
        for group in others:
            os.killpg(group, signal.SIGCONT)


def one_boot(
    platforms: dict[str, dict[str, str]], model: Path, repeats: int, logs: Path
) -> tuple[dict[str, dict[str, float]], dict[str, list[dict[str, float]]]]:
    """Start all arms, then measure them in turns, so that what else the machine does meets each alike.

    Returns an arm's medians, and the repeats that they are of."""
    running: dict[str, tuple[str, float, int]] = {}
    samples: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack:
        for steps in (0, 3):
            for platform, extra in platforms.items():
                arm, port = f"{platform} {'nextn' if steps else 'plain'}", PORT + len(running)
                recipe = Recipe("baseline").with_(draft_steps=steps)
                running[arm] = stack.enter_context(server(recipe, model, extra, port, logs / f"{port}.log"))
                generate(running[arm][0], list(range(64)), 64)
        for repeat in range(repeats):
            for arm in running:
                with alone(arm, running) as url:
                    samples.setdefault(arm, []).append(one_repeat(url, random.Random(repeat)))
        medians = {
            arm: {key: statistics.median(s[key] for s in samples[arm]) for key in samples[arm][0]}
            | {"ready_s": ready_s, "pss_gib": group_bytes(group) / 2**30}
            for arm, (_, ready_s, group) in running.items()
        }
        return medians, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prototype", type=Path)
    parser.add_argument("--boots", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the run's folder is made")
    args = parser.parse_args()
    run = Run.create(args.results, name="bench-torch-cpu")
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make(folder / "miniature", alpha=ALPHA)
        platforms: dict[str, dict[str, str]] = {"torch_cpu": {}}
        if args.prototype:
            (folder / "site").mkdir()
            platforms["prototype"] = install(args.prototype.resolve(), folder / "site")
        for boot in range(args.boots):
            medians, samples = one_boot(platforms, model, args.repeats, folder)
            run.write_json(f"samples-{boot}.json", samples)
            for arm, found in medians.items():
                results.setdefault(arm, []).append(found)
                sys.stdout.write(f"{arm}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()) + "\n")
                sys.stdout.flush()
    arms = {arm: {k: statistics.median(b[k] for b in boots) for k in boots[0]} for arm, boots in results.items()}
    plain, nextn = arms["torch_cpu plain"], arms["torch_cpu nextn"]
    held = {
        "nextn / plain ≥ 1.4": nextn["tok_s"] / plain["tok_s"],
        "prefill tok/s ≥ 4000": min(plain["prefill_tok_s"], nextn["prefill_tok_s"]),
        "PSS GiB ≤ 3.2": max(plain["pss_gib"], nextn["pss_gib"]),
        "ready s ≤ 30": max(plain["ready_s"], nextn["ready_s"]),
    }
    if args.prototype:
        held["plain / prototype plain ≥ 1.3"] = plain["tok_s"] / arms["prototype plain"]["tok_s"]
        held["nextn / prototype nextn"] = nextn["tok_s"] / arms["prototype nextn"]["tok_s"]
    rounded = {arm: {k: round(v, 3) for k, v in values.items()} for arm, values in arms.items()}
    machine = {"cores": os.cpu_count(), "boots": args.boots, "repeats": args.repeats}
    targets = {k: round(v, 3) for k, v in held.items()}
    found = {"arms": rounded, "targets": targets, **machine}
    run.write_json("result.json", found | {"boots": results})
    sys.stdout.write(json.dumps(found | {"run": str(run.path)}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
