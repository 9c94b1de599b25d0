"""Run by test_torch_cpu_server.py: load checkpoints as a server would, feed them tokens, save the logits.

Usage: model_runner.py TOKEN,TOKEN,… CHECKPOINT…  The prompt is all but the last five tokens, which are decoded one by
one; CHECKPOINT/logits.pt gets the last six rows of logits, [6, V]. SGLang is imported once (that takes ten seconds) and
every checkpoint is served in a fork, because a process can serve one model only.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
from sglang.benchmark import one_batch
from sglang.srt.models import registry  # noqa: F401  (imports every model: once, before the forks)
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

ids = [int(token) for token in sys.argv[1].split(",")]
folders = sys.argv[2:]


def run(server_args: Any, port_args: Any, bench_args: Any, gpu_id: int, tp_rank: int) -> None:
    rank = one_batch.spawn_world_rank(server_args, tp_rank=tp_rank, pp_rank=0)
    one_batch.publish(server_args, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=rank, gpu_id=gpu_id))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server_args, port_args, gpu_id, tp_rank)
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(1, len(ids) - 5, [ids[:-5]])
    with torch.inference_mode():
        _, logits, batch = runner.extend(requests)
        rows = [logits.clone()]
        for token in ids[-5:]:
            rows.append(runner.decode(torch.tensor([token]), batch)[1].clone())
    torch.save(torch.cat(rows).float(), f"{server_args.model_path}/logits.pt")


def serve(folder: str) -> None:
    flags = "--device cpu --dtype float32 --enable-fp32-lm-head --disable-radix-cache --max-total-tokens 1024"
    args = prepare_server_args(
        ["--model-path", folder, *flags.split(), "--max-running-requests", "2", "--mem-fraction-static", "0.3"]
    )
    one_batch.main(args, one_batch.BenchArgs())


if __name__ == "__main__":
    load_plugins()
    one_batch.latency_test = run
    for folder in folders:
        if (child := os.fork()) == 0:
            try:
                serve(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{folder} failed")
