"""The layer-major schedule: all forward passes of one layer, then the next layer; the same backwards.

    forward    embedding rows -> h_0 -> [layer 0: every work] -> h_1 -> ... -> h_L -> norm -> head blocks -> scores
    backward   head blocks -> norm -> [layer L-1: every work, recomputed from h_(L-1)] -> its gradient, whole -> sink -> ...

So a layer's weights come twice a step whatever the number of micro-batches, the gradient of a layer is whole before the next one
exists, and only the hidden states between layers are kept. Accumulation is exact: the same sums in the same order as plain
autograd that runs the works one after the other. The gradient of the head is dropped and computed again when it spans several
blocks, for its norm must be known before its first row moves; a tied matrix moves once, after both uses.

Left out on purpose: dropout (recomputation would need its random state; policies here have none).

Legend: M works, B sequences, S positions, D hidden size, T tokens of a work, U distinct token ids of all works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.engine.port import TokenScores, Work
from trainer.memory.anatomy import OUTER, Given, Part, Unit
from trainer.memory.head import ChunkedHead, Scored
from trainer.memory.residency import Residency

Gradients = dict[str, Tensor]  # float32, by parameter name
CHUNK_ELEMENTS = (2**22, 2**25)  # logits that exist at a time: on a CPU; on a device, where each chunk costs some launches


class Sink(Protocol):
    """Takes gradients the moment they are whole."""

    moves: bool  # whether it wants gradients at all, or their norms only
    whole: bool  # whether it wants vocabulary matrices whole, as `take`, whatever rows were used

    def take(self, unit: Unit, gradients: Gradients, rows_U: Tensor | None = None) -> bool:
        """Take the gradients of a unit, which is open: their norm first, then each of them, if it passes.

        Args:
            rows_U: rows of an embedding that were used here; its other rows have no gradient.
        """
        ...

    def passes(self, group: str, squares: Tensor) -> bool:
        """Take in the squared 2-norm of a group's gradient, before any of it is applied; False abandons the step."""
        ...

    def apply(self, unit: Unit, part: Part, gradient: Tensor, mean_square: Tensor | None = None) -> None:
        """Take the gradient of a part; its unit is open. The gradient's memory may be used."""
        ...

    def apply_rows(self, unit: Unit, part: Part, rows_U: Tensor, gradient_UD: Tensor, mean_square: Tensor) -> None:
        """Take the gradient of some rows of a part, and no others."""
        ...


@dataclass
class Passage:
    """One step's forward passes, as far as backward needs them."""

    works: Sequence[Work]
    ids_U: Tensor
    touched: list[str]  # units with rows of the embedding that were used
    indices: list[Tensor]  # of each work: which of ids_U each position takes [B, S]
    given: list[list[Given]]  # of each work and layer
    boundaries: list[list[Tensor]]  # of each layer and work: what goes in; the last row comes out of the last layer [B, S, D]
    scored: list[Scored] = field(default_factory=list)


