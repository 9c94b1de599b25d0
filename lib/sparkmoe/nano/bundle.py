"""The bundled checkpoint: what ships, whether it is whole, and where its BF16 form lies.

The package carries nano Ling once, in the mixed layout of Ling-3.0-flash-fp4 (`bundle/fp4`). A machine without FP4
kernels serves the same numbers written out: every weight of that layout is exactly a BF16 number, so form "bf16" is
derived from it, once, into `SPARKMOE_HOME/nano`, and is the same model to the last bit. One thing is stored otherwise
than it was trained: `bundle/fp4` holds every MLA latent twice (`widen`), because SGLang's GPU kernels cannot be
compiled for a latent as narrow as this model's. Each folder has a `SHA256.json`; a folder is handed out only if every
file still has its hash. A damaged derived folder is made anew; a damaged bundle is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkmoe.errors import ModelError
from sparkmoe.nano.quantize import fp8_dequantize, fp8_quantize, mxfp4_dequantize, mxfp4_quantize

log = logging.getLogger(__name__)
BUNDLE = Path(__file__).parent / "bundle" / "fp4"
HASHES = "SHA256.json"
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "b_proj"],
    "routed_experts_quant_method": "mxfp4",
    "routed_experts_group_size": 32,
}


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_hashes(folder: Path) -> None:
    names = sorted(p.name for p in folder.iterdir() if p.name != HASHES)
    (folder / HASHES).write_text(json.dumps({n: sha256(folder / n) for n in names}, indent=1) + "\n")


def damage(folder: Path) -> str | None:
    """What is wrong with a folder, naming the file and its expected SHA-256; None if it is whole."""
    if not (folder / HASHES).is_file():
        return f"{folder / HASHES} is missing"
    for name, want in json.loads((folder / HASHES).read_text()).items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing (expected SHA-256 {want})"
        found = sha256(path)
        if found != want:
            return f"{path} is damaged: its SHA-256 is {found}, expected {want}"
    return None


def folder(form: Literal["bf16", "fp4"] = "bf16") -> Path:
    """A verified model folder of nano Ling. Deriving "bf16" takes a second, once.

    Raises ModelError for another form, for a damaged bundle, and for a `SPARKMOE_HOME` that cannot be written.
    """
    if form not in ("bf16", "fp4"):
        raise ModelError(f"nano Ling has the forms 'bf16' and 'fp4', not '{form}'.")
    wrong = damage(BUNDLE)
    if wrong:
        raise ModelError(f"The bundled model cannot be used: {wrong}. Restore it with git, or reinstall sparkmoe.")
    if form == "fp4":
        return BUNDLE
    home = Path(os.environ.get("SPARKMOE_HOME") or Path.home() / ".cache" / "sparkmoe") / "nano"
    target = home / f"nano-ling-{sha256(BUNDLE / HASHES)[:12]}"
    if target.exists():
        wrong = damage(target)
        if wrong is None:
            return target
        log.warning("%s; it is derived from the bundle again.", wrong)
    try:
        home.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".bf16-", dir=home))
    except OSError as error:
        raise ModelError(
            f"{home} cannot be written ({error.strerror}); set SPARKMOE_HOME to another folder."
        ) from error
    try:
        derive(BUNDLE, scratch)
        if target.exists():
            shutil.rmtree(target)
        scratch.rename(target)
    except OSError:
        if damage(target) is not None:  # not another process that was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def derive(source: Path, out: Path) -> None:
    """Writes the BF16 form of the bundle in `source` (`dequantize`, `narrow`) into the existing folder `out`, with
    hashes.
    """
    for path in source.iterdir():
        if path.name not in ("model.safetensors", "config.json", HASHES):
            shutil.copy(path, out)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    config["kv_lora_rank"] //= 2
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = narrow(dequantize(load_file(source / "model.safetensors")), config["kv_lora_rank"])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    write_hashes(out)


def widen(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The same function with every MLA latent twice: kv_lora_rank `rank` becomes 2 * `rank`.

    RMSNorm divides (c, c) by what it divides c by, and the zeros that kv_b_proj gains ignore the copy. What it is for:
    SGLang's Triton kernel for absorbed decoding reads the value out of the key's tile. It gives the rope part a tile
    of its own for 512 + 64 and 256 + 32 only and otherwise rounds the key up: 128 + 32 would need a value of 128 in a
    tile of 256, which does not compile.
    """
    out = dict(weights)
    for name, w in weights.items():
        if name.endswith(".kv_a_proj_with_mqa.weight"):
            out[name] = torch.cat([w[:rank], w])  # its last rows are the rope key's
        elif name.endswith(".kv_a_layernorm.weight"):
            out[name] = w.repeat(2)
        elif name.endswith(".kv_b_proj.weight"):
            out[name] = F.pad(w, (0, rank))
    return out


def narrow(weights: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The inverse of `widen`, with the same `rank`."""
    out = dict(weights)
    for name, w in weights.items():
        if name.endswith(".kv_a_proj_with_mqa.weight"):
            out[name] = w[rank:].contiguous()
        elif name.endswith(".kv_a_layernorm.weight"):
            out[name] = w[:rank].contiguous()
        elif name.endswith(".kv_b_proj.weight"):
            out[name] = w[:, :rank].contiguous()
    return out


def quantize(weights: dict[str, Tensor], forms: dict[str, str]) -> dict[str, Tensor]:
    """BF16 or FP32 tensors to the mixed layout: `X.weight` and, where quantized, `X.weight_scale_inv`."""
    out: dict[str, Tensor] = {}
    for name, w in weights.items():
        if forms[name] in ("mxfp4", "fp8"):
            q, scale = (mxfp4_quantize if forms[name] == "mxfp4" else fp8_quantize)(w.float())
            out |= {name: q.contiguous(), f"{name}_scale_inv": scale.contiguous()}
        else:
            out[name] = w.to(torch.float32 if forms[name] == "fp32" else torch.bfloat16).contiguous()
    return out


def dequantize(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse: BF16 for everything that was quantized. Raises ModelError if a value is no BF16 number."""
    out: dict[str, Tensor] = {}
    for name, w in weights.items():
        if name.endswith("_scale_inv"):
            continue
        scale = weights.get(f"{name}_scale_inv")
        if scale is None:
            out[name] = w
            continue
        full = mxfp4_dequantize(w, scale) if w.dtype == torch.int8 else fp8_dequantize(w, scale)
        out[name] = full.to(torch.bfloat16)
        if not torch.equal(out[name].float(), full):
            raise ModelError(f"{name} is not exact in BF16: its scales are no powers of two.")
    return out
