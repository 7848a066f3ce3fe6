"""Pools on a real SQLite file and on a real PostgreSQL server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.experience.kit import PROMPTS
from trainer.experience.database import Database
from trainer.experience.pool import Pool


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/experience.db" if request.param == "sqlite" else request.getfixturevalue("postgresql_url")


@pytest.fixture
def open_pool(url: str, tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Return pools of one run, one for each worker that asks."""
    opened: list[Pool] = []

    def make(worker: str, lease_seconds: float = 60.0, owner: str = "run") -> Pool:
        pool = Pool(Database(url, str(tmp_path), 5.0), owner, PROMPTS, worker, lease_seconds)
        opened.append(pool)
        return pool

    yield make
    for pool in opened:
        pool.close()
