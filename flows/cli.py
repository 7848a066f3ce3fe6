"""The command line `tithe`. Nothing heavy is imported before the configuration is valid.

plan              the bill before the GPU hour
run, resume       a whole campaign, in Prefect           up          Prefect and MLflow servers on this machine
sweep             many of them that differ in some keys
<stage>           one stage by itself                    initialise  make the databases, once
status            what is current, what runs             sync        send what MLflow missed
replay            an async run again, from its pool
anchors show DIR  what anchors a directory holds
preflight         can this reward teach this base?
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.leave import Leave
from flows.plan import plan_command
from flows.workspaces import resolve_config, resolve_workspace
from tasks.command import tell
from tasks.registry import OPTIONAL_STAGES, STAGES, Stage, get_stage
from tasks.search import Kind
from tasks.workspace import REPOSITORY, Workspace
from trainer.errors import ModelError, TitheError, name_os_error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Post-train large language models with reinforcement learning: prompts, base, anchors, train, merge, evaluate, report.",
    epilog=(
        "Examples:\n\n"
        "tithe run  (the default campaign, params.yaml)\n\n"
        "tithe run recipes/smollm2.yaml  (a recipe, in a workspace of its own)\n\n"
        "tithe run -S train.optimizer.learning_rate=3e-4  (one key changed)\n\n"
        "tithe evaluate recipes/smollm2.yaml -S evaluate.split=test\n\n"
        "tithe up  (Prefect and MLflow on this machine, until Ctrl-C)"
    ),
)

Recipe = Annotated[Path | None, typer.Argument(help="A recipe (a difference from params.yaml); default: params.yaml itself.")]
Override = Annotated[
    list[str] | None,
    typer.Option("--set", "-S", metavar="KEY=VALUE", help="Set a key, e.g. train.optimizer.learning_rate=3e-4."),
]
RunDirectory = Annotated[Path | None, typer.Option("--run-dir", help="Run directory; default: runs/<campaign>-<hash>.")]
Root = Annotated[Path | None, typer.Option("--workspace", help="Workspace; default: the repository, or campaigns/<name>.")]
NoTracking = Annotated[bool, typer.Option("--no-tracking", help="Do not mirror metrics to MLflow.")]
Fork = Annotated[
    bool | None,
    typer.Option("--fork/--no-fork", help="Fork stages from a process that holds torch, or start each anew."),
]
StageList = Annotated[str | None, typer.Option("--stages", hidden=True, help="Another list of stages, as module:NAME.")]


def find(
    recipe: Path | None, overrides: list[str] | None, run_directory: Path | None, root: Path | None, stages: str | None
) -> Workspace:
    """Return the workspace that the options mean, and warn of choices that are seldom meant."""
    config = resolve_config(recipe, overrides or ())
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return resolve_workspace(config, run_directory, root, stages or "")


@app.command()
def run(
    context: typer.Context,
    recipe: Recipe = None,
    overrides: Override = None,
    run_directory: RunDirectory = None,
    root: Root = None,
    force: Annotated[list[str] | None, typer.Option("--force-stage", help="Run this stage even when it is current.")] = None,
    force_plan: Annotated[bool, typer.Option("--force", help="Start it although the plan says that it does not fit.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Without Prefect: the same stages in a plain loop.")] = False,
    no_tracking: NoTracking = False,
    fork: Fork = None,
    stages: StageList = None,
) -> None:
    """Run a campaign: every stage that is not current, in order. Run again after anything: it goes on where it stopped.

    Examples:

    tithe run

    tithe run recipes/smollm2.yaml -S campaign.seed=1

    tithe run --force-stage evaluate
    """
    from flows.start import run_campaign

    workspace = find(recipe, overrides, run_directory, root, stages)
    run_campaign(workspace, force or [], plain, not no_tracking, context.obj, fork, force_plan)


@app.command()
def resume(
    context: typer.Context,
    recipe: Recipe = None,
    overrides: Override = None,
    run_directory: RunDirectory = None,
    root: Root = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without Prefect.")] = False,
    no_tracking: NoTracking = False,
    fork: Fork = None,
    stages: StageList = None,
) -> None:
    """Go on with a campaign that was begun, and say from where. The same as `run`, but refuses to begin a new one.

    Example: tithe resume recipes/smollm2.yaml
    """
    from flows.start import run_campaign
    from trainer.errors import ConfigError

    workspace = find(recipe, overrides, run_directory, root, stages)
    if not (workspace.run / "config.json").exists():
        known = ", ".join(sorted(path.parent.name for path in workspace.root.glob("runs/*/config.json"))) or "none"
        raise ConfigError("resume", str(workspace.run), f"no such run was begun; there are: {known}. `tithe run` begins one")
    run_campaign(workspace, [], plain, not no_tracking, context.obj, fork)


@app.command()
def sweep(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A recipe (default: params.yaml), and KEY=a,b,c or KEY=low..high[:log] for each key.", metavar="[RECIPE] KEY=..."
        ),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Every combination of the values (the default).")] = False,
    random: Annotated[int, typer.Option("--random", min=0, metavar="N", help="N draws.")] = 0,
    optuna: Annotated[
        int, typer.Option("--optuna", min=0, metavar="N", help="N trials that Optuna proposes; hopeless ones are stopped.")
    ] = 0,
    overrides: Override = None,
    objective: Annotated[str, typer.Option(help="Metric of training whose last value ranks the trials.")] = "heldout/reward_mean",
    workers: Annotated[
        int, typer.Option(min=0, help="Trials at a time, each with its share of the cores; 0 decides by the machine.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Decides the draws of --random and --optuna.")] = 0,
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Whether --optuna stops trials below the median.")] = True,
    name: Annotated[
        str, typer.Option(help="Name of the sweep; default: by what it tries, so that the same command goes on.")
    ] = "",
    root: Root = None,
    plain: Annotated[bool, typer.Option("--plain", help="Without Prefect.")] = False,
    no_tracking: NoTracking = False,
    fork: Fork = None,
    stages: StageList = None,
) -> None:
    """Run trials of one campaign that differ in some keys, several at a time. Run again: only what is missing is run.

    Prompts, base and anchors are made once. A trial that fails costs that trial alone. MLflow shows them as children of one run.

    Examples:

    tithe sweep --grid train.optimizer.learning_rate=1e-4,2e-4,4e-4 campaign.seed=0,1

    tithe sweep recipes/smollm2.yaml --random 8 train.optimizer.learning_rate=1e-6..1e-4:log train.lora.rank=4..32

    tithe sweep --optuna 20 train.optimizer.learning_rate=1e-5..1e-3:log
    """
    from flows.start import run_sweep
    from flows.trials import Asked
    from tasks.sweep import Spec
    from trainer.errors import ConfigError

    axes = [word for word in words or () if "=" in word]
    recipes = [word for word in words or () if "=" not in word]
    if len(recipes) > 1:
        raise ConfigError("sweep", " ".join(recipes), "names two recipes; a key is written as KEY=a,b,c")
    if grid + bool(random) + bool(optuna) > 1:
        raise ConfigError("sweep", "", "--grid, --random and --optuna are three ways to choose; name one")
    kind: Kind = "random" if random else "optuna" if optuna else "grid"
    spec = Spec(kind, tuple(axes), random or optuna, seed, objective, prune)
    asked = Asked(spec, Path(recipes[0]) if recipes else None, tuple(overrides or ()), workers, name, root, stages or "")
    run_sweep(asked, plain, not no_tracking, context.obj, fork)


@app.command()
def status(recipe: Recipe = None, overrides: Override = None, root: Root = None, stages: StageList = None) -> None:
    """Say of each stage whether it is current, and what runs.

    Example: tithe status recipes/smollm2.yaml
    """
    from flows.start import show_status

    show_status(find(recipe, overrides, None, root, stages))


@app.command()
def preflight(
    recipe: Recipe = None,
    overrides: Override = None,
    run_directory: RunDirectory = None,
    root: Root = None,
    no_tracking: NoTracking = False,
) -> None:
    """Score a sample of the base's completions and say whether the reward can teach; prepares prompts and base first.

    Exit code 0 for good and caution, 2 for stop.

    Example: tithe preflight recipes/smollm2.yaml -S preflight.num_prompts=16
    """
    workspace = find(recipe, overrides, run_directory, root, None)
    from tasks.artifacts import prepare_workspace
    from tasks.command import limit_threads, run_stages
    from tasks.preflight import run_preflight
    from tasks.stage import stop_on_signals

    limit_threads(workspace.config)
    os.chdir(REPOSITORY)
    stop_on_signals()
    prepare_workspace(workspace)
    run_stages(workspace, (get_stage("prepare"), get_stage("base")), False, not no_tracking)
    report = run_preflight(workspace)
    print("\n".join(report.lines()))
    raise typer.Exit(2 if report.verdict == "stop" else 0)


@app.command()
def up(
    prefect_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Prefect's API and UI.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of MLflow.")] = 5000,
    slots: Annotated[int | None, typer.Option(min=1, help="Campaigns at once; default: one a GPU, or one.")] = None,
) -> None:
    """Start Prefect, MLflow and a worker on this machine and print their addresses; Ctrl-C stops all, their history stays.

    In Prefect's UI, campaigns, evaluations and plans can then be started and scheduled (Deployments). Databases are SQLite files
    in .tithe/, or PostgreSQL: TITHE_DATABASE=postgresql://user@host/name.

    Example: tithe up --prefect-port 4201 --mlflow-port 5001
    """
    from flows.up import serve

    serve(prefect_port, mlflow_port, slots)


@app.command()
def initialise() -> None:
    """Make the databases of Prefect and MLflow, so that the first campaign starts as fast as every other."""
    from flows.up import initialise as make

    make()


@app.command()
def sync(recipe: Recipe = None, overrides: Override = None, root: Root = None) -> None:
    """Send what an unreachable MLflow missed. `run` does that by itself; this is for when nothing is left to run."""
    from tasks.tracking import main as track

    workspace = find(recipe, overrides, None, root, None)
    raise typer.Exit(track(["sync", str(workspace.root), str(workspace.run)]))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Run directory of an async run: runs/<campaign>-<hash>.", metavar="RUN")],
) -> None:
    """Train an async run again from its experience pool, and say whether the policy is the same to the last bit.

    Example: tithe replay campaigns/lora-async/runs/lora-async-1a2b3c4d
    """
    from rich.progress import Progress

    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("loading", total=None)
        from tasks.replay import replay_run

        facts = replay_run(run, lambda step, total: bar.update(task, description="replaying", completed=step, total=total))
    steps, version, compared = facts["num_steps"], facts["policy_version"], facts["versions_compared"]
    print(f"replayed {steps} steps to policy version {version}; {compared} recorded versions compared")
    if not facts["identical"]:
        raise ModelError(
            f"{run}: the replayed policy differs from the recorded one (versions {facts['versions_differing']}); "
            "replay it on the machine that trained it, with the same versions of torch and this code"
        )
    print("the policy is bit for bit the recorded one")


@app.command("anchors-show")
def show_anchors(
    directory: Annotated[Path, typer.Argument(help="artifacts/anchors, or a version: runs/<run>/train/anchors/v000001.")],
) -> None:
    """Say whose anchors a directory holds, how many, and whether every file is whole. The same as `tithe anchors show DIR`.

    Example: tithe anchors show artifacts/anchors
    """
    from tasks.anchors import describe

    print("\n".join(describe(directory)))


@app.command("dvc-yaml", hidden=True)
def dvc_yaml() -> None:
    """Write dvc.yaml of the default campaign from the registry of stages."""
    from tasks.artifacts import prepare_workspace

    prepare_workspace(resolve_workspace(resolve_config(None)))
    print(REPOSITORY / "dvc.yaml")


def _add_stage(stage: Stage) -> None:
    def run_one(
        recipe: Recipe = None,
        overrides: Override = None,
        run_directory: RunDirectory = None,
        root: Root = None,
        force: Annotated[bool, typer.Option("--force", help="Run it even when its artifact is current.")] = False,
        no_tracking: NoTracking = False,
    ) -> None:
        workspace = find(recipe, overrides, run_directory, root, None)
        from tasks.artifacts import prepare_workspace
        from tasks.command import limit_threads, run_stages
        from tasks.stage import stop_on_signals

        limit_threads(workspace.config)
        os.chdir(REPOSITORY)
        stop_on_signals()
        prepare_workspace(workspace)
        run_stages(workspace, (stage,), force, not no_tracking)

    inputs = ", ".join(stage.inputs) or "nothing"
    run_one.__doc__ = f"Stage {stage.name} by itself: {inputs} to {stage.artifact}."
    app.command(stage.name, rich_help_panel="Stages")(run_one)


app.command("plan")(plan_command)
for _stage in (*STAGES, *OPTIONAL_STAGES):
    _add_stage(_stage)


def main() -> None:
    """Run the command line; every failure that tithe names is one line and an exit code (trainer/errors.py)."""
    leave = Leave()
    code: int | str | None = 0
    try:
        arguments = sys.argv[1:]
        if arguments[:2] == ["anchors", "show"]:  # `anchors` alone is the stage, which takes a recipe
            arguments = ["anchors-show", *arguments[2:]]
        app(arguments, obj=leave)
    except SystemExit as end:
        code = end.code
    except TitheError as error:
        code = tell(error)
    except OSError as error:
        code = tell(name_os_error(error))
    if leave.at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    gc.freeze()  # half a second less: what Prefect built up need not be taken apart object by object
    sys.exit(code)


if __name__ == "__main__":
    main()
