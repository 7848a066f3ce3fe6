"""Handing policies over: whole or not at all, the same weights on the other side, the probe that notices when they are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.load import lay_over
from trainer.config.schema import Train
from trainer.errors import MismatchError, ModelError
from trainer.policy.forward import completion_logprobs
from trainer.policy.lora import adapter_off
from trainer.policy.policy import Policy, build_policy
from trainer.policy.versions import PolicyStore, weights_sha256
from trainer.rollout.follower import Follower, FollowingSampler
from trainer.rollout.probe import Probe

SEQUENCES = tuple(((2 + i, 5, 9), (3, 4 + i, 7, 1)) for i in range(6))
TRAIN = {
    "method": "lora",
    "lora": {"rank": 4, "alpha": 8},
    "optimizer": {"learning_rate": 1e-3},
    "stages": [{"steps": 1}],
}


def tiny_policy(method: str = "lora", seed: int = 0) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.2,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "bos_token_id": None,
    }
    train = Train.model_validate_json(json.dumps(lay_over(TRAIN, {"method": method})))
    return build_policy(LlamaForCausalLM(LlamaConfig(**sizes)), train, seed=3)


def move(policy: Policy, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


class Pair:
    """A learner's policy and a sampler's, joined by a directory."""

    def __init__(self, root: Path, method: str = "lora", temperature: float = 1.0, sampler_seed: int = 0):
        self.learner, mine = tiny_policy(method), tiny_policy(method, sampler_seed)
        self.store, self.temperature = PolicyStore(root / "policies", keep=2), temperature
        base, plain = (completion_logprobs(self.learner.model, SEQUENCES, t, 1) for t in (temperature, 1.0))
        rows = (tuple(tuple(row) for row in scores) for scores in (base, plain))
        Probe(SEQUENCES, temperature, *rows).write(root / "policies" / "probe.json")
        self.sampler = FollowingSampler(mine, self.store, 4, 1)
        self.follower = Follower(self.sampler, self.store, 1e-3)

    def publish(self, version: int) -> None:
        scores, plain = (completion_logprobs(self.learner.model, SEQUENCES, t, 1) for t in (self.temperature, 1.0))
        self.store.publish(self.learner, version, version, scores, plain)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_sampler_follows_to_the_same_weights(tmp_path: Path, method: str, temperature: float) -> None:
    pair = Pair(tmp_path, method, temperature)
    for version in range(3):
        pair.publish(version)
        assert pair.follower.follow()
        assert not pair.follower.follow()
        assert pair.sampler.version == version
        assert pair.follower.mismatch < 1e-6
        assert weights_sha256(pair.sampler.policy) == weights_sha256(pair.learner)
        move(pair.learner, 0.05, version)


def test_nothing_is_there_before_the_first_version(tmp_path: Path) -> None:
    assert PolicyStore(tmp_path, 2).newest() is None


def test_old_versions_go_but_not_those_in_use(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    for version in range(5):
        scores = completion_logprobs(pair.learner.model, SEQUENCES, 1.0, 1)
        pair.store.publish(pair.learner, version, version, scores, scores, in_use={1})
    assert sorted(path.name for path in (tmp_path / "policies").glob("v*")) == ["v000001", "v000003", "v000004"]


def test_publishing_again_keeps_equal_weights_and_replaces_others(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.publish(4)
    file = pair.store.directory(4) / "adapter_model.safetensors"
    written = file.stat().st_mtime_ns
    pair.publish(4)
    assert file.stat().st_mtime_ns == written
    move(pair.learner, 0.1, 1)
    pair.publish(4)
    assert pair.follower.follow()
    assert weights_sha256(pair.sampler.policy) == weights_sha256(pair.learner)


def test_a_damaged_version_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.publish(0)
    file = pair.store.directory(0) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ModelError, match="does not match its sha256; policy version 0 cannot be loaded"):
        pair.follower.follow()


def test_an_adapter_of_other_layers_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.publish(0)
    train = Train.model_validate_json(json.dumps(lay_over(TRAIN, {"lora": {"target_modules": ["q_proj"]}})))
    other = build_policy(tiny_policy("full").model, train, seed=3)
    with pytest.raises(ModelError, match="other layers"):
        pair.store.load(other, 0)


def test_weights_that_never_reach_the_sampler_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)
    pair.publish(0)
    pair.follower.follow()
    monkeypatch.setattr(pair.sampler, "load_policy", lambda version: None)
    move(pair.learner, 0.002, 1)  # a small step: within the tolerance, and still noticed
    pair.publish(8)
    with pytest.raises(MismatchError, match="those of version 0: the new weights never reached the engine"):
        pair.follower.follow()


def test_an_adapter_that_is_not_applied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)
    move(pair.learner, 0.1, 1)
    pair.publish(8)
    score: Callable[..., Any] = pair.sampler.score

    def without(sequences: Any, temperature: float) -> Any:
        with adapter_off(pair.sampler.model):
            return score(sequences, temperature)

    monkeypatch.setattr(pair.sampler, "score", without)
    with pytest.raises(MismatchError, match="those of the base: the adapter is not applied"):
        pair.follower.follow()


def test_a_forgotten_temperature_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, temperature=0.7)
    pair.publish(0)
    score: Callable[..., Any] = pair.sampler.score
    monkeypatch.setattr(pair.sampler, "score", lambda sequences, temperature: score(sequences, 1.0))
    with pytest.raises(MismatchError, match=r"those of temperature 1: the engine ignores temperature 0\.7"):
        pair.follower.follow()


def test_another_base_is_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path, sampler_seed=1)
    pair.publish(0)
    with pytest.raises(MismatchError, match="another base"):
        pair.follower.follow()


def test_values_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path)
    pair.publish(0)
    monkeypatch.setattr(pair.sampler, "score", lambda sequences, temperature: [[float("nan")] * 4 for _ in sequences])
    with pytest.raises(MismatchError, match="not finite"):
        pair.follower.follow()
