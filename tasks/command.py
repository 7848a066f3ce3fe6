"""The command line of stages: `python -m tasks <stage>` and `python -m tasks.<stage>`.

Reads params.yaml of the workspace, or a resolved config.json (`--config`), before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tasks.record import Status
from tasks.registry import OPTIONAL_STAGES, STAGES, Stage, get_stage, optional_stages
from tasks.stage import run_stage, stop_on_signals
from tasks.tracking import PARENT_TRACKS, Session
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, load_config, validate
from trainer.errors import ConfigError, StopRequested, TitheError, first_line, name_os_error
from trainer.files import read_json
from trainer.processes import die_with_parent, return_blocks

FLOW_PID = "TITHE_FLOW_PID"  # process that this stage must not outlive


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage of a campaign, or all of them in order.")
    parser.add_argument("stage", help=", ".join(stage.name for stage in (*STAGES, *OPTIONAL_STAGES)) + ", all, or plan")
    parser.add_argument("--workspace", type=Path, default=Path("."), help="folder with params.yaml (default: here)")
    parser.add_argument("--config", type=Path, help="params.yaml or a resolved config.json (default: params.yaml there)")
    parser.add_argument("--run-dir", type=Path, help="run directory (default: runs/<campaign>-<hash> in the workspace)")
    parser.add_argument(
        "--force", action="store_true", help="run even when the artifact is current; plan: even when it cannot fit"
    )
    parser.add_argument("--no-tracking", action="store_true", help="do not mirror metrics to MLflow")
    parser.add_argument("--stages", default="", help="another list of stages than the registry's, as module:NAME")
    return parser.parse_args(arguments)


def read_config(path: Path) -> CampaignConfig:
    if path.suffix != ".json":
        return load_config(path)
    try:
        tree = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError("--config", str(path), f"cannot be read ({first_line(error)}); name a config.json") from None
    return validate(tree)


def limit_threads(config: CampaignConfig) -> None:
    """Give this worker its share of the cores, before torch is imported.

    A thread that waits for the others of its team spins a quarter of a millisecond and then sleeps. OpenMP's own choice, several
    milliseconds, burns a core while whoever has the other's is at work: three times slower beside two busy processes.
    """
    threads = config.machine.threads or len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def load_stages(name: str) -> tuple[Stage, ...]:
    """Return the list of stages that `module:NAME` names; an empty name is the registry's."""
    if not name:
        return STAGES
    module, _, attribute = name.partition(":")
    stages: tuple[Stage, ...] = getattr(import_module(module), attribute)
    return stages


def run_stages(workspace: Workspace, stages: Sequence[Stage], force: bool = False, tracking: bool = True) -> None:
    """Run stages in order, mirrored to MLflow unless a flow does that for them or tracking is off."""
    session = Session(workspace) if tracking and PARENT_TRACKS not in os.environ else None
    status: Status = "FAILED"
    problem: str | None = None
    try:
        for stage in stages:
            run_stage(workspace, stage, force, on_start=session.start if session else None)
            print(f"{stage.name}: {workspace.artifact(stage.artifact)}", flush=True)
        status = "FINISHED"
    except StopRequested as stop:
        status, problem = "KILLED", str(stop)
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise
    finally:
        if session:
            session.end(status, problem)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        config = read_config(options.config or options.workspace / "params.yaml")
        limit_threads(config)
        if options.stage == "train":  # whose memory is planned; the others would only pay in time
            return_blocks()
        stop_on_signals()
        if FLOW_PID in os.environ:
            die_with_parent(lambda: os.getppid() == int(os.environ[FLOW_PID]))
        run_directory = options.run_dir and options.run_dir.resolve()
        workspace = Workspace(options.workspace.resolve(), config, run_directory, load_stages(options.stages), options.stages)
        if options.stage == "plan":
            from tasks.plan import gate

            print("\n".join(gate(workspace, options.force)), flush=True)
            return 0
        every = (*optional_stages(config), *workspace.stages)
        stages = every if options.stage == "all" else (get_stage(options.stage, workspace.stages),)
        run_stages(workspace, stages, options.force, not options.no_tracking)
    except TitheError as error:
        return tell(error)
    except OSError as error:
        return tell(name_os_error(error))
    return 0


def tell(error: TitheError) -> int:
    """Print what went wrong, a line each, and return the exit code."""
    for line in str(error).splitlines():
        print(f"{'stopped' if isinstance(error, StopRequested) else 'error'}: {line}", file=sys.stderr)
    return error.exit_code
