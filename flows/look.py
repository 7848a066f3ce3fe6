"""What is done with runs that are there: compare, doctor, lineage, promote, export. Runs no stage."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.console import Console
from tasks.compare import from_files, page, table
from tasks.runs import locate, locate_all, places, read_run
from tasks.sweep import is_sweep
from trainer.errors import DataError
from trainer.files import write_text

if TYPE_CHECKING:
    from tasks.promote import Engine


def compare_runs(words: Sequence[str], objective: str, html: Path | None, from_mlflow: bool) -> None:
    """Print and draw runs side by side.

    Raises:
        DataError: no such run.
    """
    runs = locate_all(words)
    if from_mlflow:
        from tasks.tracking import read_rows

        rows = read_rows(runs)
    else:
        rows = from_files([read_run(run) for run in runs])
    if not any(row.last(objective) is not None for row in rows):
        known = sorted({name for row in rows for name in row.curves})
        raise DataError(
            objective, f"no run has measured it; --objective takes {', '.join(known) or 'nothing yet: none has a step'}"
        )
    title = words[0].rstrip("/").rpartition("/")[2] if len(words) == 1 else f"{len(rows)} runs"
    Console().table(table(rows, objective), title)
    root = next((path for path in places(words[0]) if is_sweep(path)), None)
    target = html or (root or Path()) / "compare.html"
    write_text(target, page(title, rows, objective))
    print(f"page: {target}")


def show_health(word: str, as_json: bool) -> int:
    """Print a run's health, and return the exit code that says it.

    Raises:
        DataError: no such run.
    """
    from tasks.doctor import look

    health = look(locate(word))
    if as_json:
        print(
            json.dumps(
                {"run": str(health.facts.run), "healthy": health.is_healthy, "findings": [asdict(f) for f in health.findings]},
                indent=2,
            )
        )
        return 0 if health.is_healthy else 1
    for line in health.lines:
        print(line)
    for finding in health.findings:
        print(f"\n{finding.symptom} ({finding.where}): {finding.says}")
        for sentence in finding.evidence:
            print(f"  - {sentence}")
        print(f"  turn: {finding.knob}")
    sys.stdout.flush()
    return 0 if health.is_healthy else 1


def promote_run(word: str, metric: str, margin: float, name: str, anyway: bool) -> None:
    """Register a run's model, and say which version it is.

    Raises:
        DataError, ModelError, NotBetter, TrackingError: why not.
    """
    from tasks.promote import promote

    verdict, versions = promote(locate(word), metric, margin, name, anyway)
    print(f"gate: {verdict.sentence}")
    for version in versions:
        how = "was registered before" if version.was_there else "registered"
        champion = ", and is the champion" if verdict.passes else "; the champion stays who it is"
        print(f"{version.name} version {version.number} {how}{champion}")


def export_run(word: str, target: Path, engine: Engine, adapter: bool) -> None:
    """Write a run's model for an engine, and print what to type then."""
    from tasks.promote import export

    lines = export(locate(word), target, engine, adapter)
    print(f"written: {target}")
    for line in lines:
        print(line)


def show_lineage(word: str, as_json: bool) -> None:
    """Print where a run's result comes from.

    Raises:
        DataError: no such run.
    """
    from tasks.lineage import lineage

    tree = lineage(locate(word))
    print(json.dumps(tree.as_tree(), indent=2) if as_json else "\n".join(tree.lines()))
