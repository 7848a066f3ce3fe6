"""A campaign in Prefect: one task per stage of the registry, each around `Session.attempt`.

    walk              stages in order, then the artifacts a person looks for: results table, report, MLflow link
    campaign_flow     walk as a flow of this process's own; the flows that deployments start (flows/deployments.py) walk too
    <stage> (task)    called directly, on the main thread, so that signals reach it; retried only where that can heal;
                      ends as Completed, Cached (current), Restored (from the cache), Cancelled or Failed
    Watcher (thread)  moves the progress artifact, makes alarms events, reads whether somebody cancelled the run in the UI

Whatever Prefect itself cannot do (no server, a server that dies) raises PrefectAway; the stages' files are then all there is,
and enough: the plain loop goes on from them.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow, flow, get_client, runtime, task
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import TaskRunContext, get_run_context
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import CancelledRun, PrefectException
from prefect.logging.handlers import APILogWorker
from prefect.states import Cancelled, Completed, Failed
from prefect.tasks import Task

from flows.flow_runs import note
from flows.session import Beat, Session, StageFailed, StageResult, Stop, retry_delay, signals_ask
from flows.summary import comparison, mlflow_link, report_page
from tasks.registry import Stage
from tasks.workspace import Workspace
from trainer.errors import StopRequested, TitheError
from trainer.metrics import EVENTS, read_lines

PROGRESS_SECONDS, STATE_SECONDS = 4.0, 10.0
AWAY = (httpx.HTTPError, PrefectException, OSError, RuntimeError)
_STATE_NAMES = {"made": "Completed", "cached": "Cached", "restored": "Restored"}

OnBeat = Callable[[Stage, Beat], None]
OnResult = Callable[[StageResult], None]


class PrefectAway(TitheError):
    """Prefect cannot be reached; nothing of the campaign is lost."""


def artifact_key(*parts: str) -> str:
    """Return a name that Prefect takes as an artifact's key."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class Alarms:
    """Makes the alarms of a stage, which its run directory holds, events of Prefect: a person can hang a notification on them."""

    def __init__(self, workspace: Workspace, stage: Stage):
        self._path = workspace.run / stage.name / EVENTS
        self._workspace, self._stage = workspace, stage
        self._since = time.time()

    def emit(self) -> None:
        """Send what was written since the last call."""
        for line in read_lines(self._path):
            if line["kind"] != "alarm" or line["time"] <= self._since:
                continue
            self._since = line["time"]
            name = f"{self._workspace.run_id}, {self._stage.name}"
            resource = {"prefect.resource.id": f"tithe.run.{self._workspace.run_id}", "prefect.resource.name": name}
            emit_event(f"tithe.alarm.{line.get('signal', 'other')}", resource, payload=line)


