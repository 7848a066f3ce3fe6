"""The undo journal of a step: old values of what changed, in the order of the changes, on the host or in a file.

A chunk of weights of which few elements changed is kept as (index, old value), one of which many did as it was. A bfloat16
weight that moves by less than its rounding step changes seldom, so the journal of a step is a small fraction of the weights.
It need not survive a crash: weights in memory do not either, and a run goes on from its checkpoint.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor

Half = Literal["high", "low"]
_INDEX_BYTES = 4


@dataclass(frozen=True)
class Entry:
    """Old values of a run of elements of a unit's buffer."""

    unit: str
    begin: int
    length: int
    index_N: Tensor | None  # int32, relative to `begin`; None: all of them
    values_N: Tensor

    def restore(self, flat: Tensor) -> None:
        """Put the old values back into the unit's buffer."""
        part = flat[self.begin : self.begin + self.length]
        if self.index_N is None:
            part.copy_(self.values_N)
        else:
            part[self.index_N.long().to(part.device)] = self.values_N.to(part.device)


_Place = tuple[str, int, int, int, torch.dtype]  # unit, begin, length, number of indices (-1: all), type


class Journal:
    """Keeps the changes of one step.

    Args:
        directory: where its file goes; None keeps it in memory.
    """

    def __init__(self, directory: Path | None):
        self._file: BinaryIO | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, prefix="journal-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self._entries: list[Entry] = []
        self._places: list[_Place] = []
        self.num_bytes = 0

    def clear(self) -> None:
        """Begin a step: forget the last one."""
        self._entries.clear()
        self._places.clear()
        self.num_bytes = 0
        if self._file is not None:
            self._file.seek(0)

    def keep(self, unit: str, begin: int, old_N: Tensor, changed_N: Tensor) -> None:
        """Keep what is about to change of a run of elements."""
        index_N = changed_N.nonzero().squeeze(1)
        if not len(index_N):
            return
        dense = len(index_N) * (_INDEX_BYTES + old_N.element_size()) >= old_N.numel() * old_N.element_size()
        self._add(unit, begin, len(old_N), None if dense else index_N, old_N if dense else old_N[index_N])

    def keep_at(self, unit: str, index_N: Tensor, values_N: Tensor) -> None:
        """Keep old values of elements anywhere in a unit's buffer."""
        self._add(unit, 0, 2**31 - 1, index_N, values_N)

    def _add(self, unit: str, begin: int, length: int, index_N: Tensor | None, values_N: Tensor) -> None:
        values = values_N.to("cpu", copy=True)
        index = None if index_N is None else index_N.to("cpu", torch.int32)
        self.num_bytes += values.nbytes + (0 if index is None else index.nbytes)
        if self._file is None:
            self._entries.append(Entry(unit, begin, length, index, values))
            return
        if index is not None:
            self._file.write(index.numpy().tobytes())
        self._file.write(values.view(torch.uint8).numpy().tobytes())
        self._places.append((unit, begin, length, -1 if index is None else len(index), values.dtype))

    def entries(self) -> Iterator[Entry]:
        """Yield everything that was kept since `clear`, oldest first; a chunk changes once a step, so any order will do."""
        if self._file is None:
            yield from self._entries
            return
        self._file.flush()
        self._file.seek(0)
        for unit, begin, length, count, dtype in self._places:
            index = None if count < 0 else self._read(count, torch.int32)
            yield Entry(unit, begin, length, index, self._read(length if count < 0 else count, dtype))

    def _read(self, count: int, dtype: torch.dtype) -> Tensor:
        assert self._file is not None
        raw = np.frombuffer(bytearray(self._file.read(count * dtype.itemsize)), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True)
class UnitUndo:
    """The journal as `apply_update` sees it: bound to a part of a unit."""

    journal: Journal
    unit: str
    start: int

    def keep(self, half: Half, begin: int, old_N: Tensor, changed_N: Tensor) -> None:
        self.journal.keep(self.unit if half == "high" else low_of(self.unit), self.start + begin, old_N, changed_N)


@dataclass(frozen=True)
class RowsUndo:
    """The journal as `apply_update` sees it when it is given some rows of a part, laid end to end."""

    journal: Journal
    unit: str
    start: int
    rows_U: Tensor
    width: int

    def keep(self, half: Half, begin: int, old_N: Tensor, changed_N: Tensor) -> None:
        index_N = changed_N.nonzero().squeeze(1)
        at_N = index_N + begin
        row_N = self.rows_U[torch.div(at_N, self.width, rounding_mode="floor")]
        where_N = self.start + row_N * self.width + at_N % self.width
        self.journal.keep_at(self.unit if half == "high" else low_of(self.unit), where_N, old_N[index_N])


def low_of(unit: str) -> str:
    """Return the name of the unit that holds the lower halves of a split unit."""
    return f"{unit}.low"
