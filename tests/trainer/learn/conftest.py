"""A tiny Llama, real samples from it, and the configuration of training with a few keys changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config.load import lay_over
from trainer.config.schema import Train
from trainer.learn.learner import Learner
from trainer.policy.policy import build_policy
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Completion, Group, Prompt, Request, Sample, SamplingParams, Verdict

EOS = 1
TRAIN = {
    "method": "full",
    "optimizer": {"learning_rate": 1e-3},
    "sampling": {"max_completion_tokens": 6},
    "batch": {"prompts_per_step": 4, "group_size": 4},
    "stages": [{"steps": 5}],
}


@pytest.fixture
def make_train() -> Callable[..., Train]:
    def make(difference: dict[str, Any] | None = None) -> Train:
        return Train.model_validate_json(__import__("json").dumps(lay_over(TRAIN, difference or {})))

    return make


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    def make(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {
            "vocab_size": 20,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "initializer_range": 0.2,
            "max_position_embeddings": 64,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
            "bos_token_id": None,
        }
        return LlamaForCausalLM(LlamaConfig(**(sizes | settings))).eval()

    return make


@pytest.fixture
def make_learner(make_model: Callable[..., Any], make_train: Callable[..., Train]) -> Callable[..., Learner]:
    """Return a learner over a fresh tiny model; its events are in `learner.events`."""

    def make(difference: dict[str, Any] | None = None, anchors: Any = None, **settings: Any) -> Learner:
        train = make_train(difference)
        events: list[tuple[str, str, dict[str, Any]]] = []
        policy = build_policy(make_model(**settings), train, seed=3)
        learner = Learner(policy, train, 3, anchors, lambda kind, reason, **facts: events.append((kind, reason, facts)))
        learner.events = events  # type: ignore[attr-defined]
        return learner

    return make


@pytest.fixture
def sample_groups() -> Callable[..., list[Group]]:
    """Return groups that a model really sampled, with rewards by a rule on the sample's number and tokens."""

    def sample(
        model: Any,
        num_prompts: int = 4,
        group_size: int = 4,
        reward: Callable[[int, Completion], float] = lambda index, completion: float(sum(completion.token_ids) % 3 == 0),
        temperature: float = 1.0,
        cap: int = 6,
    ) -> list[Group]:
        prompts = [
            Prompt(f"p{i}", "main", "train", "", tuple(2 + (i * 7 + j) % 17 for j in range(2 + i % 3)), "")
            for i in range(num_prompts)
        ]
        requests = [Request(p.id, p.token_ids, 1000 * i + j, j) for i, p in enumerate(prompts) for j in range(group_size)]
        completions = EmbeddedSampler(model, 8, EOS).generate(requests, SamplingParams(temperature, cap, (EOS,)))
        samples = [
            Sample(prompts[i // group_size], completion, "", Verdict("ok", reward(i, completion)))
            for i, completion in enumerate(completions)
        ]
        return [Group(prompt, tuple(samples[i * group_size : (i + 1) * group_size])) for i, prompt in enumerate(prompts)]

    return sample
