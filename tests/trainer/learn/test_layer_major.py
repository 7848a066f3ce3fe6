"""The learner over engines that run layer by layer, against the plain engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config.schema import Train
from trainer.engine.build import build_stateless
from trainer.errors import DivergedError
from trainer.learn.learner import Learner
from trainer.learn.tiered import TieredAdapterEngine
from trainer.memory.anatomy import Anatomy
from trainer.memory.build import resident, streamed
from trainer.memory.disk import DiskSource
from trainer.memory.int8 import Int8Reference
from trainer.policy.policy import build_policy
from trainer.types import Group

STATELESS = {"optimizer": {"kind": "stateless", "rule": "rms", "learning_rate": 2e-3, "weight_decay": 0.0}}


def stateless(make_model: Any, train: Train, dtype: torch.dtype = torch.float32, events: list[Any] | None = None) -> Learner:
    model = make_model().to(dtype)
    residency = resident(model)
    policy = build_policy(model, train, 3)
    policy.residency = residency
    engine = build_stateless(residency, train, 3)
    taken = [] if events is None else events
    reference = Int8Reference(make_model(), 1.0) if train.algorithm.kl.reference == "int8_streamed" else None
    return Learner(policy, train, 3, None, lambda *a, **facts: taken.append((a, facts)), engine, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["sgd", "sign", "rms", "sinkhorn"])
def test_every_rule_learns_what_is_rewarded(
    rule: str, dtype: torch.dtype, make_model: Any, make_train: Callable[..., Train], sample_groups: Callable[..., list[Group]]
) -> None:
    rate = {"sgd": 0.5, "sign": 2e-3, "rms": 2e-3, "sinkhorn": 2e-3}[rule]
    optimizer = {**STATELESS["optimizer"], "rule": rule, "learning_rate": rate}
    train = make_train({"optimizer": optimizer, "heartbeat": {"factor": 0}, "stages": [{"steps": 20}]})
    learner = stateless(make_model, train, dtype)
    rewards = []
    for step in range(1, 21):
        groups = sample_groups(learner.policy.model, reward=lambda _, completion: float(completion.token_ids.count(7)))
        rewards.append(learner.step(groups, step).metrics["reward/mean"])
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.5
    assert learner.version == 20


def test_sampler_and_learner_agree_and_the_step_reports_layers(
    make_model: Any, make_train: Callable[..., Train], sample_groups: Callable[..., list[Group]]
) -> None:
    learner = stateless(make_model, make_train(STATELESS), torch.bfloat16)
    metrics = learner.step(sample_groups(learner.policy.model), 1).metrics
    assert metrics["mismatch/max_abs_logprob"] < 1e-4, "row 10: both compute in float32"
    assert metrics.keys() >= {"grad_norm/layers.0", "grad_norm/head", "update/relative", "update/realised_fraction"}
    assert metrics["update/skipped_fraction"] == 0.0


def test_int8_reference_holds_the_policy_near_the_base(
    make_model: Any, make_train: Callable[..., Train], sample_groups: Callable[..., list[Group]]
) -> None:
    difference = {**STATELESS, "algorithm": {"kl": {"reference": "int8_streamed", "coefficient": 0.1}}}
    learner = stateless(make_model, make_train(difference))
    groups = sample_groups(learner.policy.model)
    first = learner.step(groups, 1).metrics["kl/mean"]
    assert 0 <= first < 1e-2, "the error of 8 bits"
    assert learner.step(groups, 2).metrics["kl/mean"] > first


def test_three_alarms_in_a_row_end_the_run_by_name(
    make_model: Any, make_train: Callable[..., Train], sample_groups: Callable[..., list[Group]]
) -> None:
    events: list[Any] = []
    learner = stateless(make_model, make_train(STATELESS), events=events)
    groups = sample_groups(learner.policy.model)
    block = learner.policy.model.model.layers[1]
    block.mlp.down_proj.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * torch.nan,))
    before = {name: flat.clone() for name, flat in learner.engine.weights().items()}
    learner.step(groups, 1)
    learner.step(groups, 2)
    with pytest.raises(DivergedError, match=r"3 optimizer steps in a row were skipped \(not finite in layers\.1\)") as error:
        learner.step(groups, 3)
    assert error.value.exit_code == 5
    assert all(torch.equal(flat, before[name]) for name, flat in learner.engine.weights().items())
    (arguments, facts), *_ = events
    assert arguments[0] == "skip"
    assert (facts["step"], facts["layer"], facts["value"]) == (1, "layers.1", "nan")


def test_skips_are_counted_and_loud_from_a_twentieth_on(
    make_model: Any, make_train: Callable[..., Train], sample_groups: Callable[..., list[Group]]
) -> None:
    events: list[Any] = []
    learner = stateless(make_model, make_train({**STATELESS, "stages": [{"steps": 21}]}), events=events)
    groups, block = sample_groups(learner.policy.model), learner.policy.model.model.layers[1]
    seen = []
    for step in range(1, 22):
        poisoned = step in (5, 15, 21)
        hook = block.mlp.down_proj.register_full_backward_hook(
            lambda module, inputs, outputs, by=torch.nan if poisoned else 1.0: (inputs[0] * by,)
        )
        seen.append(learner.step(groups, step).metrics)
        hook.remove()
    assert [metrics["update/skipped"] for metrics in seen] == [float(step in (5, 15, 21)) for step in range(1, 22)]
    assert seen[-1]["update/skipped_fraction"] == pytest.approx(3 / 21)
    loud = [(facts["step"], arguments[1]) for arguments, facts in events if arguments[0] == "alarm"]
    assert loud == [(21, "3 of 21 optimizer steps were skipped")], "not before there is enough to judge by"


def test_lora_over_tiers_equals_lora_in_memory(
    make_model: Any,
    make_train: Callable[..., Train],
    make_learner: Any,
    sample_groups: Callable[..., list[Group]],
    tmp_path: Path,
) -> None:
    difference = {"method": "lora", "lora": {"target_modules": ["q_proj", "o_proj"]}, "batch": {"micro_batch_tokens": 40}}
    difference["algorithm"] = {"kl": {"reference": "exact", "coefficient": 0.1}}
    plain = make_learner(difference)
    train = make_train({**difference, "memory": {"weights": "tiered"}})
    model = make_model()

    def make(anatomy: Anatomy, units: Iterator[tuple[str, Tensor]]) -> DiskSource:
        return DiskSource(tmp_path / "tiers", units, prefetch=2)

    residency = streamed(model, make, trains=False)
    policy = build_policy(model, train, 3)
    policy.residency = residency
    tiered = Learner(policy, train, 3, None, lambda *a, **facts: None, TieredAdapterEngine(policy, train, residency))
    for step in (1, 2, 3):
        groups = sample_groups(plain.policy.model)
        one, other = plain.step(groups, step), tiered.step(groups, step)
        assert other.metrics["kl/mean"] == pytest.approx(one.metrics["kl/mean"], rel=1e-4, abs=1e-7)
        assert other.metrics["grad/norm"] == pytest.approx(one.metrics["grad/norm"], rel=1e-4)
    for name, weight in plain.engine.weights().items():
        torch.testing.assert_close(tiered.engine.weights()[name], weight, rtol=1e-4, atol=1e-6)
    residency.source.shutdown()
