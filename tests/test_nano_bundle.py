"""The bundled checkpoint: whole, the same model in both forms, refused or rebuilt when damaged."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sparkmoe.errors import ModelError
from sparkmoe.nano import bundle, tokenizer
from sparkmoe.nano.config import LingConfig
from sparkmoe.nano.model import MLP, Experts, load_checkpoint
from sparkmoe.nano.problems import split
from sparkmoe.nano.quantize import FP8_BLOCK, form


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundle in its place, to be damaged."""
    shutil.copytree(bundle.BUNDLE, tmp_path / "fp4")
    monkeypatch.setattr(bundle, "BUNDLE", tmp_path / "fp4")
    return tmp_path / "fp4"


def test_bundle_is_whole_small_and_laid_out_as_flash_fp4() -> None:
    folder = bundle.folder("fp4")
    assert sum(p.stat().st_size for p in folder.iterdir()) < 20_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["routed_experts_quant_method"] == "mxfp4"
    ling = LingConfig.from_dict(config)
    dtypes = {"mxfp4": "I8", "fp8": "F8_E4M3", "bf16": "BF16", "fp32": "F32"}
    with safe_open(folder / "model.safetensors", "pt") as f:
        for name in f.keys():  # noqa: SIM118
            tensor = f.get_slice(name)
            if name.endswith("_scale_inv"):
                of = f.get_slice(name.removesuffix("_scale_inv"))
                experts = ".mlp.experts." in name
                assert tensor.get_dtype() == ("F8_E8M0" if experts else "F32")
                rows, columns = of.get_shape()
                want = [rows, columns * 2 // 32] if experts else [-(-rows // 128), columns // 128]
                assert tensor.get_shape() == want
                assert experts or columns % 128 == 0
            else:
                assert tensor.get_dtype() == dtypes[form(name, ling)], name
    assert ling.kv_lora_rank != ling.qk_nope_head_dim
    assert [bool(ling.swiglu_limit(i, shared=False)) for i in range(13)] == [False] * 8 + [True] * 4 + [False]


def test_bf16_form_is_derived_once_and_is_the_same_model(home: Path) -> None:
    folder = bundle.folder("bf16")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert bundle.folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert not [p for p in (home / "nano").iterdir() if p.name.startswith(".")]
    mixed, plain = load_file(bundle.BUNDLE / "model.safetensors"), load_file(folder / "model.safetensors")
    ling = LingConfig.from_json(folder / "config.json")
    forms = {n: form(n, ling) for n in plain}
    back = bundle.dequantize(bundle.quantize(plain, forms))
    assert all(torch.equal(back[n], plain[n]) for n in plain)
    again = bundle.quantize(bundle.widen(plain, ling.kv_lora_rank), forms)
    assert set(again) == set(mixed)
    assert all(same_bits(again[n], mixed[n]) for n in mixed)


def test_fp4_form_holds_every_latent_twice_and_changes_no_block(home: Path) -> None:
    mixed, plain = load_file(bundle.BUNDLE / "model.safetensors"), load_file(bundle.folder() / "model.safetensors")
    ling = LingConfig.from_json(bundle.folder() / "config.json")
    rank, blocks = ling.kv_lora_rank, ling.kv_lora_rank // FP8_BLOCK
    assert LingConfig.from_json(bundle.BUNDLE / "config.json").kv_lora_rank == 2 * rank
    once = bundle.quantize(plain, {n: form(n, ling) for n in plain})
    mla = [i for i in range(ling.num_hidden_layers + 1) if ling.is_mla(i)]
    assert len(mla) == 4  # three in the target, one in the MTP layer
    for name in (f"model.layers.{i}.attention." for i in mla):
        down, up = f"{name}kv_a_proj_with_mqa.weight", f"{name}kv_b_proj.weight"
        for key, rows in ((down, rank), (f"{down}_scale_inv", blocks)):
            assert same_bits(mixed[key][:rows], once[key][:rows])
            assert same_bits(mixed[key][rows:], once[key])
        for key, columns in ((up, rank), (f"{up}_scale_inv", blocks)):
            assert same_bits(mixed[key][:, :columns].contiguous(), once[key])
        assert not mixed[up][:, rank:].float().any()
    kept = [n for n in once if not re.search(r"\.kv_(a_proj_with_mqa|a_layernorm|b_proj)\.", n)]
    assert all(same_bits(mixed[n], once[n]) for n in kept)
    assert len(once) - len(kept) == 5 * len(mla)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@torch.no_grad()
def test_fp4_form_computes_what_the_bf16_form_computes(home: Path, tmp_path: Path) -> None:
    """Logits and drafts of the wide latents as they are stored, against those of the trained ones."""
    stored = bundle.dequantize(load_file(bundle.BUNDLE / "model.safetensors"))
    save_file(stored, tmp_path / "model.safetensors")
    shutil.copy(bundle.BUNDLE / "config.json", tmp_path)
    wide, narrow = load_checkpoint(tmp_path), load_checkpoint(bundle.folder())
    tok = tokenizer.load(bundle.BUNDLE / "tokenizer.json")
    for p in split("combinations", 3, seed=4):
        ids = torch.tensor([tok.encode(f"{tokenizer.prompt(p.question)}{p.reasoning}</think>{p.reply}").ids])
        hidden = [model.hidden(ids) for model in (wide, narrow)]
        steps = zip(wide.drafts(ids, hidden[0], 3), narrow.drafts(ids, hidden[1], 3), strict=True)
        for a, b in [hidden, *steps]:
            torch.testing.assert_close(wide.lm_head(a), narrow.lm_head(b), atol=2e-4, rtol=0)


def test_a_damaged_derived_file_is_named_and_made_anew(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = bundle.folder("bf16")
    want = bundle.sha256(folder / "model.safetensors")
    with (folder / "model.safetensors").open("r+b") as f:
        f.seek(5_000_000)
        f.write(b"damage")
    assert bundle.folder("bf16") == folder
    assert bundle.sha256(folder / "model.safetensors") == want
    assert "model.safetensors is damaged" in caplog.text
    assert want in caplog.text
    (folder / "config.json").unlink()
    assert (bundle.folder("bf16") / "config.json").is_file()


def test_a_damaged_or_missing_bundled_file_is_refused_with_its_hash(home: Path, copied: Path) -> None:
    want = bundle.sha256(copied / "config.json")
    (copied / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=re.escape("config.json is damaged") + f".*expected {want}"):
        bundle.folder("fp4")
    (copied / "config.json").unlink()
    with pytest.raises(ModelError, match=re.escape(f"config.json is missing (expected SHA-256 {want})")):
        bundle.folder("bf16")
    (copied / bundle.HASHES).unlink()
    with pytest.raises(ModelError, match=bundle.HASHES):
        bundle.folder("bf16")


def test_unknown_form_and_unwritable_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="'bf16' and 'fp4', not 'int4'"):
        bundle.folder("int4")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARKMOE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set SPARKMOE_HOME"):
        bundle.folder("bf16")


def test_chat_template_is_the_prompt_of_training_and_digits_stand_alone() -> None:
    tok = AutoTokenizer.from_pretrained(bundle.folder("fp4"))
    message = [{"role": "user", "content": "Mia has 120 shells."}]
    for thinking in (True, False):
        text = tok.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=thinking)
        assert text == tokenizer.prompt(message[0]["content"], thinking)
    ids = tok("120 ü 1.5")["input_ids"]
    assert tok.decode(ids) == "120 ü 1.5"
    assert [tok.decode([i]) for i in ids[:3]] == ["1", "2", "0"]
    assert tok.decode(tok("<think>2</think>")["input_ids"], skip_special_tokens=True) == "<think>2</think>"
    talk = [*message, {"role": "assistant", "content": "<think>no</think>\nyes"}, *message]
    assert "no" not in tok.apply_chat_template(talk, tokenize=False)
    system = [{"role": "system", "content": "Be brief."}, *message]
    assert "Be brief.\ndetailed thinking on<|role_end|>" in tok.apply_chat_template(system, tokenize=False)
    assert (tok.eos_token_id, tok.pad_token_id, len(tok)) == (2037, 2036, 2048)


