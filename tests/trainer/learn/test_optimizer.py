"""Schedule, groups, masters and state of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from trainer.config.schema import Optimizer
from trainer.errors import ConfigError
from trainer.learn.optimizer import PolicyOptimizer, learning_rate


def test_learning_rate_warms_up_then_falls_along_a_cosine() -> None:
    config = Optimizer(learning_rate=1.0, warmup_steps=4, final_fraction=0.1)
    rates = [learning_rate(update, 11, config, peak=2.0) for update in range(11)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4] == pytest.approx(2.0)
    assert rates[7] == pytest.approx(2.0 * (0.1 + 0.9 / 2)), "halfway down the cosine"
    assert rates[10] == pytest.approx(0.2)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)


def test_constant_schedule_and_a_stage_of_one_update() -> None:
    assert learning_rate(500, 10, Optimizer(learning_rate=1.0, schedule="constant"), 3.0) == 3.0
    assert learning_rate(0, 1, Optimizer(learning_rate=1.0), 3.0) == 3.0


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in (("a.weight", (3, 4)), ("a.bias", (4,)))
    }


def train(optimizer: PolicyOptimizer, steps: range, rate: float = 1e-2) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in optimizer.parameters.values():
            (parameter.float() * torch.randn(parameter.shape, generator=generator)).sum().backward()
        optimizer.step(rate, optimizer.grad_norm())


def test_steps_equal_torch_adamw_with_clipping() -> None:
    config = Optimizer(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    mine, theirs = weights(), weights()
    train(PolicyOptimizer(mine, config), range(4))
    groups = [{"params": [theirs["a.weight"]], "weight_decay": 0.1}, {"params": [theirs["a.bias"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.eps)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        adamw.zero_grad()
        for parameter in theirs.values():
            (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        adamw.step()
    for name in mine:
        assert torch.allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_state_goes_through_tensors_to_the_same_bits() -> None:
    config = Optimizer(learning_rate=1e-2)
    whole, first, second = (PolicyOptimizer(weights(), config) for _ in range(3))
    train(whole, range(6))
    train(first, range(3))
    second.load(first.weights(), first.state())
    train(first, range(100, 104))  # the state that was handed on is a copy
    train(second, range(3, 6))
    for name in whole.parameters:
        assert torch.equal(whole.parameters[name], second.parameters[name])


def test_a_restart_forgets_the_moments_only() -> None:
    optimizer = PolicyOptimizer(weights(), Optimizer(learning_rate=1e-2))
    train(optimizer, range(3))
    before = {name: weight.clone() for name, weight in optimizer.weights().items()}
    optimizer.restart()
    assert optimizer.state() == {}
    assert all(torch.equal(before[name], weight) for name, weight in optimizer.weights().items())


def test_bfloat16_weights_keep_small_steps_in_their_masters() -> None:
    optimizer = PolicyOptimizer(weights(torch.bfloat16), Optimizer(learning_rate=1e-6, weight_decay=0.0))
    before = {name: weight.clone() for name, weight in optimizer.weights().items()}
    train(optimizer, range(5), rate=1e-6)
    for name, parameter in optimizer.parameters.items():
        moved = (optimizer.weights()[name] - before[name]).abs()
        assert moved.min().item() > 1e-7, "the step is there, though bfloat16 could not hold it"
        assert torch.equal(parameter, optimizer.weights()[name].bfloat16())
        assert parameter.grad is None


def test_bfloat16_gradients_add_up_in_float32() -> None:
    optimizer = PolicyOptimizer(weights(torch.bfloat16), Optimizer(learning_rate=1e-6))
    parameter = optimizer.parameters["a.bias"]
    for value in (1.0, *[2.0**-9] * 4):
        (parameter * value).sum().backward()
    master = optimizer.stepped["a.bias"]
    assert master.grad is not None
    assert master.grad.tolist() == [1.0 + 4 * 2.0**-9] * 4


def test_the_first_bad_gradient_has_a_name() -> None:
    optimizer = PolicyOptimizer(weights(), Optimizer(learning_rate=1e-2))
    (optimizer.parameters["a.weight"] * torch.inf).sum().backward()
    assert not optimizer.grad_norm().isfinite()
    assert optimizer.first_bad_gradient() == "a.weight"


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_moments_give_the_same_bits_also_after_a_checkpoint(
    offload: Literal["cpu", "nvme"], dtype: torch.dtype, tmp_path: Path
) -> None:
    kept, moved = weights(dtype), weights(dtype)
    plain = PolicyOptimizer(kept, Optimizer(learning_rate=1e-2))
    config = Optimizer(learning_rate=1e-2, offload=offload, offload_small=True)
    train(plain, range(6))
    first = PolicyOptimizer(moved, config, tmp_path / "first")
    train(first, range(3))
    files = sorted(path.name for path in tmp_path.glob("first/*"))
    assert files == (["000000.exp_avg", "000000.exp_avg_sq", "000001.exp_avg", "000001.exp_avg_sq"] if offload == "nvme" else [])
    values = {name: value.clone() for name, value in first.weights().items()}
    state = {name: value.clone() for name, value in first.state().items()}
    fresh = weights(dtype)
    second = PolicyOptimizer(fresh, config, tmp_path / "second")
    second.load(values, state)
    train(second, range(3, 6))
    for name in kept:
        assert torch.equal(kept[name], fresh[name])
    assert all(torch.equal(value, second.state()[name]) for name, value in plain.state().items())


def test_an_offload_that_saves_nothing_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"16 parameters train.*500,000,000.*offload_small: true"):
        PolicyOptimizer(weights(), Optimizer(learning_rate=1e-2, offload="cpu"))
