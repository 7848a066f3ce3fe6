"""Takes any decoder-only transformers model apart into units, without knowing its kind, and runs the pieces one by one.

    embedding.0 ..   rows of the input embedding     ┐ vocabulary matrices are cut into blocks of rows, because they are often
    head.0 ..        rows of the output head         ┘ the largest tensors; a tied model has `embedding.*` only
    layers.0 ..      one decoder block each
    outer            all the rest: final norm, learned positions, biases of the head. Small, always at hand

The model's own code does all the arithmetic around its blocks. `Pieces.enter` runs its decoder with blocks that only write down
what they are given (masks, rotary embeddings, ...), `Pieces.leave` with blocks that hand over a finished hidden state, and
`Pieces.logits` its whole forward with a decoder that hands over one. So scaled embeddings, sliding masks or capped logits
need no case here.

Legend: B sequences, S positions, D hidden size, T tokens, V rows of a vocabulary matrix, U distinct token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.errors import ModelError

ALIGNMENT = 64  # elements; parts begin on a cache line, as tensors of their own do
OUTER = "outer"
Slot = tuple[nn.Module, str]  # a module and the name of its parameter
Given = tuple[tuple[Any, ...], dict[str, Any]]  # what a model gives one of its blocks beside the hidden state


@dataclass(frozen=True)
class Part:
    """A parameter, or some rows of one, inside the flat buffer of its unit."""

    name: str  # of the parameter, stable
    shape: tuple[int, ...]  # of this part
    start: int  # first element within the unit's buffer
    offset: int = 0  # first element within the parameter

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """Return this part of a unit's buffer, shaped."""
        return flat[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class Unit:
    """What is fetched, computed with and updated as one."""

    name: str
    parts: tuple[Part, ...]
    numel: int  # of the buffer, gaps included


@dataclass(frozen=True)
class Vocabulary:
    """A matrix with one row a token, in blocks of rows."""

    group: str  # `embedding` or `head`
    name: str  # of the parameter
    shape: tuple[int, int]
    units: tuple[Unit, ...]

    def rows(self, unit: Unit) -> tuple[int, int]:
        first = unit.parts[0].offset // self.shape[1]
        return first, first + unit.parts[0].shape[0]


def _unit(name: str, parameters: Mapping[str, Tensor]) -> Unit:
    parts, start = [], 0
    for key, parameter in parameters.items():
        parts.append(Part(key, tuple(parameter.shape), start))
        start += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    return Unit(name, tuple(parts), start)


def _vocabulary(group: str, name: str, weight: Tensor, max_elements: int) -> Vocabulary:
    rows, width = weight.shape
    step = max(max_elements // width, 1)
    units = []
    for index, first in enumerate(range(0, rows, step)):
        shape = (min(step, rows - first), width)
        units.append(Unit(f"{group}.{index}", (Part(name, shape, 0, first * width),), math.prod(shape)))
    return Vocabulary(group, name, (rows, width), tuple(units))


class Anatomy:
    """The units of a model and the modules that own their parameters.

    Args:
        model: a causal language model, before any adapter is put into it; its weights may be on the meta device.
        block_elements: most elements of a block of vocabulary rows; None takes those of the largest decoder block.

    Raises:
        ModelError: no decoder blocks, embedding or head can be found.
    """

    def __init__(self, model: PreTrainedModel, block_elements: int | None = None):
        self.model = model
        self.decoder: Any = model.get_decoder()
        self.embedding: Any = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        self.blocks = find_blocks(model, self.decoder)
        if self.embedding is None or self.head is None:
            raise ModelError(f"{type(model).__name__} has no input embedding or no output head; it is no causal language model")
        self.slots: dict[str, list[Slot]] = {}
        names: dict[int, str] = {}
        for module_name, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    name = names.setdefault(id(parameter), f"{module_name}.{attribute}" if module_name else attribute)
                    self.slots.setdefault(name, []).append((module, attribute))
        self.parameters: dict[str, nn.Parameter] = {name: getattr(*slots[0]) for name, slots in self.slots.items()}
        self.tied = self.embedding.weight is self.head.weight
        free = dict(self.parameters)
        self.layers: list[Unit] = []
        for index, block in enumerate(self.blocks):
            own = {id(parameter) for parameter in block.parameters()}
            mine = {name: parameter for name, parameter in free.items() if id(parameter) in own}
            free = {name: parameter for name, parameter in free.items() if name not in mine}
            self.layers.append(_unit(f"layers.{index}", mine))
        limit = block_elements or max(unit.numel for unit in self.layers)
        self.embedding_rows = self._take_vocabulary(free, "embedding", self.embedding, limit)
        self.head_rows = self.embedding_rows if self.tied else self._take_vocabulary(free, "head", self.head, limit)
        self.outer = _unit(OUTER, free)
        vocabularies = [self.embedding_rows] if self.tied else [self.embedding_rows, self.head_rows]
        self.vocabularies = {vocabulary.group: vocabulary for vocabulary in vocabularies}
        listed = [*(unit for v in vocabularies for unit in v.units), *self.layers, self.outer]
        self.units = {unit.name: unit for unit in listed}

    @staticmethod
    def _take_vocabulary(free: dict[str, nn.Parameter], group: str, module: nn.Module, limit: int) -> Vocabulary:
        name = next((name for name, parameter in free.items() if parameter is module.weight), None)
        if name is None:
            raise ModelError(f"the {group} {type(module).__name__} shares its weight with a decoder block")
        return _vocabulary(group, name, free.pop(name), limit)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    def bind(self, name: str, tensor: Tensor) -> None:
        """Let every module that owns a parameter compute with a tensor."""
        for module, attribute in self.slots[name]:
            module._parameters[attribute] = tensor  # type: ignore[assignment]  # a plain tensor computes as well


def find_blocks(model: PreTrainedModel, decoder: nn.Module) -> list[nn.Module]:
    """Return the decoder blocks: the one list of modules whose length is the configured number of layers.

    Raises:
        ModelError: there is none, or more than one.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in decoder.children() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise ModelError(f"{type(model).__name__}: found {len(lists)} lists of {count} decoder blocks instead of one")
    return list(lists[0])


class _Decoded:
    """What a decoder returns, as far as a head looks at it: everything but the hidden state is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


@contextmanager
def forwards(replacements: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Let some modules run other functions instead of their forward, inside this block."""
    before = [module.__dict__.get("forward") for module, _ in replacements]
    for module, function in replacements:
        module.forward = function
    try:
        yield
    finally:
        for (module, _), old in zip(replacements, before, strict=True):
            if old is None:
                del module.forward
            else:
                module.forward = old


class Pieces:
    """Runs a model piece by piece. Weights must be bound where a piece needs them.

    Args:
        anatomy: of the model, whose modules still have their own forward.
    """

    def __init__(self, anatomy: Anatomy):
        self.anatomy = anatomy
        self.block_forwards = [block.forward for block in anatomy.blocks]
        self.embedding_forward, self.head_forward = anatomy.embedding.forward, anatomy.head.forward
        self.padding_id: int | None = getattr(anatomy.embedding, "padding_idx", None)

    def enter(self, rows_UD: Tensor, index_BS: Tensor) -> tuple[Tensor, list[Given]]:
        """Run what comes before the first block.

        Args:
            rows_UD: rows of the embedding.
            index_BS: which of them each position takes.

        Returns:
            The hidden state [B, S, D], and for each block the arguments that the model gives it.
        """
        given: list[Given] = []
        entered: list[Tensor] = []

        def record(hidden_BSD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            entered.append(hidden_BSD)
            given.append((args, kwargs))
            return hidden_BSD

        anatomy, embedding = self.anatomy, self.anatomy.embedding
        anatomy.bind(anatomy.embedding_rows.name, rows_UD)
        embedding.padding_idx = None  # the row is another one here; the caller drops its gradient
        try:
            with forwards([(embedding, self.embedding_forward), *((block, record) for block in anatomy.blocks)]):
                anatomy.decoder(input_ids=index_BS, use_cache=False)
        finally:
            embedding.padding_idx = self.padding_id
            anatomy.bind(anatomy.embedding_rows.name, anatomy.parameters[anatomy.embedding_rows.name])
        assert len(given) == len(anatomy.blocks), "a model that does not call each block once"
        return entered[0], given

    def block(self, index: int, hidden_BSD: Tensor, given: Given) -> Tensor:
        """Run one block."""
        args, kwargs = given
        out = self.block_forwards[index](hidden_BSD, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def leave(self, hidden_BSD: Tensor) -> Tensor:
        """Run what comes after the last block (the final norm) [B, S, D]."""
        *first, last = self.anatomy.blocks
        same = [(block, lambda hidden, *args, **kwargs: hidden) for block in first]
        with forwards([*same, (last, lambda *args, **kwargs: hidden_BSD)]):
            output = self.anatomy.decoder(inputs_embeds=hidden_BSD.detach(), use_cache=False)
        return output.last_hidden_state

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Run what comes after the decoder, with the rows that are bound to the head [T, V]."""
        anatomy = self.anatomy
        dummy_11 = torch.zeros((1, 1), dtype=torch.int64, device=hidden_TD.device)
        decoded = _Decoded(hidden_TD.unsqueeze(0))
        with forwards([(anatomy.decoder, lambda *args, **kwargs: decoded), (anatomy.head, self.head_forward)]):
            return anatomy.model(input_ids=dummy_11, use_cache=False).logits[0]
