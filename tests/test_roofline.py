"""Inventory and roofline against published totals, real headers, and arithmetic done by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from sparkmoe import inventory, roofline
from sparkmoe.errors import ModelError
from sparkmoe.inventory import from_config, from_folder
from sparkmoe.roofline import Load

LING = from_config("ling-3.0-flash-fp4")
HALF_PERCENT = 0.005


# ------------------------------------------------------------------------------------------------------------ inventory


@pytest.mark.parametrize(
    ("name", "total", "active", "mtp"),
    [
        ("ling-3.0-flash-fp4", 124.41, 5.10, 3.07),
        # The card rounds to 7.9 B; the BF16 checkpoint has 15.79 GB. For the active ones cards say 1.2 or 1.3 B, which
        # lies between the count without the embedding (1.14) and with it (1.38).
        ("ling-3.0-tiny", 15.79 / 2, 1.14, 0),
        ("qwen3-30b-a3b", 30.53, 3.04, 0),
        ("gpt-oss-120b", 116.83, 5.13, 0),
        ("deepseek-v3", 671.0, 36.6, 11.6),
    ],
)
def test_published_totals(name: str, total: float, active: float, mtp: float) -> None:
    found = from_config(name)
    assert found.params() / 1e9 == pytest.approx(total, rel=HALF_PERCENT)
    assert found.active_params() / 1e9 == pytest.approx(active, rel=HALF_PERCENT)
    assert found.params(mtp=True) / 1e9 == pytest.approx(mtp, rel=HALF_PERCENT)
    assert not found.unknown


def test_published_sizes_on_disk() -> None:
    assert from_config("gpt-oss-120b").stored_bytes / 2**30 == pytest.approx(60.8, rel=HALF_PERCENT)
    assert LING.stored_bytes / 2**30 == pytest.approx(66, rel=0.01)
    # Qwen counts the embedding as active: "3.3 B activated".
    assert from_config("qwen3-30b-a3b").active_params(embedding=True) / 1e9 == pytest.approx(3.35, rel=HALF_PERCENT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sparkmoe.nano import random_checkpoint

    return random_checkpoint.make(tmp_path_factory.mktemp("nano") / "model", seed=3)


def test_miniature_is_exact_against_its_tensors(folder: Path) -> None:
    found = from_folder(folder)
    params = {True: 0, False: 0}
    experts = 0
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                size = file.get_tensor(name).numel()
                mtp = name.startswith("model.layers.12.")
                params[mtp] += size
                experts += size if ".experts." in name and not mtp else 0
    assert found.params() == params[False]
    assert found.params(mtp=True) == params[True]
    assert found.params("experts") == experts
    assert not found.unknown
    data = sum(f.stat().st_size - 8 - struct.unpack("<Q", f.read_bytes()[:8])[0] for f in folder.glob("*.safetensors"))
    assert found.stored_bytes == data


def test_config_alone_counts_what_the_headers_hold(folder: Path) -> None:
    counted, predicted = from_folder(folder), from_config(folder / "config.json")
    for part in (*inventory.PARTS, inventory.OTHER):
        for mtp in (False, True):
            assert counted.params(part, mtp=mtp) == predicted.params(part, mtp=mtp), part
    assert sum(e.tensors for e in counted.entries) == sum(e.tensors for e in predicted.entries)


def write_shard(path: Path, tensors: dict[str, tuple[str, list[int]]], bits: dict[str, int]) -> None:
    """A sparse safetensors file: a true header, and data that takes no room."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = bits[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size // 8]}
        end += size // 8
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def quantized(folder: Path, config: dict) -> Path:
    """The checkpoint of a config with FP8 linears and MXFP4 experts: packed bytes and their scales, in two shards."""
    from sparkmoe import shapes

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, tuple[str, list[int]]] = {}
    for tensor in shapes.describe(config)[1]():
        shape = list(tensor.shape)
        for i in range(tensor.count):
            name = tensor.name.replace("*", str(i))
            if tensor.form == "expert":
                tensors[name] = ("U8", [shape[0], shape[1] // 2])
                tensors[name + "_scale_inv"] = ("F8_E8M0", [shape[0], shape[1] // 32])
            elif tensor.form == "linear" and shape[0] >= 128:
                tensors[name] = ("F8_E4M3", shape)
                tensors[name + "_scale_inv"] = ("F32", [-(-n // 128) for n in shape])
            else:
                tensors[name] = ("F32" if tensor.form == "fp32" else "BF16", shape)
    names = list(tensors)
    half = len(names) // 2
    weight_map = {}
    for k, part in enumerate((names[:half], names[half:]), 1):
        shard = f"model-0000{k}-of-00002.safetensors"
        write_shard(
            folder / shard, {n: tensors[n] for n in part}, {"U8": 8, "F8_E8M0": 8, "F8_E4M3": 8, "F32": 32, "BF16": 16}
        )
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def fp4(tmp_path: Path, folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "b_proj"],
        "routed_experts_quant_method": "mxfp4",
    }
    return quantized(tmp_path / "fp4", config)


def test_quantized_headers_and_config_agree_to_the_byte(fp4: Path, folder: Path) -> None:
    counted, predicted, plain = from_folder(fp4), from_config(fp4 / "config.json"), from_folder(folder)
    assert counted.params() == plain.params()
    assert counted.params(mtp=True) == plain.params(mtp=True)
    assert set(counted.entries) == set(predicted.entries)
    assert {e.dtype for e in counted.entries if e.part == "experts" and e.role == "weight"} == {"F4"}
    assert counted.bytes("experts") * 32 == counted.params("experts") * 17  # 4.25 bits a parameter


def test_unknown_tensors_are_listed_not_hidden(fp4: Path) -> None:
    write_shard(fp4 / "extra.safetensors", {"visual.patch_embed.weight": ("BF16", [10, 3])}, {"BF16": 16})
    index = fp4 / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["visual.patch_embed.weight"] = "extra.safetensors"
    index.write_text(json.dumps(content))
    found = from_folder(fp4)
    assert found.unknown == ("visual.patch_embed.weight",)
    assert found.bytes("other") == 60
    assert "other" in set(found.table()["part"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), r"lacks 1 of 2 weight files"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b"\x00" * 5), r"is damaged: 5 bytes"),
        (
            lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(
                (f / "model-00001-of-00002.safetensors").read_bytes()[:300]
            ),
            r"model-00001-of-00002.safetensors is damaged",
        ),
        (lambda f: edit(f, num_experts=None), r"lacks 'num_experts'"),
        (lambda f: edit(f, hidden_size="wide"), r"hidden_size = 'wide'"),
        (lambda f: edit(f, num_hidden_layers=20), r"no tensor of layer 13, though its config.json has 21 layers"),
        (lambda f: edit(f, architectures=["GPT2LMHeadModel"]), r"architecture GPT2LMHeadModel; sizes are known for"),
        (lambda f: (f / "config.json").write_text("{"), r"is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), r"holds a list"),
        (lambda f: (f / "config.json").unlink(), r"config.json does not exist"),
    ],
)
def test_bad_input_is_named(fp4: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(fp4)
    with pytest.raises(ModelError, match=message):
        from_folder(fp4)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))


# ------------------------------------------------------------------------------------------------------------- roofline


def test_bytes_per_token_of_ling_flash() -> None:
    assert roofline.step_bytes(LING, Load(head="bf16")).total / 1e9 == pytest.approx(4.82, rel=HALF_PERCENT)
    assert roofline.step_bytes(LING, Load(head="fp32")).total / 1e9 == pytest.approx(4.82, rel=HALF_PERCENT)
    fp8 = roofline.step_bytes(LING, Load(head="fp8"))
    assert fp8.total / 1e9 == pytest.approx(4.42, rel=HALF_PERCENT)
    published = {"kda": 2.20, "mla": 0.22, "experts": 1.00, "head": 0.402, "KDA state": 0.15}
    assert {part: round(fp8.target[part] / 1e9, 3) for part in published} == pytest.approx(published, rel=0.025)


@pytest.mark.parametrize(
    ("drafts", "size", "even"), [(1, 5.89, 1.33), (2, 7.34, 1.66), (3, 8.78, 1.99), (4, 10.20, 2.31)]
)
def test_nextn_step_and_break_even(drafts: int, size: float, even: float) -> None:
    load = Load(head="fp8", drafts=drafts)
    assert roofline.step_bytes(LING, load).total / 1e9 == pytest.approx(size, rel=HALF_PERCENT)
    assert roofline.break_even(LING, drafts, load) == pytest.approx(even, rel=HALF_PERCENT)


def test_two_gpus_share_what_can_be_cut() -> None:
    whole = roofline.step_bytes(LING, Load(512, head="fp8", drafts=3))
    half = roofline.split(whole, 2)
    assert roofline.split(whole, 1) == whole
    assert half.target["experts"] == whole.target["experts"] / 2
    assert half.draft["head"] == whole.draft["head"] / 2
    assert half.target["router"] == whole.target["router"]
    assert half.draft["KV cache"] == whole.draft["KV cache"]
    assert 0.5 < half.total / whole.total < 0.52


def test_distinct_experts() -> None:
    found = [roofline.expected_distinct(512, 8, n) for n in (1, 2, 3, 4)]
    assert found == pytest.approx([8, 15.9, 23.6, 31.3], abs=0.06)
    measured = roofline.step_bytes(LING, Load(drafts=3, routing=lambda n: 8.0 + 4 * (n - 1)))
    assert measured.target["experts"] == pytest.approx(LING.bytes("experts") * 20 / 512)
    assert measured.draft["experts"] == pytest.approx(3 * LING.bytes("experts", mtp=True) * 8 / 512)


def test_context_and_batch_touch_cache_and_state_only_as_they_should() -> None:
    one = roofline.step_bytes(LING, Load(context=32768))
    assert one.target["KV cache"] == 7 * 576 * 2 * 32768
    eight = roofline.step_bytes(LING, Load(context=32768, batch=8))
    assert eight.target["KV cache"] == 8 * one.target["KV cache"]
    assert eight.target["KDA state"] == 8 * one.target["KDA state"]
    assert eight.target["kda"] == one.target["kda"]
    assert eight.target["experts"] / one.target["experts"] == pytest.approx(roofline.expected_distinct(512, 8, 8) / 8)
    # A sliding window stops growing: half of gpt-oss's layers look back 128 tokens at most.
    windowed = roofline.step_bytes(from_config("gpt-oss-120b"), Load(context=10_000)).target["KV cache"]
    assert windowed == 2 * (2 * 8 * 64) * 18 * (10_000 + 128)


def test_float32_servers_read_widened_weights_but_the_same_head(folder: Path) -> None:
    found = from_folder(folder)
    stored, widened = (roofline.step_bytes(found, Load(dtype=d)).target for d in ("stored", "float32"))
    assert widened["mla"] == 2 * stored["mla"]
    assert widened["experts"] == 2 * stored["experts"]
    assert widened["head"] == stored["head"]
    assert widened["KDA state"] == stored["KDA state"]
    # FP8 and MXFP4 stay what they are, and so do the parameters that are FP32 anyway.
    flash = [roofline.step_bytes(LING, Load(dtype=d)).target for d in ("stored", "float32")]
    assert flash[0]["experts"] == flash[1]["experts"]
    bf16 = sum(e.bytes for e in LING.entries if e.part == "kda" and e.dtype == "BF16")
    assert flash[1]["kda"] == flash[0]["kda"] + bf16


def test_ceilings() -> None:
    ceiling = roofline.predict(LING, 273, Load(context=32768, head="bf16"))
    assert ceiling.tpot_ms == pytest.approx(ceiling.bytes / 273e9 * 1e3)
    assert 50 < ceiling.tok_s < 56
    # On an H200 the FP8 head saves 0.09 ms whatever the overhead; drafts are charged their share of it.
    saved = [roofline.predict(LING, 4300, Load(head=h), overhead_ms=5.6).tpot_ms for h in ("bf16", "fp8")]
    assert saved[0] - saved[1] == pytest.approx(0.093, abs=0.002)
    assert roofline.overhead(LING, 4300, saved[0], Load(head="bf16")) == pytest.approx(5.6)
    drafted = roofline.predict(LING, 4300, Load(drafts=3), accept_length=2.68, overhead_ms=5.6)
    assert drafted.overhead_ms == pytest.approx(5.6 * (1 + 3 / 42))


def test_lever_gains_alone_and_together() -> None:
    load = Load(context=32768)
    gains = {g.levers: g for g in roofline.lever_gains(LING, 233, load, accept_length=3.9, experts_gb_s=120)}
    assert gains[()].speedup == 1
    assert gains[("fp8_head",)].tpot_ms == pytest.approx(gains[()].tpot_ms - 401.76e6 / 233e6, abs=0.01)
    # The experts' 1.004 GB at 120 instead of 233 GB/s.
    assert gains[()].tpot_ms - gains[("moe",)].tpot_ms == pytest.approx(1002.7 / 120 - 1002.7 / 233, rel=0.01)
    all_three = gains[("moe", "fp8_head", "nextn")]
    assert all_three.speedup > max(g.speedup for g in gains.values() if g is not all_three)
    silent = {g.levers: g for g in roofline.lever_gains(LING, 233, load)}
    assert silent[("moe",)].speedup == 1
    assert "no byte changes" in silent[("moe",)].note
    tiny = [g.levers for g in roofline.lever_gains(from_config("ling-3.0-tiny"), 233)]
    assert tiny == [(), ("moe",), ("fp8_head",), ("moe", "fp8_head")]


def test_acceptance_profile_and_best_number_of_drafts() -> None:
    # 100 steps: 20 accepted none, 16 one, 64 two: 0.8 for the first, 0.8 for the second.
    rates = roofline.acceptance([20, 16, 64])
    assert rates == pytest.approx([0.8, 0.8])
    assert roofline.accept_length(rates, 3) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert roofline.acceptance([7, 0, 0]) == [0.0]
    load = Load(head="fp8")
    good, poor = (roofline.sweep(LING, 233, r, load) for r in ([0.95], [0.2]))
    assert roofline.best_drafts(poor) == 0
    assert roofline.best_drafts(good) > 3
    assert good[3].accept_length == pytest.approx(1 + 0.95 + 0.95**2 + 0.95**3)
    # At the break-even accept length drafts neither gain nor lose.
    even = roofline.break_even(LING, 3, load)
    at_even = roofline.predict(LING, 233, Load(head="fp8", drafts=3), accept_length=even)
    assert at_even.tpot_ms == pytest.approx(poor[0].tpot_ms)


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ModelError, match=r"no MTP \(NEXTN\) layer"):
        roofline.step_bytes(from_config("ling-3.0-tiny"), Load(drafts=1))
    with pytest.raises(ModelError, match="batch 0"):
        roofline.step_bytes(LING, Load(batch=0))
    with pytest.raises(ModelError, match="0 GB/s"):
        roofline.predict(LING, 0)
    with pytest.raises(ModelError, match="at least one rate"):
        roofline.accept_length([], 2)


def test_a_draft_may_score_fewer_tokens_in_another_format() -> None:
    shared = roofline.step_bytes(LING, Load(head="bf16", drafts=3))
    own = roofline.step_bytes(LING, Load(head="bf16", drafts=3, draft_head="fp8", hot_tokens=16384))
    assert own.target == shared.target
    assert shared.draft["head"] == 3 * 157184 * 2560 * 2
    assert own.draft["head"] == 3 * 16384 * (2560 + 4)
    assert roofline.step_bytes(LING, Load(head="bf16", drafts=1, hot_tokens=16)).draft["head"] == 16 * 2560 * 2
