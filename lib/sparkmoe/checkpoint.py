"""Is this folder a model that the server can load? Answered from headers, in milliseconds.

Loading 66 GB only to learn that the ninth shard was cut short by a full disk costs six minutes and, on a machine whose
GPU shares its memory with everything else, sometimes the desktop. A safetensors file opens with its own table of
contents: eight bytes of length, a JSON object with dtype, shape and offsets of each tensor, then the data without gaps.
So the expected size of every file is known from its first few kilobytes, and so is the number of bytes to be loaded.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkmoe.errors import ModelError
from sparkmoe.machine import NANO_LING, Machine

ARCHITECTURES = ("BailingMoeV3ForCausalLM",)
_BITS = (
    dict.fromkeys(("F64", "I64", "U64"), 64)
    | dict.fromkeys(("F32", "I32", "U32"), 32)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 16)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8)
    | {"F4": 4}
)
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What the headers of a model folder say."""

    path: Path
    config: dict[str, Any] = field(repr=False)
    weight_bytes: int
    tensor_count: int
    bytes_by_dtype: dict[str, int]

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def context_length(self) -> int | None:
        """The context that the model was trained for, in tokens (`max_position_embeddings`)."""
        value = self.config.get("max_position_embeddings")
        return int(value) if value else None

    @property
    def draft_layers(self) -> int:
        """Number of NEXTN (MTP) layers; 0 means the model cannot draft for itself."""
        return int(self.config.get("num_nextn_predict_layers") or 0)

    @property
    def experts(self) -> str:
        """How the routed experts are stored: "mxfp4", another quantization's name, or "bf16"."""
        quantization = self.config.get("quantization_config") or {}
        return str(quantization.get("routed_experts_quant_method") or quantization.get("quant_method") or "bf16")

    def identity(self) -> list[Any]:
        """What makes two folders the same model for a running server: the path, and size and time of every file."""
        files = sorted(p for p in self.path.iterdir() if p.suffix in (".safetensors", ".json"))
        return [str(self.path.resolve())] + [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]


def resolve(model: Path | str | None, machine: Machine) -> Path:
    """The folder to serve: `model`, or the machine's default one. The bundled nano Ling is stored as a GPU reads it
    and served on a CPU in its BF16 form, derived on first use.

    Raises ModelError if there is none, or if the bundle is damaged.
    """
    if model is not None:
        return Path(model).expanduser().absolute()
    default = machine.default_model
    if default is None:
        raise ModelError(
            f"no model given and none found for a {machine.profile} machine; pass its folder (--model, SPARKMOE_MODEL)"
        )
    if default == NANO_LING:
        from sparkmoe.nano import bundle

        return bundle.folder("bf16" if machine.profile == "cpu" else "fp4")
    return default


def make_miniature(path: Path) -> Path:
    """The 12-layer model of random weights at `path`: whole or not at all, also with two makers at once."""
    from sparkmoe.nano import random_checkpoint

    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        random_checkpoint.make(partial)
        partial.rename(path)
    except OSError as error:
        if not (path / "config.json").is_file():
            raise ModelError(f"cannot make the miniature in {path} ({error.strerror}); set SPARKMOE_HOME") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return path


def inspect(path: Path | str) -> Checkpoint:
    """Read a model folder's headers. Raises ModelError with one sentence for whatever would stop the server."""
    folder = Path(path)
    if not folder.exists():
        raise ModelError(f"model folder {folder} does not exist")
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file; a model is a folder with config.json and *.safetensors")
    config = _config(folder)
    shards = _shards(folder)
    by_dtype: dict[str, int] = {}
    count = 0
    where: dict[str, Path] = {}
    for shard in shards:
        header = read_header(shard)
        for tensor, entry in header.items():
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            by_dtype[entry["dtype"]] = by_dtype.get(entry["dtype"], 0) + size
            where[tensor] = shard
        count += len(header)
    _check_index(folder, where)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise ModelError(f"model folder {folder} has no tokenizer (neither tokenizer.json nor tokenizer_config.json)")
    return Checkpoint(folder, config, sum(by_dtype.values()), count, by_dtype)


def read_header(shard: Path) -> dict[str, dict[str, Any]]:
    """Table of contents of one safetensors file: name → dtype, shape, data_offsets in bytes from the header's end.

    Raises ModelError if the header is damaged, disagrees with itself, or the file is shorter or longer than it says.
    """
    size = shard.stat().st_size
    with shard.open("rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise ModelError(f"{shard} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{shard} is damaged: {size:,} bytes, and its first 8 are no safetensors header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans = sorted((tuple(entry["data_offsets"]), name) for name, entry in header.items())
            sizes = {name: _tensor_bytes(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{shard} is damaged: its safetensors header cannot be read; download it again") from None
    end = 0
    for (begin, stop), name in spans:
        if begin != end or stop < begin or (sizes[name] is not None and stop - begin != sizes[name]):
            raise ModelError(f"{shard} is damaged: tensor {name} does not fit its place in the file; download it again")
        end = stop
    expected = 8 + length + end
    if size != expected:
        kind = "cut short" if size < expected else "longer than its header says"
        raise ModelError(f"{shard} is {kind}: {size:,} bytes, expected {expected:,}; download it again")
    return header


def _tensor_bytes(entry: dict[str, Any]) -> int | None:
    bits = _BITS.get(entry["dtype"])
    return None if bits is None else math.prod(entry["shape"]) * bits // 8


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        empty = "is empty" if not any(folder.iterdir()) else "has no config.json"
        raise ModelError(f"model folder {folder} {empty}; expected config.json, a tokenizer and *.safetensors")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error})") from None
    found = config.get("architectures") if isinstance(config, dict) else None
    if not found or found[0] not in ARCHITECTURES:
        named = f"architecture {found[0]}" if found else "no architecture"
        raise ModelError(f"{file} names {named}; these recipes are for {', '.join(ARCHITECTURES)} (Ling-3.0)")
    return config


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} is damaged: no readable weight_map; download it again") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks {len(missing)} of {len(names)} weight files (first: {missing[0]})")
        return [folder / name for name in names]
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(f"model folder {folder} has no *.safetensors file")
    return shards


def _check_index(folder: Path, where: dict[str, Path]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    mapped = json.loads(index.read_text())["weight_map"]
    for tensor, name in mapped.items():
        if tensor not in where or where[tensor].name != name:
            raise ModelError(f"{folder / name} lacks tensor {tensor}, which the index places there; download it again")
