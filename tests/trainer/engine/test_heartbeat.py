"""The heartbeat: what stops a step, and what does not."""

from __future__ import annotations

import math

import pytest

from trainer.engine.heartbeat import Heartbeat


def beating(factor: float = 5.0) -> Heartbeat:
    heartbeat = Heartbeat(factor, warmup=3)
    for norm in (1.0, 2.0, 3.0):
        assert heartbeat.check("layers.0", 100.0) is None, "the warm-up only watches"
        heartbeat.take({"layers.0": norm})
    return heartbeat


def test_a_jump_above_five_times_the_mean_stops() -> None:
    heartbeat = beating()
    assert heartbeat.check("layers.0", 9.9) is None
    alarm = heartbeat.check("layers.0", 10.1)
    assert alarm is not None
    assert (alarm.layer, alarm.value, alarm.limit) == ("layers.0", 10.1, pytest.approx(10.0))
    assert heartbeat.check("layers.1", 1e9) is None, "a layer without history"


def test_unsteady_norms_are_judged_by_their_deviation() -> None:
    heartbeat = Heartbeat(5.0, warmup=3)
    for norm in (0.1, 0.1, 0.1, 0.1, 4.6):
        heartbeat.take({"layers.0": norm})
    mean, deviation = 1.0, 1.8
    assert heartbeat.check("layers.0", mean + 4.9 * deviation) is None
    assert heartbeat.check("layers.0", mean + 5.1 * deviation) is not None


def test_the_first_signal_after_a_quiet_stretch_is_no_fault() -> None:
    heartbeat = Heartbeat(5.0, warmup=3, clip_norm=0.2)
    for norm in (0.0, 0.001, 0.001, 0.001, 0.0):
        heartbeat.take({"layers.0": norm})
    assert heartbeat.state()["layers.0"][0] == 3, "a norm of 0 says nothing"
    assert heartbeat.check("layers.0", 0.99) is None
    assert heartbeat.check("layers.0", 1.01) is not None


def test_a_new_stage_begins_without_history() -> None:
    heartbeat = beating()
    heartbeat.restart()
    assert heartbeat.check("layers.0", 1e9) is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stops_at_once(value: float) -> None:
    alarm = Heartbeat(0.0, warmup=100).check("head", value)
    assert alarm is not None
    assert alarm.reason == "not finite"


def test_factor_zero_looks_for_values_that_are_not_finite_only() -> None:
    assert beating(factor=0.0).check("layers.0", 1e9) is None


def test_mean_and_variance_are_exact_within_the_memory_and_then_fade() -> None:
    heartbeat = beating()
    count, mean, variance = heartbeat.state()["layers.0"]
    assert (count, mean, variance) == (3, pytest.approx(2.0), pytest.approx(2 / 3))
    for _ in range(2000):
        heartbeat.take({"layers.0": 50.0})
    assert heartbeat.state()["layers.0"][1] == pytest.approx(50.0, rel=1e-6)


def test_state_goes_through_json_and_back() -> None:
    heartbeat, other = beating(), Heartbeat(5.0, warmup=3)
    other.load(heartbeat.state())
    assert other.state() == heartbeat.state()
    assert other.check("layers.0", 10.1) is not None
