"""A model directory is loaded whole or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trainer.errors import ModelError, StopRequested
from trainer.policy.load import check_vocabulary, eos_token_ids, load_model, pick_device, save_model
from trainer.policy.tokenizer import character_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = character_tokenizer("0123456789+=")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=15, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
        )
    )
    save_model(model, tokenizer, tmp_path)
    return tmp_path


def test_loads_in_the_asked_dtype(directory: Path) -> None:
    assert load_model(directory).dtype == torch.float32
    assert load_model(directory, "bfloat16").dtype == torch.bfloat16


def test_no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no weights"):
        load_model(directory)


def test_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(directory)


def test_a_missing_tensor_is_not_initialised_at_random(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack or misshape 1 tensors, first model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(directory)


def test_a_tensor_that_the_model_has_no_place_for_is_refused(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    extra = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 16),
        "model.layers.1.mlp.up_proj.weight": torch.zeros(16, 16),
    }
    save_file({**weights, **extra}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"hold 2 tensors that a LlamaForCausalLM has no place for, first model\.layers\.0\.self"
    ):
        load_model(directory)


def test_a_buffer_that_every_model_makes_itself_may_lie_in_an_old_file(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    save_file(
        {**weights, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    load_model(directory)


def test_truncated_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"cannot be loaded"):
        load_model(directory)


def test_another_models_tokenizer(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"ids up to 28, the model embeds 15 tokens"):
        check_vocabulary(load_model(directory), character_tokenizer("abcdefghijklmnopqrstuvwxyz"), directory)


def test_a_smaller_tokenizer_without_the_models_end_is_another_models(directory: Path) -> None:
    model = load_model(directory)
    model.generation_config.eos_token_id = 14
    with pytest.raises(ModelError, match=r"ends an answer with token 14, the tokenizer has ids up to 6"):
        check_vocabulary(model, character_tokenizer("0123"), directory)


@pytest.mark.parametrize(
    "text", ["[]", "{", "{}", '{"model_type": "llama", "num_attention_heads": 0, "hidden_size": 16}', '{"model_type": "t5"}']
)
def test_a_broken_configuration_is_one_line(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"cannot be loaded \(.+\)$"):
        load_model(directory)


def test_code_that_a_directory_brings_is_refused_without_asking(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    brought = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (directory / "config.json").write_text(json.dumps(brought))
    (directory / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ModelError, match=r"custom code"):
        load_model(directory)


def test_a_stop_while_a_model_loads_stays_a_stop(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise StopRequested("stopped by SIGTERM")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", stop)
    with pytest.raises(StopRequested):
        load_model(directory)


def test_all_eos_tokens_are_known(directory: Path) -> None:
    model = load_model(directory)
    model.generation_config.eos_token_id = [7, 1]
    assert eos_token_ids(model, character_tokenizer("0123456789+=")) == (1, 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"machine\.device = 'cuda'"):
        pick_device("cuda")
