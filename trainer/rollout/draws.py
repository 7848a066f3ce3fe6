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
LARGEST = 1 - 2.0**-40  # keeps a fraction below 1 through rounding
BLOCK = 256
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


def _first_above(weights_RV: Tensor, fractions_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose cumulative weight exceeds the fraction of the total, and how far into it that falls.

    Sums in float64. An index of weight 0 is never returned, because its cumulative value equals its predecessor's.
    """
    cumulative_RV = weights_RV.cumsum(dim=-1, dtype=torch.float64)
    thresholds_R1 = fractions_R1 * cumulative_RV[:, -1:]
    index_R1 = torch.searchsorted(cumulative_RV, thresholds_R1, right=True)
    index_R1.clamp_(max=weights_RV.shape[-1] - 1)  # reached only by rows that are not finite, which the caller refuses
    weight_R1 = weights_RV.gather(1, index_R1).double()
    before_R1 = cumulative_RV.gather(1, index_R1) - weight_R1
    return index_R1, ((thresholds_R1 - before_R1) / weight_R1).clamp_(0, LARGEST)


def draw(probabilities_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Return the token that each uniform falls on when the probabilities lie side by side on [0, 1).

    A large vocabulary is searched in two steps, first its blocks and then inside one, so that the float64 sums stay short.
    """
    rows, vocabulary = probabilities_RV.shape
    fractions_R1 = uniforms_R[:, None]
    if vocabulary <= 4 * BLOCK:
        return _first_above(probabilities_RV, fractions_R1)[0][:, 0]
    if vocabulary % BLOCK:
        probabilities_RV = torch.nn.functional.pad(probabilities_RV, (0, BLOCK - vocabulary % BLOCK))
    blocks = probabilities_RV.view(rows, -1, BLOCK)
    block_R1, inside_R1 = _first_above(blocks.sum(dim=-1), fractions_R1)
    chosen = blocks[torch.arange(rows, device=blocks.device), block_R1[:, 0]]
    return (block_R1 * BLOCK + _first_above(chosen, inside_R1)[0])[:, 0].clamp_(max=vocabulary - 1)
