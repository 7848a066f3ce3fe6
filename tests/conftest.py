"""Fixtures that all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test asks for speed
settings.load_profile("any-machine")

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.browser", "tests.postgresql"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests of real processes a second try; the summary says which needed it. A fault that lasts still fails."""
    for item in items:
        marked = any(item.get_closest_marker(marker) for marker in ("smoke", "vllm", "deepspeed"))
        if marked or "reward" in item.path.parts or (isinstance(item, pytest.Function) and hasattr(item.module, "subprocess")):
            item.add_marker(pytest.mark.flaky(reruns=1))
