"""The learner as a whole: NUMERICS 3, 6, 9, 11, 19, 20 and what a step reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainer.errors import DivergedError
from trainer.learn.anchored import AnchorTerm
from trainer.learn.batch import make_batch
from trainer.learn.learner import Learner
from trainer.learn.tally import Tally
from trainer.types import Completion, Group, Sample, Verdict

Groups = Callable[..., list[Group]]
Make = Callable[..., Learner]


def gradients(learner: Learner, groups: list[Group], samples: list[int] | None = None) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of one optimizer step over some samples."""
    prepared = learner.prepare(make_batch(groups), Tally())
    chosen = torch.arange(prepared.batch.num_samples) if samples is None else torch.tensor(samples)
    loss = learner.engine.accumulate(learner.terms(prepared, chosen, Tally()))
    learner.engine.optimizer.grad_norm()  # fills in zeros where nothing was accumulated
    flat = torch.cat([p.grad.flatten() for p in learner.engine.optimizer.stepped.values() if p.grad is not None])
    return loss.item(), flat.clone()


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.engine.optimizer.weights().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def with_reward(groups: list[Group], number: int, score: float) -> list[Group]:
    """Return the groups with another reward for their first group's sample `number`."""
    first = groups[0]
    samples = [replace(s, verdict=Verdict("ok", score)) if i == number else s for i, s in enumerate(first.samples)]
    return [Group(first.prompt, tuple(samples)), *groups[1:]]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_row_3_micro_batches_change_neither_loss_nor_gradient(
    make_learner: Make, sample_groups: Groups, aggregation: str
) -> None:
    algorithm = {"aggregation": aggregation, "entropy_coefficient": 0.01, "kl": {"reference": "exact", "coefficient": 0.1}}
    results = []
    for tokens in (100_000, 80, 40):
        learner = make_learner({"algorithm": algorithm, "batch": {"micro_batch_tokens": tokens}})
        groups = sample_groups(learner.policy.model)
        num_micro_batches = len(list(learner._micro_batches(make_batch(groups), torch.arange(16))))
        results.append((num_micro_batches, *gradients(learner, groups)))
    assert results[0][0] == 1
    assert results[2][0] > results[1][0] > 1
    for _, loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)
        assert torch.allclose(gradient, results[0][2], rtol=1e-4, atol=1e-7)


