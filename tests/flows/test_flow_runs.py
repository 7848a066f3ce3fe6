"""Notes of flow runs whose process removes its own while others look."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.flow_runs import at_work, directory, note, settle


def test_a_note_that_is_removed_in_between_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITHE_STATE", str(tmp_path))
    directory().mkdir()
    (directory() / "gone.json").symlink_to("nowhere")  # it is listed, and cannot be read
    note("here", tmp_path / "run", deployed=True)
    assert at_work() == ["here"]
    assert settle("http://127.0.0.1:9/api") == {}
