"""What the learner asks of an engine: log-probs for some forward passes, and one optimizer step over all of them.

    terms (work, loss) --engine--> scores --loss--> numbers --engine--> norms --heartbeat--> weights moved, or nothing moved

The learner says what the loss of each forward pass is; the engine decides in which order passes and layers run, and where the
weights are meanwhile. A step is atomic: it is applied whole or leaves every weight as it was.

Legend: B sequences, S positions, T scored tokens, K token ids looked up at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class TokenScores:
    logprobs_TK: torch.Tensor  # float32, natural log, under the sampling distribution
    entropy_T: torch.Tensor | None = None  # float32, nats, with gradient; only where it was asked for


@dataclass(frozen=True)
class Work:
    """One forward pass: a rectangle of sequences and what is wanted of it."""

    input_ids_BS: torch.Tensor  # padded on the right with any valid id
    where_T: torch.Tensor  # flat indices (b * S + s) of the positions whose next token is scored
    ids_TK: torch.Tensor  # token ids to look up there
    entropy: bool = False


@dataclass(frozen=True)
class Term:
    """A work and what its scores add to the loss of the optimizer step."""

    work: Work
    loss: Callable[[TokenScores], torch.Tensor]  # called once, with gradient


@dataclass(frozen=True)
class Outcome:
    """What became of an optimizer step."""

    applied: bool
    loss: float
    norm: float  # global 2-norm of the gradient before clipping; of the layers seen, where the step was abandoned
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # why it was not applied
    culprit: str = ""  # the layer or tensor that stopped it
    value: float = 0.0  # its gradient norm
    limit: float = 0.0  # what it may have been


class Engine(Protocol):
    """Owns the weights that train and whatever the update rule keeps."""

    def restart(self) -> None:
        """Begin an RL stage: forget what the rule and the heartbeat keep; the weights stay."""
        ...

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        """Return scores under the weights as they are, without gradient."""
        ...

    def step(self, terms: Sequence[Term], rate: float, number: int) -> Outcome:
        """Run one optimizer step over all terms, whole or not at all.

        Args:
            terms: whose losses add up; may be empty.
            rate: learning rate.
            number: of the optimizer step over the whole run; decides the rounding.
        """
        ...

    def together(self) -> AbstractContextManager[None]:
        """Let ranks run different numbers of forward passes for the span of a block; who is done runs along until all are."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Have the adapter's weights whole, so that they can be written, for the span of a block that all ranks enter."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint keeps of the weights."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Return what the rule keeps beside them, as tensors."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside tensors."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Take all of it from a checkpoint."""
        ...
