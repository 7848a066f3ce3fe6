"""The stateless engine over several ranks: each takes its share of the forward passes, all take the same decisions.

    local gradient of a unit -> reduce-scatter -> this rank's piece, float32 -> squares of every matrix, added over ranks
    -> heartbeat -> clip -> update of the piece

Every rank is given all terms, and runs each `num_ranks`-th through the model. Scores go to all ranks, so losses and metrics are
the same floats everywhere; norms are added up over ranks before anything is decided. `sinkhorn` needs rows and columns whole, and
is refused; weight decay reaches rows of an embedding that no token used, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.engine.port import Outcome, Term, TokenScores, Work
from trainer.engine.stateless import Mover, StatelessEngine, Watch, group_of, slopes_of
from trainer.memory.anatomy import Part, Unit
from trainer.memory.int8 import Int8Reference, Int8Source
from trainer.memory.journal import UnitUndo
from trainer.memory.rules import Step, direction
from trainer.memory.schedule import Gradients, LayerMajor
from trainer.memory.sharded import ShardedSource


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a unit (of a stack of experts: each), or a vector."""

    part: Part
    start: int  # within the unit
    numel: int

    def within(self, begin: int, length: int) -> tuple[int, int]:
        """Return where it lies within a piece that begins at an element of its unit; empty where it does not."""
        first = min(max(self.start - begin, 0), length)
        return first, max(min(self.start + self.numel - begin, length), first)


def _matrices(unit: Unit) -> list[_Matrix]:
    found = []
    for part in unit.parts:
        numel = math.prod(part.shape[-2:])
        found += [_Matrix(part, start, numel) for start in range(part.start, part.start + part.numel, numel)]
    return found


def _squares(unit: Unit, begin: int, piece: Tensor) -> Tensor:
    """Return the sum of squares of each matrix's share of a piece, float64."""
    shares = [torch.linalg.vector_norm(piece[slice(*matrix.within(begin, len(piece)))]) for matrix in _matrices(unit)]
    return torch.stack(shares).double().square()


class ShardWatch(Watch):
    """Looks at norms over all ranks.

    Args:
        source: adds up over ranks.
    """

    whole = True

    def __init__(self, source: ShardedSource, *args: Any):
        super().__init__(*args)
        self.source = source

    def reduced(self, unit: Unit, gradients: Gradients) -> tuple[int, Tensor, Tensor]:
        """Return where this rank's piece begins, the sum over ranks of its gradient, and all parts' squares."""
        device = next(iter(gradients.values())).device
        flat = torch.zeros(self.source.padded_length(unit.name), device=device)
        for part in unit.parts:
            if part.name in gradients:
                part.view(flat).copy_(gradients.pop(part.name))
        piece = self.source.reduce(unit.name, flat)
        begin = self.source.piece(unit.name)[0]
        return begin, piece, self.source.total(_squares(unit, begin, piece))

    def take(self, unit: Unit, gradients: Gradients, rows_U: Tensor | None = None) -> bool:
        return self.passes(group_of(unit), self.reduced(unit, gradients)[2].sum())

    def used_elements(self, unit: Unit, rows_U: Tensor) -> int:
        """Return the number of elements of the rows of an embedding that any rank used."""
        rows, width = unit.parts[0].shape
        flags = torch.zeros(rows, device=rows_U.device)
        flags[rows_U] = 1.0
        return int((self.source.total(flags) > 0).sum()) * width


class ShardMover(ShardWatch, Mover):
    """Updates this rank's pieces."""

    moves = True

    def take(self, unit: Unit, gradients: Gradients, rows_U: Tensor | None = None) -> bool:
        begin, piece, squares = self.reduced(unit, gradients)
        if not self.passes(group_of(unit), squares.sum()):
            return False
        _, stored = self.source.piece(unit.name)
        counted = None if rows_U is None else self.used_elements(unit, rows_U)
        with torch.no_grad():
            for matrix, square in zip(_matrices(unit), squares, strict=True):
                first, last = matrix.within(begin, len(piece))
                if first < last:
                    clipped = self._clipped(unit, piece[first:last])
                    moved = direction(self.update.rule, clipped, (square / (counted or matrix.numel)).float())
                    undo = UnitUndo(self.source.journal, unit.name, first)
                    start = begin + first - matrix.part.start + matrix.part.offset
                    self._move(matrix.part, stored[first:last], None, moved, undo, start=start)
        return True


