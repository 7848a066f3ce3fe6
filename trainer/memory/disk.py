"""Cold layers on a disk: one file a unit and version, read ahead into a few slots, written back behind the computation.

    plan (expect) --reader thread--> slot --open--> computing --close(changed)--> writer thread --> the unit's other file
                                                                                     commit: the manifest names it

    layers.3.0 layers.3.1 ...   two versions of a unit; a step writes the one that is not current, so undoing it is forgetting it
    current.json                which one is current, sizes and types

Slots are as many as are read ahead, plus one that computes, one that is written, and one for lower halves where weights are
split. A slot keeps its unit until another one needs it, so the layers around the turn from forward to backward are not read
twice. The files are working copies: a run that was killed goes on from its checkpoint and makes them anew.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import ResourceError
from trainer.files import disk_full_is_named
from trainer.memory.journal import Journal

CURRENT = "current.json"
_BLOCK = 2**24  # bytes of one read or write
_ANEW = "it is a working copy: run the same command again, which makes it anew and goes on from the last checkpoint"


@dataclass(eq=False)
class _Slot:
    buffer: Tensor  # bytes
    unit: str | None = None
    is_open: bool = False
    used: int = 0  # when it was last opened
    reading: Future[None] | None = None
    writing: Future[None] | None = None

    @property
    def is_free(self) -> bool:
        return not self.is_open and (self.writing is None or self.writing.done())


@dataclass
class _Fact:
    numel: int
    dtype: torch.dtype
    current: int = 0  # version

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass
class _Counts:
    """What happened since the last step ended."""

    read_bytes: int = 0
    written_bytes: int = 0
    stalled_seconds: float = 0.0  # waited for reads and for free slots
    num_hits: int = 0  # units that were there when they were opened
    num_visits: int = 0


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a host tensor's memory."""
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_into(path: Path, buffer: memoryview, drop_cache: bool) -> None:
    """Fill a buffer from a file of exactly its size.

    Raises:
        ResourceError: it is gone, shorter than it was written, or the disk cannot read it.
    """
    with _told(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done : done + _BLOCK]], done)
                if not got:
                    raise ResourceError(f"{path}: has {done} bytes instead of the {len(buffer)} that were written; {_ANEW}")
                done += got
            if drop_cache:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what a disk fails with into a ResourceError that says where and what to do."""
    try:
        with disk_full_is_named(path):
            yield
    except OSError as error:
        raise ResourceError(f"{path}: {(error.strerror or str(error)).lower()}; {_ANEW}") from error


def write_from(path: Path, buffer: memoryview, drop_cache: bool) -> None:
    """Write a buffer to a file; what was there is replaced."""
    with _told(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            done = 0
            while done < len(buffer):
                done += os.pwritev(descriptor, [buffer[done : done + _BLOCK]], done)
            if drop_cache:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class DiskSource:
    """A `LayerSource` over files.

    Args:
        directory: is emptied first.
        units: name and buffer of every unit; they are written and let go one by one.
        prefetch: units read ahead; 0 reads a unit when it is opened.
        resident: units that stay in memory, with an undo journal in the directory.
        split: lower halves are among the units, and are open together with their units.
        drop_cache: keep no copy in the page cache of the operating system.
        more_slots: beside those, for units that stay open while a device copies them.
        new_buffer: makes a slot's memory of so many bytes; pinned memory where a device copies out of it.
    """

    def __init__(
        self,
        directory: Path,
        units: Iterable[tuple[str, Tensor]],
        *,
        prefetch: int,
        resident: Collection[str] = (),
        split: bool = False,
        drop_cache: bool = False,
        more_slots: int = 0,
        new_buffer: Callable[[int], Tensor] | None = None,
    ):
        self.directory, self.prefetch, self.drop_cache = directory, prefetch, drop_cache
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._facts: dict[str, _Fact] = {}
        self._resident: dict[str, Tensor] = {}
        for name, flat in units:
            self._facts[name] = _Fact(len(flat), flat.dtype)
            if name in resident:
                self._resident[name] = flat.clone()
            else:
                write_from(self._path(name, 0), bytes_of(flat), drop_cache)
        largest = max((f.num_bytes for name, f in self._facts.items() if name not in self._resident), default=0)
        count = prefetch + 2 + split + more_slots
        make = new_buffer or (lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
        self._slots = [_Slot(make(largest)) for _ in range(count)]
        self._where: dict[str, _Slot] = {}
        self._plan: deque[str] = deque()
        self._pending: set[str] = set()  # units whose other version was written in this step
        self._clock = 0
        self._journal = Journal(directory) if self._resident else None
        self._counts = self._last = _Counts()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="layer-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="layer-writer")
        for executor in (self._reader, self._writer):
            weakref.finalize(self, executor.shutdown, wait=False)
        self._write_manifest()

    @property
    def slot_bytes(self) -> int:
        """Memory of all slots together."""
        return sum(len(slot.buffer) for slot in self._slots)

    # -- files --------------------------------------------------------------------------------------------------------

    def _path(self, unit: str, version: int) -> Path:
        return self.directory / f"{unit}.{version}"

    def _newest(self, unit: str) -> Path:
        """Return the file with what this step has made of a unit."""
        fact = self._facts[unit]
        return self._path(unit, 1 - fact.current if unit in self._pending else fact.current)

    def _write_manifest(self) -> None:
        facts = {
            name: {"version": fact.current, "bytes": fact.num_bytes, "type": str(fact.dtype).removeprefix("torch.")}
            for name, fact in self._facts.items()
            if name not in self._resident
        }
        temporary = self.directory / f".{CURRENT}.tmp"
        with disk_full_is_named(temporary):
            temporary.write_text(json.dumps(facts, indent=1), encoding="utf-8")
            os.replace(temporary, self.directory / CURRENT)

    # -- visits ---------------------------------------------------------------------------------------------------------

    def expect(self, units: Sequence[str]) -> None:
        self._plan = deque(name for name in units if name not in self._resident)
        self._read_ahead()

    def open(self, unit: str) -> Tensor:
        if unit in self._resident:
            return self._resident[unit]
        slot = self._where.get(unit)
        if slot is None or not slot.is_open:
            begin = time.perf_counter()
            self._counts.num_visits += 1
            self._counts.num_hits += slot is not None and (slot.reading is None or slot.reading.done())
            if slot is None:
                slot = self._fetch(unit, self._claim())
            if slot.reading is not None:
                slot.reading.result()
                slot.reading = None
            self._counts.stalled_seconds += time.perf_counter() - begin
            self._clock += 1
            slot.is_open, slot.used = True, self._clock
            self._pass(unit)
            self._read_ahead()
        fact = self._facts[unit]
        return slot.buffer[: fact.num_bytes].view(fact.dtype)

    def _pass(self, unit: str) -> None:
        """Take a visit off the plan, and those before it that did not come: a device has slots of its own that answer some."""
        if unit in islice(self._plan, len(self._slots)):
            while self._plan.popleft() != unit:
                pass

    def close(self, unit: str, changed: bool = False) -> None:
        if unit in self._resident:
            return
        slot, fact = self._where[unit], self._facts[unit]
        slot.is_open = False
        if changed:
            self._pending.add(unit)
            self._counts.written_bytes += fact.num_bytes
            raw = bytes_of(slot.buffer[: fact.num_bytes])
            slot.writing = self._writer.submit(write_from, self._path(unit, 1 - fact.current), raw, self.drop_cache)
        self._read_ahead()

    def _fetch(self, unit: str, slot: _Slot) -> _Slot:
        if slot.unit is not None:
            del self._where[slot.unit]
        fact = self._facts[unit]
        slot.unit, slot.writing = unit, None
        self._where[unit] = slot
        self._counts.read_bytes += fact.num_bytes
        slot.reading = self._reader.submit(
            read_into, self._newest(unit), bytes_of(slot.buffer[: fact.num_bytes]), self.drop_cache
        )
        return slot

    def _read_ahead(self) -> None:
        """Start reading what comes next, as long as a slot is free that does not hold something that comes as soon."""
        soon: list[str] = []
        for name in self._plan:
            if len(soon) == self.prefetch:
                break
            if name not in soon:
                soon.append(name)
        for name in soon:
            if name in self._where:
                continue
            slot = self._free(soon)
            if slot is None:
                return
            self._fetch(name, slot)

    def _free(self, keep: Collection[str]) -> _Slot | None:
        """Return the free slot that was used longest ago, none of those that hold what is to be kept."""
        free = [s for s in self._slots if s.is_free and s.unit not in keep and (s.reading is None or s.reading.done())]
        slot = min(free, key=lambda s: s.used, default=None)
        if slot is not None and slot.writing is not None:
            slot.writing.result()  # raises what the writer raised
        return slot

    def _claim(self) -> _Slot:
        """Return a slot for a unit that is needed now; waits for a write, or gives up something read ahead."""
        slot = self._free(())
        if slot is not None:
            return slot
        for slot in self._slots:
            if slot.is_open:
                continue
            for future in (slot.reading, slot.writing):
                if future is not None:
                    future.result()
            slot.reading = None
            return slot
        raise AssertionError("all slots are open")

    # -- steps ------------------------------------------------------------------------------------------------------------

    def journal_of(self, unit: str) -> Journal | None:
        return self._journal if unit in self._resident else None

    def begin(self) -> None:
        assert not self._pending
        if self._journal is not None:
            self._journal.clear()

    def commit(self) -> None:
        self._finish_writes()
        for unit in self._pending:
            self._facts[unit].current = 1 - self._facts[unit].current
        self._pending.clear()
        self._write_manifest()
        self._last, self._counts = self._counts, _Counts()

    def rollback(self) -> None:
        self._plan.clear()
        self._finish_writes()
        for slot in self._slots:
            assert not slot.is_open
            if slot.reading is not None:
                slot.reading.result()
                slot.reading = None
        for unit in self._pending:
            self._forget(unit)
        self._pending.clear()
        if self._journal is not None:
            for entry in self._journal.entries():
                entry.restore(self._resident[entry.unit])

    def _finish_writes(self) -> None:
        for slot in self._slots:
            if slot.writing is not None:
                slot.writing.result()
                slot.writing = None

    def _forget(self, unit: str) -> None:
        slot = self._where.pop(unit, None)
        if slot is not None:
            slot.unit = None

    def peek(self) -> Iterator[tuple[str, Tensor]]:
        for unit, fact in self._facts.items():
            if unit in self._resident:
                yield unit, self._resident[unit]
            else:
                path = str(self._path(unit, fact.current))
                yield unit, torch.from_file(path, shared=False, size=fact.numel, dtype=fact.dtype)

    def put(self, unit: str, flat: Tensor) -> None:
        assert not self._pending
        if unit in self._resident:
            self._resident[unit].copy_(flat)
            return
        slot = self._where.get(unit)
        if slot is not None and slot.reading is not None:
            slot.reading.result()
            slot.reading = None
        self._forget(unit)
        fact = self._facts[unit]
        write_from(self._path(unit, fact.current), bytes_of(flat.contiguous().to(fact.dtype)), self.drop_cache)

    def metrics(self) -> dict[str, float]:
        last = self._last
        return {
            "tiers/read_bytes": float(last.read_bytes),
            "tiers/written_bytes": float(last.written_bytes),
            "tiers/stalled_seconds": last.stalled_seconds,
            "tiers/hit_fraction": last.num_hits / last.num_visits if last.num_visits else 1.0,
            "memory/slot_bytes": float(self.slot_bytes),
        }

    def shutdown(self) -> None:
        """End the threads and remove the files."""
        self._reader.shutdown()
        self._writer.shutdown()
        if self._journal is not None:
            self._journal.close()
        shutil.rmtree(self.directory, ignore_errors=True)
