"""Turns trained weights into the bundle: `python -m sparkmoe.nano.export WEIGHTS [OUT]`.

WEIGHTS is a folder that `sparkmoe.nano.train` wrote, OUT one for the checkpoint (left out: the package's own bundle).
The last part of training has already rounded the weights, so quantizing them here changes none: that is checked.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sparkmoe.errors import ModelError
from sparkmoe.nano import bundle, data, tokenizer, train
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.quantize import form


def export(weights: Path, out: Path) -> dict[str, float]:
    """Writes the mixed checkpoint and returns its sizes. Raises ModelError if `weights` holds none."""
    parts = sorted(weights.glob("weights-*.safetensors"))
    if not parts:
        raise ModelError(f"{weights} holds no weights-*.safetensors; make them with python -m sparkmoe.nano.train.")
    raw = {k: v for part in parts for k, v in load_file(part).items()}
    config = LingConfig.from_dict(train.CONFIG)
    # Before quantizing: the latents fill whole FP8 blocks, so widening changes no block that holds a weight.
    wide = bundle.widen(raw, config.kv_lora_rank)
    mixed = bundle.quantize(wide, {name: form(name, config) for name in wide})
    back = bundle.narrow(bundle.dequantize(mixed), config.kv_lora_rank)
    moved = max(float((back[n].float() - raw[n].float()).abs().max()) for n in raw)
    out.mkdir(parents=True, exist_ok=True)
    save_file(mixed, out / "model.safetensors", metadata={"format": "pt"})
    full = train.CONFIG | {"kv_lora_rank": 2 * config.kv_lora_rank, "quantization_config": bundle.QUANTIZATION}
    (out / "config.json").write_text(json.dumps(full, indent=1) + "\n")
    tokenizer.save(tokenizer.load(data.TOKENIZER), out)
    curves = weights / "curves.json"
    if curves.exists():
        shutil.copy(curves, out / "curves.json")
    bundle.write_hashes(out)
    return {
        "tensors": len(mixed),
        "parameters": sum(t.numel() for t in raw.values()),
        "bytes": (out / "model.safetensors").stat().st_size,
        "largest_change": moved,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=bundle.BUNDLE)
    args = parser.parse_args()
    with torch.no_grad():
        print(json.dumps(export(args.weights, args.out)))  # noqa: T201


if __name__ == "__main__":
    main()
