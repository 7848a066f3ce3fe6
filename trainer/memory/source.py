"""Where stored weights are while nothing computes with them: the port, and the source that keeps them in memory.

    expect(units)     the visits that come next, in order: a source may fetch ahead
    open(unit)        its stored buffer on the compute device, until close
    close(unit)       with `changed`, new values are written back, off the critical path where there is one
    begin .. commit   a step: `rollback` instead leaves every stored byte as it was at `begin`

One visit at a time; sources are not shared between threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainer.memory.journal import Journal


class LayerSource(Protocol):
    def expect(self, units: Sequence[str]) -> None: ...
    def open(self, unit: str) -> Tensor: ...
    def close(self, unit: str, changed: bool = False) -> None: ...
    def journal_of(self, unit: str) -> Journal | None:
        """Return what takes a unit's old values before they are overwritten; None where the source keeps a second copy."""
        ...

    def begin(self) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...

    def peek(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every unit's buffer as committed, for checkpoints; valid until the next step begins."""
        ...

    def put(self, unit: str, flat: Tensor) -> None:
        """Replace a unit's stored values, outside of a step."""
        ...

    def metrics(self) -> dict[str, float]: ...
    def shutdown(self) -> None: ...


class MemorySource:
    """All units in memory, with an undo journal.

    Args:
        flats: the buffers by unit; they stay the caller's, and are changed in place.
        journal_directory: where the journal's file goes; None keeps it in memory.
    """

    def __init__(self, flats: Mapping[str, Tensor], journal_directory: Path | None):
        self.flats = dict(flats)
        self.journal = Journal(journal_directory)

    def expect(self, units: Sequence[str]) -> None:
        """Everything is here already."""

    def open(self, unit: str) -> Tensor:
        return self.flats[unit]

    def close(self, unit: str, changed: bool = False) -> None:
        """The buffer was changed in place."""

    def journal_of(self, unit: str) -> Journal | None:
        return self.journal

    def begin(self) -> None:
        self.journal.clear()

    def commit(self) -> None:
        """The journal stays until the next step begins, for its size to be read."""

    def rollback(self) -> None:
        for entry in self.journal.entries():
            entry.restore(self.flats[entry.unit])

    def peek(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.flats.items()

    def put(self, unit: str, flat: Tensor) -> None:
        self.flats[unit].copy_(flat)

    def metrics(self) -> dict[str, float]:
        return {"memory/journal_bytes": float(self.journal.num_bytes)}

    def shutdown(self) -> None:
        self.journal.close()
