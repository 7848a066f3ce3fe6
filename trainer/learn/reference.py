"""The exact reference: the base with its adapter off, or a frozen copy of it when every weight trains."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch

from trainer.engine.port import Engine, TokenScores, Work
from trainer.learn.logprobs import TokenScorer
from trainer.policy.lora import adapter_off
from trainer.policy.policy import Policy


class Reference(Protocol):
    """Scores with the weights that the policy had in the beginning."""

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        """Return scores without gradient."""
        ...


class AdapterOff:
    """The policy's own backbone: costs no second model.

    Args:
        policy: with an adapter.
        engine: runs it.
    """

    def __init__(self, policy: Policy, engine: Engine):
        assert policy.adapter is not None
        self.policy, self.engine = policy, engine

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        with adapter_off(self.policy.model):
            return self.engine.score(works)


class FrozenCopy:
    """A second model.

    Args:
        policy: before its first step, and before a checkpoint is loaded into it.
        temperature: that of the sampling distribution.
    """

    def __init__(self, policy: Policy, temperature: float):
        self.scorer = TokenScorer(copy.deepcopy(policy.model).requires_grad_(False).eval(), temperature)

    @torch.no_grad()
    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        return [self.scorer.score(work.input_ids_BS, work.where_T, work.ids_TK, work.entropy) for work in works]


def exact_reference(policy: Policy, engine: Engine, temperature: float) -> Reference:
    """Return the reference for `kl.reference: exact`."""
    return FrozenCopy(policy, temperature) if policy.adapter is None else AdapterOff(policy, engine)
