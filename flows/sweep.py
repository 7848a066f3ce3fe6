"""The Prefect flow `sweep`: one task per trial, several at a time, then the ranking as a table.

    sweep             typed, for a deployment: whoever fills in its form starts it from Prefect's UI
    run_in_prefect    what `tithe sweep` calls where Prefect is

A trial's stages are no tasks here: a sweep's page shows trials. Trials run in threads of flows.trials with the flow's context;
a wish to stop comes from signals or from the flow run's state, and reaches all of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, flow, get_client, get_run_logger, runtime, task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from flows.campaign import AWAY, STATE_SECONDS, PrefectAway, artifact_key, naming_prefect_away
from flows.deployments import Name, RecipeName, stopped
from flows.flow_runs import note
from flows.session import Stop
from flows.trials import Asked, Runner, resolve_sweep, rows_of
from flows.workspaces import PARAMS
from tasks.search import Kind
from tasks.sweep import OBJECTIVE, Outcome, Spec, Trial
from tasks.workspace import REPOSITORY
from trainer.errors import StopRequested, TitheError


def flow_run() -> FlowRun:
    """Return the flow run that this is called in."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    return context.flow_run


@contextmanager
def cancellation_heard(stop: Stop) -> Iterator[None]:
    """Ask to stop when somebody cancels the flow run; Prefect may be away meanwhile."""
    run_id, over = flow_run().id, threading.Event()

    def watch() -> None:
        while not over.wait(STATE_SECONDS):
            with suppress(*AWAY), get_client(sync_client=True) as client:
                state = client.read_flow_run(run_id).state
                if state is not None and (state.type == StateType.CANCELLING or state.is_final()):
                    stop.ask(f"the flow run was set to {state.name} in Prefect")

    thread = threading.Thread(target=copy_context().run, args=(watch,), name="watch-sweep", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


class Progress:
    """The progress artifact of a sweep: trials that have ended, of all."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self._artifact: Any = None

    def show(self) -> None:
        sweep = self.runner.sweep
        total = max(len(sweep.trials), sweep.spec.num_trials)
        ended = sum(sweep.outcome(trial) is not None for trial in sweep.trials)
        text = f"{ended} of {total} trials"
        with suppress(*AWAY):
            if self._artifact is None:
                key = artifact_key(sweep.name)
                self._artifact = create_progress_artifact(progress=100.0 * ended / total, key=key, description=text)
            else:
                update_progress_artifact(artifact_id=self._artifact, progress=100.0 * ended / total, description=text)


def perform_as_task(runner: Runner, trial: Trial) -> Outcome | None:
    """Run a trial as a task; a Prefect that is away costs the trial nothing."""

    @task(name="trial", task_run_name=f"{trial.number} {trial.name}"[:200], cache_policy=NO_CACHE, persist_result=False)
    def run() -> State[Any]:
        outcome = runner.run_trial(trial)
        kept.append(outcome)
        if outcome is None:
            return Cancelled(message=runner.stop.reason or "stopped; the same command goes on with it")
        if outcome.state == "failed":
            return Failed(message=outcome.error)
        name = "Pruned" if outcome.state == "pruned" else "Completed"
        return Completed(name=name, message=f"{runner.sweep.spec.objective} {outcome.result} at step {outcome.step}")

    kept: list[Outcome | None] = []
    try:
        run(return_state=True)
    except TitheError:
        raise
    except AWAY as problem:
        runner.say(f"warning: Prefect is away ({str(problem)[:150]}); trial {trial.number} goes on without it")
    return kept[0] if kept else runner.run_trial(trial)


def run_trials(runner: Runner) -> State[Any]:
    """Run a sweep inside a flow, and return the flow's state."""
    note(str(flow_run().id), runner.sweep.root, deployed=flow_run().deployment_id is not None)
    progress = Progress(runner)
    before = runner.on_end

    def ended(trial: Trial, outcome: Outcome | None) -> None:
        before(trial, outcome)
        progress.show()

    runner.on_end = ended
    error: TitheError | None = None
    with cancellation_heard(runner.stop):
        try:
            runner.run(lambda trial: perform_as_task(runner, trial))
        except TitheError as problem:
            error = problem
    with suppress(*AWAY):
        rows = rows_of(runner.sweep)
        if rows:
            create_table_artifact(key=artifact_key(runner.sweep.name, "trials"), table=rows, description=str(runner.sweep.root))
    if isinstance(error, StopRequested):
        return Cancelled(message=str(error))
    return Failed(message=str(error), data=error) if error else Completed(message=f"{len(runner.sweep.trials)} trials")


def run_name() -> str:
    """Return the name of the current flow run: the sweep's, so that it is found in MLflow and on disk."""
    try:
        return resolve_sweep(asked_for(**runtime.flow_run.parameters))[0].name
    except (TitheError, OSError):
        return Path(runtime.flow_run.parameters["recipe"]).stem


def asked_for(
    recipe: str,
    axes: Sequence[str],
    search: Kind,
    trials: int,
    overrides: Sequence[str],
    objective: str,
    workers: int,
    seed: int,
    prune: bool,
    name: str,
) -> Asked:
    """Return what a form asks for."""
    kept = [tuple(text.strip() for text in texts if text.strip()) for texts in (axes, overrides)]
    spec = Spec(search, kept[0], 0 if search == "grid" else trials, seed, objective, prune)
    return Asked(spec, REPOSITORY / recipe, kept[1], workers, name.strip(), None, os.environ.get("TITHE_STAGES", ""))


@flow(name="sweep", flow_run_name=run_name, persist_result=False)
def sweep(
    recipe: RecipeName = PARAMS.name,
    axes: Annotated[list[str], Field(min_length=1)] = ["train.optimizer.learning_rate=1e-4,2e-4,4e-4"],  # noqa: B006
    search: Kind = "grid",
    trials: Annotated[int, Field(ge=1, le=1000)] = 8,
    overrides: list[str] = [],  # noqa: B006 (read only, and the form shows an empty list)
    objective: str = OBJECTIVE,
    workers: Annotated[int, Field(ge=0)] = 0,
    seed: Annotated[int, Field(ge=0)] = 0,
    prune: bool = True,
    name: Name = "",
) -> Any:
    """Run trials of one campaign that differ in some keys. Started again, only what is missing is run.

    Args:
        recipe: What the trials differ from; params.yaml is the default campaign.
        axes: One key=a,b,c or key=low..high[:log] each.
        search: grid: every combination. random: draws. optuna: proposals from what earlier trials gave.
        trials: How many, for random and optuna.
        overrides: Keys to change in every trial, one key=value each.
        objective: Metric of training whose last value ranks the trials.
        workers: Trials at a time, each with its share of the cores; 0 decides by the machine.
        seed: Decides the draws of random and optuna.
        prune: Whether optuna stops trials that are below the median of the others.
        name: Empty: by what is tried, so that the same form goes on with the same sweep.
    """
    os.chdir(REPOSITORY)
    asked = asked_for(recipe, axes, search, trials, overrides, objective, workers, seed, prune, name)
    try:
        found, at_a_time = resolve_sweep(asked)
    except TitheError as error:
        return Failed(message=str(error))
    runner = Runner(found, at_a_time, get_run_logger().info)
    state = run_trials(runner)
    return stopped(runner.stop.reason) if runner.stop else state


def sweep_flow(runner: Runner) -> Flow[[str], Any]:
    """Return the flow of a sweep that is resolved already."""

    @flow(name="sweep", flow_run_name=runner.sweep.name, persist_result=False, validate_parameters=False)
    def run(folder: str) -> Any:
        """A sweep: trials of one campaign that differ in some keys."""
        return run_trials(runner)

    return run


def run_in_prefect(runner: Runner) -> None:
    """Run a sweep as a Prefect flow.

    Raises:
        StopRequested, TitheError: how the sweep ended. PrefectAway: Prefect failed, not the sweep.
    """
    with naming_prefect_away(runner.stop):
        state: State[Any] = sweep_flow(runner)(str(runner.sweep.root), return_state=True)  # type: ignore[assignment]
        error: Any = state.result(raise_on_failure=False)
    if runner.stop:
        raise runner.stop.error()
    if isinstance(error, TitheError):
        raise error
    if not state.is_completed():
        raise PrefectAway(f"Prefect ended the flow run as {state.name} ({state.message})")
