"""Fixtures that all tests share."""

from __future__ import annotations

import os

os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.postgresql"]