def test_row_3_two_ranks_add_up_to_one(make_learner: Make, sample_groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner()
    groups = sample_groups(learner.policy.model)
    loss, gradient = gradients(learner, groups)
    tokens = sum(len(s.completion.token_ids) for g in groups for s in g.samples)
    monkeypatch.setattr("trainer.learn.learner.denominator", lambda *_: tokens)  # as reduced over both ranks
    halves = [gradients(learner, groups, samples) for samples in (list(range(0, 16, 2)), list(range(1, 16, 2)))]
    assert halves[0][0] + halves[1][0] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert torch.allclose(halves[0][1] + halves[1][1], gradient, rtol=1e-4, atol=1e-7)


def test_the_gradient_is_that_of_a_loss_written_out_by_hand(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner()
    groups, model = sample_groups(learner.policy.model), learner.policy.model
    _, gradient = gradients(learner, groups)
    model.zero_grad()
    total, tokens = torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor([s.reward for s in group.samples], dtype=torch.float64)
        spread = float(rewards.std())
        for sample, reward in zip(group.samples, rewards, strict=True):
            advantage = 0.0 if spread == 0 else float((reward - rewards.mean()) / spread)
            prompt, completion = sample.prompt.token_ids, sample.completion.token_ids
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            total = total - advantage * logprobs.sum()
            tokens += len(completion)
    (total / tokens).backward()
    plain = torch.cat([p.grad.flatten() for p in learner.engine.optimizer.stepped.values() if p.grad is not None])
    assert plain.abs().max().item() > 1e-3
    assert torch.allclose(gradient, plain, rtol=1e-3, atol=1e-6)


CLIPPED = {"clip_low": 0.05, "clip_high": 0.4, "kl": {"reference": "exact", "coefficient": 0.7, "estimator": "k3"}}
WEIGHED = {"off_policy": {"mode": "decoupled", "truncation": 1.3}, "aggregation": "sequence_mean", "truncated": "mask"}
CAPPED = {"advantage": "dr_grpo", "aggregation": "constant", "truncated": "mask", "dual_clip": 1.5}


@pytest.mark.parametrize("algorithm", [CLIPPED, WEIGHED, CAPPED])
def test_every_setting_reaches_the_loss_as_it_is_written_out_by_hand(
    make_learner: Make, make_model: Any, sample_groups: Groups, algorithm: dict[str, Any]
) -> None:
    """NUMERICS 1, 2, 4, 6, 9 together, on samples of another policy, after the policy has moved away from its reference."""
    learner = make_learner({"algorithm": algorithm, "batch": {"micro_batch_tokens": 60}})
    base, model = make_model(), learner.policy.model
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    groups = sample_groups(base, cap=12)
    loss, gradient = gradients(learner, groups)

    settings, kl = learner.algorithm, learner.algorithm.kl
    model.zero_grad()
    trains = [s for g in groups for s in g.samples if settings.truncated == "keep" or s.completion.finish_reason == "stop"]
    assert 0 < len(trains) < 16 or settings.truncated == "keep"
    num_tokens, total, clips = sum(len(s.completion.token_ids) for s in trains), torch.zeros(()), 0
    for group in groups:
        rewards = torch.tensor([s.reward for s in group.samples], dtype=torch.float64)
        for sample in (s for s in group.samples if s in trains):
            advantage = sample.reward - float(rewards.mean())
            if settings.advantage == "grpo" and float(rewards.std()) > 0:
                advantage /= float(rewards.std())
            now_T, reference_T = of_tokens(model, sample), of_tokens(base, sample).detach()
            rollout_T = torch.tensor(sample.completion.logprobs)
            decoupled = settings.off_policy.mode == "decoupled"
            ratio_T = (now_T - (now_T.detach() if decoupled else rollout_T)).exp()
            gain_T = torch.minimum(ratio_T * advantage, ratio_T.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage)
            clips += int((gain_T != ratio_T * advantage).sum())
            if advantage < 0:
                gain_T = gain_T.clamp(min=settings.dual_clip * advantage)
            if decoupled:
                gain_T = gain_T * (now_T.detach() - rollout_T).exp().clamp(max=settings.off_policy.truncation)
            loss_T = -gain_T
            if kl.reference == "exact":
                apart_T = reference_T - now_T
                loss_T = loss_T + kl.coefficient * (apart_T.exp() - 1 - apart_T)
            share = {
                "token_mean": 1 / num_tokens,
                "sequence_mean": 1 / (len(trains) * len(now_T)),
                "constant": 1 / len(trains) / 6,
            }
            total = total + loss_T.sum() * share[settings.aggregation]
    total.backward()
    plain = torch.cat([p.grad.flatten() for p in learner.engine.optimizer.stepped.values() if p.grad is not None])
    assert clips > 0 or settings.off_policy.mode == "decoupled", "nothing was clipped, so nothing was shown"
    assert loss == pytest.approx(total.item(), rel=1e-4, abs=1e-6)
    assert torch.allclose(gradient, plain, rtol=1e-3, atol=1e-5 * plain.abs().max().item())


def of_tokens(model: Any, sample: Sample) -> torch.Tensor:
    """Return the log-prob of each token of a sample's completion under a model."""
    prompt, completion = sample.prompt.token_ids, sample.completion.token_ids
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def test_samples_without_a_term_are_left_out_but_counted(make_learner: Make, sample_groups: Groups) -> None:
    """A group of equal rewards costs no forward pass; the gradient is the one of the full computation."""
    skipping, full = make_learner(), make_learner({"algorithm": {"kl": {"reference": "exact", "coefficient": 0.0}}})

    def reward(index: int, completion: Completion) -> float:
        return 1.0 if index >= 8 else float(index % 2)

    groups = sample_groups(skipping.policy.model, reward=reward)
    prepared = skipping.prepare(make_batch(groups), Tally())
    assert prepared.active_N.sum() == 8
    assert full.prepare(make_batch(groups), Tally()).active_N.sum() == 16
    mine, whole = gradients(skipping, groups), gradients(full, groups)
    assert mine[0] == pytest.approx(whole[0], abs=1e-7)
    assert torch.allclose(mine[1], whole[1], rtol=1e-4, atol=1e-7)


def test_row_6_a_truncated_sample_stays_in_the_baseline_and_leaves_the_loss(make_learner: Make, sample_groups: Groups) -> None:
    keep, mask = make_learner({"algorithm": {"truncated": "keep"}}), make_learner({"algorithm": {"truncated": "mask"}})
    groups = sample_groups(keep.policy.model, cap=12)
    reasons = [s.completion.finish_reason for g in groups for s in g.samples]
    assert {"stop", "length"} == set(reasons)
    assert all(s.completion.token_ids[-1] != 1 for g in groups for s in g.samples if s.completion.finish_reason == "length")

    kept, masked = (learner.prepare(make_batch(groups), Tally()) for learner in (keep, mask))
    assert torch.equal(kept.advantage_N, masked.advantage_N), "the baseline is that of all samples"
    stopped = [i for i, reason in enumerate(reasons) if reason == "stop"]
    by_hand = gradients(keep, groups, stopped)  # numerator and denominator of the others alone
    got = gradients(mask, groups)
    assert got[0] == pytest.approx(by_hand[0], abs=1e-7)
    assert torch.allclose(got[1], by_hand[1], rtol=1e-4, atol=1e-7)
    assert not torch.allclose(gradients(keep, groups)[1], got[1], rtol=1e-2, atol=1e-5)


def test_row_9_decoupled_with_equal_log_probs_is_direct(make_learner: Make, sample_groups: Groups) -> None:
    direct, decoupled = make_learner(), make_learner({"algorithm": {"off_policy": {"mode": "decoupled"}}})
    groups = sample_groups(direct.policy.model)
    assert torch.allclose(gradients(direct, groups)[1], gradients(decoupled, groups)[1], rtol=1e-3, atol=1e-6)
    metrics = decoupled.step(groups, 1).metrics
    assert metrics["off_policy/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["off_policy/effective_sample_fraction"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["off_policy/kept_fraction"] == 1.0
    assert "off_policy/weight_mean" not in direct.step(groups, 1).metrics


def test_row_9_a_stale_sampler_is_weighed_once_and_never_twice(make_learner: Make, sample_groups: Groups) -> None:
    difference = {"algorithm": {"off_policy": {"mode": "decoupled", "truncation": 1.5}}}
    learner = make_learner(difference)
    groups = sample_groups(make_learner(difference, seed=1).policy.model)  # sampled by another policy
    prepared = learner.prepare(make_batch(groups), Tally())
    assert prepared.weight_T is not None
    active_T = prepared.active_N.repeat_interleave(prepared.batch.length_N)
    expected_T = torch.exp(prepared.old_T - prepared.batch.rollout_T).clamp(max=1.5)
    assert torch.allclose(prepared.weight_T[active_T], expected_T[active_T])
    assert prepared.weight_T[active_T].max().item() == 1.5
    metrics = learner.step(groups, 1).metrics
    assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4), "the ratio is against the re-scored policy"
    assert metrics["off_policy/effective_sample_fraction"] < 0.9
    assert metrics["mismatch/mean_abs_logprob"] > 0.1


def test_row_10_mismatch_of_an_on_policy_step_is_rounding(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner({"batch": {"passes": 3}, "optimizer": {"learning_rate": 1e-2}})
    metrics = learner.step(sample_groups(learner.policy.model), 1).metrics
    assert metrics["mismatch/mean_abs_logprob"] < 1e-5
    assert metrics["mismatch/max_abs_logprob"] < 1e-4
    assert metrics["ratio/max"] > 1.01, "later passes do move away"


def test_row_11_dropout_is_off_whenever_log_probs_are_scored(make_learner: Make, sample_groups: Groups) -> None:
    lora = {"rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    algorithm = {"off_policy": {"mode": "decoupled"}, "kl": {"reference": "exact"}}
    learner = make_learner({"method": "lora", "lora": lora, "algorithm": algorithm})
    for name, weight in learner.engine.optimizer.parameters.items():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)  # an adapter that matters
    groups = sample_groups(learner.policy.model)
    prepared = learner.prepare(make_batch(groups), Tally())
    assert torch.allclose(prepared.old_T, prepared.batch.rollout_T, atol=1e-5), "rho = 1 in scoring"
    assert prepared.reference_T is not None
    assert not torch.allclose(prepared.reference_T, prepared.old_T, atol=1e-2)
    assert torch.equal(prepared.reference_T, learner.prepare(make_batch(groups), Tally()).reference_T)
    metrics = learner.step(groups, 1).metrics
    assert metrics["off_policy/weight_mean"] == pytest.approx(1.0, abs=1e-4), "a step scores without it too"
    assert metrics["mismatch/max_abs_logprob"] > 1e-3, "the update itself does drop"
    assert not learner.policy.model.training


def test_the_bases_own_dropout_is_off_for_good(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner(attention_dropout=0.5)
    metrics = learner.step(sample_groups(learner.policy.model), 1).metrics
    assert metrics["mismatch/max_abs_logprob"] < 1e-4
    assert learner.policy.model.config.attention_dropout == 0.5, "what is saved stays as it was"


def test_the_exact_reference_is_the_base_for_both_methods(make_learner: Make, sample_groups: Groups) -> None:
    kl = {"algorithm": {"kl": {"reference": "exact", "coefficient": 0.1}}, "optimizer": {"learning_rate": 0.05}}
    for method in ({"method": "full"}, {"method": "lora", "lora": {"rank": 4, "alpha": 8}}):
        learner = make_learner(kl | method)
        groups = sample_groups(learner.policy.model)
        base = learner.prepare(make_batch(groups), Tally()).reference_T
        assert base is not None
        assert torch.allclose(base, make_batch(groups).rollout_T, atol=1e-5)
        first = learner.step(groups, 1).metrics
        assert first["kl/mean"] == pytest.approx(0.0, abs=1e-6)
        for step in range(2, 5):
            metrics = learner.step(groups, step).metrics
        assert metrics["kl/mean"] > 1e-4
        after = learner.prepare(make_batch(groups), Tally()).reference_T
        assert after is not None
        assert torch.equal(after, base), method


def test_row_19_equal_seeds_give_equal_bits_whatever_the_global_generator(make_learner: Make, sample_groups: Groups) -> None:
    lora = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}, "batch": {"passes": 2, "minibatches": 3}}
    results = []
    for noise in (1, 2):
        learner = make_learner(lora)
        groups = sample_groups(learner.policy.model)
        torch.manual_seed(noise)
        torch.rand(noise)
        learner.step(groups, 1)
        results.append(weights_of(learner))
    assert same(*results)


def test_row_20_a_loss_that_is_not_finite_changes_no_weight(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner()
    groups = sample_groups(learner.policy.model)
    learner.step(groups, 1)
    before, state = weights_of(learner), {k: v.clone() for k, v in learner.engine.optimizer.state().items()}
    stats = learner.step(with_reward(groups, 0, math.nan), 2)
    assert same(before, learner.engine.optimizer.weights())
    assert same(state, learner.engine.optimizer.state())
    assert (stats.num_skipped, stats.version, stats.metrics["update/skipped"]) == (1, 1, 1)
    kind, reason, facts = learner.events[0]  # type: ignore[attr-defined]
    assert (kind, facts["step"]) == ("skip", 2)
    assert "not finite" in reason


def test_row_20_only_the_optimizer_step_with_the_bad_sample_is_skipped(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner({"batch": {"passes": 2, "minibatches": 4}})
    first, *others = sample_groups(learner.policy.model)
    sample = first.samples[0]
    broken = replace(sample, completion=replace(sample.completion, logprobs=(math.nan,) * len(sample.completion.logprobs)))
    stats = learner.step([Group(first.prompt, (broken, *first.samples[1:])), *others], 1)
    assert stats.num_skipped == 2, "one in each pass"
    assert stats.version == 6
    assert math.isfinite(stats.metrics["loss/total"]), "a skipped step is not averaged in"
    assert all(weight.isfinite().all() for weight in learner.engine.optimizer.weights().values())


@pytest.mark.parametrize("factor", [5.0, 0.0])
def test_row_20_an_infinite_gradient_of_a_finite_loss_changes_no_weight(
    make_learner: Make, sample_groups: Groups, factor: float
) -> None:
    """Whether the heartbeat compares norms or not (a factor of 0)."""
    learner = make_learner({"heartbeat": {"factor": factor}})
    groups, before = sample_groups(learner.policy.model), weights_of(learner)
    name, weight = list(learner.policy.trainable.items())[3]
    weight.register_hook(lambda gradient: gradient * math.inf)
    stats = learner.step(groups, 1)
    assert stats.version == 0
    assert stats.num_skipped == learner.train.batch.optimizer_steps_per_step
    assert same(weights_of(learner), before)
    assert name.split(".")[2] in str(learner.events[0])


def test_row_20_a_bad_weight_is_named_and_too_many_skips_end_the_run(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner({"max_skipped_in_a_row": 3})
    groups = sample_groups(learner.policy.model)
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        learner.engine.optimizer.parameters[name][0, 0] = torch.nan
    learner.step(groups, 1)
    learner.step(groups, 2)
    with pytest.raises(DivergedError, match=r"step 3: 3 optimizer steps in a row were skipped .*model\.") as error:
        learner.step(groups, 3)
    assert error.value.exit_code == 5
    assert learner.version == 0


def test_a_good_step_ends_the_row_of_skips(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner({"max_skipped_in_a_row": 2})
    groups = sample_groups(learner.policy.model)
    bad = with_reward(groups, 0, math.nan)
    for step, batch in enumerate([bad, groups, bad, groups], start=1):
        learner.step(batch, step)
    assert learner.version == 2


@pytest.mark.parametrize(
    ("method", "advantage"), [("full", "grpo"), ("full", "dr_grpo"), ("lora", "rloo"), ("lora", "reinforce")]
)
def test_it_learns_what_is_rewarded(make_learner: Make, sample_groups: Groups, method: str, advantage: str) -> None:
    lora = {"rank": 8, "alpha": 16}
    batch, algorithm = {"passes": 2, "minibatches": 2}, {"advantage": advantage}
    rate = 1e-2 if method == "full" else 3e-2
    difference = {"method": method, "lora": lora, "algorithm": algorithm, "batch": batch, "optimizer": {"learning_rate": rate}}
    learner = make_learner({**difference, "stages": [{"steps": 10}]})

    def reward(index: int, completion: Completion) -> float:
        return completion.token_ids.count(7) / len(completion.token_ids)

    means = [
        learner.step(sample_groups(learner.policy.model, group_size=8, reward=reward), step).metrics["reward/mean"]
        for step in range(1, 11)
    ]
    assert means[-1] > means[0] + 0.2


def test_activation_checkpointing_changes_nothing(make_learner: Make, sample_groups: Groups) -> None:
    results = []
    for checkpointing in (False, True):
        learner = make_learner({"activation_checkpointing": checkpointing})
        groups = sample_groups(learner.policy.model)
        with learner.policy.updating():
            results.append(gradients(learner, groups))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-8)


def test_activation_checkpointing_does_recompute(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner({"activation_checkpointing": True})
    calls = []
    learner.policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    groups = sample_groups(learner.policy.model)
    calls.clear()
    learner.step(groups, 1)
    assert len(calls) == 2, "once forward, once in backward"


def test_a_step_reports_what_a_person_needs(make_learner: Make, sample_groups: Groups) -> None:
    learner = make_learner({"batch": {"passes": 2, "minibatches": 2}})
    groups = sample_groups(learner.policy.model)
    metrics = learner.step(groups, 1).metrics
    rewards = torch.tensor([s.reward for g in groups for s in g.samples])
    assert metrics["reward/mean"] == pytest.approx(rewards.mean().item())
    flat = [logprob for g in groups for s in g.samples for logprob in s.completion.logprobs]
    assert metrics["entropy"] == pytest.approx(-sum(flat) / len(flat), rel=1e-6)
    assert metrics["policy/version"] == learner.version == 4
    assert metrics["lr"] == pytest.approx(learner.train.optimizer.learning_rate, rel=0.2)
    assert {"loss/total", "loss/policy", "ratio/mean", "clip/fraction", "grad/norm", "completion/length_mean"} <= metrics.keys()
    assert all(math.isfinite(value) for value in metrics.values())


def test_state_goes_on_to_the_same_bits(make_learner: Make, sample_groups: Groups) -> None:
    difference = {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "algorithm": {"kl": {"reference": "exact", "controller": "adaptive", "coefficient": 0.1, "target": 0.01}},
        "batch": {"minibatches": 2},
    }
    whole, other = make_learner(difference), make_learner(difference)
    groups = sample_groups(whole.policy.model)
    whole.step(groups, 1)
    parts, facts = whole.state()
    parts = {part: {name: tensor.clone() for name, tensor in tensors.items()} for part, tensors in parts.items()}
    expected = whole.step(groups, 2)
    other.load_state(parts, facts)
    assert other.step(groups, 2).metrics == expected.metrics
    assert same(weights_of(whole), weights_of(other))
    assert whole.kl.coefficient == other.kl.coefficient != 0.1


class HandMadeAnchors:
    """Anchors of a model, scored by a plain forward pass."""

    def __init__(self, model: Any, k: int):
        self.prompts = [(2 + i, 3) for i in range(6)]
        self.completions = [(5,) * (1 + i % 3) + (1,) for i in range(6)]
        self.tables = []
        with torch.no_grad():
            for prompt, completion in zip(self.prompts, self.completions, strict=True):
                logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
                values, ids = torch.log_softmax(logits, -1).sort(descending=True)
                own = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
                self.tables.append((ids[:, :k], values[:, :k], torch.logsumexp(values[:, k:], -1), own))
        self.top_k, self.num_tokens = k, sum(len(completion) for completion in self.completions)

    def __len__(self) -> int:
        return len(self.prompts)

    def take(self, indices: list[int]) -> Any:
        taken = object.__new__(HandMadeAnchors)
        taken.prompts, taken.completions = ([side[i] for i in indices] for side in (self.prompts, self.completions))
        columns = [torch.cat([self.tables[i][column] for i in indices]) for column in range(4)]
        taken.top_ids_TK, taken.top_logprobs_TK, taken.tail_T, taken.sampler_logprobs_T = columns  # type: ignore[attr-defined]
        return taken


def test_row_21_anchors_hold_the_policy_at_the_reference(make_learner: Make, make_model: Any, sample_groups: Groups) -> None:
    """At the reference the term is zero; away from it, it pulls back without any reference in memory."""
    source = HandMadeAnchors(make_model(), k=6)
    learner = make_learner(
        {"algorithm": {"kl": {"reference": "anchors", "coefficient": 1.0}}, "stages": [{"steps": 30}]},
        anchors=AnchorTerm(source, batch_size=4, micro_batch_tokens=12, seed=0),
    )
    assert learner.reference is None
    groups = sample_groups(learner.policy.model, reward=lambda index, completion: 0.5)
    assert learner.step(groups, 1).metrics["kl/mean"] == pytest.approx(0.0, abs=1e-5)
    with torch.no_grad():
        for weight in learner.engine.optimizer.parameters.values():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    distances = [learner.step(groups, step).metrics["kl/mean"] for step in range(2, 31)]
    assert distances[0] > 0.01
    assert distances[-1] < 0.2 * distances[0]


def test_row_21_anchors_read_at_every_step_give_the_same(
    make_learner: Make, make_model: Any, sample_groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for resident in (2**26, 0):
        monkeypatch.setattr("trainer.learn.anchored.RESIDENT_BYTES", resident)
        term = AnchorTerm(HandMadeAnchors(make_model(seed=1), k=6), batch_size=4, micro_batch_tokens=12, seed=0)
        learner = make_learner({"algorithm": {"kl": {"reference": "anchors", "coefficient": 1.0}}}, anchors=term)
        results.append(gradients(learner, sample_groups(learner.policy.model, reward=lambda index, completion: 0.5)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][0] > 0.01
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-7)


def test_anchors_come_in_shuffled_epochs_that_the_update_decides(make_model: Any) -> None:
    term = AnchorTerm(HandMadeAnchors(make_model(), k=3), batch_size=4, micro_batch_tokens=100, seed=0)
    taken = [term.indices(update) for update in range(3)]
    assert sorted(taken[0] + taken[1][:2]) == list(range(6))
    assert sorted(taken[1][2:] + taken[2]) == list(range(6))
    assert term.indices(0) == taken[0], "asking again, out of order, gives the same"


def test_an_rl_stage_begins_with_a_fresh_optimizer_and_its_own_rate(make_learner: Make, sample_groups: Groups) -> None:
    stages = [{"name": "a", "steps": 2}, {"name": "b", "steps": 3, "learning_rate": 5e-4, "max_completion_tokens": 9}]
    learner = make_learner({"stages": stages, "optimizer": {"learning_rate": 1e-3, "final_fraction": 0.5}})
    groups = sample_groups(learner.policy.model)
    rates = [learner.step(groups, step).metrics["lr"] for step in (1, 2)]
    weights = weights_of(learner)
    learner.begin_stage(learner.train.stages[1])
    assert same(weights, learner.engine.optimizer.weights())
    assert learner.engine.optimizer.state() == {}
    assert learner.length_cap == 9
    rates += [learner.step(groups, step).metrics["lr"] for step in (3, 4, 5)]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 5e-4 * 0.75, 5e-4 * 0.5])
    assert learner.version == 5, "the policy goes on"
