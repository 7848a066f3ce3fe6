"""When a reward is gamed: signals from the answers, and a watch over the metric history. Pure.

    answer_signals(texts by group)   distinct answers and repetition, one line of metrics a step
    watch(history)                   alarms that the newest held-out look gives reason for, and the one before did not

The sign of a gamed reward (PITFALLS 20 of the field) is training reward that rises while held-out reward falls. Length,
repetition and sameness of the answers say how it is done. A look is compared with the best one before, in steps of at least
two looks, because one held-out look is noisy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

TRAINING, HELDOUT, LENGTH = "reward/mean", "heldout/reward_mean", "completion/length_mean"
DISTINCT, REPETITION = "answers/distinct_fraction", "answers/repetition_fraction"
WORDS = 4
RISE, FALL = 0.03, 0.05
LONGER, REPEATED, ALIKE = 1.5, 0.2, 0.5


@dataclass(frozen=True)
class Alarm:
    signal: str  # heldout_falls, answers_grow, answers_repeat, answers_alike
    step: int
    reason: str


def repetition(text: str) -> float:
    """Return the share of a text's runs of four words that stood in it before; 0 for a short text."""
    words = text.split()
    runs = [tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def answer_signals(groups: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the share of distinct answers within groups, and the mean repetition within answers."""
    if not groups:
        return {}
    return {
        DISTINCT: fmean(len(set(group)) / len(group) for group in groups),
        REPETITION: fmean(repetition(text) for group in groups for text in group),
    }


def watch(history: Sequence[dict[str, Any]]) -> list[Alarm]:
    """Return the alarms of the newest held-out look; one that the look before already gave is not repeated.

    Args:
        history: lines of metrics.jsonl, {"step": int, "metrics": {...}}, in order.
    """
    looks = [index for index, line in enumerate(history) if HELDOUT in line["metrics"]]
    if len(looks) < 4:
        return []
    before = {alarm.signal for alarm in _alarms(history[: looks[-2] + 1], looks[:-1])}
    return [alarm for alarm in _alarms(history[: looks[-1] + 1], looks) if alarm.signal not in before]


def _alarms(history: Sequence[dict[str, Any]], looks: Sequence[int]) -> list[Alarm]:
    """Return what holds at the last look: the last two against the best two in a row before them."""
    if len(looks) < 4:
        return []
    step = int(history[-1]["step"])
    heldout = [float(history[look]["metrics"][HELDOUT]) for look in looks]
    pairs = [fmean(heldout[i : i + 2]) for i in range(len(heldout) - 3)]
    best = max(range(len(pairs)), key=lambda i: pairs[i])
    now, then = fmean(heldout[-2:]), pairs[best]
    recent, old = history[looks[-3] + 1 :], history[max(0, looks[best] - 1) : looks[best + 1] + 1]
    rise = _mean(recent, TRAINING) - _mean(old, TRAINING)
    if not rise > RISE:
        return []
    found = []
    if then - now > FALL:
        found.append(
            ("heldout_falls", f"training reward rose by {rise:.3f} while held-out reward fell from {then:.3f} to {now:.3f}")
        )
    if now <= then:
        longer = _mean(recent, LENGTH) / max(_mean(old, LENGTH), 1e-9)
        if longer > LONGER:
            found.append(("answers_grow", f"answers grew {longer:.1f} times as long, and only the training reward rose"))
        if _mean(recent, REPETITION) - _mean(old, REPETITION) > REPEATED:
            found.append(
                (
                    "answers_repeat",
                    f"{_mean(recent, REPETITION):.0%} of the answers' phrases repeat, and only the training reward rose",
                )
            )
        if _mean(recent, DISTINCT) < ALIKE * _mean(old, DISTINCT):
            found.append(
                (
                    "answers_alike",
                    f"only {_mean(recent, DISTINCT):.0%} of a group's answers are distinct, and only the training reward rose",
                )
            )
    advice = "the reward may be gamed: read the samples, and stop or change it"
    return [Alarm(signal, step, f"{reason}; {advice}") for signal, reason in found]


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    values = [float(line["metrics"][name]) for line in lines if name in line["metrics"]]
    return fmean(values) if values else float("nan")