@torch.no_grad()
def test_reference_solves_problems_and_the_limits_matter(home: Path) -> None:
    """Greedy, token by token, without a server: four problems; then the same text without the SwiGLU limits."""
    folder = bundle.folder("bf16")
    model, tok = load_checkpoint(folder), tokenizer.load(folder / "tokenizer.json")
    end = tok.token_to_id(tokenizer.END_OF_TURN)
    right, moved = 0, []
    for problem in [p for p in split("instances", 60, seed=5) if p.steps == 2][:4]:
        ids = tok.encode(tokenizer.prompt(problem.question)).ids
        start = len(ids)
        while ids[-1] != end or len(ids) == start:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            assert len(ids) < start + 120
        right += tok.decode(ids[start:]).endswith(f"#### {problem.result}")
        row = torch.tensor([ids])
        with_limits = model(row).log_softmax(-1)[0, start - 1 : -1].gather(1, row[0, start:, None])
        limits = {m: m.limit for m in model.modules() if isinstance(m, MLP | Experts)}
        for m in limits:
            m.limit = None
        without = model(row).log_softmax(-1)[0, start - 1 : -1].gather(1, row[0, start:, None])
        for m, limit in limits.items():
            m.limit = limit
        moved.append((with_limits - without).abs().mean())
    assert right == 4
    assert torch.stack(moved).mean() > 0.02
