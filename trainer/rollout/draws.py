"""Random draws that depend on (seed, position) alone, so a completion is the same in any batch, slot or worker.

A counter-based generator: splitmix64's finaliser (Steele, Lea, Flood 2014) over the hashed seed plus the position, in int64
tensors that wrap as unsigned ones do. One uniform a token, turned into a token by the inverse of the cumulative
distribution in float64.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit value."""
    return value - 2**64 if value >= 2**63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, as unsigned integers do."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def mix(value: Tensor) -> Tensor:
    """Hash int64 values: a bijection of 64 bits."""
    value = (value ^ _shift(value, 30)) * MIX_1
    value = (value ^ _shift(value, 27)) * MIX_2
    return value ^ _shift(value, 31)


def uniforms(hashed_seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """Return one float64 in [0, 1) for each (hashed seed, position).

    Args:
        hashed_seeds_R: `mix(seeds)`, int64. positions_R: index of the token within its completion, int64.
    """
    return _shift(mix(hashed_seeds_R + (positions_R + 1) * GOLDEN), 12).double() * 2.0**-52


def draw(logprobs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Return the token that each uniform falls on: the first whose cumulative probability exceeds it.

    A token of probability 0 is never drawn: its cumulative value equals its predecessor's.
    """
    cumulative_RV = logprobs_RV.exp().cumsum(dim=-1, dtype=torch.float64)
    thresholds_R1 = uniforms_R[:, None] * cumulative_RV[:, -1:]
    tokens_R = torch.searchsorted(cumulative_RV, thresholds_R1, right=True)[:, 0]
    return tokens_R.clamp_(max=logprobs_RV.shape[-1] - 1)  # reached only by non-finite rows, which the caller refuses
