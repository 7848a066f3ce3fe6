"""The stateless engine: every weight trains, layer by layer, and nothing is kept but the weights.

    forward through all layers -> scores -> losses -> backward: gradient of a layer whole -> norm -> heartbeat -> clip -> update

A step is atomic. Resident weights keep an undo journal, tiered ones a second copy on the disk; an alarm in any layer puts back
whatever later layers have changed by then. With `two_pass` clipping all norms are known before the first weight moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trainer.config.schema import Optimizer
from trainer.engine.heartbeat import Alarm, Heartbeat
from trainer.engine.port import Outcome, Term, TokenScores, Work
from trainer.memory.anatomy import Part, Unit
from trainer.memory.journal import RowsUndo, UnitUndo, low_of
from trainer.memory.residency import Residency
from trainer.memory.rules import Movement, Step, Undo, apply_update, direction
from trainer.memory.schedule import Gradients, LayerMajor, Passage, squared_norm, whole_gradient
from trainer.types import derive_seed

_SMALL = 1e-6  # as in torch's clip_grad_norm_


def clip_coefficient(max_norm: float, norm: float) -> float:
    """Return what a gradient of this norm is multiplied by."""
    return min(max_norm / (norm + _SMALL), 1.0)


class Watch:
    """A sink that looks at norms only.

    Args:
        heartbeat: judges them.
    """

    moves = False
    whole = False

    def __init__(self, heartbeat: Heartbeat):
        self.heartbeat = heartbeat
        self.norms: dict[str, float] = {}
        self.alarm: Alarm | None = None

    @property
    def norm(self) -> float:
        """The global norm of what was seen."""
        return math.sqrt(sum(norm**2 for norm in self.norms.values()))

    def passes(self, group: str, squares: Tensor) -> bool:
        value = float(squares)
        norm = math.sqrt(value) if value >= 0 else value  # a sum of squares below 0 is not a number
        self.norms[group] = norm
        self.alarm = self.alarm or self.heartbeat.check(group, norm)
        return self.alarm is None

    def take(self, unit: Unit, gradients: Gradients, rows_U: Tensor | None = None) -> bool:
        device = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
        if not self.passes(group_of(unit), squared_norm(gradients.values(), device)):
            return False
        for part in unit.parts if self.moves else ():
            self.apply(unit, part, whole_gradient(part, gradients, device))
        return True

    def apply(self, unit: Unit, part: Part, gradient: Tensor, mean_square: Tensor | None = None) -> None:
        raise AssertionError("moves nothing")

    def apply_rows(self, unit: Unit, part: Part, rows_U: Tensor, gradient_UD: Tensor, mean_square: Tensor) -> None:
        raise AssertionError("moves nothing")


class Mover(Watch):
    """A sink that updates weights.

    Args:
        heartbeat: judges norms first.
        residency: of the weights.
        step: the update.
        seed: of the campaign and the optimizer step.
        max_norm: to which each group's own norm is clipped; None takes `coefficient` for all.
        coefficient: that gradients are multiplied by.
    """

    moves = True

    def __init__(
        self, heartbeat: Heartbeat, residency: Residency, step: Step, seed: int, max_norm: float | None, coefficient: float = 1.0
    ):
        super().__init__(heartbeat)
        self.residency, self.update, self.seed, self.max_norm, self.coefficient = residency, step, seed, max_norm, coefficient
        self.movement = Movement()

    def _clipped(self, unit: Unit, gradient: Tensor) -> Tensor:
        if self.update.rule != "sgd":
            return gradient  # the other rules have one length whatever the gradient's
        coefficient = self.coefficient
        if self.max_norm is not None:
            coefficient = clip_coefficient(self.max_norm, self.norms[group_of(unit)])
        return gradient if coefficient == 1.0 else gradient.mul_(coefficient)

    @torch.no_grad()
    def apply(self, unit: Unit, part: Part, gradient: Tensor, mean_square: Tensor | None = None) -> None:
        moved = direction(self.update.rule, self._clipped(unit, gradient), mean_square)
        source, where = self.residency.source, slice(part.start, part.start + part.numel)
        stored, low = source.open(unit.name)[where], self.residency.low(unit)
        low_N = None if low is None else low[where]
        journal = source.journal_of(unit.name)
        undo = None if journal is None else UnitUndo(journal, unit.name, part.start)
        self._move(part, stored, low_N, moved.reshape(-1), undo, start=part.offset)
        if low is not None:
            source.close(low_of(unit.name), changed=True)

    @torch.no_grad()
    def apply_rows(self, unit: Unit, part: Part, rows_U: Tensor, gradient_UD: Tensor, mean_square: Tensor) -> None:
        moved_UD = direction(self.update.rule, self._clipped(unit, gradient_UD), mean_square)
        source, width = self.residency.source, part.shape[-1]
        stored_VD, low = part.view(source.open(unit.name)), self.residency.low(unit)
        stored, low_N = stored_VD[rows_U].flatten(), None if low is None else part.view(low)[rows_U].flatten()
        journal = source.journal_of(unit.name)
        undo = None if journal is None else RowsUndo(journal, unit.name, part.start, rows_U, width)
        rows = rows_U + part.offset // width
        self._move(part, stored, low_N, moved_UD.reshape(-1), undo, rows_U=rows, width=width)
        stored_VD[rows_U] = stored.view(-1, width)
        if low is not None and low_N is not None:
            part.view(low)[rows_U] = low_N.view(-1, width)
            source.close(low_of(unit.name), changed=True)

    def _move(self, part: Part, stored: Tensor, low: Tensor | None, moved: Tensor, undo: Undo | None, **where: Any) -> None:
        decays, seed = len(part.shape) >= 2, derive_seed(self.seed, part.name)
        options = {"decays": decays, "low_N": low, "undo": undo, "movement": self.movement, **where}
        apply_update(stored, moved, self.update, seed, **options)


def group_of(unit: Unit) -> str:
    """Return whose norm decides over a unit: its own, or that of the whole vocabulary matrix it is a block of."""
    return unit.name.split(".")[0] if unit.name.startswith(("embedding.", "head.")) else unit.name


class StatelessEngine:
    """Layer-major forward and backward, and an update rule without state.

    Args:
        residency: of all weights, which train.
        config: rule, clipping, decay, rounding.
        heartbeat: judges every layer's norm.
        temperature: that of the sampling distribution.
        seed: the campaign's.
        boundary_device: where hidden states wait for backward; None: where they are computed.
        chunk_elements: most logits that exist at a time; None takes what keeps the device busy.
    """

    def __init__(
        self,
        residency: Residency,
        config: Optimizer,
        heartbeat: Heartbeat,
        temperature: float,
        seed: int,
        boundary_device: torch.device | None = None,
        chunk_elements: int | None = None,
    ):
        self.residency, self.config, self.heartbeat, self.seed = residency, config, heartbeat, seed
        self.schedule = LayerMajor(residency, temperature, chunk_elements, boundary_device)
        self.previous_norm = 0.0  # of the last applied step; 0: there was none

    def restart(self) -> None:
        """The rule has nothing to forget, the heartbeat has."""
        self.heartbeat.restart()

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        return self.schedule.score(works) if works else []

    def step(self, terms: Sequence[Term], rate: float, number: int) -> Outcome:
        if not terms:
            return Outcome(True, 0.0, 0.0)
        passage = self.schedule.forward([term.work for term in terms])
        loss, slopes = slopes_of(terms, [seen.scores() for seen in passage.scored])
        return self._finish(passage, loss, slopes, rate, number)

    def _finish(self, passage: Passage, loss: float, slopes: list[TokenScores], rate: float, number: int) -> Outcome:
        """Run backward and the update, and say what became of them."""
        if not math.isfinite(loss):
            return Outcome(False, loss, 0.0, {}, "not finite: the loss", "loss", loss, math.inf)
        coefficient = 1.0
        if self.config.clips == "two_pass":
            watch = self._watch()
            if not self.schedule.backward(passage, slopes, watch):
                return self._abandoned(loss, watch)
            coefficient = clip_coefficient(self.config.max_grad_norm, watch.norm)
        elif self.config.clips == "previous":
            coefficient = clip_coefficient(self.config.max_grad_norm, self.previous_norm) if self.previous_norm else 1.0
        update = Step(self.config.rule, rate, self.config.weight_decay, self.config.rounding)
        max_norm = self.config.max_grad_norm if self.config.clips == "per_layer" else None
        mover = self._mover(update, derive_seed(self.seed, "round", number), max_norm, coefficient)
        source = self.residency.source
        source.begin()
        if not self.schedule.backward(passage, slopes, mover):
            source.rollback()
            self.residency.refresh_outer()
            return self._abandoned(loss, mover)
        source.commit()
        self.heartbeat.take(mover.norms)
        self.previous_norm = mover.norm
        norms = {f"grad_norm/{group}": norm for group, norm in mover.norms.items()}
        metrics = {**Movement.metrics(self._reduced(mover.movement.sums())), **norms, **source.metrics()}
        return Outcome(True, loss, mover.norm, metrics)

    def _watch(self) -> Watch:
        return Watch(self.heartbeat)

    def _mover(self, update: Step, seed: int, max_norm: float | None, coefficient: float) -> Mover:
        return Mover(self.heartbeat, self.residency, update, seed, max_norm, coefficient)

    def _reduced(self, sums: Tensor) -> Tensor:
        """Add up over ranks, where there are several."""
        return sums

    def _abandoned(self, loss: float, watch: Watch) -> Outcome:
        alarm = watch.alarm
        assert alarm is not None
        return Outcome(False, loss, watch.norm, {}, alarm.reason, alarm.layer, alarm.value, alarm.limit)

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()  # there are no others

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()  # they always are

    def weights(self) -> dict[str, Tensor]:
        """Return all units' buffers by name; those on a disk are mapped, not read."""
        return dict(self.residency.source.peek())

    def state(self) -> dict[str, Tensor]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"heartbeat": self.heartbeat.state(), "previous_norm": self.previous_norm}

    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        for name, flat in weights.items():
            self.residency.source.put(name, flat)
        self.residency.refresh_outer()
        self.heartbeat.load(facts["heartbeat"])
        self.previous_norm = facts["previous_norm"]


def slopes_of(terms: Sequence[Term], scores: Sequence[TokenScores]) -> tuple[float, list[TokenScores]]:
    """Return the loss of all terms, and its gradient by each one's scores."""
    slopes, total = [], 0.0
    for term, found in zip(terms, scores, strict=True):
        logprobs_TK = found.logprobs_TK.detach().requires_grad_()
        entropy_T = None if found.entropy_T is None else found.entropy_T.detach().requires_grad_()
        with torch.enable_grad():
            part = term.loss(TokenScores(logprobs_TK, entropy_T))
        part.backward()
        total += float(part.detach())
        slope_TK = torch.zeros_like(logprobs_TK) if logprobs_TK.grad is None else logprobs_TK.grad
        slopes.append(TokenScores(slope_TK, None if entropy_T is None else entropy_T.grad))
    return total, slopes
