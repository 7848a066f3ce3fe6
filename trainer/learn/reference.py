"""The exact reference: the base with its adapter off, or a frozen copy of it when every weight trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.learn.logprobs import TokenScorer
from trainer.policy.lora import adapter_off
from trainer.policy.policy import Policy


class Reference:
    """Scores with the weights that the policy had when this was made.

    Args:
        policy: before its first step, and before a checkpoint is loaded into it.
        temperature: that of the sampling distribution.
    """

    def __init__(self, policy: Policy, temperature: float):
        self._adapted = policy.model if policy.adapter is not None else None
        model = policy.model if policy.adapter is not None else copy.deepcopy(policy.model).requires_grad_(False).eval()
        self.scorer = TokenScorer(model, temperature)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Score inside this block only."""
        if self._adapted is None:
            yield
        else:
            with adapter_off(self._adapted):
                yield
