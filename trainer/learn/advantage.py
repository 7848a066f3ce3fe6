"""Rewards of a step's samples in, one advantage per sample out. Float64, pure, no learned critic.

    grpo       (r - mean of the group) / standard deviation of the group     DeepSeekMath, arXiv 2402.03300
    dr_grpo    r - mean of the group                                         Dr. GRPO, arXiv 2503.20783
    rloo       r - mean of the others of the group                           RLOO, arXiv 2402.14740
    reinforce  r - mean of the whole batch

A group whose rewards are all equal says nothing about its prompt: its advantages are exactly 0, not a rounding error over a
rounding error. The standard deviation is the unbiased one (n - 1).

Legend: N samples, G groups.
"""

from __future__ import annotations

from typing import Literal

import torch

AdvantageKind = Literal["grpo", "rloo", "dr_grpo", "reinforce"]
EQUAL_WITHIN = 1e-6  # rewards of a group that differ by no more than this are equal


def zero_variance_groups(rewards_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """Return, for each group, whether its rewards are all equal.

    Args:
        rewards_N: float64 rewards [N].
        group_N: int64 index of each sample's group, 0 to G - 1 [N].

    Returns:
        Booleans [G].
    """
    num_groups = int(group_N.max()) + 1
    highest_G = torch.full((num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group_N, rewards_N, "amax")
    lowest_G = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, group_N, rewards_N, "amin")
    return highest_G - lowest_G <= EQUAL_WITHIN


def advantages(rewards_N: torch.Tensor, group_N: torch.Tensor, kind: AdvantageKind) -> torch.Tensor:
    """Return one advantage per sample.

    Args:
        rewards_N: float64 rewards [N].
        group_N: int64 index of each sample's group, 0 to G - 1; groups may differ in size but none has size 1 [N].
        kind: see the module's map.

    Returns:
        Float64 advantages [N]; a reward that is not finite makes its group's advantages not finite, never 0.
    """
    assert rewards_N.dtype == torch.float64, "rewards are averaged in float64"
    if kind == "reinforce":
        centred_N = rewards_N - rewards_N.mean()
        return torch.where(rewards_N.max() - rewards_N.min() <= EQUAL_WITHIN, 0.0, centred_N)
    size_G = torch.bincount(group_N).to(torch.float64)
    assert bool((size_G > 1).all()), "a group of one has no baseline"
    zeros_G = torch.zeros_like(size_G)
    mean_G = zeros_G.scatter_add(0, group_N, rewards_N) / size_G
    centred_N = rewards_N - mean_G[group_N]
    if kind == "grpo":
        variance_G = zeros_G.scatter_add(0, group_N, centred_N**2) / (size_G - 1)
        scaled_N = centred_N / variance_G.sqrt()[group_N]
    elif kind == "rloo":
        scaled_N = centred_N * (size_G / (size_G - 1))[group_N]
    else:
        scaled_N = centred_N
    return torch.where(zero_variance_groups(rewards_N, group_N)[group_N], 0.0, scaled_N)
