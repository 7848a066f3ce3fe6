"""What a step cost: seconds and the most memory, phase by phase."""

from __future__ import annotations

from trainer.processes import forget_peak_memory
from trainer.schedule.sync import Clock, costs

HELD_BYTES = 200_000_000


def hold() -> None:
    held = bytearray(HELD_BYTES)
    held[::4096] = b"\1" * len(held[::4096])


def test_memory_belongs_to_the_phase_that_held_it() -> None:
    hold()
    clock = Clock()
    with clock("sample"):
        hold()
    with clock("learn"):
        pass
    metrics = costs([], clock)
    assert metrics["memory/rss_peak_bytes"] == clock.highest >= HELD_BYTES
    if not forget_peak_memory():  # the kernel keeps one peak for all
        assert "memory/sample_peak_bytes" not in metrics
        return
    assert metrics["memory/sample_peak_bytes"] - metrics["memory/learn_peak_bytes"] > 0.8 * HELD_BYTES
    assert metrics["time/step_seconds"] >= metrics["time/sample_seconds"]


def test_what_was_held_between_two_steps_is_in_the_whole() -> None:
    forget_peak_memory()
    hold()
    clock = Clock()
    with clock("learn"):
        pass
    assert clock.highest >= HELD_BYTES
