"""Where do a model's bytes lie? Counted from headers or from a config, without reading a weight.

At batch 1 a decode step is one pass over the weights that a token touches, so its time is, to first order, those
bytes divided by the memory bandwidth. "124 billion parameters" says nothing about that: only 5 billion of them are
touched, and the touched ones are stored in three formats. The inventory sorts every tensor into a part of the model
(attention, router, routed experts, head, …), with its dtype as stored and quantization scales kept apart, because
each lever of this cookbook changes one part.

Two conventions, both those of the model cards: the MTP layer is not part of the model's total, and *active* parameters
count the head but not the embedding, of which a token reads one row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from sparkmoe import checkpoint
from sparkmoe.errors import ModelError
from sparkmoe.shapes import Config, Shape, Tensor, describe

PARTS = ("kda", "mla", "attention", "dense", "shared", "experts", "router", "norms", "head", "embedding", "draft input")
OTHER = "other"

# First match wins; "attention" becomes kda, mla or attention by the kind of its layer. `*` stands for a number.
RULES: tuple[tuple[str, str], ...] = (
    (r"\.(eh_proj|enorm|hnorm|final_layernorm|shared_head\.norm)\.", "draft input"),
    (r"(word_embeddings|embed_tokens)\.", "embedding"),
    (r"^lm_head\.|\.shared_head\.head\.", "head"),
    (r"\.mlp\.experts\.", "experts"),
    (r"\.mlp\.shared_experts?\.", "shared"),
    (r"\.mlp\.(gate|router)\.", "router"),
    (r"\.mlp\.", "dense"),
    (r"\.(attention|self_attn)\.", "attention"),
    (r"norm\.", "norms"),
)
_SCALE = re.compile(r"(weight_scale(_inv)?|[._]scales?|input_scale)$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NUMBER = re.compile(r"\.\d+(?=\.)")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_WIDTH = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Entry:
    """Tensors of one part, role and dtype. Scales have bytes but count no parameters."""

    part: str
    mtp: bool
    role: Literal["weight", "scale"]
    dtype: str
    params: int
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Inventory:
    """A model's tensors by part. `source` is the folder or config it was counted from."""

    source: str
    shape: Shape
    entries: tuple[Entry, ...]
    unknown: tuple[str, ...] = ()

    def params(self, part: str | None = None, *, mtp: bool = False) -> int:
        """Parameters of the target (or of the MTP layers), of one part or of all."""
        return sum(e.params for e in self.entries if e.mtp == mtp and part in (None, e.part))

    def bytes(self, part: str | None = None, *, mtp: bool = False) -> int:
        """Bytes as stored, scales included, of the target (or of the MTP layers), of one part or of all."""
        return sum(e.bytes for e in self.entries if e.mtp == mtp and part in (None, e.part))

    def active_params(self, *, embedding: bool = False) -> int:
        """Parameters that one token touches: top-k of the experts, the head, and the embedding only if asked for."""
        idle = self.params("experts") * (1 - self.shape.top_k / self.shape.experts) if self.shape.experts else 0
        skipped = 0 if embedding or self.shape.tied else self.params("embedding")
        return round(self.params() - idle - skipped)

    @property
    def stored_bytes(self) -> int:
        """Everything in the checkpoint, MTP layers and scales included."""
        return sum(e.bytes for e in self.entries)

    def table(self) -> pd.DataFrame:
        """One row per part, role and dtype: parameters, bytes, tensors."""
        order = {part: i for i, part in enumerate((*PARTS, OTHER))}
        rows = sorted(self.entries, key=lambda e: (e.mtp, order[e.part], e.role != "weight", e.dtype))
        return pd.DataFrame(
            [
                {"part": f"MTP {e.part}" if e.mtp else e.part, "role": e.role, "dtype": e.dtype}
                | {"params": e.params, "bytes": e.bytes, "tensors": e.tensors}
                for e in rows
            ]
        )


@lru_cache(maxsize=4096)
def _rule(name: str) -> tuple[str, bool]:
    """(part, whether it is a scale) of a tensor name whose numbers were replaced."""
    part = next((part for pattern, part in RULES if re.search(pattern, name)), OTHER)
    return part, bool(_SCALE.search(name))


class _Stored(NamedTuple):
    name: str
    dtype: str
    params: int
    bytes: int
    tensors: int = 1


