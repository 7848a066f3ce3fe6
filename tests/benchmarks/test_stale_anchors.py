"""The demonstration of docs/anchors.md: stale anchors let a loophole be exploited while their KL stays low; guards prevent it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stale_anchors import curves, run_all
from trainer.metrics import read_lines

LAST = 3  # looks that are averaged


def end(curve: list[tuple[int, float]]) -> float:
    return sum(value for _, value in curve[-LAST:]) / LAST


@pytest.mark.smoke
def test_stale_anchors_break_what_guarded_ones_keep(tmp_path: Path) -> None:
    runs = run_all(tmp_path, ("stale", "guarded"), {"train": {"stages": [{"steps": 40}]}})
    stale, guarded = (curves(runs[name]) for name in ("stale", "guarded"))
    assert end(stale["reward"]) > end(guarded["reward"]) + 0.5, "the loophole pays"
    assert end(stale["wanted"]) < 0.5 < end(guarded["wanted"]), "and what was wanted is lost"
    assert end(stale["exact_kl"]) > 1.0 > 0.4 > end(guarded["exact_kl"])
    assert end(stale["trained_kl"]) < 0.5 * end(stale["exact_kl"]), "of which the KL term sees little"
    assert end(guarded["trained_kl"]) == pytest.approx(end(guarded["exact_kl"]), rel=0.4)
    kinds = {name: [event["kind"] for event in read_lines(run / "events.jsonl")] for name, run in runs.items()}
    assert "refresh" not in kinds["stale"]
    assert kinds["guarded"].count("refresh") >= 3
    assert "alarm" in kinds["stale"], "the audit sees it, were it only listened to"
