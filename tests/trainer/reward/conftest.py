"""Samples of real data, where there are any, and what many reward tests build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.reward.code import choose_kind

ROOT = Path(__file__).resolve().parents[3]


def read_sample(name: str) -> list[dict[str, Any]]:
    """Return the rows of a real data set's sample, which lies beside the repository and never in it."""
    for folder in (ROOT.parent, ROOT.parent.parent):
        path = folder / "shared" / "data" / name
        if path.is_file():
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pytest.skip(f"no ../shared/data/{name} beside the repository")


@pytest.fixture(scope="session")
def gsm8k() -> list[dict[str, Any]]:
    return read_sample("gsm8k_200.jsonl")


@pytest.fixture(scope="session")
def humaneval() -> list[dict[str, Any]]:
    return read_sample("humaneval_40.jsonl")


@pytest.fixture(scope="session")
def sandbox_kind() -> str:
    """The sandbox that holds on this machine; the test is skipped where none does."""
    try:
        return choose_kind("auto")
    except ConfigError as error:
        pytest.skip(str(error))
