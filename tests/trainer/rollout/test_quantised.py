"""A quantised copy: what is in its files, that rounding is the same as reading them back, and when it is made anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.policy.test_versions import tiny_policy
from trainer.errors import ModelError
from trainer.files import write_manifest
from trainer.policy.load import save_model
from trainer.policy.tokenizer import character_tokenizer
from trainer.rollout.quantised import pack_int4, quantise_rows, rounded, write_quantised

MATRIX = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """hidden 32; its down projection has rows of 48, which no group of 4-bit values divides."""
    save_model(tiny_policy("full").model, character_tokenizer("0123456789+="), tmp_path / "base")
    write_manifest(tmp_path / "base", {})
    return tmp_path / "base"


def test_int8_files_hold_the_rounded_matrix(base: Path, tmp_path: Path) -> None:
    before = load_file(base / "model.safetensors")
    made = load_file(write_quantised(base, tmp_path / "int8", "int8", round_only=False) / "model.safetensors")
    assert made[MATRIX].dtype == torch.int8
    again = made[MATRIX].float() * made[f"{MATRIX}_scale"]
    assert torch.allclose(again, rounded(before[MATRIX], "int8", 0))
    assert float((again - before[MATRIX]).abs().max()) <= float(before[MATRIX].abs().max()) / 127
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert torch.equal(made[name], before[name])
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"


def test_int4_packs_eight_values_the_first_in_the_lowest_bits() -> None:
    values = torch.tensor([[-8, -7, 0, 1, 2, 3, 6, 7]], dtype=torch.int8)
    (packed,) = pack_int4(values).flatten().tolist()
    assert [((packed >> (4 * i)) & 15) - 8 for i in range(8)] == values.flatten().tolist()
    weight = torch.randn(4, 64)
    quantised, scale = quantise_rows(weight, 7, 32)
    assert scale.shape == (4, 2)
    again = (quantised.float().view(4, 2, 32) * scale.unsqueeze(-1)).view(4, 64)
    assert torch.allclose(again, rounded(weight, "int4", 32))


def test_rounding_alone_keeps_names_types_and_configuration(base: Path, tmp_path: Path) -> None:
    before = load_file(base / "model.safetensors")
    made = load_file(write_quantised(base, tmp_path / "copy", "int8", round_only=True) / "model.safetensors")
    assert made.keys() == before.keys()
    assert all(made[name].dtype == before[name].dtype for name in made)
    changed = {name for name in made if not torch.equal(made[name], before[name])}
    assert changed == {name for name in before if ".layers." in name and before[name].ndim == 2}
    assert "quantization_config" not in json.loads((tmp_path / "copy" / "config.json").read_text())


def test_a_copy_is_made_once_and_anew_for_another_base(base: Path, tmp_path: Path) -> None:
    target = write_quantised(base, tmp_path / "copy", "int8", round_only=True)
    written = (target / "model.safetensors").stat().st_mtime_ns
    write_quantised(base, target, "int8", round_only=True)
    assert (target / "model.safetensors").stat().st_mtime_ns == written
    save_model(tiny_policy("full", seed=7).model, character_tokenizer("0123456789+="), base)
    write_manifest(base, {})
    write_quantised(base, target, "int8", round_only=True)
    assert (target / "model.safetensors").stat().st_mtime_ns != written


def test_what_the_format_cannot_hold_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="int4 wants rows of a multiple of 32"):
        write_quantised(base, tmp_path / "copy", "int4", round_only=False)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    with pytest.raises(ModelError, match="quantised already"):
        write_quantised(base, tmp_path / "copy", "int8", round_only=False)
