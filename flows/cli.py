"""The command line `tithe`. Nothing heavy is imported before the configuration is valid.

plan              the bill before the GPU hour
run, resume       a whole campaign, in Prefect           up          Prefect and MLflow servers on this machine
sweep             many of them that differ in some keys  compare     runs side by side
doctor            what ails a run                        lineage     where a result comes from
promote           a model into MLflow's registry         export      a model for transformers or vLLM
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
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flows.leave import Leave
from flows.plan import plan_command
from flows.workspaces import resolve_config, resolve_workspace
from tasks.command import tell
from tasks.registry import OPTIONAL_STAGES, STAGES, Stage, get_stage
from tasks.search import Kind
from tasks.workspace import REPOSITORY, Workspace, replayable
from trainer.errors import ConfigError, ModelError, TitheError, name_os_error

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


def must_be_begun(workspace: Workspace, command: str) -> None:
    """Raise ConfigError when a command is for a run that is there, and there is none."""
    if not (workspace.run / "config.json").exists():
        known = ", ".join(sorted(path.parent.name for path in workspace.root.glob("runs/*/config.json"))) or "none"
        raise ConfigError(command, str(workspace.run), f"no such run was begun; there are: {known}. `tithe run` begins one")


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

    workspace = find(recipe, overrides, run_directory, root, stages)
    must_be_begun(workspace, "resume")
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


class Engine(StrEnum):
    transformers = "transformers"
    vllm = "vllm"


RunArgument = Annotated[
    str,
    typer.Argument(help="A run id or directory, a workspace (its newest run), a sweep (its best).", metavar="RUN"),
]


@app.command()
def compare(
    words: Annotated[list[str], typer.Argument(help="Runs, or a sweep (all its trials).", metavar="RUN...|SWEEP")],
    objective: Annotated[str, typer.Option(help="Metric of training whose last value ranks the runs.")] = "heldout/reward_mean",
    html: Annotated[Path | None, typer.Option(help="Where the page goes; default: compare.html in the sweep, else here.")] = None,
    from_mlflow: Annotated[bool, typer.Option("--mlflow", help="Read what MLflow holds of them instead of their files.")] = False,
) -> None:
    """Lay runs side by side: the keys in which they differ, what each reached, their curves on one page.

    Examples:

    tithe compare campaigns/quickstart-grid-1a2b3c

    tithe compare quickstart-1a2b3c4d quickstart-5e6f7a8b --objective reward/mean
    """
    from flows.look import compare_runs

    compare_runs(words, objective, html, from_mlflow)


@app.command()
def doctor(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say whether a run is healthy, or what ails it: where, on what evidence, and which knob to turn.

    Exit code 0 for healthy, 1 for findings.

    Example: tithe doctor quickstart-1a2b3c4d
    """
    from flows.look import show_health

    raise typer.Exit(show_health(run, as_json))


@app.command()
def lineage(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For programs, with whole hashes.")] = False,
) -> None:
    """Show where a result comes from: data, base, anchors, configuration, code, environment, policy, evaluation, with hashes.

    Example: tithe lineage quickstart-1a2b3c4d
    """
    from flows.look import show_lineage

    show_lineage(run, as_json)


@app.command()
def promote(
    run: RunArgument,
    metric: Annotated[str, typer.Option(help="Of the evaluation: its gain over the base decides.")] = "pass@1",
    margin: Annotated[float, typer.Option(min=0, help="Least gain, in the metric's unit: 0.02 is two points of pass@1.")] = 0.0,
    name: Annotated[str, typer.Option(help="Of the registered model; default: the campaign's.")] = "",
    anyway: Annotated[bool, typer.Option("--anyway", help="Register it although the gate refuses; no champion then.")] = False,
) -> None:
    """Register a run's model in MLflow, with evaluation and lineage, when it beats the base beyond chance.

    The gate: the lower end of the paired bootstrap interval of the metric's gain lies above the margin.

    Example: tithe promote quickstart-1a2b3c4d --margin 0.02
    """
    from flows.look import promote_run

    promote_run(run, metric, margin, name, anyway)


@app.command()
def export(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(help="New or empty, or an earlier export.", metavar="DIR")],
    engine: Annotated[Engine, typer.Option("--for", help="Which engine will load it.")] = Engine.transformers,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, beside its base.")] = False,
) -> None:
    """Write a run's model where plain transformers or vLLM loads it, and print what to type then.

    Example: tithe export quickstart-1a2b3c4d models/adder --for vllm
    """
    from flows.look import export_run

    export_run(run, directory, engine.value, adapter)


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
def sync(recipe: Recipe = None, overrides: Override = None, root: Root = None, stages: StageList = None) -> None:
    """Send what an unreachable MLflow missed. `run` does that by itself; this is for when nothing is left to run."""
    from tasks.tracking import main as track

    workspace = find(recipe, overrides, None, root, stages)
    must_be_begun(workspace, "sync")
    raise typer.Exit(track(["sync", str(workspace.root), str(workspace.run)]))


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Run directory of an async run: runs/<campaign>-<hash>.", metavar="RUN")],
) -> None:
    """Train an async run again from its experience pool, and say whether the policy is the same to the last bit.

    Example: tithe replay campaigns/lora-async/runs/lora-async-1a2b3c4d
    """
    replayable(run)
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
