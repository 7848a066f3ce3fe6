"""From the configuration to weights in their place and an engine over them, for the choices that run layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from trainer.config.schema import Memory, Train
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.sharded import ShardedEngine, ShardedReference
from trainer.engine.stateless import StatelessEngine
from trainer.memory.anatomy import Anatomy
from trainer.memory.build import resident, streamed
from trainer.memory.device import CudaLane, DeviceSource, pinned_buffer, pinned_copy
from trainer.memory.disk import DiskSource
from trainer.memory.int8 import Int8Reference
from trainer.memory.lazy import DirectoryReader, skeleton
from trainer.memory.residency import Residency
from trainer.memory.sharded import ShardedSource
from trainer.memory.source import LayerSource, MemorySource
from trainer.policy.load import DTYPES, load_model, pick_device


def place_weights(
    directory: Path, dtype: str, device: str, train: Train, run: Path, mesh: DeviceMesh | None = None
) -> tuple[PreTrainedModel, Residency]:
    """Load a base with its weights where the configuration wants them; the model works as a whole.

    Args:
        directory: of the base.
        dtype: in which weights are stored.
        device: `machine.device`.
        train: the configuration of training.
        run: the run's directory; journals and cold layers lie in it.
        mesh: of the ranks that share them, where they are sharded.
    """
    memory, trains = train.memory, train.method == "full"
    journal = run / "journal" if memory.journal == "disk" else None
    on = pick_device(device)
    if memory.weights == "resident" or (memory.weights == "tiered" and memory.source == "host" and on.type == "cpu"):
        model = load_model(directory, dtype, device)
        return model, resident(model, trains=trains, split=memory.split, journal_directory=journal)
    model = skeleton(directory)
    reader = DirectoryReader(directory, DTYPES[dtype], on, model)
    cold = (Path(memory.directory) if memory.directory else run) / "tiers"
    if memory.weights == "sharded":  # on the disk there are only whole units on their way into a checkpoint
        assert mesh is not None

        def cut(anatomy: Anatomy, units: Iterator[tuple[str, Tensor]]) -> ShardedSource:
            pieces = ((name, flat.to(on)) for name, flat in units)
            return ShardedSource(pieces, mesh, journal, memory.prefetch > 0, cold)

        return model, streamed(model, cut, trains=trains, reader=reader, block_elements=_WHOLE)

    def make(anatomy: Anatomy, units: Iterator[tuple[str, Tensor]]) -> LayerSource:
        if on.type == "cpu":
            return disk_source(memory, cold, units)
        largest = max(unit.numel for unit in anatomy.units.values()) * reader.dtype.itemsize
        inner: LayerSource
        hot = _stay(memory)
        if memory.source == "disk":  # what stays hot is on the device, so all of it is on the disk
            kept = memory.model_copy(update={"resident_layers": 0})
            inner = disk_source(kept, cold, units, new_buffer=pinned_buffer, more_slots=memory.prefetch + 3)
        else:
            inner = MemorySource({name: pinned_copy(flat) for name, flat in units}, journal)
        return DeviceSource(inner, CudaLane(on), largest, memory.prefetch, hot)

    return model, streamed(model, make, trains=trains, split=memory.split, reader=reader)


_WHOLE = 2**62  # elements of a block of vocabulary rows: all of them


@contextmanager
def recalled_base(
    directory: Path, dtype: str, device: str, train: Train, run: Path, mesh: DeviceMesh | None = None
) -> Iterator[tuple[PreTrainedModel, LayerSource | None]]:
    """Have the base once more for the span of a block, whole, or where the policy is; and what holds its weights then.

    Args:
        directory, dtype, device, train, run, mesh: as in `place_weights`.
    """
    if train.memory.weights in ("resident", "zero3"):
        yield load_model(directory, dtype, device), None
        return
    cold = (Path(train.memory.directory) if train.memory.directory else run) / "recalled"
    memory = train.memory.model_copy(update={"directory": str(cold), "split": False, "journal": "memory"})
    frozen = train.model_copy(update={"method": "lora", "memory": memory})
    model, residency = place_weights(directory, dtype, device, frozen, cold, mesh)
    try:
        yield model, residency.source
    finally:
        residency.source.shutdown()


@contextmanager
def recalled_int8(
    directory: Path, dtype: str, device: str, train: Train, run: Path, mesh: DeviceMesh | None = None
) -> Iterator[tuple[PreTrainedModel, LayerSource]]:
    """Have the base with 8-bit weights for the span of a block, as a model that can be called; and what holds its weights.

    Args:
        directory, dtype, device, train, run, mesh: as in `place_weights`.
    """
    residency = place_reference(directory, dtype, device, train, run / "recalled", mesh).residency
    residency.whole_model()
    try:
        yield residency.anatomy.model, residency.source
    finally:
        residency.source.shutdown()


def place_reference(
    directory: Path, dtype: str, device: str, train: Train, run: Path, mesh: DeviceMesh | None = None
) -> Int8Reference:
    """Quantise a base to 8 bits, layer by layer, and keep it where the weights are: in memory, on the disk, over ranks.

    Args:
        directory, dtype, device, train, run, mesh: as in `place_weights`.
    """
    memory, model = train.memory, skeleton(directory)
    on = pick_device(device)
    reader = DirectoryReader(directory, DTYPES[dtype], on, model)
    cold = (Path(memory.directory) if memory.directory else run) / "reference"

    def on_disk(packed: Iterator[tuple[str, Tensor]]) -> LayerSource:
        return DiskSource(cold, packed, prefetch=memory.prefetch)

    if mesh is not None:

        def cut(packed: Iterator[tuple[str, Tensor]]) -> LayerSource:
            return ShardedSource(((name, raw.to(on)) for name, raw in packed), mesh, None, memory.prefetch > 0)

        return ShardedReference(model, train.sampling.temperature, cut, reader, block_elements=_WHOLE)
    is_disk = memory.weights == "tiered" and memory.source == "disk"
    if on.type == "cpu":
        return Int8Reference(model, train.sampling.temperature, on_disk if is_disk else None, reader)

    def streamed_in(packed: Iterator[tuple[str, Tensor]]) -> LayerSource:
        options: dict[str, Any] = {"new_buffer": pinned_buffer, "more_slots": memory.prefetch + 3}
        largest = 0

        def each() -> Iterator[tuple[str, Tensor]]:
            nonlocal largest
            for name, raw in packed:
                largest = max(largest, raw.nbytes)
                yield name, raw

        inner: LayerSource
        if is_disk:
            inner = DiskSource(cold, each(), prefetch=memory.prefetch, **options)
        else:
            inner = MemorySource({name: pinned_copy(raw) for name, raw in each()}, None)
        return DeviceSource(inner, CudaLane(on), largest, memory.prefetch)

    return Int8Reference(model, train.sampling.temperature, streamed_in, reader)


def disk_source(memory: Memory, directory: Path, units: Iterator[tuple[str, Tensor]], **options: Any) -> DiskSource:
    """Write a model's units to a disk, but those that are to stay in memory."""
    stay = _stay(memory)
    return DiskSource(directory, units, prefetch=memory.prefetch, resident=stay, split=memory.split, **options)


def _stay(memory: Memory) -> set[str]:
    """Return the units that stay where they compute."""
    return {f"layers.{index}{half}" for index in range(memory.resident_layers) for half in ("", ".low")}


def build_stateless(residency: Residency, train: Train, seed: int) -> StatelessEngine:
    """Return the stateless engine over weights in their place."""
    heartbeat = Heartbeat(train.heartbeat.factor, train.heartbeat.warmup_steps, train.optimizer.max_grad_norm)
    kind = ShardedEngine if isinstance(residency.source, ShardedSource) else StatelessEngine
    return kind(residency, train.optimizer, heartbeat, train.sampling.temperature, seed, boundary_device(train.memory))


def boundary_device(memory: Memory) -> torch.device | None:
    return torch.device("cpu") if memory.boundaries == "host" else None
