"""How long does the inventory of a full-size checkpoint take? Sparse files, so 70 GB of weights take no room.

Run: python tests/bench_inventory.py. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib import resources
from pathlib import Path

from sparkmoe import inventory
from test_roofline import quantized


def main() -> None:
    config = json.loads((resources.files("sparkmoe") / "models" / "ling-3.0-flash-fp4.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        folder = quantized(Path(scratch) / "model", config)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            found = inventory.from_folder(folder)
            times.append(time.perf_counter() - start)
    result = {
        "bench": "inventory",
        "checkpoint_gb": found.stored_bytes / 1e9,
        "tensors": sum(e.tensors for e in found.entries),
        "total_b": found.params() / 1e9,
        "first_s": times[0],
        "best_s": min(times),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
