"""What `tithe` says while it works: a moving line per stage on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from flows.session import Beat, StageResult
from tasks.registry import Stage
from tasks.sweep import Outcome, Trial

PLAIN_SECONDS = 15.0
FILE_COLUMNS = 160  # of tables where there is no terminal that says how wide it is
_HOW = {"made": "made in {seconds:.1f} s", "cached": "current", "restored": "taken from the cache"}


class Console:
    """Progress and results of one campaign."""

    def __init__(self) -> None:
        wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_COLUMNS
        self._out = RichConsole(highlight=False, soft_wrap=True, width=wide)
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._last = 0.0

    def __enter__(self) -> Console:
        if self._out.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._out, transient=True)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def say(self, text: str) -> None:
        """Print a message."""
        self._out.print(text, markup=False)

    def beat(self, stage: Stage, beat: Beat) -> None:
        """Show how far a stage is."""
        self._show(stage.name, f"{stage.name}: {beat['doing']}", beat)

    def trial_beat(self, trial: Trial, stage: Stage, beat: Beat) -> None:
        """Show how far a stage of a trial is."""
        self._show(str(trial.number), f"trial {trial.number} {stage.name}: {beat['doing']}", beat)

    def _show(self, bar: str, text: str, beat: Beat) -> None:
        total = beat.get("total") or 0
        if self._progress is not None:
            if bar not in self._bars:
                self._bars[bar] = self._progress.add_task(text, total=total or None)
            self._progress.update(self._bars[bar], completed=beat["step"], total=total or None, description=text)
        elif total and time.monotonic() - self._last >= PLAIN_SECONDS:
            self._last = time.monotonic()
            self.say(f"{text}, step {beat['step']} of {total}")

    def _hide(self, bar: str) -> None:
        if self._progress is not None and bar in self._bars:
            self._progress.remove_task(self._bars.pop(bar))

    def trial_end(self, trial: Trial, outcome: Outcome | None) -> None:
        """Say how a trial ended."""
        self._hide(str(trial.number))
        if outcome is None:
            how = "stopped"
        elif outcome.state == "done":
            how = f"{outcome.result:.4g} at step {outcome.step}, {outcome.seconds:.0f} s"
        else:
            how = str(outcome.error) if outcome.state == "pruned" else f"failed: {outcome.error}"
        self.say(f"trial {trial.number} ({trial.name}): {how}")

    def result(self, result: StageResult) -> None:
        """Say how a stage ended."""
        self._hide(result.stage)
        attempts = f" at attempt {result.attempts}" if result.attempts > 1 else ""
        self.say(f"{result.stage:<9} {_HOW[result.how].format(seconds=result.seconds)}{attempts}")

    def table(self, rows: list[dict[str, Any]], title: str) -> None:
        """Print rows as a table; the columns are the keys of the first."""
        table = Table(title=title, title_justify="left")
        for name in rows[0]:
            table.add_column(name)
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        self._out.print(table)