class ShardedEngine(StatelessEngine):
    """As `StatelessEngine`, on every rank of a group.

    Args:
        residency: over a `ShardedSource`, with each vocabulary matrix in one block.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        assert isinstance(self.residency.source, ShardedSource)
        assert self.config.rule != "sinkhorn"
        self.source: ShardedSource = self.residency.source

    def step(self, terms: Sequence[Term], rate: float, number: int) -> Outcome:
        if not terms:
            return Outcome(True, 0.0, 0.0)
        works = [term.work for term in terms]
        passage = self.schedule.forward(share_of(works, self.source))
        scores = [seen.scores() for seen in passage.scored]
        loss, slopes = slopes_of(terms, all_scores(works, scores, self.source))
        mine = slopes[self.source.rank :: self.source.num_ranks] or [_silent(found) for found in scores]
        return self._finish(passage, loss, mine, rate, number)

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        return shared_scores(works, self.schedule, self.source)

    def together(self) -> AbstractContextManager[None]:
        return self.source.together(self.residency.walk)

    def _watch(self) -> Watch:
        return ShardWatch(self.source, self.heartbeat)

    def _mover(self, update: Step, seed: int, max_norm: float | None, coefficient: float) -> Mover:
        return ShardMover(self.source, self.heartbeat, self.residency, update, seed, max_norm, coefficient)

    def _reduced(self, sums: Tensor) -> Tensor:
        return self.source.total(sums)


class ShardedReference(Int8Reference):
    """As `Int8Reference`, its bytes sharded over ranks, each of which scores its share."""

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        outer = self.residency.source
        assert isinstance(outer, Int8Source)
        assert isinstance(outer.inner, ShardedSource)
        return shared_scores(works, self.schedule, outer.inner)


class Shares(Protocol):
    """Ranks that share forward passes."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def total(self, values: Tensor) -> Tensor:
        """Return values added up over ranks."""
        ...


def share_of(works: Sequence[Work], source: ShardedSource) -> list[Work]:
    """Return this rank's works; one that has none runs along with the first: the others need it to gather and to reduce."""
    return list(works[source.rank :: source.num_ranks] or works[:1])


def shared_scores(works: Sequence[Work], schedule: LayerMajor, source: ShardedSource) -> list[TokenScores]:
    """Return the scores of all works, each of which one rank has run."""
    return all_scores(works, schedule.score(share_of(works, source)), source) if works else []


def all_scores(works: Sequence[Work], mine: Sequence[TokenScores], source: Shares) -> list[TokenScores]:
    """Return the scores of all works on every rank, given those of this rank's share."""
    device = mine[0].logprobs_TK.device
    lengths = [work.ids_TK.numel() + work.entropy * len(work.ids_TK) for work in works]
    flat = torch.zeros(sum(lengths), device=device)
    parts = flat.split(lengths)
    for part, found in zip(parts[source.rank :: source.num_ranks], mine, strict=False):  # one that runs along has no part
        part[: found.logprobs_TK.numel()] = found.logprobs_TK.flatten()
        if found.entropy_T is not None:
            part[found.logprobs_TK.numel() :] = found.entropy_T
    source.total(flat)
    return list(_unpacked(works, parts))


def _unpacked(works: Sequence[Work], parts: Sequence[Tensor]) -> Iterator[TokenScores]:
    for work, part in zip(works, parts, strict=True):
        count = work.ids_TK.numel()
        yield TokenScores(part[:count].view(work.ids_TK.shape).clone(), part[count:].clone() if work.entropy else None)


def _silent(found: TokenScores) -> TokenScores:
    entropy_T = None if found.entropy_T is None else torch.zeros_like(found.entropy_T)
    return TokenScores(torch.zeros_like(found.logprobs_TK), entropy_T)
