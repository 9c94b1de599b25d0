import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from sparkmoe.checkpoint import inspect, resolve
from sparkmoe.errors import ModelError
from sparkmoe.machine import Machine


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small whole model folder of two shards with an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    for number in (1, 2):
        tensors = {f"layer{number}.a": np.ones((4, 8), np.float32), f"layer{number}.b": np.ones(16, np.float16)}
        save_file(tensors, folder / f"model-{number}.safetensors")
    names = {f"layer{n}.{t}": f"model-{n}.safetensors" for n in (1, 2) for t in "ab"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def test_a_whole_model(model: Path) -> None:
    seen = inspect(model)
    assert (seen.tensor_count, seen.weight_bytes) == (4, 2 * (4 * 8 * 4 + 16 * 2))
    assert seen.bytes_by_dtype == {"F32": 256, "F16": 64}
    assert (seen.context_length, seen.draft_layers, seen.experts) == (4096, 1, "bf16")


def test_the_random_miniature(miniature: Path) -> None:
    seen = inspect(miniature)
    assert seen.weight_bytes == pytest.approx((miniature / "model.safetensors").stat().st_size, rel=0.01)
    assert seen.draft_layers == 1


def test_mixed_quantization_is_read(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}
    (model / "config.json").write_text(json.dumps(config))
    assert inspect(model).experts == "mxfp4"


def no_folder(model: Path) -> None:
    shutil.rmtree(model)


def a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("weights")


def empty(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


def broken_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')


def other_architecture(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def no_architecture(model: Path) -> None:
    (model / "config.json").write_text("[]")


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def no_weights(model: Path) -> None:
    for file in model.glob("*.safetensors*"):
        file.unlink()


def a_missing_shard(model: Path) -> None:
    (model / "model-2.safetensors").unlink()


def a_broken_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{}")


def a_tensor_too_few(model: Path) -> None:
    save_file({"layer2.a": np.ones((4, 8), np.float32)}, model / "model-2.safetensors")


def truncated(model: Path) -> None:
    shard = model / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])


def too_long(model: Path) -> None:
    with (model / "model-1.safetensors").open("ab") as file:
        file.write(b"\0" * 16)


def zeroed_header(model: Path) -> None:
    shard = model / "model-1.safetensors"
    shard.write_bytes(b"\0" * shard.stat().st_size)


def garbled_header(model: Path) -> None:
    raw = bytearray((model / "model-1.safetensors").read_bytes())
    raw[20:24] = b"\xff{{["
    (model / "model-1.safetensors").write_bytes(bytes(raw))


def no_bytes(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(b"")


def shape_against_size(model: Path) -> None:
    header = json.dumps({"layer1.a": {"dtype": "F32", "shape": [4, 9], "data_offsets": [0, 128]}}).encode()
    (model / "model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 128)


def lfs_pointer(model: Path) -> None:
    (model / "model-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (no_folder, "does not exist"),
        (a_file, "is a file"),
        (empty, "is empty; expected config.json"),
        (no_config, "has no config.json"),
        (broken_config, "is not JSON"),
        (other_architecture, "names architecture LlamaForCausalLM.*BailingMoeV3ForCausalLM"),
        (no_architecture, "names no architecture"),
        (no_tokenizer, "has no tokenizer"),
        (no_weights, r"has no \*\.safetensors"),
        (a_missing_shard, r"lacks 1 of 2 weight files \(first: model-2.safetensors\)"),
        (a_broken_index, "no readable weight_map"),
        (a_tensor_too_few, r"model-2.safetensors lacks tensor layer2.b"),
        (truncated, r"model-1.safetensors is cut short: [\d,]+ bytes, expected [\d,]+"),
        (too_long, "longer than its header says"),
        (zeroed_header, "no safetensors header"),
        (garbled_header, "header cannot be read"),
        (no_bytes, "is damaged: 0 bytes"),
        (shape_against_size, "tensor layer1.a does not fit its place"),
        (lfs_pointer, "Git LFS pointer"),
    ],
)
def test_harm_is_named(model: Path, harm: Callable[[Path], None], sentence: str) -> None:
    harm(model)
    with pytest.raises(ModelError, match=sentence):
        inspect(model)


def test_the_identity_changes_with_the_files(model: Path) -> None:
    before = inspect(model).identity()
    assert inspect(model).identity() == before
    save_file(
        {"layer1.a": np.zeros((4, 8), np.float32), "layer1.b": np.ones(16, np.float16)}, model / "model-1.safetensors"
    )
    assert inspect(model).identity() != before


def test_a_gpu_machine_without_a_model_asks_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARKMOE_MODEL", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"none found for a spark machine.*--model"):
        resolve(None, Machine.named("spark"))
    monkeypatch.setenv("SPARKMOE_MODEL", str(tmp_path / "mine"))
    assert resolve(None, Machine.named("spark")) == tmp_path / "mine"
