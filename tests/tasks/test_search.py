"""What a sweep tries: the grammar of axes, grids, draws that stay the same, and Optuna from what is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.search import Axis, Known, draw, grid, is_hopeless, parse_axis, propose
from trainer.errors import ConfigError

RATE = parse_axis("train.optimizer.learning_rate=1e-5..1e-3:log")
RANK = parse_axis("train.lora.rank=4..64")
METHOD = parse_axis("train.method=lora,full")


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("a.b=1,2,3", Axis("a.b", ("1", "2", "3"))),
        ("a.b = x , y", Axis("a.b", ("x", "y"))),
        ("a.b=[q_proj,v_proj],[q_proj]", Axis("a.b", ("[q_proj,v_proj]", "[q_proj]"))),
        ('a.b="x,y",z', Axis("a.b", ('"x,y"', "z"))),
        ("a.b=1..4", Axis("a.b", (), 1, 4, whole=True)),
        ("a.b=0.1..0.4", Axis("a.b", (), 0.1, 0.4)),
        ("a.b=1e-5..1e-3:log", Axis("a.b", (), 1e-5, 1e-3, log=True)),
        ("a.b=-2..2", Axis("a.b", (), -2, 2, whole=True)),
        ("a.b=hf:one..two,hf:x", Axis("a.b", ("hf:one..two", "hf:x"))),
    ],
)
def test_an_axis_is_read(text: str, axis: Axis) -> None:
    assert parse_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a.b", "expected key=a,b,c"),
        ("=1,2", "expected key=a,b,c"),
        ("a.b=", "names no value"),
        ("a.b=1,,2", "empty value"),
        ("a.b=1,", "empty value"),
        ("a.b=3..1", "from the lower number to the higher"),
        ("a.b=1..1", "from the lower number to the higher"),
        ("a.b=0..1:log", "log scale has no zero"),
        ("a.b=1..9:lag", "'lag' is no scale"),
        ("a.b=1..1e999", "from the lower number"),
    ],
)
def test_a_text_that_is_no_axis_is_refused_with_what_to_write(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_axis(text)


def test_a_grid_is_every_combination_and_takes_no_range() -> None:
    assert grid([METHOD, parse_axis("campaign.seed=0,1")]) == [
        {"train.method": "lora", "campaign.seed": "0"},
        {"train.method": "lora", "campaign.seed": "1"},
        {"train.method": "full", "campaign.seed": "0"},
        {"train.method": "full", "campaign.seed": "1"},
    ]
    with pytest.raises(ConfigError, match="needs a list of values"):
        grid([RANK])
    with pytest.raises(ConfigError, match="too many"):
        grid([parse_axis(f"k{n}=1,2,3,4,5,6,7,8,9,10") for n in range(4)])


def test_draws_are_those_of_their_number_and_none_comes_twice() -> None:
    few, many = draw([RATE, RANK], 3, seed=7), draw([RATE, RANK], 9, seed=7)
    assert many[:3] == few
    assert draw([RATE, RANK], 3, seed=8) != few
    assert len({str(values) for values in many}) == 9
    with pytest.raises(ConfigError, match="only 2 different trials"):
        draw([METHOD], 3, seed=0)


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.booleans(), st.integers(0, 100))
def test_a_drawn_value_lies_in_its_range(a: float, b: float, log: bool, seed: int) -> None:
    low, high = min(a, b), max(a, b)
    if low == high:
        return
    axis = Axis("k", (), low, high, log=log)
    assert low <= float(axis.draw(random.Random(seed))) <= high


def finished(values: dict[str, str], result: float) -> Known:
    return Known(values, "done", result, {step: result * step / 10 for step in range(1, 11)})


def test_optuna_comes_near_what_was_good() -> None:
    """Trials near 1e-4 were good, so most proposals lie there; each follows from what is known alone."""
    axes = [RATE]
    known = [
        finished({RATE.key: f"{10**-power:.6g}"}, -abs(power - 4)) for power in (3.1, 3.3, 3.6, 3.9, 4.0, 4.1, 4.2, 4.5, 4.7, 4.9)
    ]
    proposals = [propose(axes, known[n:] + known[:n], seed=n) for n in range(6)]
    near = sum(3e-5 < float(values[RATE.key]) < 3e-4 for values in proposals)
    assert near >= 4, proposals
    assert propose(axes, known, seed=1) == propose(axes, known, seed=1)


def test_optuna_takes_every_kind_of_axis_and_trials_that_run_failed_or_were_pruned() -> None:
    axes = [RATE, RANK, METHOD]
    values = {RATE.key: "1e-4", RANK.key: "8", METHOD.key: "lora"}
    known = [finished(values, 0.5), Known(values), Known(values, "failed"), Known(values, "pruned", 0.1, {3: 0.1})]
    found = propose(axes, [*known, Known(values, "done", None)], seed=0)
    assert 1e-5 <= float(found[RATE.key]) <= 1e-3
    assert 4 <= int(found[RANK.key]) <= 64
    assert found[METHOD.key] in ("lora", "full")


def test_a_trial_is_hopeless_below_the_median_of_three_after_a_fifth_of_its_steps() -> None:
    known = [finished({RANK.key: str(n)}, n / 10) for n in (4, 6, 8)]
    bad, good = {1: 0.0, 4: 0.01}, {1: 0.0, 4: 0.5}
    assert is_hopeless([RANK], known, bad, 10)
    assert not is_hopeless([RANK], known, good, 10)
    assert not is_hopeless([RANK], known[:2], bad, 10)
    assert not is_hopeless([RANK], known, {1: 0.0}, 10)
    assert not is_hopeless([RANK], known, {}, 10)
