"""Between a source, which stores weights, and the model's modules, which compute with them.

*Direct*: the model's own parameters are views into the buffers of a MemorySource, and compute as they are. *Streamed*: the
parameters are placeholders of NaN (one element each, whatever their shape), and `open` puts a unit's weights into its modules,
converted to the compute type where that differs, until `close`. A CPU computes in float32 whatever is stored: its bfloat16
products are many times slower. With `whole_model` the model can still be called as it is: its blocks fetch themselves.

Legend: U distinct token ids, D hidden size, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.memory.anatomy import OUTER, Anatomy, Pieces, Unit, Vocabulary
from trainer.memory.journal import low_of
from trainer.memory.source import LayerSource

Leaves = dict[str, Tensor]  # by parameter name


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of a shape that takes one element of memory; computing with it gives NaN, so a mistake is loud."""
    return nn.Parameter(torch.full((1,), torch.nan, dtype=dtype, device=device).expand(shape), requires_grad=False)


class Residency:
    """Opens and closes units.

    Args:
        anatomy: of the model.
        source: holds all units of it.
        trains: whether the units' weights get gradients.
        compute_dtype: in which units compute.
        direct: the model's parameters are the source's buffers.
    """

    def __init__(self, anatomy: Anatomy, source: LayerSource, trains: bool, compute_dtype: torch.dtype, direct: bool):
        self.anatomy, self.source, self.trains, self.compute_dtype, self.direct = anatomy, source, trains, compute_dtype, direct
        self.pieces = Pieces(anatomy)
        self.device = next(iter(anatomy.parameters.values())).device
        self._desk = torch.empty(0, dtype=compute_dtype, device=self.device)
        self.outer: Leaves = {}
        self.refresh_outer()

    def refresh_outer(self) -> None:
        """Put the small weights outside of blocks into their modules, anew after they changed."""
        unit = self.anatomy.outer
        if self.direct:
            self.outer = {part.name: self.anatomy.parameters[part.name] for part in unit.parts}
            return
        flat = self.source.open(OUTER).to(self.compute_dtype, copy=True)
        self.source.close(OUTER)
        self.outer = {part.name: self._leaf(part.view(flat)) for part in unit.parts}
        for name, leaf in self.outer.items():
            self.anatomy.bind(name, leaf)

    def _leaf(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(self.trains)

    def open(self, unit: Unit) -> Leaves:
        """Put a unit's weights into its modules and return them; a vocabulary matrix's modules then hold the unit's rows only."""
        leaves: Leaves
        stored = self.source.open(unit.name)
        if self.direct and unit.name.startswith("layers."):
            return {part.name: self.anatomy.parameters[part.name] for part in unit.parts}
        flat = stored if stored.dtype == self.compute_dtype else self._converted(stored)
        leaves = {part.name: self._leaf(part.view(flat)) for part in unit.parts}
        for name, leaf in leaves.items():
            self.anatomy.bind(name, leaf)
        return leaves

    def _converted(self, stored: Tensor) -> Tensor:
        if len(self._desk) < len(stored):
            self._desk = torch.empty(0, dtype=self.compute_dtype, device=self.device)  # free it before the larger one is made
            self._desk = torch.empty(len(stored), dtype=self.compute_dtype, device=self.device)
        return self._desk[: len(stored)].copy_(stored)

    def close(self, unit: Unit, changed: bool = False) -> None:
        """Take a unit's weights out of its modules."""
        if not (self.direct and unit.name.startswith("layers.")):
            for part in unit.parts:
                self.anatomy.bind(part.name, self.anatomy.parameters[part.name])
        self.source.close(unit.name, changed)

    @contextmanager
    def opened(self, unit: Unit) -> Iterator[Leaves]:
        leaves = self.open(unit)
        try:
            yield leaves
        finally:
            self.close(unit)

    def rows(self, vocabulary: Vocabulary, ids_U: Tensor) -> Tensor:
        """Return rows of a vocabulary matrix in the compute type, a copy [U, D].

        Args:
            ids_U: sorted.
        """
        rows_UD = torch.empty((len(ids_U), vocabulary.shape[1]), dtype=self.compute_dtype, device=self.device)
        for unit, begin, end in self.touched(vocabulary, ids_U):
            first, _ = vocabulary.rows(unit)
            stored = unit.parts[0].view(self.source.open(unit.name))
            rows_UD[begin:end].copy_(stored.index_select(0, ids_U[begin:end] - first))
            self.source.close(unit.name)
        return rows_UD

    def touched(self, vocabulary: Vocabulary, ids_U: Tensor) -> list[tuple[Unit, int, int]]:
        """Return the units that hold any of some sorted ids, and which of the ids those are, as (unit, begin, end)."""
        if len(vocabulary.units) == 1:
            return [(vocabulary.units[0], 0, len(ids_U))]
        ends = torch.tensor([vocabulary.rows(unit)[1] for unit in vocabulary.units], device=ids_U.device)
        bounds = [0, *torch.searchsorted(ids_U, ends).tolist()]
        found = zip(vocabulary.units, bounds[:-1], bounds[1:], strict=True)
        return [(unit, begin, end) for unit, begin, end in found if end > begin]

    def low(self, unit: Unit) -> Tensor | None:
        """Open the lower halves of a split unit; None where weights are not split."""
        return self.source.open(low_of(unit.name)) if self.split else None

    split = False  # set by whoever stored lower halves beside the units

    def state_dict(self) -> dict[str, Tensor]:
        """Return all parameters by every name they have, as stored; a tied one as one tensor."""
        flats = dict(self.source.peek())
        found: dict[str, Tensor] = {}
        for vocabulary in self.anatomy.vocabularies.values():
            found[vocabulary.name] = torch.cat([unit.parts[0].view(flats[unit.name]) for unit in vocabulary.units])
        for unit in (*self.anatomy.layers, self.anatomy.outer):
            found |= {part.name: part.view(flats[unit.name]) for part in unit.parts}
        named = {id(m): name for name, m in self.anatomy.model.named_modules()}
        everywhere: dict[str, Tensor] = {}
        for name, slots in self.anatomy.slots.items():
            everywhere |= {f"{named[id(module)]}.{attribute}".lstrip("."): found[name] for module, attribute in slots}
        return everywhere

    # -- the whole model as one callable ----------------------------------------------------------------------------------

    def whole_model(self) -> None:
        """Let the model's own forward work: embedding, blocks and head fetch their weights when they are called."""
        anatomy, pieces = self.anatomy, self.pieces

        def embed(ids: Tensor) -> Tensor:
            self.source.expect(self.order)
            ids_U, index = torch.unique(ids, return_inverse=True)
            rows_UD = self.rows(anatomy.embedding_rows, ids_U)
            anatomy.bind(anatomy.embedding_rows.name, rows_UD)
            anatomy.embedding.padding_idx = None
            try:
                out: Tensor = pieces.embedding_forward(index)
            finally:
                anatomy.embedding.padding_idx = pieces.padding_id
                anatomy.bind(anatomy.embedding_rows.name, anatomy.parameters[anatomy.embedding_rows.name])
            return out

        def block(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                with self.opened(anatomy.layers[index]):
                    return pieces.block_forwards[index](*args, **kwargs)

            return forward

        def head(hidden: Tensor) -> Tensor:
            return torch.cat([out for _, out in self.head_parts(lambda: pieces.head_forward(hidden))], dim=-1)

        anatomy.embedding.forward = embed
        anatomy.head.forward = head
        for index, module in enumerate(anatomy.blocks):
            module.forward = block(index)

    @property
    def order(self) -> list[str]:
        """The visits of a forward pass of the whole model, after those to the embedding."""
        return [unit.name for unit in (*self.anatomy.layers, *self.anatomy.head_rows.units)]

    def walk(self) -> None:
        """Visit the units as a forward pass of the whole model does, without computing; each vocabulary matrix is one block."""
        order = self.order
        self.source.expect(order)
        for name in (self.anatomy.embedding_rows.units[0].name, *order):
            self.source.open(name)
            self.source.close(name)

    def head_parts(self, run: Callable[[], Tensor]) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Run something with each block of head rows in turn; yields (first row, last row + 1) and its result."""
        for unit in self.anatomy.head_rows.units:
            bounds = self.anatomy.head_rows.rows(unit)
            with self.opened(unit), self.head_bias(*bounds):
                yield bounds, run()

    @contextmanager
    def head_bias(self, first: int, last: int) -> Iterator[None]:
        """Cut the head's bias, where it has one, to the rows that are bound."""
        head = self.anatomy.head
        whole = getattr(head, "bias", None)
        if whole is None:
            yield
            return
        head._parameters["bias"] = whole[first:last]
        try:
            yield
        finally:
            head._parameters["bias"] = whole
