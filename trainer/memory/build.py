"""A loaded model in, a residency out: its weights move into the buffers of a source, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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


def buffers(anatomy: Anatomy, release: bool) -> Iterator[tuple[Unit, Tensor]]:
    """Yield every unit with a new buffer that holds its weights.

    Args:
        anatomy: of a model with its weights.
        release: whether the model's own tensors are given up, each as soon as it is copied.
    """
    for vocabulary in anatomy.vocabularies.values():
        weight = anatomy.parameters[vocabulary.name].detach()
        whole = torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device).copy_(weight.flatten())
        if release:
            anatomy.parameters[vocabulary.name].data = torch.empty(0)
        for unit in vocabulary.units:
            begin = unit.parts[0].offset
            yield unit, whole[begin : begin + unit.numel]
    for unit in (*anatomy.layers, anatomy.outer):
        parameters = [anatomy.parameters[part.name] for part in unit.parts]
        if not parameters:
            continue
        flat = torch.zeros(unit.numel, dtype=parameters[0].dtype, device=parameters[0].device)
        assert all(parameter.dtype == flat.dtype for parameter in parameters), "a unit of several types"
        for part, parameter in zip(unit.parts, parameters, strict=True):
            part.view(flat).copy_(parameter.detach())
            if release:
                parameter.data = torch.empty(0)
        yield unit, flat


def resident(
    model: PreTrainedModel,
    *,
    trains: bool = True,
    split: bool = False,
    journal_directory: Path | None = None,
    adapter: frozenset[int] = frozenset(),
    block_elements: int | None = None,
) -> Residency:
    """Keep all weights in memory as they are stored.

    Args:
        model: changed in place; goes on working as a whole.
        trains: whether its weights train.
        split: whether bfloat16 weights get lower halves, so that together they are float32.
        journal_directory: where the undo journal's file goes; None keeps it in memory.
        adapter: ids of parameters that stay in their modules.
        block_elements: most elements of a block of vocabulary rows.
    """
    anatomy = Anatomy(model, adapter, block_elements)
    stored = next(iter(anatomy.parameters.values())).dtype
    device = model.device
    compute = compute_dtype_of(stored, device)
    direct = compute == stored
    flats: dict[str, Tensor] = {}
    for unit, flat in buffers(anatomy, release=True):
        flats[unit.name] = flat
        if split:
            flats[low_of(unit.name)] = torch.zeros(unit.numel, dtype=torch.int16, device=device)
    if direct:
        _views(anatomy, flats, trains)
    else:
        _placeholders(anatomy, compute, device)
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
    adapter: frozenset[int] = frozenset(),
    block_elements: int | None = None,
) -> Residency:
    """Move all weights out of a model into a source that fetches them when they are needed.

    Args:
        model: changed in place; goes on working as a whole.
        make_source: takes the anatomy and all units' buffers, one by one.
        trains, split, adapter, block_elements: as in `resident`.
    """
    anatomy = Anatomy(model, adapter, block_elements)
    stored, device = next(iter(anatomy.parameters.values())).dtype, model.device
    compute = compute_dtype_of(stored, device)

    def each() -> Iterator[tuple[str, Tensor]]:
        for unit, flat in buffers(anatomy, release=True):
            yield unit.name, flat
            if split:
                yield low_of(unit.name), torch.zeros(unit.numel, dtype=torch.int16)

    source = make_source(anatomy, each())
    _placeholders(anatomy, compute, device)
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


def _placeholders(anatomy: Anatomy, dtype: torch.dtype, device: torch.device) -> None:
    shapes = {part.name: part.shape for unit in (*anatomy.layers, anatomy.outer) for part in unit.parts}
    shapes |= {vocabulary.name: vocabulary.shape for vocabulary in anatomy.vocabularies.values()}
    for name, shape in shapes.items():
        held: nn.Parameter = placeholder(shape, dtype, device)
        anatomy.parameters[name] = held
        anatomy.bind(name, held)
