"""Evaluate: real models, sampler and verifier; the numbers are checked against the answers that are written beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.evaluate import completion_cap, evaluate, run
from tasks.registry import StagePaths
from trainer.config import CampaignConfig
from trainer.errors import DataError, ModelError
from trainer.evaluation import Protocol, answer_prompts, choose_prompts
from trainer.files import sha256_text, write_manifest
from trainer.policy.load import save_model
from trainer.policy.tokenizer import character_tokenizer, encode, tokenizer_hash
from trainer.prompts import write_prompts
from trainer.reward import build_verifier
from trainer.statistics import pass_at_k
from trainer.types import Prompt

Campaign = Callable[[dict[str, Any]], CampaignConfig]
TOKENIZER = character_tokenizer("0123456789+-()=")
SETTINGS: dict[str, Any] = {
    "evaluate": {"num_prompts": 20, "samples_per_prompt": 6, "pass_at": [1, 3, 6], "bootstrap_resamples": 300},
    "train": {"sampling": {"max_completion_tokens": 3}, "sampler": {"slots": 16}},
}


def build_base(directory: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
    )
    save_model(LlamaForCausalLM(config), TOKENIZER, directory)
    return directory


def make_prompts(answers: dict[str, str], split: Any = "heldout") -> list[Prompt]:
    return [Prompt(sha256_text(t)[:16], "main", split, t, encode(TOKENIZER, t), a) for t, a in answers.items()]


def write(directory: Path, prompts: list[Prompt]) -> Path:
    directory.mkdir()
    write_prompts(directory, "heldout", prompts)
    write_prompts(directory, "test", [])
    write_manifest(directory, {"tokenizer_hash": tokenizer_hash(TOKENIZER)})
    return directory


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    return build_base(tmp_path / "base", 0), build_base(tmp_path / "trained", 1)


@pytest.fixture
def prompts(tmp_path: Path, models: tuple[Path, Path], campaign: Campaign) -> Path:
    """Twenty prompts; the gold answer of every second one is what the trained model says greedily."""
    config = campaign(SETTINGS)
    asked = make_prompts({f"{i}+{i}=": "?" for i in range(10, 30)})
    verifier = build_verifier(config.reward)
    said = answer_prompts(models[1], asked, Protocol(config.evaluate, 3, 0), verifier)
    gold = {a.prompt.text: a.greedy.text if i % 2 else "no such answer" for i, a in enumerate(said)}
    return write(tmp_path / "prompts", make_prompts(gold))


def evaluated(config: CampaignConfig, prompts: Path, models: tuple[Path, Path], root: Path) -> dict[str, Any]:
    out = root / "out"
    out.mkdir(parents=True)
    evaluate(config, prompts, {"base": models[0], "trained": models[1]}, out, root / "run")
    return {
        "summary": json.loads((out / "evaluation.json").read_text()),
        "lines": [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()],
        "metrics": json.loads((root / "run" / "metrics.jsonl").read_text())["metrics"],
    }


def test_summary_agrees_with_the_answers_beside_it(
    campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    found = evaluated(campaign(SETTINGS), prompts, models, tmp_path / "e")
    summary, lines = found["summary"], found["lines"]
    assert (summary["num_prompts"], summary["split"], len(lines)) == (20, "heldout", 20)
    assert summary["trained"]["greedy_accuracy"]["value"] == 0.5
    assert summary["base"]["greedy_accuracy"]["value"] < 0.5
    for name in ("base", "trained"):
        samples = [line[name]["samples"] for line in lines]
        assert all(len(group) == 6 for group in samples)
        for line in lines:
            for sample in [line[name], *line[name]["samples"]]:
                assert (sample["score"] == 1.0) == (sample["text"].strip() == line["answer"].strip())
                assert sample["finish_reason"] == "stop" or sample["length"] == 3
        correct = [sum(sample["score"] >= 1 for sample in group) for group in samples]
        every = [sample for group in samples for sample in group]
        expected = {
            "pass@1": np.mean(correct) / 6,
            "pass@3": np.mean([pass_at_k(6, c, 3) for c in correct]),
            "pass@6": np.mean([c > 0 for c in correct]),
            "greedy_accuracy": np.mean([line[name]["score"] for line in lines]),
            "mean_reward": np.mean([s["score"] for s in every]),
            "mean_length": np.mean([s["length"] for s in every]),
            "truncated_fraction": np.mean([s["finish_reason"] == "length" for s in every]),
        }
        assert set(expected) | {"statuses"} == set(summary[name])
        for metric, value in expected.items():
            interval = summary[name][metric]
            assert interval["value"] == pytest.approx(value, abs=1e-6)
            assert interval["low"] <= interval["value"] <= interval["high"]
            assert found["metrics"][f"evaluate/{name}/{metric.replace('@', '_at_')}"] == interval["value"]
        assert summary[name]["statuses"] == {
            s: [e["status"] for e in every].count(s) for s in sorted({e["status"] for e in every})
        }
    gain = summary["difference"]["greedy_accuracy"]["value"]
    assert gain == pytest.approx(0.5 - summary["base"]["greedy_accuracy"]["value"], abs=1e-6)


def test_two_runs_write_the_same_bytes(campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    for name, slots in (("one", 16), ("two", 16), ("few", 5)):
        evaluated(
            campaign({**SETTINGS, "train": {**SETTINGS["train"], "sampler": {"slots": slots}}}), prompts, models, tmp_path / name
        )
    for file in ("evaluation.json", "samples.jsonl"):
        first = (tmp_path / "one" / "out" / file).read_bytes()
        assert (tmp_path / "two" / "out" / file).read_bytes() == first
        assert (tmp_path / "few" / "out" / file).read_bytes() == first  # a draw depends on its seed, not on its slot


def test_both_models_meet_the_same_luck(campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    found = evaluated(campaign(SETTINGS), prompts, (models[1], models[1]), tmp_path / "e")
    for line in found["lines"]:
        assert line["base"] == line["trained"]
    for interval in found["summary"]["difference"].values():
        assert interval == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_another_campaign_seed_draws_other_samples(
    campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    one = evaluated(campaign(SETTINGS), prompts, models, tmp_path / "one")["lines"]
    other = evaluated(campaign({**SETTINGS, "campaign": {"seed": 1}}), prompts, models, tmp_path / "two")["lines"]
    assert [line["trained"]["text"] for line in one] == [line["trained"]["text"] for line in other]  # greedy draws nothing
    assert [line["trained"]["samples"] for line in one] != [line["trained"]["samples"] for line in other]


def test_one_model_by_its_path(campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    facts = evaluate(campaign(SETTINGS), prompts, {"mine": models[1]}, tmp_path / "out", tmp_path / "run")
    assert facts["mine"]["greedy_accuracy"] == 0.5
    assert "difference" not in json.loads((tmp_path / "out" / "evaluation.json").read_text())


def test_stage_reads_base_and_merged(
    campaign: Campaign, models: tuple[Path, Path], prompts: Path, stage_paths: Callable[..., StagePaths]
) -> None:
    facts = run(campaign(SETTINGS), stage_paths("evaluation", prompts=prompts, base=models[0], merged=models[1]))
    assert facts["trained"]["greedy_accuracy"] == 0.5


def test_completion_cap_is_the_longest_that_was_trained(campaign: Campaign) -> None:
    stages = [{"name": "a", "steps": 1, "max_completion_tokens": 9}, {"name": "b", "steps": 1}]
    assert completion_cap(campaign({"train": {"sampling": {"max_completion_tokens": 3}, "stages": stages}})) == 9


def test_prompts_are_chosen_without_regard_to_their_order() -> None:
    asked = make_prompts({f"{i}+{i}=": "?" for i in range(50)})
    assert choose_prompts(asked, 10) == choose_prompts(asked[::-1], 10)
    assert {prompt.text for prompt in choose_prompts(asked, 10)} != {prompt.text for prompt in asked[:10]}
    assert len(choose_prompts(asked, 100)) == 50


def test_empty_split_names_the_setting(campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    config = campaign({**SETTINGS, "evaluate": {**SETTINGS["evaluate"], "split": "test"}})
    with pytest.raises(DataError, match=r"test\.jsonl: has no prompts; set evaluate\.split, or prepare\.test_fraction above 0"):
        evaluated(config, prompts, models, tmp_path / "e")


def test_model_with_another_tokenizer(campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    other = character_tokenizer("abc")
    other.save_pretrained(models[1])
    with pytest.raises(ModelError, match=r"trained: its tokenizer \([0-9a-f]{12}\) is not the one that the prompts in"):
        evaluated(campaign(SETTINGS), prompts, models, tmp_path / "e")


def test_model_without_weights(campaign: Campaign, models: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    (models[1] / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"trained: has no weights"):
        evaluated(campaign(SETTINGS), prompts, models, tmp_path / "e")
