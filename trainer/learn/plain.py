"""The plain engine: forward passes one after the other, gradients kept whole, AdamW. For adapters, and models that fit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import Train
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Outcome, Term, TokenScores, Work
from trainer.learn.logprobs import TokenScorer
from trainer.learn.optimizer import PolicyOptimizer
from trainer.policy.policy import Policy

_LAYER = re.compile(r"\.(\d+)\.")


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter by its name, as in `layers.3`; outside of the layers, its own name."""
    match = _LAYER.search(parameter)
    return f"layers.{match[1]}" if match else parameter


class PlainEngine:
    """Micro-batch by micro-batch, then AdamW.

    Args:
        policy: its trainable weights are stepped in place.
        train: the configuration of training.
        directory: for optimizer state that is kept in files.
    """

    def __init__(self, policy: Policy, train: Train, directory: Path | None = None):
        self.device = policy.device
        self.between: Callable[[], object] = lambda: None  # called after each micro-batch of an optimizer step
        self.scorer = TokenScorer(policy.model, train.sampling.temperature)
        self.optimizer = PolicyOptimizer(policy.trainable, train.optimizer, directory)
        self.heartbeat = Heartbeat(train.heartbeat.factor, train.heartbeat.warmup_steps, train.optimizer.max_grad_norm)

    def restart(self) -> None:
        self.optimizer.restart()
        self.heartbeat.restart()

    @torch.no_grad()
    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        return [self._score(work) for work in works]

    def _score(self, work: Work) -> TokenScores:
        return self.scorer.score(work.input_ids_BS, work.where_T, work.ids_TK, work.entropy)

    def accumulate(self, terms: Sequence[Term]) -> torch.Tensor:
        """Leave the gradient of all terms in the weights' .grad, and return their loss."""
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for term in terms:
            part = term.loss(self._score(term.work))
            part.backward()
            loss += part.detach()
            self.between()
        return loss

    def step(self, terms: Sequence[Term], rate: float, number: int) -> Outcome:
        loss, norm = self.accumulate(terms), self.optimizer.grad_norm()
        names = list(self.optimizer.stepped)
        *each, total, value = torch.cat([self.optimizer.norms().double(), norm.double()[None], loss.double()[None]]).tolist()
        layers: dict[str, float] = {}
        for name, single in zip(names, each, strict=True):
            layers[layer_of(name)] = layers.get(layer_of(name), 0.0) + single**2
        norms = {layer: math.sqrt(square) for layer, square in layers.items()}
        alarms = [alarm for layer, single in norms.items() if (alarm := self.heartbeat.check(layer, single))]
        if alarms or not math.isfinite(value + total):
            bad = self.optimizer.first_bad_gradient()
            self.optimizer.zero_grad()
            if bad is None and alarms:
                alarm = alarms[0]
                return Outcome(False, value, total, {}, alarm.reason, alarm.layer, alarm.value, alarm.limit)
            where = "the gradient's norm" if math.isfinite(value) else "the loss"
            culprit = f"{where}, first bad gradient in {bad}" if bad else where
            return Outcome(False, value, total, {}, f"not finite: {culprit}", bad or "loss", total, math.inf)
        self.optimizer.step(rate, norm)
        self.heartbeat.take(norms)
        return Outcome(True, value, total)

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # there are no others

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()  # they always are

    def weights(self) -> dict[str, torch.Tensor]:
        return self.optimizer.weights()

    def state(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state()

    def facts(self) -> dict[str, Any]:
        return {"heartbeat": self.heartbeat.state()}

    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        self.optimizer.load(weights, state)
        self.heartbeat.load(facts["heartbeat"])
