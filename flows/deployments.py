"""The flows that a person starts or schedules from Prefect's UI; prefect.yaml makes deployments of them, `tithe up` registers it.

    campaign   every stage that is not current, as `tithe run` does it
    evaluate   evaluation and report by themselves, with other settings than before
    plan       the bill before the GPU hour, as `tithe plan` makes it

Their parameters are the form that the UI shows: a recipe from a list of the files there are, and keys to change. A flow run
that is cancelled in the UI ends as Cancelled after a checkpoint; one whose worker stops is scheduled again and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from uuid import UUID

from prefect import flow, get_client, get_run_logger, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from flows.campaign import AWAY, artifact_key, show_results, walk
from flows.flow_runs import note, schedule_again
from flows.session import Beat, Session, StageResult, open_session, run_plainly
from flows.workspaces import PARAMS, recipe_names, resolve_config, resolve_workspace
from tasks.registry import STAGES, Stage
from tasks.workspace import REPOSITORY, Workspace, state_directory
from trainer.config import CampaignConfig
from trainer.errors import StopRequested, TitheError

if TYPE_CHECKING:
    RecipeName: TypeAlias = str
    PlanName: TypeAlias = str
    StageName: TypeAlias = str
else:
    RecipeName = Literal[recipe_names()]
    PlanName = Literal[recipe_names("recipes", "recipes/plans")]
    StageName = Literal[tuple(stage.name for stage in STAGES)]

Name = Annotated[str, Field(max_length=60)]


def configuration(recipe: str, name: str = "", overrides: Sequence[str] = ()) -> CampaignConfig:
    """Return the configuration that a form asks for.

    Raises:
        ConfigError: it is wrong.
    """
    named = [f"campaign.name={name.strip()}"] if name.strip() else []
    return resolve_config(REPOSITORY / recipe, [*named, *(text.strip() for text in overrides if text.strip())])


def workspace_of(config: CampaignConfig) -> Workspace:
    """Return the workspace of a configuration; TITHE_STAGES names another list of stages, as module:NAME."""
    return resolve_workspace(config, stages_name=os.environ.get("TITHE_STAGES", ""))


def run_name() -> str:
    """Return the name of the current flow run: the campaign's run id, so that it is found in MLflow and on disk."""
    form = runtime.flow_run.parameters
    try:
        config = configuration(form["recipe"], form.get("name", ""), form.get("overrides") or ())
        return workspace_of(config).run_id
    except (TitheError, OSError):
        return Path(form["recipe"]).stem


def plan_name() -> str:
    """Return the name of a flow run of `plan`: what the bill is for."""
    form = runtime.flow_run.parameters
    parts = [Path(form["target"]).stem, form.get("model"), form.get("hardware"), f"x{form['devices']}" if form["devices"] else ""]
    return " ".join(str(part) for part in parts if part)


@flow(name="campaign", flow_run_name=run_name, persist_result=False)
def campaign(
    recipe: RecipeName = PARAMS.name,
    name: Name = "",
    overrides: list[str] = [],  # noqa: B006 (read only, and the form shows an empty list)
    force: list[StageName] = [],  # noqa: B006
) -> Any:
    """Run a campaign: every stage that is not current, from prompts to report. Started again it goes on where it stopped.

    Args:
        recipe: params.yaml is the default campaign.
        name: Empty: the recipe's own. Another name is another campaign beside it.
        overrides: Keys to change, one key=value each, e.g. train.optimizer.learning_rate=3e-4
        force: Stages to run even when nothing of theirs changed.
    """
    return run_stages(recipe, name, overrides, force)


@flow(name="evaluate", flow_run_name=run_name, persist_result=False)
def evaluate(recipe: RecipeName = PARAMS.name, name: Name = "", overrides: list[str] = []) -> Any:  # noqa: B006
    """Evaluate a trained campaign again, and write its report.

    Args:
        recipe: The recipe that was trained.
        name: The campaign's name, where it was given another.
        overrides: What to do otherwise, one key=value each, e.g. evaluate.num_prompts=1024 or evaluate.split=test
    """
    return run_stages(recipe, name, overrides, ["evaluate", "report"], only=("evaluate", "report"))


