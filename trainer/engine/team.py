"""A team of processes (ranks) that do the same work in step, and what they tell each other. `ALONE` is a team of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trainer.errors import RankError

T = TypeVar("T")


class Team:
    """A group of ranks.

    Args:
        group: with a backend for the host's memory; None is a team of one.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """Return what every rank gives, by rank."""
        if self._group is None:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def share(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes.

        Raises:
            RankError: it failed to; its own error is raised there.
        """
        if self._group is None:
            return make()
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = make()
            except Exception as failure:
                box[1] = f"{type(failure).__name__}: {failure}"
                dist.broadcast_object_list(box, group_src=0, group=self._group)
                raise
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        if box[1] is not None:
            raise RankError(f"rank 0 failed: {box[1]}")
        made: T = box[0]
        return made

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(flag))

    def wait(self) -> None:
        """Return once all ranks are here."""
        if self._group is not None:
            dist.barrier(group=self._group)


ALONE = Team()
