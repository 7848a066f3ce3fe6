"""The counter-based draws: right, uniform, and independent of everything but seed and position."""

from __future__ import annotations

import pytest
import torch

from trainer.rollout.draws import draw, mix, uniforms


def splitmix64(state: int) -> int:
    """The published finaliser on Python integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def test_mix_is_splitmix64() -> None:
    seeds = [0, 1, 2, 12345678901234567, 2**63 - 1]
    got = [value % 2**64 for value in mix(torch.tensor(seeds)).tolist()]
    assert got == [splitmix64(seed) for seed in seeds]
    state = (splitmix64(7) + 3 * 0x9E3779B97F4A7C15) % 2**64
    assert uniforms(mix(torch.tensor([7])), torch.tensor([2])).item() == (splitmix64(state) >> 12) * 2.0**-52


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    seeds, positions = torch.arange(200), torch.arange(500)
    values = uniforms(mix(seeds)[:, None].expand(-1, 500), positions[None].expand(200, -1))
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values.float(), bins=20, min=0, max=1)
    expected = values.numel() / 20
    assert ((counts - expected) ** 2 / expected).sum() < 19 + 5 * (2 * 19) ** 0.5
    centred = values - 0.5
    for shifted in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(shifted.mean()) < 5 * (1 / 12) / shifted.numel() ** 0.5


def test_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0])
    values = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    assert draw(probabilities.expand(6, -1), values).tolist() == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("vocabulary", [1024, 1025, 1280, 3001])
def test_a_large_vocabulary_is_drawn_as_a_small_one(vocabulary: int) -> None:
    probabilities = torch.softmax(3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)), -1)
    probabilities[::3] = 0
    probabilities[-300:] = 0
    probabilities = probabilities / probabilities.sum()
    values = torch.cat(
        [torch.linspace(0, 1 - 1e-9, 1999, dtype=torch.float64), torch.tensor([1 - 2.0**-52], dtype=torch.float64)]
    )
    tokens = draw(probabilities.expand(2000, -1), values)
    assert (probabilities[tokens] > 0).all()
    cumulative = torch.cat([torch.zeros(1).double(), probabilities.double().cumsum(0)])
    assert (cumulative[tokens] <= values + 1e-6).all()
    assert (cumulative[tokens + 1] >= values - 1e-6).all()
    assert (tokens.diff() >= 0).all()