def _collect(source: str, shape: Shape, stored: Iterable[_Stored]) -> Inventory:
    sums: dict[tuple[str, bool, bool, str], list[int]] = {}
    unknown: list[str] = []
    layers: set[int] = set()
    for tensor in stored:
        found = _LAYER.search(tensor.name)
        layer = int(found[1]) if found else -1
        part, scale = _rule(_NUMBER.sub(".*", tensor.name))
        if layer >= len(shape.kinds):
            part = OTHER
        elif part == "attention":
            part = shape.kinds[layer] if layer >= 0 and shape.kinds[layer] != "window" else part
        if part == OTHER:
            unknown.append(tensor.name)
        layers.add(layer)
        total = sums.setdefault((part, layer >= shape.layers, scale, tensor.dtype), [0, 0, 0])
        total[0] += 0 if scale else tensor.params
        total[1] += tensor.bytes
        total[2] += tensor.tensors
    missing = [i for i in range(len(shape.kinds)) if i not in layers]
    if missing:
        raise ModelError(
            f"{source} holds no tensor of layer {missing[0]}, though its config.json has {len(shape.kinds)} layers "
            f"({shape.mtp_layers} of them MTP). The download is not complete, or the config belongs to another model."
        )
    entries = (
        Entry(part, mtp, "scale" if scale else "weight", dtype, *total)
        for (part, mtp, scale, dtype), total in sums.items()
    )
    return Inventory(source, shape, tuple(entries), tuple(unknown))


def from_folder(folder: Path | str) -> Inventory:
    """Count a checkpoint: `config.json` and the headers of its safetensors files, nothing else is read.

    Raises ModelError for a missing file, shard or config field, a damaged header, an unknown architecture.
    """
    path = Path(folder)
    config = _read_config(path / "config.json")
    shape, _ = describe(config)
    packed = _expert_format(config) == "mxfp4"
    return _collect(str(path), shape, _headers(path, packed))


def _headers(folder: Path, packed: bool) -> Iterator[_Stored]:
    for shard in checkpoint._shards(folder):
        for name, entry in checkpoint.read_header(shard).items():
            begin, end = entry["data_offsets"]
            # Two FP4 values share a byte where the file calls it an 8-bit integer.
            pair = 2 if packed and entry["dtype"] in ("U8", "I8") and ".experts." in name else 1
            yield _Stored(name, "F4" if pair == 2 and not _SCALE.search(name) else entry["dtype"],
                          pair * math.prod(entry["shape"]), end - begin)  # fmt: skip


def from_config(config: Config | Path | str) -> Inventory:
    """Count the model that a config describes: a dict, a path to `config.json`, or a name from `shipped()`."""
    if isinstance(config, (str, Path)):
        source, content = str(config), _read_config(Path(config))
    else:
        source, content = "config", dict(config)
    shape, tensors = describe(content)
    return _collect(source, shape, (piece for tensor in tensors() for piece in _as_stored(tensor, content)))


def shipped() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(
        Path(f.name).stem for f in (resources.files("sparkmoe") / "models").iterdir() if f.name.endswith(".json")
    )


def _expert_format(config: Config) -> str:
    quantization = config.get("quantization_config") or {}
    return str(quantization.get("routed_experts_quant_method") or quantization.get("quant_method") or "none")


def _as_stored(tensor: Tensor, config: Config) -> Iterator[_Stored]:
    """The tensor and its scales in the checkpoint's format, from `quantization_config`."""
    quantization: dict[str, Any] = config.get("quantization_config") or {}
    size = math.prod(tensor.shape)
    if tensor.form == "expert" and _expert_format(config) == "mxfp4":
        yield _Stored(tensor.name, "F4", size * tensor.count, size * tensor.count // 2, tensor.count)
        blocks = size // tensor.shape[-1] * math.ceil(tensor.shape[-1] / 32) * tensor.count
        yield _Stored(tensor.name + "_scale", "F8_E8M0", 0, blocks, tensor.count)
        return
    block = quantization.get("weight_block_size")
    skipped = set(quantization.get("modules_to_not_convert") or ())
    # A matrix with fewer rows than a block (one row per head) is left alone.
    if (
        tensor.form in ("linear", "expert")
        and quantization.get("quant_method") == "fp8"
        and block
        and tensor.shape[0] >= block[0]
        and not skipped & set(tensor.name.split("."))
    ):
        yield _Stored(tensor.name, "F8_E4M3", size * tensor.count, size * tensor.count, tensor.count)
        blocks = math.prod(math.ceil(n / b) for n, b in zip(tensor.shape, block, strict=True)) * tensor.count
        yield _Stored(tensor.name + "_scale_inv", "F32", 0, 4 * blocks, tensor.count)
        return
    dtype = (
        "F32" if tensor.form == "fp32" else _DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")), "BF16")
    )
    yield _Stored(tensor.name, dtype, size * tensor.count, size * tensor.count * _WIDTH[dtype], tensor.count)


def _read_config(file: Path) -> dict[str, Any]:
    if str(file) in shipped():
        file = Path(str(resources.files("sparkmoe") / "models" / f"{file}.json"))
    if not file.is_file():
        raise ModelError(f"{file} does not exist; an inventory needs config.json, or one of: {', '.join(shipped())}.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); download it again.") from None
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds a {type(config).__name__}, not a config; download it again.")
    return config
