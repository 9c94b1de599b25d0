"""Keep the GPU busy for three seconds and say what it did: `python -m sparkmoe.spark_load` prints one line of JSON.

A clock says nothing while a GPU idles, and a GB10 whose power supply was negotiated badly idles like any other; only
under load it stays at 500–850 MHz. This runs in a process of its own because a CUDA context, once made, holds hundreds
of megabytes of the pool until its process ends. Bandwidth in GB/s (1e9) over a buffer of 1 GiB, far beyond the cache.

Not yet run on a GB10.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_BUFFER_BYTES = 1 << 30
_SECONDS = 3.0


def measure() -> dict[str, Any]:
    """`free_bytes` and `total_bytes` of cudaMemGetInfo before the load, `gb_s`, and during it the median `sm_mhz`,
    `power_w` and `temperature_c` where the GPU reports them; `humming_gb_s`, or `humming_error`."""
    import statistics

    import torch

    from sparkmoe.gpus import nvml_facts

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32, device="cuda")
    buffer.sum()
    torch.cuda.synchronize()
    seconds: list[float] = []
    facts: list[dict[str, float]] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        begun = time.perf_counter()
        for _ in range(8):
            buffer.sum()
        if len(seconds) % 10 == 5:
            facts += nvml_facts().get("gpus", [])[:1]  # asked while the kernels above still run
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / 8)
    seen: dict[str, Any] = {"free_bytes": free_bytes, "total_bytes": total_bytes}
    seen["gb_s"] = _BUFFER_BYTES / min(seconds) / 1e9
    for name in ("sm_mhz", "power_w", "temperature_c"):
        if values := [each[name] for each in facts if name in each]:
            seen[name] = statistics.median(values)
    return seen | _humming()


def _humming() -> dict[str, Any]:
    """What Humming takes the memory's bandwidth to be: it picks tile sizes by that, and asks NVML for it."""
    try:
        from humming.utils.device import calculate_gpu_bandwidth

        return {"humming_gb_s": float(calculate_gpu_bandwidth())}
    except Exception as error:
        return {"humming_error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure()) + "\n")
