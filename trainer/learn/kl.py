"""Distance between policy and reference: values to report, terms to train on, and the controller of their coefficient.

On samples of the policy, with d = l_ref - l (Schulman, "Approximating KL divergence", 2020):

    value  k1 = -d    k2 = d^2 / 2    k3 = exp(d) - 1 - d          all estimate KL(policy || reference)
    term   k2         its expected gradient is the exact gradient of KL(policy || reference); reported with k3's value
           k3         its expected gradient is that of the forward KL(reference || policy)
           ratio_k3   rho * k3 with gradient through rho = exp(l - l_old): exact on-policy

k1 as a term has zero expected gradient, so it is a value only. d is clamped to +-20 before exp, values to +-10.

At an *anchor* the reference is cached: log-probs of its top K tokens and the mass of the rest. The KL is the sum over those
K plus one bucket for the tail: exact when K is the vocabulary, a lower bound before (data processing inequality).

Legend: T tokens, K cached tokens at each position.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from trainer.config.schema import Kl

Estimator = Literal["k2", "k3", "ratio_k3"]
Direction = Literal["policy_to_reference", "reference_to_policy"]
MAX_LOG_RATIO = 20.0
MAX_VALUE = 10.0
_SMALLEST_TAIL = -30.0  # log mass; a cached tail below it is rounding
MAX_LOG_MASS = -1e-7  # log of the largest top-K mass that float32 tells from 1


def kl_value(logprobs_T: torch.Tensor, reference_T: torch.Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> torch.Tensor:
    """Return the estimate of KL(policy || reference) at each sampled token [T]."""
    difference_T = (reference_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        value_T = -difference_T
    elif kind == "k2":
        value_T = difference_T**2 / 2
    else:
        value_T = torch.expm1(difference_T) - difference_T
    return value_T.clamp(-MAX_VALUE, MAX_VALUE)


def kl_term(logprobs_T: torch.Tensor, old_T: torch.Tensor, reference_T: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Return the KL term of the loss at each token; its value is k3 (times the ratio for `ratio_k3`).

    Args:
        logprobs_T: log-probs under the policy, with gradient [T].
        old_T: log-probs under the policy that sampled [T].
        reference_T: log-probs under the reference [T].
        estimator: see the module's map.
    """
    if estimator == "k2":
        slope_T = (logprobs_T - reference_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value_T = kl_value(logprobs_T.detach(), reference_T)
        return value_T + slope_T * (logprobs_T - logprobs_T.detach())
    value_T = kl_value(logprobs_T, reference_T)
    if estimator == "k3":
        return value_T
    return torch.exp((logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) * value_T


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0 without cancellation (Maechler 2012)."""
    near_zero = x > -math.log(2)
    # Both branches of `where` get a gradient, so each sees only arguments at which it is finite.
    by_expm1 = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    by_log1p = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, by_expm1, by_log1p)


def full_kl(logits_TV: torch.Tensor, reference_TV: torch.Tensor) -> torch.Tensor:
    """Return KL(policy || reference) over the whole vocabulary at each position [T], in float64.

    Args:
        logits_TV: the policy's logits, over the temperature, in float32 [T, V].
        reference_TV: the reference's, likewise [T, V].
    """
    logprobs_TV, other_TV = torch.log_softmax(logits_TV, -1), torch.log_softmax(reference_TV, -1)
    return (logprobs_TV.exp() * (logprobs_TV - other_TV)).sum(-1, dtype=torch.float64)


def anchored_kl(
    logprobs_TK: torch.Tensor, anchor_TK: torch.Tensor, anchor_tail_T: torch.Tensor, direction: Direction = "policy_to_reference"
) -> torch.Tensor:
    """Return KL(policy || anchor) over the anchor's top K tokens and one tail bucket, at each position.

    Args:
        logprobs_TK: the policy's log-probs of the anchor's top tokens, with gradient [T, K].
        anchor_TK: the anchor's log-probs of them [T, K].
        anchor_tail_T: log of the anchor's mass outside them; -inf where they are the whole vocabulary [T].
        direction: `reference_to_policy` returns KL(anchor || policy).

    Returns:
        Nats [T], at least 0 up to rounding.
    """
    forward = direction == "reference_to_policy"
    apart_TK = logprobs_TK - anchor_TK
    top_T = (anchor_TK.exp() * -apart_TK if forward else logprobs_TK.exp() * apart_TK).sum(-1)
    log_mass_T = torch.logsumexp(logprobs_TK, -1).clamp(max=MAX_LOG_MASS)
    log_tail_T = log1mexp(log_mass_T)
    has_tail_T = anchor_tail_T > -torch.inf
    cached_tail_T = torch.where(has_tail_T, anchor_tail_T, 0.0).clamp(min=_SMALLEST_TAIL)
    apart_T = log_tail_T - cached_tail_T
    tail_T = cached_tail_T.exp() * -apart_T if forward else log_tail_T.exp() * apart_T
    return top_T + torch.where(has_tail_T, tail_T, 0.0)


class KlController:
    """Holds the KL coefficient; `adaptive` steers the mean KL per token to a target (Ziegler et al. 2019).

    After n steps the coefficient is multiplied by 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon.
    """

    def __init__(self, config: Kl):
        self.config = config
        self.coefficient = config.coefficient

    def update(self, mean_kl: float, num_steps: int = 1) -> float:
        """Take in the mean KL of the last steps, and return the factor of the coefficient; 1 where it is not finite."""
        if self.config.controller == "fixed" or not math.isfinite(mean_kl):
            return 1.0
        error = min(max(mean_kl / self.config.target - 1, -0.2), 0.2)
        factor = max(1 + error * num_steps / self.config.horizon, 0.0)
        self.coefficient *= factor
        return factor
