"""The policy loss at each token, and the weights that sum tokens into one number.

    loss = sum over tokens of weight_T * loss_T        weight_T comes from the whole optimizer step, before any backward

so that splitting the step into micro-batches, or over ranks, changes neither the loss nor its gradient. Prompt tokens are
not here at all: T counts sampled tokens only.

Legend: N samples of an optimizer step, T their sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
MAX_LOG_RATIO = 20.0


def log_ratio(logprobs_T: torch.Tensor, old_T: torch.Tensor) -> torch.Tensor:
    """Return log rho, clamped to +-20 so that exp stays finite [T]."""
    return (logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class PpoLoss:
    loss_T: torch.Tensor  # with gradient
    ratio_T: torch.Tensor  # rho, detached
    clipped_T: torch.Tensor  # booleans: the gradient is zero here


def ppo_loss(
    logprobs_T: torch.Tensor,
    old_T: torch.Tensor,
    advantage_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PpoLoss:
    """Return the clipped surrogate loss of each token.

    -min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347); for A < 0 never above -c A (dual clip, arXiv 1912.09729).

    Args:
        logprobs_T: log-probs under the policy, with gradient [T].
        old_T: log-probs that the ratio is taken against [T].
        advantage_T: advantage of each token's sample [T].
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: c > 1.
    """
    ratio_T = torch.exp(log_ratio(logprobs_T, old_T))
    free_T = -ratio_T * advantage_T
    held_T = -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T
    loss_T = torch.maximum(free_T, held_T)
    ceiling_T = -dual_clip * advantage_T
    over_T = (advantage_T < 0) & (loss_T > ceiling_T)
    loss_T = torch.where(over_T, ceiling_T, loss_T)
    with torch.no_grad():
        clipped_T = over_T | (held_T > free_T)
    return PpoLoss(loss_T, ratio_T.detach(), clipped_T)


def decoupled_weight(old_T: torch.Tensor, rollout_T: torch.Tensor, truncation: float) -> torch.Tensor:
    """Return min(exp(l_old - l_roll), C): how much likelier a token is to the learner than to its sampler.

    Token-level and truncated, because a product over a long completion is heavy-tailed. Carries no gradient.
    """
    return torch.exp(log_ratio(old_T.detach(), rollout_T)).clamp(max=truncation)


def effective_sample_fraction(weight_T: torch.Tensor) -> torch.Tensor:
    """Return (sum w)^2 / (n sum w^2), Kish's effective sample size over the number of tokens: 1 when all weights are equal."""
    return weight_T.sum() ** 2 / (weight_T.numel() * (weight_T**2).sum())


def denominator(aggregation: Aggregation, num_tokens: int, num_samples: int, length_cap: int) -> int:
    """Return what the sum over all micro-batches and ranks is divided by.

    Args:
        num_tokens: sampled tokens that train, over the whole optimizer step.
        num_samples: samples that train, over the whole optimizer step.
        length_cap: the common cap of completions, in tokens.
    """
    if aggregation == "token_mean":
        return num_tokens
    return num_samples if aggregation == "sequence_mean" else num_samples * length_cap


def token_weights(aggregation: Aggregation, length_T: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return the weight of each token in the loss; the weights of an optimizer step sum over all its micro-batches.

    Args:
        aggregation: `token_mean`: 1 / tokens. `sequence_mean`: 1 / (samples x own length). `constant`: 1 / (samples x cap).
        length_T: number of sampled tokens in each token's completion [T].
        divisor: from `denominator`, of the whole optimizer step.
    """
    if aggregation == "sequence_mean":
        return 1.0 / (length_T * max(divisor, 1))
    return torch.full_like(length_T, 1.0 / max(divisor, 1), dtype=torch.float32)
