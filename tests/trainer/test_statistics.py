"""pass@k against enumeration, bootstrap intervals against theory."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from trainer.statistics import bootstrap_intervals, bootstrap_means, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        correct = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = [any(subset) for subset in combinations(correct, k)]
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    """Averaged over draws of n samples it is 1 - (1 - p)^k, which the plug-in 1 - (1 - c/n)^k is not."""
    draw = np.random.default_rng(0)
    correct = draw.binomial(8, 0.3, size=20000)
    estimates = np.array([pass_at_k(8, int(c), 4) for c in correct])
    truth = 1 - 0.7**4
    assert abs(estimates.mean() - truth) < 4 * estimates.std() / len(estimates) ** 0.5
    plug_in = 1 - (1 - correct / 8) ** 4
    assert abs(plug_in.mean() - truth) > 4 * plug_in.std() / len(plug_in) ** 0.5


def test_pass_at_k_does_not_overflow() -> None:
    assert pass_at_k(10000, 1, 100) == pytest.approx(0.01)


def test_interval_matches_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(400, 1))
    [interval] = bootstrap_intervals(values, 4000, 0.95, seed=7)
    half = 1.96 * values.std() / 20
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(2)
    covered = 0
    for trial in range(300):
        [interval] = bootstrap_intervals(draw.binomial(1, 0.4, size=(200, 1)).astype(float), 400, 0.9, seed=trial)
        covered += interval.low <= 0.4 <= interval.high
    assert covered / 300 == pytest.approx(0.9, abs=4 * (0.09 / 300) ** 0.5)


def test_equal_seeds_pair_the_resamples() -> None:
    draw = np.random.default_rng(3)
    first, second = draw.normal(size=(50, 2)), draw.normal(size=(50, 2))
    left = bootstrap_means(second - first, 100, seed=5)
    np.testing.assert_allclose(left, bootstrap_means(second, 100, 5) - bootstrap_means(first, 100, 5), atol=1e-12)
    assert not np.allclose(left, bootstrap_means(second - first, 100, seed=6))


def test_pairing_narrows_the_interval_of_the_difference() -> None:
    draw = np.random.default_rng(4)
    hard = draw.normal(size=(200, 1))
    paired = bootstrap_intervals((hard + 0.1 + draw.normal(0, 0.05, size=(200, 1))) - hard, 1000, 0.95, 0)[0]
    assert 0 < paired.low < 0.1 < paired.high
    assert paired.high - paired.low < 0.05
