"""Run one stage by itself: check its inputs, hold its lock, call its function, put the artifact in place with a manifest.

`run_stage` is the only way in which a stage runs, whoever asks: the flow's child process, `dvc repro`, or a person with
`python -m tasks <stage>`. A stage whose artifact is current is left alone; was its process killed after the artifact had come
into place, then `close_record` writes what it had no time for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tasks.locks import hold
from tasks.record import begin, finish, flatten, git_tags, numbers, truth
from tasks.registry import Stage
from tasks.workspace import REPOSITORY, Workspace, params_of
from trainer.errors import DataError, StopRequested
from trainer.files import MANIFEST, damage, new_directory, read_json, read_manifest, write_manifest
from trainer.metrics import RunWriter

_NOT_FACTS = ("stage", "params", "inputs", "files", "content_sha256")  # of a manifest


def stage_lock(workspace: Workspace, stage: Stage) -> AbstractContextManager[None]:
    """Hold the only right to write a stage's artifact."""
    return hold(workspace.root / ".tithe" / f"{stage.name}.lock", f"stage {stage.name} already runs in {workspace.root}")


def stop_on_signals() -> None:
    """Make SIGTERM and SIGINT raise StopRequested in the main thread; the trainer turns it into a checkpoint first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(f"stopped by {signal.Signals(number).name}; run the same command again to go on")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def run_stage(
    workspace: Workspace, stage: Stage, force: bool = False, on_start: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Bring a stage's artifact up to date and return its manifest.

    Args:
        force: run it even when the artifact is current.
        on_start: called when it is not, before the stage begins.

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
            close_record(workspace, stage)
            return manifest
        wrong = damage(target) if target.exists() else None
        if on_start is not None:
            on_start()
        with recorded(workspace, stage):
            manifest = _make(workspace, stage, target)
        if wrong:
            RunWriter(workspace.run / stage.name).event("rebuild", f"{wrong}; the artifact was made again")
        return manifest


def _make(workspace: Workspace, stage: Stage, target: Path) -> dict[str, Any]:
    key = workspace.key(stage)
    inputs = {name: (read_manifest(workspace.artifact(name)) or {})["content_sha256"] for name in stage.inputs}
    with new_directory(target) as out:
        facts = stage.function(workspace.config, workspace.paths(stage, out))
        made_from = {"key": key, "params": params_of(stage, workspace.config), "inputs": inputs}
        manifest = write_manifest(out, {"stage": stage.name, **made_from, **facts})
    write_result(workspace.run / stage.name, manifest)
    return manifest


def write_result(run: Path, manifest: dict[str, Any]) -> None:
    """Write a stage's result.json: the facts of its artifact's manifest."""
    RunWriter(run).result({name: value for name, value in manifest.items() if name not in _NOT_FACTS})


def close_record(workspace: Workspace, stage: Stage) -> None:
    """Write that a stage ended well whose artifact is current, where a kill came between the artifact and its record."""
    run, artifact = workspace.run / stage.name, workspace.artifact(stage.artifact)
    record, manifest = truth(run), read_manifest(artifact)
    if record is None or manifest is None or record.status not in ("KILLED", "FAILED") or record.identity != manifest["key"]:
        return
    made = (artifact / MANIFEST).stat().st_mtime
    if made < record.started:  # it was to be made anew, and that attempt never came to its end
        return
    write_result(run, manifest)
    finish(run, "FINISHED", ended=made, error=None, **outcome(workspace, stage))


@contextmanager
def recorded(workspace: Workspace, stage: Stage) -> Iterator[None]:
    """Write in the stage's run directory that it runs, and how it ended."""
    run = workspace.run / stage.name
    params = flatten(params_of(stage, workspace.config))
    names = {"campaign": workspace.config.campaign.name, "run": workspace.run_id, "stage": stage.name}
    tags = {**names, "key": workspace.key(stage), **git_tags(REPOSITORY)}
    begin(run, "stage", stage.name, workspace.config, workspace.key(stage), params, tags)
    try:
        yield
    except StopRequested as stop:
        finish(run, "KILLED", error=str(stop))
        raise
    except BaseException as error:
        finish(run, "FAILED", error=f"{type(error).__name__}: {error}")
        raise
    finish(run, "FINISHED", **outcome(workspace, stage))


def outcome(workspace: Workspace, stage: Stage) -> dict[str, Any]:
    """Return what a record says of a finished stage: its final numbers and its artifact."""
    artifact = workspace.artifact(stage.artifact)
    manifest = read_manifest(artifact)
    assert manifest is not None
    final: dict[str, float] = {}
    for name in stage.metrics:
        final.update(numbers(read_json(artifact / name)))
    facts = {"path": str(artifact), "content_sha256": manifest["content_sha256"], "upload": stage.upload}
    return {"final": final, "artifact": facts}
