"""An adapter over a frozen backbone that lies in tiers: layer by layer over all micro-batches, then AdamW as ever."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.config.schema import Train
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term, TokenScores, Work
from trainer.engine.stateless import slopes_of
from trainer.learn.optimizer import PolicyOptimizer
from trainer.learn.plain import PlainEngine
from trainer.memory.residency import Residency
from trainer.memory.schedule import LayerMajor
from trainer.policy.policy import Policy


class TieredAdapterEngine(PlainEngine):
    """As `PlainEngine`, but the backbone's layers are fetched one after the other.

    Args:
        policy: with an adapter, which is always in memory.
        train: the configuration of training.
        residency: of the backbone, which does not train.
        boundary_device: where hidden states wait for backward; None: where they are computed.
    """

    def __init__(self, policy: Policy, train: Train, residency: Residency, boundary_device: torch.device | None = None):
        assert policy.adapter is not None
        assert not residency.trains
        self.device = policy.device
        self.schedule = LayerMajor(residency, train.sampling.temperature, boundary_device=boundary_device)
        self.optimizer = PolicyOptimizer(policy.trainable, train.optimizer)
        self.heartbeat = Heartbeat(train.heartbeat.factor, train.heartbeat.warmup_steps, train.optimizer.max_grad_norm)

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        return self.schedule.score(works) if works else []

    def accumulate(self, terms: Sequence[Term]) -> torch.Tensor:
        self.optimizer.zero_grad()
        if not terms:
            return torch.zeros((), device=self.device)
        passage = self.schedule.forward([term.work for term in terms])
        loss, slopes = slopes_of(terms, [seen.scores() for seen in passage.scored])
        self.schedule.backward(passage, slopes, None)
        return torch.tensor(loss, device=self.device)
