"""The heartbeat: what every layer's gradient norm usually is, and whether it is that now.

A layer whose norm is not finite, or (after a warm-up) above its limit, stops the optimizer step. The limit is `factor` times the
running mean; where gradients are unsteady it is `factor` standard deviations above the mean, and it is never below `factor`
times the norm to which gradients are clipped: a sparse reward gives long quiet stretches, and the first signal after one is no
fault. Norms of stopped steps and norms of exactly 0 do not enter the history. Mean and variance are exponential, so that a run's
beginning does not judge its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class _Pulse:
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0


@dataclass(frozen=True)
class Alarm:
    """A norm that stops a step."""

    layer: str
    value: float
    limit: float  # inf where the value is not finite

    @property
    def reason(self) -> str:
        if not math.isfinite(self.value):
            return "not finite"
        return f"gradient norm {self.value:.3g} above the layer's limit of {self.limit:.3g}"


class Heartbeat:
    """Watches gradient norms by layer.

    Args:
        factor: times its mean that a norm may be; 0 looks for values that are not finite only.
        warmup: steps that enter the history before it judges.
        clip_norm: norm to which gradients are clipped; up to `factor` times it is always let through.
        memory: steps over which the history reaches back, roughly.
    """

    def __init__(self, factor: float, warmup: int, clip_norm: float = 0.0, memory: int = 100):
        self.factor, self.warmup, self.clip_norm, self.memory = factor, warmup, clip_norm, memory
        self._pulses: dict[str, _Pulse] = {}

    def restart(self) -> None:
        """Forget the history: another RL stage has other prompts, and other norms."""
        self._pulses = {}

    def check(self, layer: str, norm: float) -> Alarm | None:
        """Return an alarm when this norm must stop the step."""
        if not math.isfinite(norm):
            return Alarm(layer, norm, math.inf)
        pulse = self._pulses.get(layer)
        if not self.factor or pulse is None or pulse.count < self.warmup or pulse.mean == 0.0:
            return None
        limit = max(self.factor * max(pulse.mean, self.clip_norm), pulse.mean + self.factor * math.sqrt(pulse.variance))
        return Alarm(layer, norm, limit) if norm > limit else None

    def take(self, norms: Mapping[str, float]) -> None:
        """Take the norms of a step that was applied into the history."""
        for layer, norm in norms.items():
            if norm == 0.0:
                continue
            pulse = self._pulses.setdefault(layer, _Pulse())
            pulse.count += 1
            share = 1.0 / min(pulse.count, self.memory)
            apart = norm - pulse.mean
            pulse.mean += share * apart
            pulse.variance = (1 - share) * (pulse.variance + share * apart**2)

    def state(self) -> dict[str, list[float]]:
        """Return the history as JSON: [count, mean, variance] by layer."""
        return {layer: [pulse.count, pulse.mean, pulse.variance] for layer, pulse in self._pulses.items()}

    def load(self, state: Mapping[str, list[float]]) -> None:
        self._pulses = {layer: _Pulse(int(count), mean, variance) for layer, (count, mean, variance) in state.items()}