class LayerMajor:
    """Runs forward and backward passes layer by layer.

    Args:
        residency: opens the units.
        temperature: that of the sampling distribution.
        chunk_elements: most logits that exist at a time; None takes what keeps the device busy.
        boundary_device: where hidden states between layers are kept; None leaves them where they are computed.
    """

    def __init__(
        self,
        residency: Residency,
        temperature: float,
        chunk_elements: int | None = None,
        boundary_device: torch.device | None = None,
    ):
        self.residency, self.pieces, self.anatomy = residency, residency.pieces, residency.anatomy
        self.device = residency.device
        self.head = ChunkedHead(residency, temperature, chunk_elements or CHUNK_ELEMENTS[self.device.type != "cpu"])
        self.boundary_device = boundary_device or self.device

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        """Return log-probs (and entropies) of all works, without gradient."""
        return [scored.scores() for scored in self.forward(works, keep=False).scored]

    # -- forward ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, works: Sequence[Work], keep: bool = True) -> Passage:
        """Run all works through all layers.

        Args:
            works: at least one.
            keep: whether `backward` will follow; otherwise hidden states are dropped on the way.
        """
        anatomy, residency = self.anatomy, self.residency
        ids_U = torch.unique(torch.cat([work.input_ids_BS.flatten() for work in works]))
        touched = [unit.name for unit, _, _ in residency.touched(anatomy.embedding_rows, ids_U)]
        order = [*touched, *(unit.name for unit in anatomy.layers), *(unit.name for unit in anatomy.head_rows.units)]
        residency.source.expect([*order, *self._backward_order(touched)] if keep else order)
        indices = [torch.searchsorted(ids_U, work.input_ids_BS) for work in works]
        rows_UD = residency.rows(anatomy.embedding_rows, ids_U)
        entered = [self.pieces.enter(rows_UD, index_BS) for index_BS in indices]
        hidden = [self._away(hidden_BSD) for hidden_BSD, _ in entered]
        passage = Passage(works, ids_U, touched, indices, [given for _, given in entered], [])
        for number, unit in enumerate(anatomy.layers):
            if keep:
                passage.boundaries.append(hidden)
            with residency.opened(unit):
                hidden = [self._away(self._block(number, passage, m, self._here(h))) for m, h in enumerate(hidden)]
        passage.boundaries.append(hidden)
        selected = [self._away(self._selected(m, passage, self._here(h))) for m, h in enumerate(hidden)]
        passage.scored = self.head.forward(selected, works)
        return passage

    def _backward_order(self, touched: list[str]) -> list[str]:
        head = [unit.name for unit in self.anatomy.head_rows.units]
        layers = [unit.name for unit in reversed(self.anatomy.layers)]
        if not self.residency.trains:
            return [*head, *layers]
        return [*head, *layers, *touched, *head, *([] if self.anatomy.tied else touched)]

    def _block(self, number: int, passage: Passage, work: int, hidden_BSD: Tensor) -> Tensor:
        return self.pieces.block(number, hidden_BSD, passage.given[work][number])

    def _selected(self, index: int, passage: Passage, hidden_BSD: Tensor) -> Tensor:
        """Run what follows the last layer and keep the scored positions [T, D]."""
        return self.pieces.leave(hidden_BSD).flatten(0, 1).index_select(0, passage.works[index].where_T)

    def _away(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.boundary_device, non_blocking=True)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, passage: Passage, slopes: Sequence[TokenScores], sink: Sink | None) -> bool:
        """Run backward through all layers and give every gradient to the sink as soon as it is whole.

        Args:
            passage: from forward; can be used again, as long as no weight has moved.
            slopes: gradients of the loss by the scores of each work.
            sink: where gradients go; None where the units do not train. Adapters inside the modules collect theirs in `.grad`.

        Returns:
            False when the sink abandoned the step; some of its gradients were then applied already.
        """
        assert (sink is not None) == self.residency.trains
        self.residency.source.expect(self._backward_order(passage.touched))  # anew: with two passes this is the second
        last = passage.boundaries[-1]
        pinned = self.boundary_device.type == "cpu" and self.device.type == "cuda"
        hidden_slopes = [
            torch.zeros(seen.hidden_TD.shape, device=self.boundary_device, pin_memory=pinned) for seen in passage.scored
        ]
        head = self._head_gradient(passage, slopes, hidden_slopes)
        outer: Gradients = {}
        early = sink is not None and not sink.whole and not self.anatomy.tied
        if early and sink is not None and not sink.passes(self.anatomy.head_rows.group, head.squares):
            return False
        flow = [
            self._away(self._through_leave(m, passage, self._here(h), self._here(hidden_slopes[m]), outer))
            for m, h in enumerate(last)
        ]
        hidden_slopes.clear()
        for number in reversed(range(len(self.anatomy.layers))):
            unit = self.anatomy.layers[number]
            leaves, gradients = self.residency.open(unit), Gradients()
            changed = False
            try:
                wanted = number > 0 or self.residency.trains
                with collecting(leaves, gradients):
                    for m, h in enumerate(passage.boundaries[number]):
                        slope_BSD = self._through_block(number, passage, m, self._here(h), self._here(flow[m]), wanted)
                        flow[m] = self._away(slope_BSD)
                        collect(leaves, gradients)
                release(leaves)
                if sink is not None:
                    if not sink.take(unit, gradients):
                        return False
                    changed = sink.moves
            finally:
                release(leaves)
                self.residency.close(unit, changed)
        return sink is None or self._rest(passage, slopes, sink, flow, outer, head)

    def _through_leave(self, index: int, passage: Passage, hidden_BSD: Tensor, slope_TD: Tensor, outer: Gradients) -> Tensor:
        with torch.enable_grad():
            leaf_BSD = hidden_BSD.detach().requires_grad_()
            selected_TD = self._selected(index, passage, leaf_BSD)
        torch.autograd.backward(selected_TD, slope_TD.to(selected_TD.dtype))
        collect(self.residency.outer, outer)
        assert leaf_BSD.grad is not None
        return leaf_BSD.grad

    def _through_block(
        self, number: int, passage: Passage, index: int, hidden_BSD: Tensor, slope_BSD: Tensor, wanted: bool
    ) -> Tensor:
        with torch.enable_grad():
            leaf_BSD = hidden_BSD.detach().requires_grad_(wanted)
            out_BSD = self._block(number, passage, index, leaf_BSD)
        if not out_BSD.requires_grad:
            return slope_BSD  # a first layer without an adapter
        torch.autograd.backward(out_BSD, slope_BSD)
        return leaf_BSD.grad if leaf_BSD.grad is not None else slope_BSD

    def _head_gradient(self, passage: Passage, slopes: Sequence[TokenScores], hidden_slopes: list[Tensor]) -> _HeadGradient:
        """Push the scores' gradient through all blocks of the head; add up its norm, keep what a tied embedding will need."""
        rows, head = self.anatomy.head_rows, _HeadGradient()
        touched = {unit.name: (begin, end) for unit, begin, end in self.residency.touched(rows, passage.ids_U)}
        for unit in rows.units:
            gradient = self.head.backward(unit, passage.scored, slopes, hidden_slopes)
            if gradient is None:
                continue
            head.squares = head.squares + squared_norm([gradient], self.device)
            if len(rows.units) == 1:
                head.whole = gradient
            elif self.anatomy.tied and unit.name in touched:
                begin, end = touched[unit.name]
                head.touched.append(gradient.index_select(0, passage.ids_U[begin:end] - rows.rows(unit)[0]))
        return head

    # -- what moves last: the small weights, and the vocabulary ---------------------------------------------------------

    def _rest(
        self,
        passage: Passage,
        slopes: Sequence[TokenScores],
        sink: Sink,
        flow: list[Tensor],
        outer: Gradients,
        head: _HeadGradient,
    ) -> bool:
        rows_UD = self._embedding_gradient(passage, flow, outer)
        release(self.residency.outer)
        if sink.whole:
            return self._rest_whole(sink, passage.ids_U, rows_UD, outer, head)
        ids_U, rows = passage.ids_U, self.anatomy.embedding_rows
        squares = squared_norm([rows_UD], self.device)
        if self.anatomy.tied:
            squares = self._tie(head, ids_U, rows_UD)
        groups = [(OUTER, squared_norm(outer.values(), self.device)), (rows.group, squares)]
        if not all(sink.passes(group, value) for group, value in groups):
            return False
        if not sink.moves:
            return True
        self._apply_outer(sink, outer)
        head_squares = squares if self.anatomy.tied else head.squares
        self._apply_head(passage, slopes, sink, head, rows_UD if self.anatomy.tied else None, head_squares)
        if not self.anatomy.tied:
            mean_square = squares / rows_UD.numel()
            for unit, begin, end in self.residency.touched(rows, ids_U):
                self.residency.source.open(unit.name)
                local_U = ids_U[begin:end] - rows.rows(unit)[0]
                sink.apply_rows(unit, unit.parts[0], local_U, rows_UD[begin:end], mean_square)
                self.residency.source.close(unit.name, changed=True)
        return True

    def _rest_whole(self, sink: Sink, ids_U: Tensor, rows_UD: Tensor, outer: Gradients, head: _HeadGradient) -> bool:
        """Give the sink what moves last as whole matrices; every vocabulary matrix is one block then."""
        assert head.whole is not None, "several blocks of head rows"
        rows = self.anatomy.embedding_rows
        given: list[tuple[Unit, Gradients, Tensor | None]] = []
        if self.anatomy.outer.parts:
            given.append((self.anatomy.outer, outer, None))
        if self.anatomy.tied:
            given.append((rows.units[0], {rows.name: head.whole.index_add_(0, ids_U, rows_UD)}, None))
        else:
            dense = torch.zeros(rows.shape, device=self.device).index_copy_(0, ids_U, rows_UD)
            head_rows = self.anatomy.head_rows
            given += [(rows.units[0], {rows.name: dense}, ids_U), (head_rows.units[0], {head_rows.name: head.whole}, None)]
        if not all(sink.take(*one) for one in given):
            return False
        self.residency.refresh_outer()
        return True

    def _embedding_gradient(self, passage: Passage, flow: list[Tensor], outer: Gradients) -> Tensor:
        """Return the gradient of the rows of the embedding that were used, float32 [U, D]."""
        rows_UD = self.residency.rows(self.anatomy.embedding_rows, passage.ids_U).requires_grad_()
        leaves, gradients = {"rows": rows_UD}, Gradients()
        for index_BS, slope_BSD in zip(passage.indices, flow, strict=True):
            with torch.enable_grad():
                hidden_BSD, _ = self.pieces.enter(rows_UD, index_BS)
            torch.autograd.backward(hidden_BSD, self._here(slope_BSD))
            collect(leaves, gradients)
            collect(self.residency.outer, outer)
        if self.pieces.padding_id is not None:
            gradients["rows"][passage.ids_U == self.pieces.padding_id] = 0.0
        return gradients["rows"]

    def _tie(self, head: _HeadGradient, ids_U: Tensor, rows_UD: Tensor) -> Tensor:
        """Add the embedding's gradient to that of the head where it is held whole; return the squared norm of the sum."""
        if head.whole is not None:
            head.whole.index_add_(0, ids_U, rows_UD)
            return squared_norm([head.whole], self.device)
        before_UD = torch.cat(head.touched)
        return head.squares + squared_norm([before_UD + rows_UD], self.device) - squared_norm([before_UD], self.device)

    def _apply_outer(self, sink: Sink, outer: Gradients) -> None:
        unit = self.anatomy.outer
        if not unit.parts:
            return
        self.residency.source.open(unit.name)
        for part in unit.parts:
            sink.apply(unit, part, whole_gradient(part, outer, self.device))
        self.residency.source.close(unit.name, changed=True)
        self.residency.refresh_outer()

    def _apply_head(
        self,
        passage: Passage,
        slopes: Sequence[TokenScores],
        sink: Sink,
        head: _HeadGradient,
        rows_UD: Tensor | None,
        squares: Tensor,
    ) -> None:
        """Apply the head's gradient; with several blocks, and not held whole, it is computed again block by block."""
        rows = self.anatomy.head_rows
        mean_square = squares / (rows.shape[0] * rows.shape[1])
        touched = {unit.name: (begin, end) for unit, begin, end in self.residency.touched(rows, passage.ids_U)}
        for unit in rows.units:
            gradient = head.whole
            if gradient is None:
                gradient = self.head.backward(unit, passage.scored, slopes, None)
                assert gradient is not None
                if rows_UD is not None and unit.name in touched:
                    begin, end = touched[unit.name]
                    gradient.index_add_(0, passage.ids_U[begin:end] - rows.rows(unit)[0], rows_UD[begin:end])
            self.residency.source.open(unit.name)
            sink.apply(unit, unit.parts[0], gradient, mean_square)
            self.residency.source.close(unit.name, changed=True)


