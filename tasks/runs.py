"""Finding runs again: a run directory from what a person types, and what it left. Reads files that may be half written.

locate("quickstart-1a2b3c4d")     a run id, of any campaign or sweep
locate("campaigns/mine")          a workspace: its newest run
locate("campaigns/mine-grid-1a")  a sweep: the run of its best trial
locate("runs/mine-1a2b3c4d")      the directory itself, or that of one of its stages
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tasks.record import Record, read_record, truth
from tasks.sweep import is_sweep, read_sweep
from tasks.workspace import REPOSITORY, Workspace, campaigns_directory
from trainer.config import CampaignConfig, validate
from trainer.errors import ConfigError, DataError, first_line, nearest
from trainer.files import read_json
from trainer.metrics import METRICS, read_sound_lines

Series = dict[str, list[tuple[float, float]]]  # metric -> (step, value), finite, in order


def known_runs() -> list[Path]:
    """Return every run directory of this repository, the newest last."""
    patterns = ("*/runs/*/config.json", "*/*/runs/*/config.json")  # of campaigns, of sweeps
    found = [path.parent for path in REPOSITORY.glob("runs/*/config.json")]
    found += [path.parent for pattern in patterns for path in campaigns_directory().glob(pattern)]
    return sorted(found, key=_age)


def _age(run: Path) -> float:
    record = read_record(run)
    return record.started if record is not None else (run / "config.json").stat().st_mtime


def places(word: str) -> tuple[Path, ...]:
    """Return the folders that a word may name."""
    return Path(word), REPOSITORY / word, campaigns_directory() / word


def locate(word: str) -> Path:
    """Return the run directory that a word means.

    Raises:
        DataError: it means none; names the nearest that there is.
    """
    for path in places(word):
        found = _at(path)
        if found is not None:
            return found.resolve()
    known = known_runs()
    named = [run for run in known if run.name == word]
    if named:
        return named[-1]
    names = [run.name for run in known]
    there = Path(word).is_dir()
    what = "is no run directory: it has no config.json" if there else "no such run"
    raise DataError(word, f"{what}; {nearest(word, names) if names else 'none was begun yet: `tithe run` begins one'}")


def _at(path: Path) -> Path | None:
    if (path / "config.json").is_file():
        return path
    if is_sweep(path):
        sweep = read_sweep(path)
        done = [sweep.workspace(trial).run for trial, outcome in sweep.ranking() if outcome.state == "done"]
        if not done:
            raise DataError(str(path), "is a sweep of which no trial is done yet; run it, or name one of its trials")
        return done[0]
    runs = sorted((found.parent for found in path.glob("runs/*/config.json")), key=_age) if path.is_dir() else []
    if runs:
        return runs[-1]
    if path.is_dir() and (path.parent / "config.json").is_file():
        return path.parent
    return None


def locate_all(words: Iterable[str]) -> list[Path]:
    """Return the run directories that words mean; a sweep means all its trials that were begun."""
    found: list[Path] = []
    for word in words:
        roots = [path for path in places(word) if is_sweep(path)]
        if roots:
            sweep = read_sweep(roots[0])
            runs = [sweep.run_of(trial) for trial in sweep.trials]
            begun = [run for run in runs if run is not None and (run / "config.json").is_file()]
            if not begun:
                raise DataError(word, "is a sweep of which no trial has begun; run it first")
            found += begun
        else:
            found.append(locate(word))
    return list(dict.fromkeys(run.resolve() for run in found))


def read_config(run: Path) -> CampaignConfig:
    """Return a run's configuration.

    Raises:
        DataError: config.json is missing, damaged or of another version.
    """
    try:
        return validate(read_json(run / "config.json"))
    except (OSError, ValueError, ConfigError) as error:
        raise DataError(str(run / "config.json"), f"cannot be read ({first_line(error)}); the run directory is damaged") from None


def workspace_of(run: Path) -> Workspace:
    """Return the workspace that a run was made in.

    Raises:
        DataError: see `read_config`.
    """
    record = read_record(run)
    root = Path(record.tags["workspace"]) if record is not None and "workspace" in record.tags else run.parent.parent
    if not root.is_dir():  # moved since
        root = run.parent.parent
    return Workspace(root, read_config(run), run)


def standing(run: Path) -> str:
    """Return how a run or a stage of it stands, and what it said last: `finished`, `killed: stopped by SIGINT; ...`."""
    record = truth(run)
    if record is None:
        return "never begun"
    if record.status == "FINISHED" or not record.error:
        return record.ending
    said = record.error.splitlines()[0]
    return said if record.ending == "pruned" else f"{record.ending}: {said}"


def read_series(path: Path) -> tuple[Series, int]:
    """Return a metrics.jsonl as series by name, and how many lines of it are broken."""
    lines, broken = read_sound_lines(path)
    series: Series = {}
    for line in lines:
        metrics, step = line.get("metrics"), line.get("step")
        if not isinstance(metrics, dict) or not isinstance(step, int | float):
            broken += 1
            continue
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                continue
            if math.isfinite(number):
                series.setdefault(name, []).append((float(step), number))
    return series, broken


@dataclass(frozen=True)
class RunFacts:
    """What a run left, as far as it is there."""

    run: Path
    config: CampaignConfig
    record: Record | None
    stages: Mapping[str, Record]
    series: Series = field(default_factory=dict)  # of training
    broken_lines: int = 0

    @property
    def status(self) -> str:
        return self.record.ending if self.record else "never begun"

    @property
    def name(self) -> str:
        return self.record.name if self.record else self.run.name

    @property
    def final(self) -> dict[str, float]:
        """The numbers that sum up its stages: `evaluate/trained/pass@1/value` and so on."""
        return {f"{name}/{key}": value for name, record in self.stages.items() for key, value in record.final.items()}

    @property
    def train_seconds(self) -> float | None:
        record = self.stages.get("train")
        return record.ended - record.started if record is not None and record.ended else None


def read_run(run: Path) -> RunFacts:
    """Return what a run left.

    Raises:
        DataError: its configuration cannot be read.
    """
    config = read_config(run)
    series, broken = read_series(run / "train" / METRICS)
    found = {path.parent.name: truth(path.parent) for path in sorted(run.glob("*/record.json"))}
    stages = {name: record for name, record in found.items() if record is not None}
    return RunFacts(run, config, truth(run), stages, series, broken)
