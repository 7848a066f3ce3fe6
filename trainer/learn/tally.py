"""Metrics of a step, kept as tensors until the step is over, so that counting never waits for the device."""

from __future__ import annotations

import torch


class Tally:
    """Sums, counts and peaks by name; `means` turns them into numbers in one go."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counts: dict[str, int] = {}
        self._peaks: dict[str, torch.Tensor] = {}

    def set(self, name: str, value: torch.Tensor) -> None:
        """Keep one value, the last one given."""
        self._sums[name], self._counts[name] = value.detach(), 1

    def total(self, name: str, value: torch.Tensor) -> None:
        """Take a part into a sum that counts as one value, such as a micro-batch's share of a loss."""
        self._sums[name], self._counts[name] = self._sums.get(name, 0) + value.detach(), 1

    def add(self, name: str, values: torch.Tensor) -> None:
        """Take values into the mean of all values of this name."""
        values = values.detach().double()
        self._sums[name] = self._sums.get(name, 0) + values.sum()
        self._counts[name] = self._counts.get(name, 0) + values.numel()

    def peak(self, name: str, values: torch.Tensor) -> None:
        """Take values into the largest of this name; a value that is not a number wins."""
        if values.numel():
            highest = values.detach().max()
            self._peaks[name] = torch.maximum(self._peaks[name], highest) if name in self._peaks else highest

    def take(self, other: Tally) -> None:
        """Take in another tally."""
        for name, total in other._sums.items():
            self._sums[name] = self._sums.get(name, 0) + total
            self._counts[name] = self._counts.get(name, 0) + other._counts[name]
        for name, highest in other._peaks.items():
            self.peak(name, highest)

    def means(self) -> dict[str, float]:
        """Return all metrics as numbers; one without any value is left out."""
        values = {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name]} | self._peaks
        if not values:
            return {}
        device = next((value.device for value in values.values() if value.device.type != "cpu"), torch.device("cpu"))
        numbers = torch.stack([value.to(device, torch.float64) for value in values.values()]).tolist()
        return dict(zip(values, numbers, strict=True))
