"""Between host and device: a few device slots, filled and emptied on a stream of their own, beside the computation.

    inner source (disk or host) --stream in--> device slot --event--> computing --event--> stream out --> inner source

The two streams are apart because a link to the host moves both ways at once. A slot is overwritten only after the event that was
recorded behind its last use; the computation waits for the event behind the copy. Slots are allocated once and owned here, so no
tensor crosses streams in the allocator's hands. Host buffers are registered with the driver at their exact size (torch's own
pinning rounds up to a power of two); where that fails they stay pageable, and copies are then synchronous.

`HostLane` does the same without a device, so that the hand-over of slots can be tested on a CPU.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trainer.memory.journal import Journal
from trainer.memory.source import LayerSource


class Mark(Protocol):
    """A point on a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""
        ...

    def synchronize(self) -> None: ...


Way = Literal["in", "out"]


class Lane(Protocol):
    """The copy streams of a device: one towards it, one away from it."""

    device: torch.device

    def copying(self, way: Way) -> AbstractContextManager[Any]:
        """Issue what follows on a copy stream."""
        ...

    def mark_copy(self, way: Way) -> Mark: ...
    def mark_compute(self) -> Mark: ...
    def copy_waits(self, way: Way, mark: Mark) -> None: ...
    def compute_waits(self, mark: Mark) -> None: ...


class CudaLane:
    """Two side streams of a CUDA device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: dict[Way, torch.cuda.Stream] = {"in": torch.cuda.Stream(device), "out": torch.cuda.Stream(device)}

    def copying(self, way: Way) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[way])

    def mark_copy(self, way: Way) -> Mark:
        event = torch.cuda.Event()
        event.record(self._streams[way])
        return event

    def mark_compute(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def copy_waits(self, way: Way, mark: Any) -> None:
        self._streams[way].wait_event(mark)

    def compute_waits(self, mark: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """A host's work is done when it returns."""


class HostLane:
    """No device: copies happen at once."""

    device = torch.device("cpu")

    def copying(self, way: Way) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark_copy(self, way: Way) -> Mark:
        return _Done()

    def mark_compute(self) -> Mark:
        return _Done()

    def copy_waits(self, way: Way, mark: Mark) -> None:
        """Nothing to wait for."""

    def compute_waits(self, mark: Mark) -> None:
        """Nothing to wait for."""


class _Pages(mmap.mmap):
    """Pages of host memory with nothing else on them, for the driver pins whole pages; unpinned before they are given back."""

    address = 0  # where they are pinned

    def __del__(self) -> None:
        if self.address:
            self.unpin(self.address)

    unpin: Callable[[int], Any]


