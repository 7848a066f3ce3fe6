"""The hacking watch, from made-up metric histories."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.reward.hacking import answer_signals, repetition, watch


def history(training: list[float], heldout: list[float], every: int = 5, **others: list[float]) -> list[dict[str, Any]]:
    """One line a step; a held-out value every so many steps, the first one at step 0."""
    lines: list[dict[str, Any]] = [{"step": 0, "metrics": {"heldout/reward_mean": heldout[0]}}]
    for step in range(1, every * (len(heldout) - 1) + 1):
        metrics = {"reward/mean": training[(step - 1) // every]}
        metrics |= {name.replace("__", "/"): values[(step - 1) // every] for name, values in others.items()}
        if step % every == 0:
            metrics["heldout/reward_mean"] = heldout[step // every]
        lines.append({"step": step, "metrics": metrics})
    return lines


def test_training_up_and_heldout_down_is_an_alarm_once() -> None:
    training, heldout = [0.3, 0.5, 0.6, 0.8, 0.9, 0.95], [0.3, 0.5, 0.55, 0.5, 0.4, 0.3, 0.2]
    lines = history(training, heldout)
    raised = [(alarm.signal, alarm.step) for end in range(1, len(lines) + 1) if "heldout/reward_mean" in lines[end - 1]["metrics"]
              for alarm in watch(lines[:end])]  # fmt: skip
    assert [signal for signal, _ in raised] == ["heldout_falls"]
    assert 15 < raised[0][1] < 30


@pytest.mark.parametrize(
    ("training", "heldout"),
    [
        ([0.3, 0.5, 0.6, 0.8, 0.9], [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]),  # both rise
        ([0.9, 0.8, 0.6, 0.4, 0.3], [0.9, 0.8, 0.7, 0.5, 0.4, 0.3]),  # both fall: a collapse, not a gamed reward
        ([0.3, 0.5, 0.6, 0.8, 0.9], [0.5, 0.52, 0.49, 0.51, 0.5, 0.49]),  # held-out only wavers
        ([0.3, 0.9], [0.5, 0.1, 0.0]),  # too early to say
    ],
)
def test_everything_else_is_none(training: list[float], heldout: list[float]) -> None:
    lines = history(training, heldout)
    assert [alarm for end in range(len(lines) + 1) for alarm in watch(lines[:end])] == []


def test_how_it_is_gamed_is_named() -> None:
    flat, rising = [0.5] * 6, [0.3, 0.4, 0.6, 0.8, 0.9]
    for signal, name, values in (
        ("answers_grow", "completion__length_mean", [10, 11, 15, 40, 60]),
        ("answers_repeat", "answers__repetition_fraction", [0.0, 0.0, 0.1, 0.5, 0.6]),
        ("answers_alike", "answers__distinct_fraction", [0.9, 0.9, 0.5, 0.2, 0.1]),
    ):
        lines = history(rising, flat, **{name: [float(v) for v in values]})
        found = {alarm.signal for end in range(len(lines) + 1) for alarm in watch(lines[:end])}
        assert found == {signal}


def test_signals_of_answers() -> None:
    found = answer_signals([["a", "a", "b", "c"], ["x"] * 4])
    assert found["answers/distinct_fraction"] == pytest.approx((3 / 4 + 1 / 4) / 2)
    assert found["answers/repetition_fraction"] == 0
    assert repetition("so we have it " * 20) > 0.9
    assert repetition("every word here stands just once and none of them comes again") == 0
    assert answer_signals([]) == {}
