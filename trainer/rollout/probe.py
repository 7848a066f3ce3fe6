"""The probe: fixed completions on which a sampler must give the learner's log-probs after every load of a policy.

A policy that never reaches the engine, an adapter that is loaded but not applied, a forgotten temperature: training would go on
and learn from wrong ratios. So the sampler scores the probe after every load and stops when it is off, with the likely cause,
found by asking whose log-probs it gave instead. A sampler that stayed where it was while the learner moved is off too, however
small the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import MismatchError
from trainer.files import read_json, write_json

Scores = list[list[float]]
_NOISE = 1e-5  # mean difference below which two policies count as the same


@dataclass(frozen=True)
class Probe:
    sequences: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # (prompt ids, completion ids)
    temperature: float
    base: tuple[tuple[float, ...], ...]  # log-probs of the policy that training began with
    untempered: tuple[tuple[float, ...], ...]  # the same at temperature 1

    def write(self, path: Path) -> None:
        write_json(
            path,
            {
                "sequences": [[list(prompt), list(completion)] for prompt, completion in self.sequences],
                "temperature": self.temperature,
                "base": [list(row) for row in self.base],
                "untempered": [list(row) for row in self.untempered],
            },
        )


def read_probe(path: Path) -> Probe:
    tree = read_json(path)
    sequences = tuple((tuple(prompt), tuple(completion)) for prompt, completion in tree["sequences"])
    rows = (tuple(tuple(row) for row in tree[key]) for key in ("base", "untempered"))
    return Probe(sequences, tree["temperature"], *rows)


def difference(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Return the mean absolute difference over all tokens; infinite when shapes differ or a value is not finite."""
    a = [value for row in left for value in row]
    b = [value for row in right for value in row]
    if len(a) != len(b) or not a or not all(math.isfinite(value) for value in (*a, *b)):
        return math.inf
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


@dataclass(frozen=True)
class Look:
    """One inspection of a sampler: what the learner says of the probe, and what the sampler gave."""

    version: int
    expected: Scores
    given: Scores


def check(
    given: Scores, probe: Probe, version: int, expected: Scores, previous: Look | None, tolerance: float, who: str = "the sampler"
) -> float:
    """Return how far a sampler is from the learner on the probe, in mean absolute log-prob a token.

    Args:
        given: the sampler's log-probs; it has just loaded `version`.
        probe: what was scored.
        version: for the message.
        expected: the learner's log-probs of that version.
        previous: the look before.
        tolerance: above it the sampler stops.
        who: the sampler, for the message.

    Raises:
        MismatchError: it is off; the message names the likely cause.
    """
    apart = difference(given, expected)
    stale = previous is not None and _is_stale(given, expected, previous, apart)
    if apart <= tolerance and not stale:
        return apart
    raise MismatchError(
        f"policy version {version}: the log-probs of the probe that {who} gives are {apart:.2e} a token off the learner's "
        f"(tolerance {tolerance:.0e}). {_cause(given, probe, apart, previous, stale)}"
    )


def _is_stale(given: Scores, expected: Scores, previous: Look, apart: float) -> bool:
    """Return whether a sampler stayed where it was although the learner moved.

    Its distance to its own last answer tells it even of an engine that is a constant distance off (another precision); an engine
    that lags a version behind is nearer to the learner's last version than to this one.
    """
    moved = difference(expected, previous.expected)
    if not moved > _NOISE:
        return False
    return difference(given, previous.given) < moved / 4 or difference(given, previous.expected) < apart / 4


def _cause(given: Scores, probe: Probe, apart: float, previous: Look | None, stale: bool) -> str:
    if not math.isfinite(apart):
        return "It gave values that are not finite, or not one for every token: the policy directory or the engine is damaged"
    if stale and previous is not None:
        return f"They are those of version {previous.version}: the new weights never reached the engine (a cache by name?)"
    if difference(given, probe.base) < apart / 4:
        return "They are those of the base: the adapter is not applied"
    if probe.temperature != 1 and difference(given, probe.untempered) < apart / 4:
        return f"They are those of temperature 1: the engine ignores temperature {probe.temperature:g} when it scores"
    return (
        "Likely causes: another base, another precision or quantization of the backbone (base.dtype, "
        "train.sampler.quantization, or a server that others reload), or another chat model"
    )
