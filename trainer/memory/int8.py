"""The INT8 reference: a frozen copy of the base with 8-bit matrices, run layer by layer, forward only.

    W [m, n] -> round(W / scale) as int8, scale [m] = largest absolute value of an output row / 127

Matrices (and stacks of them) are quantised by output row, vectors stay as they are. A unit is dequantised whole when it is
opened, so products run in the compute type with float32 accumulation. Stored: one byte a weight and four a row, in memory or on
a disk.
`logprob_error` says what that costs: mean absolute difference to the unquantised log-probs, measured where the reference is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.engine.port import TokenScores, Work
from trainer.memory.anatomy import Anatomy, Part, Unit
from trainer.memory.build import Loaded, Reader, buffers, compute_dtype_of, placeholders
from trainer.memory.residency import Residency
from trainer.memory.schedule import LayerMajor
from trainer.memory.source import LayerSource, MemorySource

WARN_AT = 0.02  # mean absolute log-prob error from which the reference is not to be trusted blindly


def quantise(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return (int8 values, float32 scales by output row) of a matrix or a stack of them [..., m, n]."""
    scale = matrix.float().abs().amax(-1, keepdim=True) / 127
    values = torch.where(scale > 0, matrix.float() / scale, 0.0).round().clamp(-127, 127).to(torch.int8)
    return values, scale.squeeze(-1)


def packed_bytes(part: Part) -> int:
    """Return how many bytes a part takes, to the next multiple of 64."""
    rows = part.numel // part.shape[-1] if len(part.shape) >= 2 else 0
    raw = part.numel + 4 * rows if rows else 4 * part.numel
    return -(-raw // 64) * 64


def pack(unit: Unit, flat: Tensor) -> Tensor:
    """Return a unit's buffer quantised, as bytes."""
    chunks = []
    for part in unit.parts:
        weight = part.view(flat)
        if len(part.shape) >= 2:
            values, scale = quantise(weight)
            raw = torch.cat([scale.flatten().view(torch.uint8), values.flatten().view(torch.uint8)])
        else:
            raw = weight.float().contiguous().view(torch.uint8)
        chunks += [raw, raw.new_zeros(packed_bytes(part) - len(raw))]
    return torch.cat(chunks)


def unpack(unit: Unit, packed: Tensor, flat: Tensor) -> Tensor:
    """Fill a unit's buffer from its quantised bytes."""
    begin = 0
    for part in unit.parts:
        raw = packed[begin : begin + packed_bytes(part)]
        if len(part.shape) >= 2:
            rows = part.numel // part.shape[-1]
            scale = raw[: 4 * rows].view(torch.float32).view(part.shape[:-1])
            values = raw[4 * rows : 4 * rows + part.numel].view(torch.int8).view(part.shape)
            part.view(flat).copy_(values).mul_(scale.unsqueeze(-1))
        else:
            part.view(flat).copy_(raw[: 4 * part.numel].view(torch.float32))
        begin += len(raw)
    return flat


class Int8Source:
    """Dequantises what an inner source holds; forward only.

    Args:
        inner: holds the units' quantised bytes.
        anatomy: of the model.
        dtype: to compute in.
        device: to compute on.
    """

    def __init__(self, inner: LayerSource, anatomy: Anatomy, dtype: torch.dtype, device: torch.device):
        self.inner, self.units, self.device = inner, anatomy.units, device
        self._desk = torch.zeros(max(unit.numel for unit in anatomy.units.values()), dtype=dtype, device=device)

    def expect(self, units: Sequence[str]) -> None:
        self.inner.expect(units)

    def open(self, unit: str) -> Tensor:
        packed = self.inner.open(unit).to(self.device)
        return unpack(self.units[unit], packed, self._desk[: self.units[unit].numel])

    def close(self, unit: str, changed: bool = False) -> None:
        assert not changed, "a reference does not change"
        self.inner.close(unit)

    def journal_of(self, unit: str) -> None:
        return None

    def begin(self) -> None:
        raise AssertionError("a reference takes no step")

    commit = rollback = begin

    def peek(self) -> Iterator[tuple[str, Tensor]]:
        return self.inner.peek()

    def put(self, unit: str, flat: Tensor) -> None:
        self.inner.put(unit, pack(self.units[unit], flat))

    def metrics(self) -> dict[str, float]:
        return self.inner.metrics()

    def shutdown(self) -> None:
        self.inner.shutdown()


class Int8Reference:
    """Scores with 8-bit weights.

    Args:
        model: the base or its skeleton; its weights are given up.
        temperature: that of the sampling distribution.
        keep: makes the source that holds the quantised bytes, from (unit, bytes); None keeps them in memory.
        reader: of weights that the model does not have.
        block_elements: most elements of a block of vocabulary rows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        keep: Callable[[Iterator[tuple[str, Tensor]]], LayerSource] | None = None,
        reader: Reader | None = None,
        block_elements: int | None = None,
    ):
        model.requires_grad_(False)
        anatomy = Anatomy(model, block_elements)
        weights = reader or Loaded(anatomy)
        compute = compute_dtype_of(weights.dtype, weights.device)
        packed = self._counted((unit.name, pack(unit, flat)) for unit, flat in buffers(anatomy, weights, torch.device("cpu")))
        inner = keep(packed) if keep else MemorySource(dict(packed), None)
        placeholders(anatomy, compute, weights.device)
        source = Int8Source(inner, anatomy, compute, weights.device)
        self.residency = Residency(anatomy, source, trains=False, compute_dtype=compute, direct=False)
        self.schedule = LayerMajor(self.residency, temperature)

    def _counted(self, packed: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        self.num_bytes = 0  # of all units, wherever they lie
        for name, raw in packed:
            self.num_bytes += raw.nbytes
            yield name, raw

    def score(self, works: Sequence[Work]) -> list[TokenScores]:
        """Return scores of all works, without gradient."""
        return self.schedule.score(works) if works else []


def logprob_error(one: Sequence[TokenScores], other: Sequence[TokenScores]) -> float:
    """Return the mean absolute difference of two lists of scores."""
    apart = [(a.logprobs_TK - b.logprobs_TK).abs().flatten() for a, b in zip(one, other, strict=True)]
    return float(torch.cat(apart).mean())


def prompt_works(prompts: Sequence[Sequence[int]], device: torch.device, most: int = 32) -> list[Work]:
    """Return one work that scores the tokens of some prompts themselves, their first ones excepted."""
    chosen = [ids for ids in prompts if len(ids) > 1][:most]
    if not chosen:
        return []
    width = max(len(ids) for ids in chosen) - 1
    rows = torch.tensor([[*ids[:-1], *[ids[0]] * (width + 1 - len(ids))] for ids in chosen], device=device)
    where = [row * width + column for row, ids in enumerate(chosen) for column in range(len(ids) - 1)]
    targets = [token for ids in chosen for token in ids[1:]]
    return [Work(rows, torch.tensor(where, device=device), torch.tensor(targets, device=device).unsqueeze(1))]
