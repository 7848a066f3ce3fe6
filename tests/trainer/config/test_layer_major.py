"""Choices of method S that make no sense are refused with what to set instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.plan import Asked, gather
from tasks.registry import get_stage
from tasks.workspace import params_of
from trainer.config.load import load_config
from trainer.config.schema import CampaignConfig
from trainer.errors import ConfigError
from trainer.plan.plan import make_plan

ROOT = Path(__file__).parents[3]
S = ("train.optimizer.kind=stateless", "train.optimizer.learning_rate=1e-4")
SHARDED = (*S, "train.memory.weights=sharded")


def load(*overrides: str) -> CampaignConfig:
    return load_config(ROOT / "params.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        ((*S, "train.method=lora"), "train.optimizer.kind", "adamw"),
        ((*S, "train.optimizer.clipping=global"), "train.optimizer", "two_pass"),
        (("train.optimizer.clipping=per_layer",), "train.optimizer", "global"),
        (("train.memory.weights=tiered",), "train.memory.weights", "stateless"),
        (("train.memory.split=true",), "train.memory.split", "stateless"),
        ((*S, "train.memory.split=true"), "train.memory.split", "bfloat16"),
        ((*S, "train.memory.resident_layers=2"), "train.memory", "tiered"),
        ((*S, "train.activation_checkpointing=true"), "train.activation_checkpointing", "leave it out"),
        ((*S, "train.algorithm.kl.reference=exact"), "train.algorithm.kl.reference", "int8_streamed"),
        (("train.method=lora", "train.memory.weights=tiered", "train.lora.dropout=0.1"), "train.lora.dropout", "set 0"),
        (("train.memory.weights=sharded",), "train.memory.weights", "stateless"),
        (("train.method=lora", "train.memory.weights=sharded"), "train.memory.weights", "tiered"),
        ((*SHARDED, "train.optimizer.rule=sinkhorn"), "train.optimizer.rule", "rms"),
        ((*SHARDED, "train.schedule=async"), "train.schedule", "sync"),
        ((*SHARDED, "train.memory.split=true", "base.dtype=bfloat16"), "train.memory", "float32"),
        ((*SHARDED, "train.memory.resident_layers=2"), "train.memory", "tiered"),
        ((*SHARDED, "machine.nodes=2"), "machine", "host:port"),
        (("machine.ranks=2",), "machine.ranks", "sharded"),
    ],
)
def test_refusals_name_key_and_fix(overrides: tuple[str, ...], key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert error.value.key.startswith(key)
    assert fix in str(error.value)


@pytest.mark.parametrize("recipe", ["stateless", "stateless-1t"])
def test_the_recipes_are_valid(recipe: str) -> None:
    config = load_config(ROOT / "recipes" / f"{recipe}.yaml", params=ROOT / "params.yaml")
    assert config.train.layer_major
    assert config.train.optimizer.clips == "per_layer"
    assert not config.warnings()


def test_a_rate_of_another_rules_scale_is_warned_of() -> None:
    assert "low for sgd" in load(*S, "train.optimizer.rule=sgd").warnings()[0]
    assert "high for rms" in load(*S, "train.optimizer.learning_rate=0.1").warnings()[0]
    assert "clips nothing" in load(*S, "train.optimizer.clipping=two_pass").warnings()[0]
    sgd = load(*S, "train.optimizer.rule=sgd", "train.optimizer.learning_rate=0.1", "train.optimizer.clipping=two_pass")
    assert not sgd.warnings()


def test_the_number_of_ranks_is_no_part_of_a_results_identity() -> None:
    one, other = (load(*SHARDED, f"machine.ranks={ranks}") for ranks in (1, 2))
    train = get_stage("train")
    assert params_of(train, one) == params_of(train, other)


def test_the_published_configuration_can_be_planned() -> None:
    recipe = ROOT / "recipes" / "stateless-1t.yaml"
    plan = make_plan(gather(Asked(recipe, model="dense-1t", hardware="h100-80gb"), ROOT / "params.yaml"))
    assert plan.request.choices.devices == 100
    assert plan.request.choices.train.residency == "sharded"
