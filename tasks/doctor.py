"""What a run directory says of a run's health: read here, judged by the rules of trainer.diagnosis.

config.json, record.json, plan.json              what was asked for, how it stands, what was planned
train/metrics.jsonl, events.jsonl, heartbeat     what happened; a line that a crash has torn is counted and passed over
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tasks.locks import Owner
from tasks.runs import RunFacts, read_run, read_series
from trainer.diagnosis import ENOUGH_STEPS, Finding, Signs, diagnose, pace
from trainer.files import read_json
from trainer.metrics import EVENTS, HEARTBEAT, METRICS, read_sound_lines

_PHASES = {
    "sample": "sampling",
    "wait": "waiting for samples",
    "learn": "learning",
    "reward": "judging",
    "anchors": "anchors",
    "hand_over": "handing the policy over",
    "log": "the pool",
}


@dataclass(frozen=True)
class Health:
    """What is known of a run's health."""

    facts: RunFacts
    findings: tuple[Finding, ...]
    lines: tuple[str, ...]  # what a person reads first

    @property
    def is_healthy(self) -> bool:
        return not self.findings


def look(run: Path) -> Health:
    """Judge a run, finished or not.

    Raises:
        DataError: its configuration cannot be read.
    """
    facts = read_run(run)
    found = signs_of(facts)
    findings = tuple(diagnose(found)) if found.num_steps or found.error or found.silent_seconds else ()
    return Health(facts, findings, tuple(_lines(facts, found, findings)))


def signs_of(facts: RunFacts) -> Signs:
    """Return what the rules look at."""
    train = facts.run / "train"
    events, _ = read_sound_lines(train / EVENTS)
    forecast, _ = read_series(facts.run / METRICS)
    planned = {
        name.removeprefix("plan/predicted_"): points[-1][1]
        for name, points in forecast.items()
        if name.startswith("plan/predicted_")
    }
    beat = _beat(train)
    record = facts.stages.get("train")
    running = record is not None and record.status == "RUNNING"
    silent = time.time() - beat["time"] if running and beat else None
    said = (facts.record,) if facts.status == "pruned" else (facts.record, *facts.stages.values())
    errors = [entry.error for entry in said if entry is not None and entry.error]
    host = float(psutil.virtual_memory().total) if record is not None and Owner.from_json(record.owner).is_here else None
    return Signs(
        facts.config,
        facts.series,
        events,
        "running" if running else facts.status,
        "; ".join(dict.fromkeys(errors)),
        silent,
        str(beat.get("doing", "")),
        planned,
        host,
    )


def _beat(train: Path) -> dict[str, Any]:
    try:
        beat = read_json(train / HEARTBEAT)
        return {**beat, "time": float(beat["time"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _lines(facts: RunFacts, signs: Signs, findings: tuple[Finding, ...]) -> list[str]:
    total = sum(stage.steps for stage in facts.config.train.stages)
    lines = [f"{facts.run.name}: {signs.status}, {signs.num_steps} of {total} training steps"]
    if signs.error:
        lines.append(f"it said: {signs.error.splitlines()[0]}")
    shares = pace(signs)
    if shares:
        step = signs.middle("time/step_seconds")
        parts = ", ".join(f"{_PHASES.get(name, name)} {share:.0%}" for name, share in list(shares.items())[:4] if share >= 0.005)
        planned = signs.planned.get("step_seconds")
        lines.append(f"a step takes {step:.3g} s{f' (planned {planned:.3g})' if planned else ''}: {parts}")
    if facts.broken_lines:
        lines.append(f"{facts.broken_lines} lines of its metrics are broken and were passed over")
    if signs.num_steps < ENOUGH_STEPS and not findings:
        lines.append(f"too early to say more: the rules want {ENOUGH_STEPS} steps")
    elif not findings:
        lines.append("healthy: none of the known troubles shows")
    return lines
