"""The command line of stages: `python -m tasks <stage>` and `python -m tasks.<stage>`.

Reads params.yaml of the workspace, or a resolved config.json (`--config`), before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tasks.registry import BY_NAME, get_stage, stages_of
from tasks.stage import run_stage, stop_on_signals
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, load_config, validate
from trainer.errors import TitheError
from trainer.files import read_json


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage of a campaign, or all of them in order.")
    parser.add_argument("stage", help=", ".join(BY_NAME) + ", or all")
    parser.add_argument("--workspace", type=Path, default=Path("."), help="folder with params.yaml (default: here)")
    parser.add_argument("--config", type=Path, help="params.yaml or a resolved config.json (default: params.yaml there)")
    parser.add_argument("--run-dir", type=Path, help="run directory (default: runs/<campaign>-<hash> in the workspace)")
    parser.add_argument("--force", action="store_true", help="run even when the artifact is current")
    parser.add_argument("--no-tracking", action="store_true", help="do not mirror metrics to MLflow")
    return parser.parse_args(arguments)


def read_config(path: Path) -> CampaignConfig:
    return validate(read_json(path)) if path.suffix == ".json" else load_config(path)


def limit_threads(config: CampaignConfig) -> None:
    """Give this worker its share of the cores, before torch is imported."""
    threads = config.machine.threads or os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    try:
        config = read_config(options.config or options.workspace / "params.yaml")
        limit_threads(config)
        stop_on_signals()
        workspace = Workspace(options.workspace.resolve(), config, options.run_dir and options.run_dir.resolve())
        for stage in stages_of(config) if options.stage == "all" else (get_stage(options.stage),):
            run_stage(workspace, stage, options.force)
            print(f"{stage.name}: {workspace.artifact(stage.artifact)}")
    except TitheError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    return 0
