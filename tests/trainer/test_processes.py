"""What processes share: the collector that rests while modules are imported."""

from __future__ import annotations

import gc

import pytest

from trainer.processes import importing


def failing_import() -> None:
    with importing():
        assert gc.get_threshold()[0] > 10_000
        raise ImportError


def test_the_collector_works_again_after_imports_also_after_failed_ones() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError):
        failing_import()
    assert gc.get_threshold() == before
