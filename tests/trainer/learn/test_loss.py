"""NUMERICS 2 (clipping), 4 (aggregations), 9 (decoupled weights)."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.learn.loss import decoupled_weight, denominator, effective_sample_fraction, log_ratio, ppo_loss, token_weights


def clipped(ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Return (loss, d loss / d log-prob, clipped) of one token at clip 0.2 / 0.3 and dual clip 3."""
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss = ppo_loss(logprob, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), 0.2, 0.3, 3.0)
    loss.loss_T.sum().backward()
    assert logprob.grad is not None
    return loss.loss_T.item(), logprob.grad.item(), bool(loss.clipped_T)


def test_row_2_the_log_ratio_ends_at_20() -> None:
    apart = log_ratio(torch.tensor([21.0, 300.0, -300.0, 19.0]), torch.zeros(4))
    assert apart.tolist() == [20.0, 20.0, -20.0, 19.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "is_clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),  # on-policy: the policy gradient
        (1.25, 2.0, -2.5, -2.5, False),
        (1.5, 2.0, -2.6, 0.0, True),  # a good token that is already likelier by more than 0.3
        (0.5, 2.0, -1.0, -1.0, False),  # a good token that became rarer is not held back
        (0.9, -1.0, 0.9, 0.9, False),
        (0.5, -1.0, 0.8, 0.0, True),  # a bad token that is already rarer by more than 0.2
        (2.0, -1.0, 2.0, 2.0, False),
        (5.0, -1.0, 3.0, 0.0, True),  # dual clip: never above 3
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_row_2_by_hand(ratio: float, advantage: float, loss: float, slope: float, is_clipped: bool) -> None:
    got = clipped(ratio, advantage)
    assert got[:2] == pytest.approx((loss, slope))
    assert got[2] is is_clipped


def test_row_2_a_log_ratio_without_bounds_stays_finite() -> None:
    new, old = torch.tensor([0.0, -3e4], requires_grad=True), torch.tensor([-3e4, 0.0])
    loss = ppo_loss(new, old, torch.tensor([-1.0, -1.0]), 0.2, 0.2, 3.0)
    loss.loss_T.sum().backward()
    assert loss.loss_T.tolist() == [3.0, pytest.approx(0.8)]
    assert loss.ratio_T.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()


LENGTHS = [1, 3]  # tokens of two samples
PER_TOKEN = torch.tensor([1, 3, 3, 3])
LOSSES = torch.tensor([8.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", (8 + 1 + 2 + 3) / 4), ("sequence_mean", (8 / 1 + 6 / 3) / 2), ("constant", (8 + 1 + 2 + 3) / (2 * 5))],
)
def test_row_4_aggregations_enumerated(aggregation: str, expected: float) -> None:
    divisor = denominator(aggregation, sum(LENGTHS), len(LENGTHS), length_cap=5)  # type: ignore[arg-type]
    weights = token_weights(aggregation, PER_TOKEN, divisor)  # type: ignore[arg-type]
    assert (LOSSES * weights).sum().item() == pytest.approx(expected)


def test_row_4_an_optimizer_step_without_a_training_token_is_no_division_by_zero() -> None:
    assert token_weights("token_mean", PER_TOKEN, denominator("token_mean", 0, 0, 5)).isfinite().all()


def test_row_9_equal_log_probs_weigh_exactly_one() -> None:
    old = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert decoupled_weight(old, old.clone(), 2.0).tolist() == [1.0] * 50


def test_row_9_the_weight_is_truncated_and_carries_no_gradient() -> None:
    old, rollout = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True), torch.tensor([-1.5, -9.0, -2.0])
    weight = decoupled_weight(old, rollout, 2.0)
    assert not weight.requires_grad
    assert weight.tolist() == pytest.approx([math.exp(0.5), 2.0, math.exp(-1)])


def test_row_9_effective_sample_size() -> None:
    assert effective_sample_fraction(torch.full((7,), 0.3)).item() == pytest.approx(1.0)
    assert effective_sample_fraction(torch.tensor([1.0, 0.0, 0.0, 0.0])).item() == pytest.approx(0.25)
