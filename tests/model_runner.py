"""Run by test_torch_cpu_server.py: load a checkpoint as a server would, feed it tokens, save the logits.

Usage: model_runner.py CHECKPOINT OUT.pt TOKEN…  The prompt is all but the last five tokens, which are decoded one by
one; OUT gets the last six rows of logits, [6, V].
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sglang.benchmark import one_batch
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

folder, out, *tokens = sys.argv[1:]
ids = [int(t) for t in tokens]


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
    torch.save(torch.cat(rows).float(), out)


if __name__ == "__main__":
    load_plugins()
    one_batch.latency_test = run
    flags = "--device cpu --dtype float32 --enable-fp32-lm-head --disable-radix-cache --max-total-tokens 1024"
    args = prepare_server_args(
        ["--model-path", folder, *flags.split(), "--max-running-requests", "2", "--mem-fraction-static", "0.3"]
    )
    one_batch.main(args, one_batch.BenchArgs())
