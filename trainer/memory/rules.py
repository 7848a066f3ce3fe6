"""Stateless updates: a gradient in, a changed weight out, and nothing kept from one step to the next.

    gradient --direction(rule)--> D --apply_update--> W <- round(W - rate * (D + decay * W))

    sgd       D = G
    sign      D = sign(G)                                                  signSGD, arXiv 1802.04434
    rms       D = G / rms(G)                       one number per matrix
    sinkhorn  D = G with rows, then columns brought to rms 1, in turns     SinkGD, arXiv 2502.06742

All but `sgd` have entries of size about 1, so their learning rates are a relative change of the weights; that of `sgd` is not.
A tensor with more than two dimensions (experts) is a stack of matrices. Vectors take `rms` where the rule is `sinkhorn`.

bfloat16 weights are rounded stochastically, E[round(x)] = x. The 16 random bits of an element are a hash of (seed, index within
the parameter), so chunks, ranks and devices draw the same. `split` keeps float32 as a bfloat16 and the 16 bits below it;
only the update reads those. Everything runs in chunks that stay in the cache.

Legend: N elements of a flat parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Rule = Literal["sgd", "sign", "rms", "sinkhorn"]
Rounding = Literal["stochastic", "nearest"]
CHUNK = 2**18  # elements of one pass on a CPU; even, so that chunks begin on a pair of random halves
DEVICE_CHUNK = 2**24  # the same on a device, where a pass is some fifty launches
SINKHORN_ROUNDS = 5
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # lowbias32, as signed 32-bit numbers


def direction(rule: Rule, gradient: Tensor, mean_square: Tensor | None = None) -> Tensor:
    """Return the direction of an update; the gradient's memory is used for it.

    Args:
        rule: see the module's map.
        gradient: float32, [..., m, n] or [n]; its values are lost.
        mean_square: of the whole matrix, where `gradient` is a part of one (rows of a vocabulary matrix): a scalar. A part
            takes `rms` where the rule is `sinkhorn`, whose columns would need the whole.
    """
    if rule == "sgd":
        return gradient
    if rule == "sign":
        return gradient.sign_()
    if rule == "sinkhorn" and gradient.ndim >= 2 and mean_square is None:
        for _ in range(SINKHORN_ROUNDS):
            _unit_rms(gradient, -1)
            _unit_rms(gradient, -2)
        return gradient
    if mean_square is None:
        mean_square = _mean_square(gradient, tuple(range(max(gradient.ndim - 2, 0), gradient.ndim)))
    return gradient.mul_(_inverse_root(mean_square))


def _mean_square(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    count = math.prod(values.shape[dim] for dim in dims)
    return torch.linalg.vector_norm(values, dim=dims, keepdim=True).square() / count


def _inverse_root(mean_square: Tensor) -> Tensor:
    return torch.where(mean_square > 0, mean_square.rsqrt(), 0.0)  # a gradient of zeros moves nothing


def _unit_rms(values: Tensor, dim: int) -> None:
    values.mul_(_inverse_root(_mean_square(values, (dim,))))


# -- rounding -------------------------------------------------------------------------------------------------------


def random_halves(
    seed: int, start: int, count: int, device: torch.device, rows_U: Tensor | None = None, width: int = 0
) -> Tensor:
    """Return 16 random bits for each of some elements as int16 [count].

    Args:
        seed: of (step, parameter), 0 <= seed < 2**63.
        start: index of the first element within its parameter; with `rows_U` within those rows laid end to end.
        count: number of elements.
        rows_U: rows of the parameter that the elements are of; None: all, one after the other.
        width: of a row.
    """
    first = start >> 1
    pairs = ((start + count + 1) >> 1) - first
    if rows_U is None:
        assert first + pairs < 2**31, "a parameter of more than 2**32 elements"
        x = torch.arange(first, first + pairs, dtype=torch.int32, device=device)
    elif width % 2 == 0:
        half = width // 2
        x = torch.arange(first, first + pairs, device=device)
        x = (rows_U[torch.div(x, half, rounding_mode="floor")] * half + x % half).to(torch.int32)
    else:
        element = torch.arange(start, start + count, device=device)
        element = rows_U[torch.div(element, width, rounding_mode="floor")] * width + element % width
        bits = _hash((element >> 1).to(torch.int32), seed).to(torch.int32)
        return torch.where(element % 2 == 0, (bits << 16) >> 16, bits >> 16).to(torch.int16)
    return _hash(x, seed).view(torch.int16)[start & 1 :][:count]


def _hash(x: Tensor, seed: int) -> Tensor:
    """Hash int32 counters in place (lowbias32, with the seed mixed in twice)."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0x7FFFFFFF
    x.add_(low - 2**32 if low >= 2**31 else low)
    scratch = torch.empty_like(x)
    _fold(x, scratch, 16).mul_(_MULTIPLIERS[0])
    x.bitwise_xor_(high)
    _fold(x, scratch, 15).mul_(_MULTIPLIERS[1])
    return _fold(x, scratch, 16)


