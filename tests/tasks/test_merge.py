"""The merge stage: its file, its warning, and the base that it checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks.merge import run
from tasks.registry import StagePaths
from trainer.config import CampaignConfig
from trainer.errors import ModelError
from trainer.files import damage, write_manifest
from trainer.policy.load import load_model, save_model
from trainer.policy.tokenizer import character_tokenizer, load_tokenizer, tokenizer_hash

Campaign = Callable[[dict[str, Any]], CampaignConfig]
Paths = Callable[..., StagePaths]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = character_tokenizer("0123456789+=")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    save_model(LlamaForCausalLM(config), tokenizer, tmp_path / "base")
    write_manifest(tmp_path / "base", {"stage": "base"})
    return tmp_path / "base"


def make_policy(base: Path, directory: Path, size: float, trained_from: str | None = None) -> Path:
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, size)
    adapted.save_pretrained(str(directory))
    content = json.loads((base / "manifest.json").read_text())["content_sha256"]
    write_manifest(directory, {"inputs": {"base": trained_from or content}})
    return directory


def test_writes_a_model_with_its_tokenizer_and_the_report(
    campaign: Campaign, base: Path, stage_paths: Paths, tmp_path: Path
) -> None:
    paths = stage_paths("merged", base=base, policy=make_policy(base, tmp_path / "policy", 0.1))
    facts = run(campaign({"merge": {"dtype": "bfloat16"}}), paths)
    report = json.loads((paths.out / "merge.json").read_text())
    assert report["tensors"][0]["name"] == "model.layers.0.self_attn.q_proj.weight"
    assert {key: report[key] for key in facts} == facts
    assert facts["num_changed"] == 1
    assert 0.9 < facts["cosine"] < 1
    assert load_model(paths.out, "bfloat16").dtype == torch.bfloat16
    assert tokenizer_hash(load_tokenizer(paths.out)) == tokenizer_hash(load_tokenizer(base))
    assert damage(base) is None
    assert not (paths.run / "events.jsonl").exists()
    [line] = (paths.run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"]["merge/cosine"] == facts["cosine"]


def test_warns_when_rounding_loses_the_update(campaign: Campaign, base: Path, stage_paths: Paths, tmp_path: Path) -> None:
    paths = stage_paths("merged", base=base, policy=make_policy(base, tmp_path / "policy", 0.001))
    facts = run(campaign({"merge": {"dtype": "bfloat16"}}), paths)
    assert facts["cosine"] < 0.9
    [line] = (paths.run / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "warning"
    assert "set merge.dtype: float32" in json.loads(line)["reason"]


def test_warns_when_the_policy_is_the_base(campaign: Campaign, base: Path, stage_paths: Paths, tmp_path: Path) -> None:
    paths = stage_paths("merged", base=base, policy=make_policy(base, tmp_path / "policy", 0.0))
    run(campaign({}), paths)
    [line] = (paths.run / "events.jsonl").read_text().splitlines()
    assert "no update reached its weights" in json.loads(line)["reason"]


def test_policy_trained_from_another_base(campaign: Campaign, base: Path, stage_paths: Paths, tmp_path: Path) -> None:
    policy = make_policy(base, tmp_path / "policy", 0.1, trained_from="f" * 64)
    with pytest.raises(
        ModelError, match=r"policy: was trained from another base \(f{12}\) than .*base .*run the train stage again"
    ):
        run(campaign({}), stage_paths("merged", base=base, policy=policy))