@dataclass
class _HeadGradient:
    squares: Tensor | Any = 0.0
    whole: Tensor | None = None  # where one block is the whole head
    touched: list[Tensor] = field(default_factory=list)  # rows that a tied embedding used too


def collect(leaves: dict[str, Tensor], gradients: Gradients) -> None:
    """Move the gradients of leaves into float32 sums; a float32 leaf goes on accumulating in place."""
    for name, leaf in leaves.items():
        if leaf.grad is None:
            continue
        if leaf.dtype == torch.float32:
            if name in gradients and gradients[name] is not leaf.grad:
                gradients[name].add_(leaf.grad)
            else:
                gradients[name] = leaf.grad
                continue
        else:
            gradients[name] = leaf.grad.float() if name not in gradients else gradients[name].add_(leaf.grad)
        leaf.grad = None


@contextmanager
def collecting(leaves: dict[str, Tensor], gradients: Gradients) -> Iterator[None]:
    """Collect gradients of other types than float32 one by one, as backward makes them: a layer's are never there twice."""

    def taken(name: str) -> Callable[[Tensor], None]:
        return lambda leaf: collect({name: leaf}, gradients)

    others = [(name, leaf) for name, leaf in leaves.items() if leaf.requires_grad and leaf.dtype != torch.float32]
    handles = [leaf.register_post_accumulate_grad_hook(taken(name)) for name, leaf in others]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def release(leaves: dict[str, Tensor]) -> None:
    """Let leaves forget their gradients."""
    for leaf in leaves.values():
        leaf.grad = None


def whole_gradient(part: Part, gradients: Gradients, device: torch.device) -> Tensor:
    """Take a part's gradient out; one that never came is zero."""
    gradient = gradients.pop(part.name, None)
    return torch.zeros(part.shape, device=device) if gradient is None else gradient


def squared_norm(gradients: Any, device: torch.device) -> Tensor:
    """Return the sum of squares of all elements, as float64 of the float32 norms of the tensors."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