@flow(name="plan", flow_run_name=plan_name, persist_result=False)
def plan(
    target: PlanName = PARAMS.name,
    model: str = "",
    hardware: str = "",
    devices: Annotated[int, Field(ge=0)] = 0,
    overrides: list[str] = [],  # noqa: B006
) -> Any:
    """Say before it starts whether a campaign fits, what binds and what it costs.

    Args:
        target: A recipe, or a plan file.
        model: A known name, e.g. qwen3-8b, or a directory. Empty: the recipe's.
        hardware: A known device, e.g. h100-80gb, or local. Empty: the file's.
        devices: Training devices; 0: as the file says.
        overrides: Keys to change, one key=value each, e.g. train.method=lora
    """
    from tasks.plan import Asked, gather, write_page
    from trainer.plan.advice import advise
    from trainer.plan.plan import make_plan

    try:
        asked = Asked(REPOSITORY / target, model or None, hardware or None, devices or None, None, None, tuple(overrides))
        made = make_plan(gather(asked))
    except TitheError as error:
        return Failed(message=str(error))
    advice = advise(made)
    page = state_directory() / "plans" / f"{runtime.flow_run.id}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_page(made, page, advice)
    sentence = made.verdict.sentence[0].upper() + made.verdict.sentence[1:]
    steps = [f"* {step.change.says(step.after.request)}: {step.effect}" for step in (*advice.fit, *advice.faster)]
    lines = [f"**{sentence}.**", "", f"{made.schedule.binds} sets the pace.", "", *steps, "", f"Page with every term: `{page}`"]
    create_markdown_artifact(key=artifact_key("plan", Path(target).stem), markdown="\n".join(lines))
    return Completed(message=sentence) if made.verdict.fits else Completed(name="DoesNotFit", message=sentence)


def run_stages(recipe: str, name: str, overrides: Sequence[str], force: Sequence[str], only: Collection[str] = ()) -> State[Any]:
    """Run stages of a campaign in the current flow run, and return the state that it ends in."""
    logger = get_run_logger()
    os.chdir(REPOSITORY)
    try:
        config = configuration(recipe, name, overrides)
        for warning in config.warnings():
            logger.warning(warning)
        workspace = workspace_of(config)
        logger.info(f"campaign {workspace.run_id} in {workspace.root}")
        note(str(runtime.flow_run.id), workspace.run, deployed=True)
        with open_session(workspace, logger.info, force) as session:
            state = orchestrated(session, only)
    except StopRequested as stop:
        return stopped(str(stop))
    except TitheError as error:
        return Failed(message=str(error))
    if state.is_completed():
        with suppress(*AWAY):
            show_results(session)
    return state


def orchestrated(session: Session, only: Collection[str]) -> State[Any]:
    """Walk the stages as tasks; where Prefect fails on the way, go on without it, and raise what failed by itself."""
    logger = get_run_logger()

    def result(value: StageResult) -> None:
        logger.info(f"{value.stage}: {value.how} in {value.seconds:.1f} s")

    def beat(stage: Stage, value: Beat) -> None:
        """Prefect shows the progress artifact instead."""

    try:
        state = walk(session, beat, result, only)
    except TitheError:
        raise
    except AWAY as problem:
        logger.warning(f"Prefect is away ({problem}); the campaign goes on without it, and nothing is lost")
        run_plainly(session, beat, result, only)
        return Completed(message="ended well while Prefect was away")
    if session.stop:
        raise session.stop.error()
    if state.is_failed() and isinstance(state.data, TitheError):
        raise state.data
    return state


def stopped(reason: str) -> State[Any]:
    """Return how a flow run ends that was stopped: as Cancelled where a person wished it, scheduled again where the worker stops.

    Raises:
        Abort: it is scheduled again; this attempt says no more.
    """
    flow_run = UUID(str(runtime.flow_run.id))
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(flow_run).state
        if state is not None and (state.is_cancelling() or state.is_cancelled()):
            return Cancelled(message=reason)
        because = "the worker stopped; the next one goes on from the last checkpoint"
        schedule_again(str(client.api_url).rstrip("/"), str(flow_run), because)
    raise Abort(reason)
