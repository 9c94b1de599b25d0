"""How long does a trace of 1 GB take to read, and how much memory?

Run: python tests/bench_trace.py [GB] [--gz]. The trace is generated like one of a GPU server: launches, kernels with
all their arguments, operators, spans. The last line is one JSON object.
"""

from __future__ import annotations

import gzip
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from sparkmoe import breakdown, trace

LAYER = ("fused_add_rmsnorm", "nvjet_gemm", "causal_conv1d", "fused_recurrent_kda", "nvjet_gemm", "fused_add_rmsnorm",
         "router_gemm", "grouped_topk", "humming_moe", "silu_and_mul", "humming_moe", "nvjet_gemm")  # fmt: skip


def generate(path: Path, size: float) -> int:
    """Write about `size` bytes of trace (before packing); the number of events."""
    count, written, now = 0, 0, 1e6
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        written += file.write(
            '{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H200"}], "traceEvents": [\n'
        )
        while written < size:
            events = [{"ph": "X", "cat": "user_annotation", "name": "step[DECODE bs=1]", "pid": 1, "tid": 1}]
            events[0] |= {"ts": now, "dur": 900.0, "args": {"External id": count}}
            for k in range(42 * len(LAYER)):
                common = {"External id": count + k, "correlation": count + k}
                at = now + 10 + 2 * k
                events.append({"ph": "X", "cat": "cpu_op", "name": "aten::op", "pid": 1, "tid": 1, "ts": at, "dur": 1.5,
                               "args": {"External id": count + k, "Record function id": 0, "Ev Idx": k}})  # fmt: skip
                events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                               "ts": at + 0.5, "dur": 0.9, "args": {"cbid": 211, **common}})  # fmt: skip
                events.append({"ph": "X", "cat": "kernel", "name": LAYER[k % len(LAYER)], "pid": 0, "tid": 7,
                               "ts": at + 20, "dur": 1.7, "args": {"queued": 0, "device": 0, "context": 1, "stream": 7,
                               "registers per thread": 64, "shared memory": 49152, "blocks per SM": 1.2,
                               "grid": [8, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 30,
                               **common}})  # fmt: skip
            written += file.write(",\n".join(json.dumps(e) for e in events) + ",\n")
            count += len(events)
            now += 1100.0
        file.write('{"ph": "M", "name": "end", "pid": 1}], "traceName": "generated"}\n')
    return count


def main() -> None:
    sizes = [float(word) for word in sys.argv[1:] if word != "--gz"]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / ("t.json.gz" if "--gz" in sys.argv else "t.json")
        wanted = (sizes[0] if sizes else 1.0) * 1e9
        events = generate(path, wanted)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        seen = trace.read(path)
        read_s = time.perf_counter() - start
        found = breakdown.break_down(seen, trace.steps(seen))
        result = {
            "bench": "trace",
            "trace_gb": wanted / 1e9,
            "file_gb": path.stat().st_size / 1e9,
            "events": events,
            "steps": found.steps,
            "read_s": read_s,
            "total_s": time.perf_counter() - start,
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "rss_before_gib": before / 2**20,
            "named_share": found.named_share,
        }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
