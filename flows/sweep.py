"""The Prefect flow `sweep`: one task per trial, several at a time, then the ranking as a table.

    sweep             typed, for a deployment: whoever fills in its form starts it from Prefect's UI
    run_in_prefect    what `tithe sweep` calls where Prefect is

A trial's stages are no tasks here: a sweep's page shows trials. Trials run in threads of flows.trials with the flow's context;
a wish to stop comes from signals or from the flow run's state, and reaches all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, flow, get_client, task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from flows.campaign import AWAY, STATE_SECONDS, PrefectAway, artifact_key
from flows.session import Stop
from flows.trials import Asked, Runner, resolve_sweep, rows_of
from tasks.search import Kind
from tasks.sweep import OBJECTIVE, Outcome, Spec, Trial
from trainer.errors import StopRequested, TitheError

_AXES, _NONE = ["train.optimizer.learning_rate=1e-4,2e-4,4e-4"], list[str]()


@contextmanager
def cancellation_heard(stop: Stop) -> Iterator[None]:
    """Ask to stop when somebody cancels the flow run; Prefect may be away meanwhile."""
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    run_id, over = context.flow_run.id, threading.Event()

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


@flow(name="sweep", persist_result=False)
def sweep(
    recipe: Annotated[str, Field(description="A recipe (a difference from params.yaml), or params.yaml itself.")] = "params.yaml",
    search: Annotated[
        Kind, Field(description="grid: every combination. random: draws. optuna: proposals, with pruning.")
    ] = "grid",
    axes: Annotated[list[str], Field(description="key=a,b,c or key=low..high[:log], one a line", min_length=1)] = _AXES,
    trials: Annotated[int, Field(description="How many, for random and optuna.", ge=1, le=1000)] = 8,
    overrides: Annotated[list[str], Field(description="Keys to set in every trial: key=value")] = _NONE,
    objective: Annotated[str, Field(description="Metric of training whose last value ranks the trials.")] = OBJECTIVE,
    workers: Annotated[int, Field(description="Trials at the same time; 0 decides by the machine.", ge=0)] = 0,
    seed: Annotated[int, Field(description="Decides the draws of random and optuna.", ge=0)] = 0,
    prune: Annotated[bool, Field(description="Whether optuna stops trials that are worse than the median.")] = True,
    name: Annotated[str, Field(description="Name of the sweep; empty derives it, so that the same form goes on.")] = "",
) -> Any:
    """A sweep: trials of one campaign that differ in some keys; what is done already is not run again."""
    spec = Spec(search, tuple(axes), trials if search != "grid" else 0, seed, objective, prune)
    found, at_a_time = resolve_sweep(Asked(spec, Path(recipe), tuple(overrides), workers, name))
    return run_trials(Runner(found, at_a_time, lambda text: print(text, flush=True)))


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
    try:
        state: State[Any] = sweep_flow(runner)(str(runner.sweep.root), return_state=True)  # type: ignore[assignment]
        error: Any = state.result(raise_on_failure=False)
    except TitheError:
        raise
    except AWAY as problem:
        if runner.stop:
            raise runner.stop.error() from problem
        raise PrefectAway(f"Prefect is away ({' '.join(str(problem).split())[:150]})") from problem
    if runner.stop:
        raise runner.stop.error()
    if isinstance(error, TitheError):
        raise error
    if not state.is_completed():
        raise PrefectAway(f"Prefect ended the flow run as {state.name} ({state.message})")
