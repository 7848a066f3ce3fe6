"""Run one stage by itself: check its inputs, hold its lock, call its function, put the artifact in place with a manifest.

`run_stage` is the only way in which a stage runs, whoever asks: the flow's child process, `dvc repro`, or a person with
`python -m tasks <stage>`. A stage whose artifact is current is left alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tasks.registry import Stage
from tasks.workspace import Workspace, params_of
from trainer.errors import BusyError, DataError, StopRequested
from trainer.files import damage, new_directory, read_manifest, write_manifest
from trainer.metrics import RunWriter


@contextmanager
def stage_lock(workspace: Workspace, stage: Stage) -> Iterator[None]:
    """Hold the only right to write a stage's artifact; the lock dies with its process."""
    path = workspace.root / ".tithe" / f"{stage.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BusyError(
                f"stage {stage.name} already runs in {workspace.root} (pid {file.read().strip()}); wait or stop it"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def stop_on_signals() -> None:
    """Make SIGTERM and SIGINT raise StopRequested in the main thread; the trainer turns it into a checkpoint first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(f"stopped by {signal.Signals(number).name}; run the same command again to go on")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def run_stage(workspace: Workspace, stage: Stage, force: bool = False) -> dict[str, Any]:
    """Bring a stage's artifact up to date and return its manifest.

    Raises:
        DataError: an input is missing or damaged. BusyError: somebody else runs it. Any TitheError of the stage itself.
    """
    with stage_lock(workspace, stage):
        workspace.claim_run()
        for name in stage.inputs:
            wrong = damage(workspace.artifact(name))
            if wrong:
                raise DataError(wrong, "the artifact is damaged; remove its directory and run the stage that makes it again")
        target = workspace.artifact(stage.artifact)
        if not force and workspace.is_current(stage):
            manifest = read_manifest(target)
            assert manifest is not None
            return manifest
        key = workspace.key(stage)
        inputs = {name: (read_manifest(workspace.artifact(name)) or {})["content_sha256"] for name in stage.inputs}
        with new_directory(target) as out:
            paths = workspace.paths(stage, out)
            paths.run.mkdir(parents=True, exist_ok=True)
            facts = stage.function(workspace.config, paths)
            made_from = {"key": key, "params": params_of(stage, workspace.config), "inputs": inputs}
            manifest = write_manifest(out, {"stage": stage.name, **made_from, **facts})
        RunWriter(workspace.run / stage.name).result({"key": key, **facts})
        return manifest