def _fold(x: Tensor, scratch: Tensor, shift: int) -> Tensor:
    """x ^= x >> shift, with zeros shifted in."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    scratch.bitwise_and_((1 << (32 - shift)) - 1)
    return x.bitwise_xor_(scratch)


def _chunk(values: Tensor) -> int:
    return CHUNK if values.device.type == "cpu" else DEVICE_CHUNK


def round_stochastic(values_N: Tensor, seed: int, start: int = 0, rows_U: Tensor | None = None, width: int = 0) -> Tensor:
    """Return float32 values rounded to bfloat16, up or down with the probability that keeps the mean.

    Args:
        values_N: float32, contiguous [N].
        seed: of (step, parameter).
        start, rows_U, width: where the elements lie in their parameter, as in `random_halves`.
    """
    rounded_N = torch.empty(values_N.shape, dtype=torch.bfloat16, device=values_N.device)
    chunk = _chunk(values_N)
    for begin in range(0, len(values_N), chunk):
        part = values_N[begin : begin + chunk]
        halves = random_halves(seed, start + begin, len(part), part.device, rows_U, width)
        bits = halves.to(torch.int32).add_(2**15)
        bits.add_(part.view(torch.int32))
        rounded_N[begin : begin + chunk].view(torch.int16).copy_(bits.view(torch.int16)[1::2])
    return rounded_N


def split(values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 values as (bfloat16 nearest to them, the int16 that is missing)."""
    bits = values_N.contiguous().view(torch.int32)
    high = bits + 2**15
    low = (bits - (high & -(2**16))).to(torch.int16)
    return high.view(torch.int16)[1::2].contiguous().view(torch.bfloat16), low


def join(high_N: Tensor, low_N: Tensor) -> Tensor:
    """Return the float32 values of which `split` made two halves, bit for bit."""
    bits = (high_N.view(torch.int16).to(torch.int32) << 16).add_(low_N.to(torch.int32))
    return bits.view(torch.float32)


# -- applying -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What an optimizer step does to every parameter."""

    rule: Rule
    rate: float
    decay: float = 0.0  # decoupled: of matrices only
    rounding: Rounding = "stochastic"  # of bfloat16 weights without a low half


class Undo(Protocol):
    """Where old values go before they are overwritten."""

    def keep(self, half: Literal["high", "low"], begin: int, old_N: Tensor, changed_N: Tensor) -> None:
        """Keep the elements that are about to change.

        Args:
            half: the stored weights, or the lower halves of split ones.
            begin: index of the first element within the tensor that `apply_update` was given.
            old_N: old values, a view that is overwritten next.
            changed_N: bool, the same length.
        """
        ...


@dataclass
class Movement:
    """What updates did, in sums that add up over parameters and ranks. Tensors, so that nothing waits for the device."""

    weight_squares: Tensor | float = 0.0
    intended_squares: Tensor | float = 0.0
    realised_squares: Tensor | float = 0.0
    agreement: Tensor | float = 0.0  # inner product of realised and intended
    num_changed: Tensor | float = 0.0
    num_elements: int = 0

    def add(self, old_N: Tensor, intended_N: Tensor, realised_N: Tensor) -> None:
        self.weight_squares = self.weight_squares + old_N.dot(old_N).double()
        self.intended_squares = self.intended_squares + intended_N.dot(intended_N).double()
        self.realised_squares = self.realised_squares + realised_N.dot(realised_N).double()
        self.agreement = self.agreement + realised_N.dot(intended_N).double()
        self.num_changed = self.num_changed + realised_N.count_nonzero()
        self.num_elements += len(old_N)

    def sums(self) -> Tensor:
        """Return everything as float64 [6], to add up over ranks."""
        values = (self.weight_squares, self.intended_squares, self.realised_squares, self.agreement, self.num_changed)
        return torch.tensor([float(value) for value in (*values, self.num_elements)], dtype=torch.float64)

    @staticmethod
    def metrics(sums: Tensor) -> dict[str, float]:
        """Return `update/relative` = norm(dW) / norm(W) as intended, and how much of the step the stored weights took."""
        weight, intended, realised, agreement, changed, elements = sums.tolist()
        return {
            "update/relative": math.sqrt(intended / weight) if weight > 0 else 0.0,
            "update/realised_fraction": agreement / intended if intended > 0 else 1.0,
            "update/realised_relative": math.sqrt(realised / weight) if weight > 0 else 0.0,
            "update/changed_fraction": changed / elements if elements else 0.0,
        }


def apply_update(
    stored_N: Tensor,
    direction_N: Tensor,
    step: Step,
    seed: int,
    *,
    decays: bool,
    low_N: Tensor | None = None,
    start: int = 0,
    rows_U: Tensor | None = None,
    width: int = 0,
    undo: Undo | None = None,
    movement: Movement | None = None,
) -> None:
    """Move stored weights along a direction, in place: W <- round(W - rate * (D + decay * W)).

    Args:
        stored_N: float32 or bfloat16, contiguous, the parameter or a part of it [N].
        direction_N: float32 [N]; its values are lost.
        step: rate, decay, rounding.
        seed: of (step, parameter).
        decays: whether weight decay applies to this parameter.
        low_N: int16, the lower halves of bfloat16 weights that are kept split [N].
        start, rows_U, width: where the elements lie in their parameter, as in `random_halves`.
        undo: takes old values first.
        movement: takes sums of what happened.
    """
    decay = step.rate * step.decay if decays else 0.0
    chunk = _chunk(stored_N)
    for begin in range(0, len(stored_N), chunk):
        part = slice(begin, begin + chunk)
        stored, low = stored_N[part], None if low_N is None else low_N[part]
        old = join(stored, low) if low is not None else stored.float()
        intended = direction_N[part].mul_(-step.rate)
        if decay:
            intended.sub_(old, alpha=decay)
        target = old + intended
        new_low = None
        if stored.dtype == torch.float32:
            new = target
        elif low is not None:
            new, new_low = split(target)
        elif step.rounding == "stochastic":
            new = round_stochastic(target, seed, start + begin, rows_U, width)
        else:
            new = target.to(stored.dtype)
        if movement is not None:
            reached = target if low is not None else new.float()
            movement.add(old, intended, reached - old)
        if undo is not None:
            undo.keep("high", begin, stored, new != stored)
            if low is not None and new_low is not None:
                undo.keep("low", begin, low, new_low != low)
        stored.copy_(new)
        if low is not None and new_low is not None:
            low.copy_(new_low)