def _pin(pages: _Pages, buffer: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
        pages.unpin, pages.address = runtime.cudaHostUnregister, buffer.data_ptr()
        return
    with suppress(RuntimeError):  # the next launch would raise what the driver remembers of this
        torch.zeros(1, device="cuda")


def pinned_buffer(num_bytes: int) -> Tensor:
    """Return exact-size host memory, pinned where the driver allows it (`Tensor.is_pinned` tells)."""
    pages = _Pages(-1, max(num_bytes, 1))
    buffer = torch.frombuffer(pages, dtype=torch.uint8, count=max(num_bytes, 1))[:num_bytes]
    _pin(pages, buffer if num_bytes else torch.frombuffer(pages, dtype=torch.uint8))
    return buffer


def pinned_copy(flat: Tensor) -> Tensor:
    """Return a copy of a host buffer in exact-size pinned memory."""
    return pinned_buffer(flat.nbytes).view(flat.dtype).copy_(flat)


@dataclass(eq=False)
class _Slot:
    buffer: Tensor  # bytes, on the device
    unit: str | None = None
    is_open: bool = False
    filled: Mark | None = None  # behind the copy that filled it
    released: Mark | None = None  # behind the computation that used it last
    host_open: bool = False  # its unit is open in the inner source, for a copy that is under way
    emptied: Mark | None = None  # behind the copy that writes it back


class DeviceSource:
    """A `LayerSource` on a device, over one on the host.

    Args:
        inner: the host's.
        lane: the device's copy stream.
        slot_bytes: size of the largest unit.
        prefetch: units copied ahead; there are so many slots, plus one that computes, one that is written back, and one for
            lower halves.
        resident: units that stay on the device once they are there, each in a slot of its own size; they are written back too.
    """

    def __init__(self, inner: LayerSource, lane: Lane, slot_bytes: int, prefetch: int, resident: Collection[str] = ()):
        self.inner, self.lane, self.prefetch = inner, lane, prefetch
        self._slots = [self._new_slot(slot_bytes) for _ in range(prefetch + 3)]
        self._resident, self._own = frozenset(resident), dict[str, _Slot]()
        self._where: dict[str, _Slot] = {}
        self._facts: dict[str, tuple[torch.dtype, int]] = {}  # type and number of elements
        self._plan: deque[str] = deque()
        self._order: deque[_Slot] = deque(self._slots)  # the one that was used longest ago first

    def _new_slot(self, num_bytes: int) -> _Slot:
        """Return a slot; its memory may have been another tensor's, with which the computation has not finished."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.lane.device)
        return _Slot(buffer, released=self.lane.mark_compute())

    def expect(self, units: Sequence[str]) -> None:
        self._plan = deque(units)
        self.inner.expect(units)
        self._copy_ahead()

    def open(self, unit: str) -> Tensor:
        slot = self._where.get(unit)
        if slot is None or not slot.is_open:
            if self._plan and self._plan[0] == unit:
                self._plan.popleft()
            if slot is None:
                slot = self._bring(unit, ())
            assert slot is not None, "all slots are open"
            if slot.filled is not None:
                self.lane.compute_waits(slot.filled)
            slot.is_open = True
            if slot in self._order:
                self._order.remove(slot)
                self._order.append(slot)
            self._copy_ahead()
        return self._view(slot)

    def close(self, unit: str, changed: bool = False) -> None:
        slot = self._where[unit]
        slot.is_open = False
        slot.released = self.lane.mark_compute()
        if changed:
            self._settle(slot)
            host = self.inner.open(unit)
            self.lane.copy_waits("out", slot.released)
            with self.lane.copying("out"):
                host.copy_(self._view(slot), non_blocking=True)
            slot.emptied = self.lane.mark_copy("out")
        self._copy_ahead()

    def _view(self, slot: _Slot) -> Tensor:
        assert slot.unit is not None
        dtype, numel = self._facts[slot.unit]
        return slot.buffer[: numel * dtype.itemsize].view(dtype)

    def _bring(self, unit: str, keep: Sequence[str]) -> _Slot | None:
        """Start to copy a unit to the device; None where no slot is free but those of units to keep."""
        slot = next((one for one in self._order if not one.is_open and one.unit not in keep), None)
        if unit in self._resident:
            if unit not in self._own:
                self._own[unit] = self._new_slot(self.inner.open(unit).nbytes)
                self._slots.append(self._own[unit])
            slot = self._own[unit]
        if slot is None:
            return None
        self._settle(slot)
        if slot.unit is not None:
            del self._where[slot.unit]
        host = self.inner.open(unit)
        self._facts[unit] = (host.dtype, len(host))
        slot.unit, slot.host_open = unit, True
        self._where[unit] = slot
        if slot.released is not None:
            self.lane.copy_waits("in", slot.released)
        with self.lane.copying("in"):
            self._view(slot).copy_(host, non_blocking=True)
        slot.filled = self.lane.mark_copy("in")
        return slot

    def _settle(self, slot: _Slot) -> None:
        """Wait until the host's side of a slot is done, and give it back to the inner source."""
        if slot.host_open:
            assert slot.filled is not None
            assert slot.unit is not None
            slot.filled.synchronize()
            self.inner.close(slot.unit)
            slot.host_open = False
        if slot.emptied is not None:
            assert slot.unit is not None
            slot.emptied.synchronize()
            self.inner.close(slot.unit, changed=True)
            slot.emptied = None

    def _settle_all(self) -> None:
        for slot in self._slots:
            self._settle(slot)

    def _copy_ahead(self) -> None:
        soon = list(dict.fromkeys(self._plan))[: self.prefetch]
        for name in soon:
            if name not in self._where and self._bring(name, soon) is None:
                return
        for slot in self._slots:  # the host's slots are few: give back those whose copies are through, wait for none
            marks = [slot.filled if slot.host_open else None, slot.emptied]
            if all(mark is None or mark.query() for mark in marks):
                self._settle(slot)

    # -- steps ----------------------------------------------------------------------------------------------------------

    def journal_of(self, unit: str) -> Journal | None:
        return self.inner.journal_of(unit)

    def begin(self) -> None:
        self.inner.begin()

    def commit(self) -> None:
        self._settle_all()
        self.inner.commit()

    def rollback(self) -> None:
        self._plan.clear()
        self._settle_all()
        self.inner.rollback()
        self._drop()

    def _drop(self) -> None:
        """Forget what the slots hold."""
        self._settle_all()
        self._where.clear()
        for slot in self._slots:
            slot.unit = None

    def peek(self) -> Iterator[tuple[str, Tensor]]:
        self._settle_all()
        return self.inner.peek()

    def put(self, unit: str, flat: Tensor) -> None:
        self._drop()
        self.inner.put(unit, flat.cpu())

    def metrics(self) -> dict[str, float]:
        slots = float(sum(slot.buffer.nbytes for slot in self._slots))
        return {**self.inner.metrics(), "memory/device_slot_bytes": slots}

    def shutdown(self) -> None:
        self._settle_all()
        self.inner.shutdown()
