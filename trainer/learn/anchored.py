"""The anchored KL term: a small batch of stored completions in every optimizer step, no reference model in memory.

Legend: T completion tokens, K cached tokens at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trainer.engine.port import Term, TokenScores, Work
from trainer.learn.batch import MicroBatch, Sequences, make_sequences, split_micro_batches
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

    top_k: int  # K
    num_tokens: int  # completion tokens of all of them

    def __len__(self) -> int: ...
    def take(self, indices: Sequence[int]) -> AnchorBatch: ...


RESIDENT_BYTES = 2**26  # anchors up to this size stay in memory instead of being read again at every optimizer step
_ENTRY_BYTES = 12  # of a cached token: int64 id, float32 log-prob


@dataclass(frozen=True)
class _Loaded:
    """Anchored completions on the device; per-token arrays in the order of the sequences."""

    sequences: Sequences
    top_ids_TK: torch.Tensor
    top_logprobs_TK: torch.Tensor
    tail_T: torch.Tensor

    @classmethod
    def of(cls, batch: AnchorBatch, device: torch.device) -> _Loaded:
        per_token = (batch.top_ids_TK.to(device), batch.top_logprobs_TK.to(device), batch.tail_T.to(device))
        return cls(make_sequences(batch.prompts, batch.completions).to(device), *per_token)


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
        self._all: _Loaded | None = None

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
        anchors, chosen_M = self._load(self.indices(update), device)
        divisor = int(anchors.sequences.completion_length_N.cpu()[chosen_M].sum())

        def term(micro: MicroBatch) -> Term:
            def loss(scores: TokenScores) -> torch.Tensor:
                kl_T = anchored_kl(scores.logprobs_TK, anchors.top_logprobs_TK[micro.token_T], anchors.tail_T[micro.token_T])
                part = coefficient * kl_T.sum() / divisor
                tally.add("kl/mean", kl_T)
                tally.total("loss/kl", part)
                return part

            return Term(Work(micro.input_ids_BS, micro.where_T, anchors.top_ids_TK[micro.token_T]), loss)

        return [term(micro) for micro in split_micro_batches(anchors.sequences, chosen_M, self.micro_batch_tokens)]

    def _load(self, indices: list[int], device: torch.device) -> tuple[_Loaded, torch.Tensor]:
        """Return loaded anchors and where in them the wanted ones are."""
        if self.source.num_tokens * self.source.top_k * _ENTRY_BYTES > RESIDENT_BYTES:
            return _Loaded.of(self.source.take(indices), device), torch.arange(len(indices))
        if self._all is None:
            self._all = _Loaded.of(self.source.take(range(len(self.source))), device)
        return self._all, torch.tensor(indices)
