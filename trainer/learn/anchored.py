"""The anchored KL term: a small batch of stored completions in every optimizer step, no reference model in memory.

The same forward pass also measures *drift*: the KL between the policy that drew the completions and the policy now, at the drawn
tokens. It says how stale the anchors are, whatever they are held against.

Legend: T completion tokens, K cached tokens at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from trainer.engine.port import Engine, Term, TokenScores, Work
from trainer.learn.batch import MicroBatch, Sequences, make_sequences, split_micro_batches
from trainer.learn.kl import Direction, anchored_kl, kl_value
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

    @property
    def sampler_logprobs_T(self) -> torch.Tensor:
        """float32: log-prob of each token under the policy that drew it"""
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
    sampler_T: torch.Tensor

    @classmethod
    def of(cls, batch: AnchorBatch, device: torch.device) -> _Loaded:
        per_token = (batch.top_ids_TK, batch.top_logprobs_TK, batch.tail_T, batch.sampler_logprobs_T)
        return cls(make_sequences(batch.prompts, batch.completions).to(device), *(each.to(device) for each in per_token))

    def work(self, micro: MicroBatch) -> Work:
        """Return a forward pass that looks up the cached tokens and, last, the drawn one."""
        ids_TK = torch.cat([self.top_ids_TK[micro.token_T], micro.target_T.unsqueeze(1)], 1)
        return Work(micro.input_ids_BS, micro.where_T, ids_TK)

    def kl(self, micro: MicroBatch, logprobs_TK: torch.Tensor, direction: Direction = "policy_to_reference") -> torch.Tensor:
        return anchored_kl(logprobs_TK[:, :-1], self.top_logprobs_TK[micro.token_T], self.tail_T[micro.token_T], direction)

    def drift(self, micro: MicroBatch, logprobs_TK: torch.Tensor) -> torch.Tensor:
        """Return k3 of KL(policy that drew || policy now): the completions are samples of the former."""
        return kl_value(self.sampler_T[micro.token_T], logprobs_TK[:, -1].detach())


class AnchorTerm:
    """Walks through the anchors in shuffled epochs; the number of the optimizer step alone decides which come.

    Args:
        source: the anchors.
        batch_size: anchored completions in each optimizer step.
        micro_batch_tokens: padded tokens of one forward pass.
        seed: the campaign's.
        direction: of the KL that trains.
    """

    def __init__(
        self,
        source: AnchorSource,
        batch_size: int,
        micro_batch_tokens: int,
        seed: int,
        direction: Direction = "policy_to_reference",
    ):
        self.micro_batch_tokens, self.seed, self.direction, self.most = micro_batch_tokens, seed, direction, batch_size
        self.replace(source)

    def replace(self, source: AnchorSource) -> None:
        """Go on with other anchors."""
        self.source = source
        self.batch_size = min(self.most, len(source))
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
            tally: takes `kl/mean`, `loss/kl` and `anchors/drift`.
            device: of the policy.
        """
        anchors, chosen_M = self._load(self.indices(update), device)
        divisor = int(anchors.sequences.completion_length_N.cpu()[chosen_M].sum())

        def term(micro: MicroBatch) -> Term:
            def loss(scores: TokenScores) -> torch.Tensor:
                kl_T = anchors.kl(micro, scores.logprobs_TK, self.direction)
                part = coefficient * kl_T.sum() / divisor
                reported_T = kl_T if self.direction == "policy_to_reference" else anchors.kl(micro, scores.logprobs_TK.detach())
                tally.add("kl/mean", reported_T)
                tally.add("anchors/drift", anchors.drift(micro, scores.logprobs_TK))
                tally.total("loss/kl", part)
                return part

            return Term(anchors.work(micro), loss)

        return [term(micro) for micro in split_micro_batches(anchors.sequences, chosen_M, self.micro_batch_tokens)]

    def measure(self, engine: Engine, device: torch.device, most: int) -> tuple[float, float]:
        """Return mean anchored KL(policy || anchor) and drift per token, without gradient, over the first anchors.

        Args:
            engine: runs the policy.
            device: of the policy.
            most: anchored completions to look at.
        """
        anchors, chosen_M = self._load(list(range(min(most, len(self.source)))), device)
        micros = list(split_micro_batches(anchors.sequences, chosen_M, self.micro_batch_tokens))
        scored = engine.score([anchors.work(micro) for micro in micros])
        pairs = [(micro, scores.logprobs_TK) for micro, scores in zip(micros, scored, strict=True)]
        kl_T, drift_T = (torch.cat([of(*pair).double() for pair in pairs]) for of in (anchors.kl, anchors.drift))
        return float(kl_T.mean()), float(drift_T.mean())

    def _load(self, indices: list[int], device: torch.device) -> tuple[_Loaded, torch.Tensor]:
        """Return loaded anchors and where in them the wanted ones are."""
        if self.source.num_tokens * self.source.top_k * _ENTRY_BYTES > RESIDENT_BYTES:
            return _Loaded.of(self.source.take(indices), device), torch.arange(len(indices))
        if self._all is None:
            self._all = _Loaded.of(self.source.take(range(len(self.source))), device)
        return self._all, torch.tensor(indices)
