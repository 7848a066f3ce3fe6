"""Weights sharded over ranks by torch FSDP2: each rank holds a piece of every unit, and a unit is whole only while it computes.

    open(unit)    FSDP2 unshard: all-gather of the unit's flat parameter (the next one's is under way already)
    close(unit)   FSDP2 reshard: the whole is freed, the piece stays
    reduce        reduce-scatter of a unit's float32 gradient: each rank gets the sum over ranks of its piece

Units are flat buffers, so a piece is a contiguous run of elements and rounding draws the same bits wherever an element lives.
Vocabulary matrices are one unit each here. Checkpoints hold whole units and so restore on any number of ranks; the first rank
gets them one by one, through files that it maps, so that no host has to hold them all.

Every call is one of all ranks in the same order. Where they run different numbers of forward passes, `together` evens that out.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from trainer.memory.disk import bytes_of, write_from
from trainer.memory.journal import Journal

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before torch 2.13


class _Flat(nn.Module):
    """One unit as a module with one parameter, for FSDP2 to shard."""

    def __init__(self, flat: Tensor):
        super().__init__()
        self.flat = nn.Parameter(flat, requires_grad=False)


class ShardedSource:
    """A `LayerSource` over ranks.

    Args:
        units: name and whole buffer of every unit, equal on all ranks; each is cut as it comes.
        mesh: one-dimensional.
        journal_directory: where this rank's undo journal goes; None keeps it in memory.
        prefetch: whether the unit that comes next is gathered while one computes.
        spool: a directory for files of whole units, while they are looked at; None keeps them in memory.
    """

    def __init__(
        self,
        units: Iterable[tuple[str, Tensor]],
        mesh: DeviceMesh,
        journal_directory: Path | None,
        prefetch: bool = True,
        spool: Path | None = None,
    ):
        self.group, self.rank, self.num_ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.prefetch, self.spool = prefetch, spool
        self._announces = False  # whether every sequence of visits is announced to the other ranks first
        self._units: dict[str, Any] = {}
        self._lengths: dict[str, int] = {}
        for name, flat in units:
            self._lengths[name] = len(flat)
            self._units[name] = fully_shard(_Flat(flat), mesh=mesh, reshard_after_forward=True)
        self._open: set[str] = set()
        self._coming: dict[str, Any] = {}  # gathers under way
        self._plan: deque[str] = deque()
        self.journal = Journal(journal_directory)

    def piece(self, unit: str) -> tuple[int, Tensor]:
        """Return where this rank's piece of a unit begins, and the piece, to be changed in place."""
        module = self._units[unit]
        was_open = unit in self._open
        if was_open:
            module.reshard()
        local: Tensor = module.flat.to_local().detach()
        self._open.discard(unit)
        return self.rank * self._chunk(unit), local

    def _chunk(self, unit: str) -> int:
        return -(-self._lengths[unit] // self.num_ranks)

    def padded_length(self, unit: str) -> int:
        """Return the length of a unit's buffer when all pieces are equally long."""
        return self._chunk(unit) * self.num_ranks

    def reduce(self, unit: str, padded: Tensor) -> Tensor:
        """Return the sum over ranks of a unit's gradient, this rank's piece of it.

        Args:
            padded: float32, the whole unit as this rank sees it, with zeros up to its padded length.
        """
        chunk = self._chunk(unit)
        mine = torch.empty(chunk, dtype=padded.dtype, device=padded.device)
        _reduce_scatter(mine, padded, group=self.group)
        return mine[: max(min(chunk, self._lengths[unit] - self.rank * chunk), 0)]

    def total(self, values: Tensor) -> Tensor:
        """Return values added up over ranks."""
        dist.all_reduce(values, group=self.group)
        return values

    # -- visits ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, walk: Callable[[], None]) -> Iterator[None]:
        """Let ranks run different numbers of forward passes inside the block; who is done walks along until all are.

        Args:
            walk: visits the units as a forward pass does, and computes nothing.
        """
        self._announces = True
        try:
            yield
        finally:
            self._announces = False
        while self.total(torch.zeros(1)) > 0:
            walk()

    def expect(self, units: Sequence[str]) -> None:
        if self._announces:
            self.total(torch.ones(1))
        self._plan = deque(units)

    def open(self, unit: str) -> Tensor:
        module = self._units[unit]
        if unit not in self._open:
            handle = self._coming.pop(unit, None)
            if handle is not None:
                handle.wait()
            else:
                module.unshard()
            self._open.add(unit)
            if self._plan and self._plan[0] == unit:
                self._plan.popleft()
            if self.prefetch and self._plan and self._plan[0] not in self._open and self._plan[0] not in self._coming:
                self._coming[self._plan[0]] = self._units[self._plan[0]].unshard(async_op=True)
        whole: Tensor = module.flat.detach()
        return whole

    def close(self, unit: str, changed: bool = False) -> None:
        if unit in self._open:
            self._units[unit].reshard()
            self._open.discard(unit)

    def _settle(self) -> None:
        """Wait for gathers that nobody came for, and let them go: they would hold old values."""
        for unit, handle in self._coming.items():
            handle.wait()
            self._units[unit].reshard()
        self._coming.clear()
        self._plan.clear()

    def journal_of(self, unit: str) -> Journal | None:
        return self.journal

    def begin(self) -> None:
        self.journal.clear()

    def commit(self) -> None:
        self._settle()

    def rollback(self) -> None:
        self._settle()
        for entry in self.journal.entries():
            entry.restore(self.piece(entry.unit)[1])

    def peek(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole units, on the host, to the first rank; the others must ask too, and get nothing."""
        if self.spool is not None and self.rank == 0:
            shutil.rmtree(self.spool, ignore_errors=True)
            self.spool.mkdir(parents=True)
        for unit in self._units:
            whole = self.open(unit)
            if self.rank == 0:
                held = self._spooled(unit, whole.to("cpu", copy=True))
            self.close(unit)
            if self.rank == 0:
                yield unit, held
        self._settle()

    def _spooled(self, unit: str, whole: Tensor) -> Tensor:
        """Write a unit into a file and return the file, mapped, where there is a place for it."""
        if self.spool is None:
            return whole
        path = self.spool / unit
        write_from(path, bytes_of(whole), drop_cache=False)
        return torch.from_file(str(path), shared=False, size=len(whole), dtype=whole.dtype)

    def put(self, unit: str, flat: Tensor) -> None:
        begin, local = self.piece(unit)
        local.copy_(flat[begin : begin + len(local)])

    def metrics(self) -> dict[str, float]:
        held = sum(module.flat.to_local().nbytes for module in self._units.values())
        return {"memory/journal_bytes": float(self.journal.num_bytes), "memory/shard_bytes": float(held)}

    def shutdown(self) -> None:
        self.journal.close()
        if self.spool is not None and self.rank == 0:
            shutil.rmtree(self.spool, ignore_errors=True)
