"""The anchored KL term: a small batch of stored completions in every optimizer step, no reference model in memory.

Legend: T completion tokens, K cached tokens at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from trainer.engine.port import Term, TokenScores, Work
from trainer.learn.batch import MicroBatch, make_sequences, split_micro_batches
from trainer.learn.kl import anchored_kl
from trainer.learn.tally import Tally
from trainer.types import derive_seed


class AnchorBatch(Protocol):
    """Some anchored completions; cached distributions are flat over all their tokens, on the host."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]: ...
    @property
    def completions(self) -> Sequence[Sequence[int]]: ...
    @property
    def top_ids_TK(self) -> torch.Tensor:
        """int64"""
        ...

    @property
    def top_logprobs_TK(self) -> torch.Tensor:
        """float32, natural log"""
        ...

    @property
    def tail_T(self) -> torch.Tensor:
        """float32: log of the mass outside the top K; -inf where K is the vocabulary"""
        ...


class AnchorSource(Protocol):
    """Where anchored completions come from: trainer.anchors.store.AnchorStore, or a few made by hand."""

    def __len__(self) -> int: ...
    def take(self, indices: Sequence[int]) -> AnchorBatch: ...


class AnchorTerm:
    """Walks through the anchors in shuffled epochs; the number of the optimizer step alone decides which come.

    Args:
        source: the anchors.
        batch_size: anchored completions in each optimizer step.
        micro_batch_tokens: padded tokens of one forward pass.
        seed: the campaign's.
    """

    def __init__(self, source: AnchorSource, batch_size: int, micro_batch_tokens: int, seed: int):
        self.source, self.micro_batch_tokens, self.seed = source, micro_batch_tokens, seed
        self.batch_size = min(batch_size, len(source))
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def indices(self, update: int) -> list[int]:
        """Return the anchors of an optimizer step, counted from 0 over the whole run."""
        first = update * self.batch_size
        return [self._at(position) for position in range(first, first + self.batch_size)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.source))
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "anchors", epoch)))
            self._epoch, self._order = epoch, generator.permutation(len(self.source))
        return int(self._order[offset])

    def terms(self, update: int, coefficient: float, tally: Tally, device: torch.device) -> list[Term]:
        """Return the forward passes of an optimizer step's anchors, and coefficient x mean anchored KL per token as their loss.

        Args:
            update: number of the optimizer step.
            coefficient: of the KL term.
            tally: takes `kl/mean` and `loss/kl`.
            device: of the policy.
        """
        anchors = self.source.take(self.indices(update))
        sequences, divisor = make_sequences(anchors.prompts, anchors.completions).to(device), len(anchors.tail_T)
        top_ids_TK, top_TK, tail_T = (t.to(device) for t in (anchors.top_ids_TK, anchors.top_logprobs_TK, anchors.tail_T))
        everything_M = torch.arange(len(sequences.start_N))

        def term(micro: MicroBatch) -> Term:
            def loss(scores: TokenScores) -> torch.Tensor:
                kl_T = anchored_kl(scores.logprobs_TK, top_TK[micro.token_T], tail_T[micro.token_T])
                part = coefficient * kl_T.sum() / divisor
                tally.add("kl/mean", kl_T)
                tally.total("loss/kl", part)
                return part

            return Term(Work(micro.input_ids_BS, micro.where_T, top_ids_TK[micro.token_T]), loss)

        return [term(micro) for micro in split_micro_batches(sequences, everything_M, self.micro_batch_tokens)]
