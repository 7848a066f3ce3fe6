"""What the learner asks of an engine: log-probs for some forward passes, and one optimizer step over all of them.

    works --engine--> scores --loss(index, scores)--> losses --engine--> norms --decide--> weights moved, or nothing moved

The learner says what the loss of each forward pass is; the engine decides in which order passes and layers run, and where the
weights are meanwhile. A step is atomic: it is applied whole or leaves every weight as it was.

Legend: B sequences, S positions, T scored tokens, K token ids looked up at each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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


LossOf = Callable[[int, TokenScores], torch.Tensor]  # index of the work, its scores -> its share of the loss


@dataclass(frozen=True)
class Outcome:
    """What became of an optimizer step."""

    applied: bool
    loss: float
    norm: float  # global 2-norm of the gradient, as far as it was computed when the step was abandoned
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # why it was not applied
    culprit: str = ""  # the layer or tensor that stopped it
    value: float = 0.0  # its gradient norm
    limit: float = 0.0  # what it may have been
