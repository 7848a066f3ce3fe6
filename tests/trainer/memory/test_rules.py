"""Update rules, rounding and the undo journal: NUMERICS 13."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.memory.journal import Journal, RowsUndo, UnitUndo
from trainer.memory.rules import (
    CHUNK,
    Movement,
    Step,
    apply_update,
    direction,
    join,
    random_halves,
    round_stochastic,
    split,
)

CPU = torch.device("cpu")


def test_sgd_and_sign() -> None:
    gradient = torch.tensor([[2.0, -3.0], [0.0, 1e-9]])
    assert torch.equal(direction("sgd", gradient.clone()), gradient)
    assert direction("sign", gradient.clone()).tolist() == [[1.0, -1.0], [0.0, 1.0]]


@pytest.mark.parametrize("rule", ["rms", "sinkhorn"])
def test_normalised_rules_have_rms_one_whatever_the_scale(rule: str) -> None:
    gradient = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    one, other = direction(rule, gradient.clone()), direction(rule, gradient * 1e-4)  # type: ignore[arg-type]
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert float(one.square().mean()) == pytest.approx(1.0, rel=1e-4)
    assert torch.equal(one.sign(), gradient.sign())


def test_sinkhorn_brings_rows_and_columns_to_rms_one() -> None:
    moved = direction("sinkhorn", torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).exp())
    for dim in (0, 1):
        assert torch.allclose(moved.square().mean(dim).sqrt(), torch.tensor(1.0), atol=0.02)


def test_experts_are_normalised_one_by_one_and_an_idle_one_stays() -> None:
    stack = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 0.0])[:, None, None]
    for rule in ("rms", "sinkhorn"):
        moved = direction(rule, stack.clone())  # type: ignore[arg-type]
        assert torch.allclose(moved[:2].square().mean((1, 2)), torch.ones(2), rtol=1e-4)
        assert not moved[2].any()


def test_a_part_of_a_matrix_is_divided_by_the_norm_of_the_whole() -> None:
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    parts = [direction("rms", part.clone(), whole.square().mean()) for part in whole.split(2)]
    torch.testing.assert_close(torch.cat(parts), direction("rms", whole.clone()))


# -- rounding: NUMERICS 13 -------------------------------------------------------------------------------------------


def test_row_13_rounding_keeps_the_mean() -> None:
    value = 1.0 + 0.3 * 2**-7  # 0.3 of the way to the next bfloat16
    rounded = torch.stack([round_stochastic(torch.full((1,), value), seed) for seed in range(10_000)]).double()
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
    standard_error = float(rounded.std()) / 100
    assert abs(float(rounded.mean()) - value) < 4 * standard_error
    within_one = round_stochastic(torch.full((10_000,), value), 5).double()
    assert abs(float(within_one.mean()) - value) < 4 * float(within_one.std()) / 100


def test_row_13_the_seed_decides_the_bits() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_stochastic(values, 3), round_stochastic(values, 3))
    assert not torch.equal(round_stochastic(values, 3), round_stochastic(values, 4))
    assert not torch.equal(round_stochastic(values, 3), round_stochastic(values, 3 + 2**40))


@given(start=st.integers(0, 10_000), count=st.integers(1, 300))
def test_bits_depend_on_the_index_alone(start: int, count: int) -> None:
    assert torch.equal(random_halves(9, start, count, CPU), random_halves(9, 0, start + count, CPU)[start:])


@pytest.mark.parametrize("width", [6, 7])
def test_rows_draw_what_they_draw_within_the_whole(width: int) -> None:
    rows = torch.tensor([1, 4, 11])
    whole = random_halves(9, 0, 12 * width, CPU).view(12, width)
    assert torch.equal(random_halves(9, 0, 3 * width, CPU, rows, width), whole[rows].flatten())


def test_values_on_the_grid_stay() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert torch.equal(round_stochastic(values, 1).float(), values)


def test_split_is_float32_bit_for_bit_and_its_upper_half_the_nearest() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(-20, 20, (10_000,)).float()
    high, low = split(values)
    assert torch.equal(join(high, low), values)
    assert torch.equal((high.float() - values).abs(), (values.bfloat16().float() - values).abs())


# -- applying ---------------------------------------------------------------------------------------------------------


def test_float32_is_plain_sgd_with_decoupled_decay() -> None:
    weight, gradient = torch.randn(100), torch.randn(100)
    moved = weight.clone()
    apply_update(moved, gradient.clone(), Step("sgd", 0.1, 0.5), 0, decays=True)
    torch.testing.assert_close(moved, weight - 0.1 * gradient - 0.1 * 0.5 * weight)
    undecayed = weight.clone()
    apply_update(undecayed, gradient.clone(), Step("sgd", 0.1, 0.5), 0, decays=False)
    torch.testing.assert_close(undecayed, weight - 0.1 * gradient)


def test_small_steps_survive_stochastic_rounding_and_split_but_not_the_nearest() -> None:
    total = CHUNK + 1000
    weight = torch.randn(total, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = torch.ones(total)
    kept = {}
    for name in ("stochastic", "nearest", "split"):
        stored, movement = weight.clone(), Movement()
        low = torch.zeros(total, dtype=torch.int16) if name == "split" else None
        step = Step("rms", 1e-4, rounding="nearest" if name == "nearest" else "stochastic")
        for number in range(5):
            apply_update(stored, moved.clone(), step, number, decays=False, low_N=low, movement=movement)
        kept[name] = Movement.metrics(movement.sums())["update/realised_fraction"]
        if low is not None:
            torch.testing.assert_close(join(stored, low), weight.float() - 5e-4)
    assert kept["stochastic"] == pytest.approx(1.0, abs=0.05)
    assert kept["split"] == pytest.approx(1.0, abs=1e-3)
    assert kept["nearest"] < 0.1


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "split"])
def test_the_journal_undoes_a_step_bit_for_bit(kind: str, on_disk: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(CHUNK + 500, generator=generator).to(torch.float32 if kind == "float32" else torch.bfloat16)
    low = torch.zeros(len(flat), dtype=torch.int16) if kind == "split" else None
    flats = {"layers.0": flat} | ({} if low is None else {"layers.0.low": low})
    journal = Journal(tmp_path if on_disk else None)
    for number in range(2):  # the second step forgets the first
        before = {name: values.clone() for name, values in flats.items()}
        journal.clear()
        step = Step("rms", 1e-3)
        undo = UnitUndo(journal, "layers.0", 64)
        part_low = None if low is None else low[64:]
        apply_update(flat[64:], torch.ones(len(flat) - 64), step, number, decays=True, low_N=part_low, undo=undo)
        rows, width = torch.tensor([0, 3]), 8
        kept, kept_low = flat[:64].view(8, 8)[rows].flatten(), None if low is None else low[:64].view(8, 8)[rows].flatten()
        undo_rows = RowsUndo(journal, "layers.0", 0, rows, width)
        where = {"rows_U": rows, "width": width}
        apply_update(kept, torch.ones(16), step, number, decays=True, low_N=kept_low, undo=undo_rows, **where)  # type: ignore[arg-type]
        flat[:64].view(8, 8)[rows] = kept.view(2, 8)
        if low is not None and kept_low is not None:
            low[:64].view(8, 8)[rows] = kept_low.view(2, 8)
        assert not torch.equal(flat, before["layers.0"])
        for entry in journal.entries():
            entry.restore(flats[entry.unit])
        for name, values in flats.items():
            assert torch.equal(values, before[name]), name
        assert 0 < journal.num_bytes < (2.5 if kind == "bfloat16" else 7) * len(flat)
    journal.close()
