"""Verdicts as metrics: statuses, parts, and what judging costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from trainer.types import Verdict, VerdictStatus


def summarise(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the metrics of a step's verdicts, one verdict per sample.

    Returns:
        `reward/status_<status>_fraction` for every status, `reward/part_<name>`: mean weighted term,
        `reward/part_<name>_status_<status>_fraction` for each part of a mix, where it is not 0, and
        `reward/judge_seconds_mean`, `reward/judge_seconds_max`: of one answer.
    """
    if not verdicts:
        return {}
    count = len(verdicts)
    metrics = {
        f"reward/status_{status}_fraction": sum(v.status == status for v in verdicts) / count
        for status in get_args(VerdictStatus)
    }
    for name in dict.fromkeys(name for verdict in verdicts for name in verdict.parts):
        metrics[f"reward/part_{name}"] = sum(verdict.parts.get(name, 0.0) for verdict in verdicts) / count
    for name, status in dict.fromkeys(item for verdict in verdicts for item in verdict.statuses.items()):
        share = sum(verdict.statuses.get(name) == status for verdict in verdicts) / count
        metrics[f"reward/part_{name}_status_{status}_fraction"] = share
    metrics["reward/judge_seconds_mean"] = sum(verdict.seconds for verdict in verdicts) / count
    metrics["reward/judge_seconds_max"] = max(verdict.seconds for verdict in verdicts)
    return metrics


def part_shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return, for each part of a mix, `part_<name>_ok_fraction`: of held-out answers, whatever the part weighs in training."""
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.statuses)
    return {f"part_{name}_ok_fraction": sum(v.statuses.get(name) == "ok" for v in verdicts) / len(verdicts) for name in names}