class Watcher:
    """A thread beside one attempt at a stage: progress to Prefect, cancellation from it. Prefect may be away meanwhile."""

    def __init__(self, session: Session, stage: Stage):
        self.session, self.stage = session, stage
        context = get_run_context()
        assert isinstance(context, TaskRunContext)
        self.run_id = context.task_run.flow_run_id
        self.beat: Beat | None = None
        self._over = threading.Event()
        self._shown: Beat | None = None
        self._artifact: Any = None
        self._alarms = Alarms(session.workspace, stage)

    @contextmanager
    def beside(self) -> Iterator[None]:
        thread = threading.Thread(target=copy_context().run, args=(self._watch,), name=f"watch-{self.stage.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(timeout=5)
            with suppress(*AWAY):
                self._alarms.emit()

    def _watch(self) -> None:
        asked = time.monotonic()
        while not self._over.wait(PROGRESS_SECONDS):
            with suppress(*AWAY):
                self._show_progress()
                self._alarms.emit()
            if time.monotonic() - asked >= STATE_SECONDS:
                asked = time.monotonic()
                with suppress(*AWAY):
                    self._read_state()

    def _show_progress(self) -> None:
        beat = self.beat
        if beat is None or beat == self._shown or not beat.get("total"):
            return
        percent = min(100.0, 100.0 * beat["step"] / beat["total"])
        description = f"{self.stage.name}: {beat['doing']}, step {beat['step']} of {beat['total']}"
        if self._artifact is None:
            key = artifact_key(self.session.workspace.config.campaign.name, self.stage.name)
            self._artifact = create_progress_artifact(progress=percent, key=key, description=description)
        else:
            update_progress_artifact(artifact_id=self._artifact, progress=percent, description=description)
        self._shown = beat

    def finish(self) -> None:
        """Fill the progress bar of a stage that ended well."""
        if self._artifact is not None:
            with suppress(*AWAY):
                update_progress_artifact(artifact_id=self._artifact, progress=100.0, description=f"{self.stage.name}: done")

    def _read_state(self) -> None:
        assert self.run_id is not None
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(self.run_id).state
        if state is not None and (state.type == StateType.CANCELLING or state.is_final()):
            self.session.stop.ask(f"the flow run was set to {state.name} in Prefect")


def stage_task(session: Session, stage: Stage, on_beat: OnBeat, on_result: OnResult) -> Task[[], Any]:
    """Return a stage as a Prefect task."""

    def can_heal(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
        error: Any = state.result(raise_on_failure=False)
        return isinstance(error, StageFailed) and session.tries_again(error)

    @task(
        name=stage.name,
        task_run_name=stage.name,
        retries=session.retries,
        retry_delay_seconds=[float(retry_delay(n)) for n in range(session.retries)] or 0.0,
        retry_condition_fn=can_heal,
        cache_policy=NO_CACHE,
        persist_result=False,
    )
    def run() -> State[Any]:
        watcher = Watcher(session, stage)

        def beat(value: Beat) -> None:
            watcher.beat = value
            on_beat(stage, value)

        try:
            with watcher.beside():
                result = session.attempt(stage, beat)
        except StopRequested as stop:
            return Cancelled(message=str(stop))
        watcher.finish()
        on_result(result)
        message = f"{result.how} in {result.seconds:.1f} s: {session.workspace.artifact(stage.artifact)}"
        return Completed(name=_STATE_NAMES[result.how], message=message, data=result.how)

    return run


def show_results(session: Session) -> None:
    """Leave in the flow run what a person looks for there."""
    workspace = session.workspace
    name = workspace.config.campaign.name
    results = session.results.values()
    stages = [{"stage": r.stage, "result": r.how, "seconds": round(r.seconds, 1), "attempts": r.attempts} for r in results]
    create_table_artifact(key=artifact_key(name, "stages"), table=stages, description=f"Stages of {workspace.run_id}")
    rows = comparison(workspace)
    if rows:
        create_table_artifact(key=artifact_key(name, "evaluation"), table=rows, description="Base and trained, before and after")
    link = mlflow_link(workspace)
    page = report_page(workspace)
    if page is not None:
        create_markdown_artifact(key=artifact_key(name, "report"), markdown=report_text(workspace, page, rows, link))
    if link:
        create_link_artifact(key=artifact_key(name, "mlflow"), link=link, link_text="MLflow run")


def report_text(workspace: Workspace, page: Path, rows: Sequence[Mapping[str, str]], link: str | None) -> str:
    """Return what the flow run says of the report, as Markdown: the figures, and where the page with the curves is."""
    lines = [f"# {workspace.run_id}", ""]
    if rows:
        lines += ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
        lines += ["| " + " | ".join(row.values()) + " |" for row in rows] + [""]
    if link:
        inside = f"{page.parent.name}/{page.name}"
        lines += [f"[Report with curves and samples]({link}/artifacts/{inside}) · [MLflow run]({link})", ""]
    return "\n".join([*lines, f"Report: `{page}`", "", f"Run directory: `{workspace.run}`"])


def walk(session: Session, on_beat: OnBeat, on_result: OnResult, only: Collection[str] = ()) -> State[Any]:
    """Bring the stages up to date as tasks of the flow run that this is called in, and return the state that it ends in.

    Args:
        only: names of stages to bring up to date; empty for all.
    """
    with signals_ask(session.stop):
        for stage in session.chosen(only):
            state = stage_task(session, stage, on_beat, on_result)(return_state=True)
            if state.is_cancelled():
                return Cancelled(message=session.stop.reason)
            if not state.is_completed():
                error: Any = state.result(raise_on_failure=False)
                return Failed(message=str(error), data=error)
    return Completed(message=f"{len(session.results)} stages")


def campaign_flow(session: Session, on_beat: OnBeat, on_result: OnResult) -> Flow[[str, str], Any]:
    """Return the flow of one session."""

    @flow(name="campaign", flow_run_name=session.workspace.run_id, persist_result=False, validate_parameters=False)
    def campaign(workspace: str, run: str) -> Any:
        """One campaign: prompts to report."""
        note(str(runtime.flow_run.id), session.workspace.run, deployed=False)
        state = walk(session, on_beat, on_result)
        if state.is_completed():
            with suppress(*AWAY):
                show_results(session)
        return state

    return campaign


def drain(timeout_seconds: float) -> bool:
    """Let Prefect send the logs and events that it still holds; return whether they arrived.

    Without it they would be sent at the interpreter's end, when a private server is gone, and retried for two minutes.
    """
    waiting: set[Any] = set()
    for worker in (APILogWorker, EventsWorker):
        outcome: Any = worker.drain_all(timeout=timeout_seconds)
        waiting |= outcome[1]
    return not waiting


@contextmanager
def naming_prefect_away(stop: Stop) -> Iterator[None]:
    """Raise PrefectAway where Prefect fails in this block, unless somebody asked to stop."""
    try:
        yield
    except TitheError:
        raise
    except AWAY as problem:
        if stop:
            raise stop.error() from problem
        text = " ".join(str(problem).split()) or type(problem).__name__
        raise PrefectAway(f"Prefect is away ({text[:150]})") from problem


def run_in_prefect(session: Session, on_beat: OnBeat, on_result: OnResult) -> None:
    """Run the stages as a Prefect flow.

    Raises:
        StageFailed, StopRequested: how the campaign ended. PrefectAway: Prefect failed, not the campaign.
    """
    run = campaign_flow(session, on_beat, on_result)
    with naming_prefect_away(session.stop):
        state: State[Any] = run(str(session.workspace.root), str(session.workspace.run), return_state=True)  # type: ignore[assignment]
        error: Any = state.result(raise_on_failure=False)
    if session.stop or isinstance(error, CancelledRun):
        raise session.stop.error()
    if isinstance(error, TitheError):
        raise error
    if not state.is_completed():
        raise PrefectAway(f"Prefect ended the flow run as {state.name} ({state.message})")
