"""The run directory of one stage: what a trainer writes while it works, and what everybody else reads.

    metrics.jsonl   one line a step: {"step": 3, "time": 1764428400.1, "metrics": {"reward/mean": 0.5, ...}}
    events.jsonl    one line an event: {"time": ..., "kind": "skip", "step": 3, "reason": "...", ...}
    heartbeat       JSON of the last sign of life: {"time": ..., "pid": ..., "step": 3, "total": 60, "doing": "sampling"}
    result.json     written last, by a stage that ended well

Files only, no tracker: `tasks.tracking` ships the lines to MLflow. Importable without torch.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from trainer.files import disk_full_is_named, write_text

METRICS, EVENTS, HEARTBEAT, RESULT = "metrics.jsonl", "events.jsonl", "heartbeat", "result.json"
STAGE_PID = "TITHE_STAGE_PID"  # of the stage's own process, in those that work for it: the heartbeat is the stage's


def read_heartbeat(directory: Path) -> dict[str, Any] | None:
    """Return the last sign of life in a run directory, if there is one."""
    try:
        return dict(json.loads((directory / HEARTBEAT).read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSONL file; a last line cut off by a crash is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:  # not yet, or a run that begins anew has just removed it
        return []
    return [json.loads(line) for line in lines if line]


def read_sound_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a JSONL file that are whole objects, and how many others there are: for looking at any run."""
    if not path.is_file():
        return [], 0
    sound, broken = [], 0
    for raw in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
        except ValueError:  # torn by a crash, a full disk or a hand
            line = None
        if isinstance(line, dict):
            sound.append(line)
        elif raw.strip():
            broken += 1
    return sound, broken


class RunWriter:
    """Writes the files of one stage's run directory.

    Args:
        directory: made if it is not there.
        resume_step: metric and event lines of later steps are removed, so that a resumed run has one line a step.
            None keeps the files; 0 begins anew. A last line cut off by a crash is removed in any case.
    """

    def __init__(self, directory: Path, resume_step: int | None = None):
        self.directory = directory
        self._beating = threading.Lock()  # whoever waits for the pool gives signs of life, also beside the main thread
        directory.mkdir(parents=True, exist_ok=True)
        for path in (directory / METRICS, directory / EVENTS):
            if resume_step == 0:
                path.unlink(missing_ok=True)
            elif path.exists() and (resume_step is not None or path.read_bytes()[-1:] not in (b"", b"\n")):
                self._keep_until(path, resume_step)

    @staticmethod
    def _keep_until(path: Path, step: int | None) -> None:
        kept = [line for line in read_lines(path) if step is None or (line.get("step") or 0) <= step]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        path = self.directory / name
        with disk_full_is_named(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Append the metrics of a step; a value that is not finite is written as a string, so the line stays JSON."""
        clean = {k: (float(v) if math.isfinite(v) else str(float(v))) for k, v in values.items()}
        self._append(METRICS, {"step": step, "time": time.time(), "metrics": clean})

    def sync(self) -> None:
        """Put the lines written so far on the disk, so that a checkpoint never knows of a step whose line is lost."""
        for name in (METRICS, EVENTS):
            path = self.directory / name
            if path.exists():
                with disk_full_is_named(path), open(path, "ab") as file:
                    os.fsync(file.fileno())

    def event(self, kind: str, reason: str, step: int | None = None, **facts: Any) -> None:
        """Append an event: `kind` is one of sync, refresh, rebuild, skip, rollback, drop, alarm, resume, stop, warning."""
        self._append(EVENTS, {"time": time.time(), "kind": kind, "step": step, "reason": reason, **facts})

    def heartbeat(self, doing: str, step: int = 0, total: int = 0) -> None:
        """Say that the process lives, what it does and how far it is."""
        pid = int(os.environ.get(STAGE_PID) or os.getpid())
        beat = {"time": time.time(), "pid": pid, "step": step, "total": total, "doing": doing}
        temporary = self.directory / f".{HEARTBEAT}.tmp"
        with self._beating, disk_full_is_named(temporary):
            temporary.write_text(json.dumps(beat))
            os.replace(temporary, self.directory / HEARTBEAT)

    def result(self, values: dict[str, Any]) -> None:
        write_text(self.directory / RESULT, json.dumps(values, indent=2, sort_keys=True) + "\n")
