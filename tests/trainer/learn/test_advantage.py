"""NUMERICS 5: group advantages in float64, exact zeros where a group's rewards are equal."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.learn.advantage import advantages, zero_variance_groups

GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25, 0.75], dtype=torch.float64)


def test_row_5_eight_equal_rewards_give_exact_zeros() -> None:
    rewards = torch.full((8,), 0.7, dtype=torch.float64)
    for kind in ("grpo", "rloo", "dr_grpo", "reinforce"):
        assert advantages(rewards, torch.zeros(8, dtype=torch.int64), kind).tolist() == [0.0] * 8


def test_row_5_rewards_that_differ_by_rounding_are_equal() -> None:
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3 + 5e-7], dtype=torch.float64)
    assert advantages(rewards, torch.zeros(3, dtype=torch.int64), "grpo").tolist() == [0.0, 0.0, 0.0]


def test_row_5_grpo_by_hand() -> None:
    one, half = math.sqrt(1 / 3), math.sqrt(0.125)
    expected = [0.5 / one, -0.5 / one, -0.5 / one, 0.5 / one, -0.25 / half, 0.25 / half]
    assert advantages(REWARDS, GROUPS, "grpo").tolist() == pytest.approx(expected, rel=1e-12)


def test_row_5_the_others_by_hand() -> None:
    assert advantages(REWARDS, GROUPS, "dr_grpo").tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, -0.25, 0.25])
    leave_one_out = [1 - 1 / 3, 0 - 2 / 3, 0 - 2 / 3, 1 - 1 / 3, 0.25 - 0.75, 0.75 - 0.25]
    assert advantages(REWARDS, GROUPS, "rloo").tolist() == pytest.approx(leave_one_out)
    assert advantages(REWARDS, GROUPS, "reinforce").tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, -0.25, 0.25])
    shifted = REWARDS + torch.tensor([0.0, 0, 0, 0, 3, 3], dtype=torch.float64)
    assert advantages(shifted, GROUPS, "reinforce").tolist() == pytest.approx((shifted - shifted.mean()).tolist())


def test_row_5_float64_keeps_a_small_difference_on_a_large_reward() -> None:
    rewards = torch.tensor([1e6, 1e6 + 1e-3], dtype=torch.float64)
    assert advantages(rewards, torch.zeros(2, dtype=torch.int64), "grpo").tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    with pytest.raises(AssertionError, match="float64"):
        advantages(rewards.float(), torch.zeros(2, dtype=torch.int64), "grpo")


def test_row_20_a_reward_that_is_not_a_number_is_not_hidden() -> None:
    rewards = torch.tensor([math.nan, 1.0, 0.0, 1.0], dtype=torch.float64)
    result = advantages(rewards, torch.tensor([0, 0, 1, 1]), "grpo")
    assert result[:2].isnan().all()
    assert result[2:].isfinite().all()


def test_zero_variance_is_told_by_group() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    assert zero_variance_groups(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [True, False]
