"""Numbers from few samples, with how far to trust them: pass@k without bias, intervals by resampling prompts.

Prompts are the independent units: the samples of one prompt are not, so only prompts are resampled. Importable without torch.

Legend: P prompts, M metrics, S resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_CHUNK_INDICES = 2**22


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate the chance that at least one of k samples is correct, without bias.

    1 - C(n - c, k) / C(n, k), as a product that does not overflow: Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1 and figure 3.

    Args:
        num_samples: n, samples drawn for the prompt.
        num_correct: c, how many of them are correct.
        k: at most n.
    """
    assert 0 <= num_correct <= num_samples, (num_correct, num_samples)
    assert 1 <= k <= num_samples, (k, num_samples)
    if num_samples - num_correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its confidence interval."""

    value: float
    low: float
    high: float


def bootstrap_means(values_PM: Floats, num_resamples: int, seed: int) -> Floats:
    """Return the means of resampled prompts, [S, M].

    The same prompts are drawn for every metric and, with the same seed and P, for every call: the difference of two models'
    resampled means is that of a paired bootstrap.
    """
    num_prompts = values_PM.shape[0]
    draw = np.random.Generator(np.random.Philox(seed))
    means_SM = np.empty((num_resamples, values_PM.shape[1]))
    step = max(1, _CHUNK_INDICES // num_prompts)
    for begin in range(0, num_resamples, step):
        end = min(begin + step, num_resamples)
        chosen = draw.integers(0, num_prompts, size=(end - begin, num_prompts))
        for row, indices in enumerate(chosen, start=begin):
            means_SM[row] = values_PM[indices].mean(axis=0)
    return means_SM


def bootstrap_intervals(values_PM: Floats, num_resamples: int, confidence: float, seed: int) -> list[Interval]:
    """Return the mean over prompts of each metric with its percentile bootstrap interval (Efron 1979).

    Args:
        values_PM: one row a prompt, one column a metric.
        num_resamples: S.
        confidence: such as 0.95.
        seed: decides the resamples.
    """
    tail = (1 - confidence) / 2
    low, high = np.quantile(bootstrap_means(values_PM, num_resamples, seed), [tail, 1 - tail], axis=0)
    means = values_PM.mean(axis=0)
    return [Interval(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]
