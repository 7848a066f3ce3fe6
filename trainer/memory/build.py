"""A loaded model in, a residency out: its weights move into the buffers of a source, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.memory.anatomy import Anatomy, Unit
from trainer.memory.journal import low_of
from trainer.memory.residency import Residency, placeholder
from trainer.memory.source import LayerSource, MemorySource


def compute_dtype_of(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type to compute in: float32 on a CPU, whose bfloat16 products are many times slower."""
    return torch.float32 if device.type == "cpu" else stored


class Loaded:
    """The weights of a model that has them, each given up once it was read."""

    def __init__(self, anatomy: Anatomy):
        self.anatomy = anatomy
        first = next(iter(anatomy.parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        assert all(parameter.dtype == self.dtype for parameter in anatomy.parameters.values()), "weights of several types"

    def read(self, name: str) -> Tensor:
        parameter = self.anatomy.parameters[name]
        weight = parameter.detach()
        parameter.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
        return weight


class Reader(Protocol):
    """Where weights come from, each read once."""

    dtype: torch.dtype  # in which they are to be stored
    device: torch.device  # on which the model computes

    def read(self, name: str) -> Tensor: ...


def buffers(anatomy: Anatomy, reader: Reader, device: torch.device, whole: bool = False) -> Iterator[tuple[Unit, Tensor]]:
    """Yield every unit with a new buffer that holds its weights.

    Args:
        anatomy: of the model.
        reader: of its weights.
        device: where the buffers lie.
        whole: whether the blocks of a vocabulary matrix are to lie one after the other in one buffer.
    """
    for vocabulary in anatomy.vocabularies.values():
        weight = reader.read(vocabulary.name)
        if whole:
            weight = weight.to(device, reader.dtype, copy=True)
        for unit in vocabulary.units:
            rows = weight[slice(*vocabulary.rows(unit))].reshape(-1)
            yield unit, rows if whole else rows.to(device, reader.dtype, copy=True)
    for unit in (*anatomy.layers, anatomy.outer):
        if unit.parts:
            flat = torch.zeros(unit.numel, dtype=reader.dtype, device=device)
            for part in unit.parts:
                part.view(flat).copy_(reader.read(part.name))
            yield unit, flat


def resident(
    model: PreTrainedModel,
    *,
    trains: bool = True,
    split: bool = False,
    journal_directory: Path | None = None,
    block_elements: int | None = None,
) -> Residency:
    """Keep all weights in memory as they are stored.

    Args:
        model: changed in place; goes on working as a whole.
        trains: whether its weights train.
        split: whether bfloat16 weights get lower halves, so that together they are float32.
        journal_directory: where the undo journal's file goes; None keeps it in memory.
        block_elements: most elements of a block of vocabulary rows.
    """
    anatomy = Anatomy(model, block_elements)
    reader = Loaded(anatomy)
    device = reader.device
    compute = compute_dtype_of(reader.dtype, device)
    direct = compute == reader.dtype
    flats: dict[str, Tensor] = {}
    for unit, flat in buffers(anatomy, reader, device, whole=True):
        flats[unit.name] = flat
        if split:
            flats[low_of(unit.name)] = torch.zeros(unit.numel, dtype=torch.int16, device=device)
    if direct:
        _views(anatomy, flats, trains)
    else:
        placeholders(anatomy, compute, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the model's own tensors were others than the units' buffers
    residency = Residency(anatomy, MemorySource(flats, journal_directory), trains, compute, direct)
    residency.split = split
    if not direct:
        residency.whole_model()
    return residency


def streamed(
    model: PreTrainedModel,
    make_source: Callable[[Anatomy, Iterator[tuple[str, Tensor]]], LayerSource],
    *,
    trains: bool = True,
    split: bool = False,
    block_elements: int | None = None,
    reader: Reader | None = None,
) -> Residency:
    """Move all weights out of a model into a source that fetches them when they are needed.

    Args:
        model: changed in place; goes on working as a whole.
        make_source: takes the anatomy and all units' buffers, one by one.
        trains, split, block_elements: as in `resident`.
        reader: of weights that the model does not have; None: it has them.
    """
    anatomy = Anatomy(model, block_elements)
    weights = reader or Loaded(anatomy)
    device = weights.device
    compute = compute_dtype_of(weights.dtype, device)

    def each() -> Iterator[tuple[str, Tensor]]:
        for unit, flat in buffers(anatomy, weights, torch.device("cpu")):
            yield unit.name, flat
            if split:
                yield low_of(unit.name), torch.zeros(unit.numel, dtype=torch.int16)

    source = make_source(anatomy, each())
    placeholders(anatomy, compute, device)
    residency = Residency(anatomy, source, trains, compute, direct=False)
    residency.split = split
    residency.whole_model()
    return residency


def _views(anatomy: Anatomy, flats: dict[str, Tensor], trains: bool) -> None:
    """Let the model's parameters be views into the buffers."""
    for vocabulary in anatomy.vocabularies.values():
        parameter, first = anatomy.parameters[vocabulary.name], flats[vocabulary.units[0].name]
        rows, width = vocabulary.shape
        whole = first.as_strided((rows, width), (width, 1))  # the blocks lie one after the other in one buffer
        parameter.data = whole
        parameter.requires_grad_(trains)
    for unit in (*anatomy.layers, anatomy.outer):
        for part in unit.parts:
            parameter = anatomy.parameters[part.name]
            parameter.data = part.view(flats[unit.name])
            parameter.requires_grad_(trains)


def placeholders(anatomy: Anatomy, dtype: torch.dtype, device: torch.device) -> None:
    """Take all weights out of a model; one of their shape stays in each place."""
    shapes = {part.name: part.shape for unit in (*anatomy.layers, anatomy.outer) for part in unit.parts}
    shapes |= {vocabulary.name: vocabulary.shape for vocabulary in anatomy.vocabularies.values()}
    for name, shape in shapes.items():
        held: nn.Parameter = placeholder(shape, dtype, device)
        anatomy.parameters[name] = held
        anatomy.bind(name, held)
