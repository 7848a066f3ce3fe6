"""What Prefect, MLflow and DVC cost: the same campaign by itself and orchestrated, alternating, each in a fresh workspace.

    bare          `python -m tasks all --no-tracking`: one process, no server, no tracker, no data versioning
    orchestrated  `tithe run`: stages as processes of their own, Prefect's private server, MLflow, a DVC commit

Wall and CPU seconds of the whole process tree. The databases exist and the code is compiled beforehand, as after `make setup`
and a first command; nothing else is warm.

    python -m benchmarks.overhead            make bench-overhead            expected: below 10 % of the quickstart
    python -m benchmarks.overhead -S base.scratch.steps=400 -S train.stages.0.steps=3   a shrunken campaign: seconds, not percent
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.workspaces import resolve_config
from tasks.artifacts import prepare_workspace
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import CampaignConfig
from trainer.files import write_json

RESULTS = Path(__file__).parent / "results"
BOUND = 0.10
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Measured:
    """One run of a campaign."""

    kind: str
    wall_seconds: float
    cpu_seconds: float


def cpu_seconds() -> float:
    """Return the CPU time of all children of this process that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def adopt_orphans() -> None:
    """Become the parent of every process that a campaign leaves to itself, so that its CPU time is counted (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Wait for all children, adopted ones too."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def measure(kind: str, command: list[str], environment: dict[str, str]) -> Measured:
    before, started = cpu_seconds(), time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    wall = time.monotonic() - started
    reap()
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Measured(kind, wall, cpu_seconds() - before)


def bare(config: CampaignConfig, folder: Path) -> Measured:
    workspace = Workspace(folder / "bare", config)
    prepare_workspace(workspace)
    command = [sys.executable, "-m", "tasks", "all", "--no-tracking", "--workspace", str(workspace.root)]
    return measure("bare", command, {})


def orchestrated(config: CampaignConfig, overrides: list[str], folder: Path, state: Path) -> Measured:
    """Run in a fresh workspace with fresh databases, so that nothing comes out of a cache."""
    shutil.copytree(state, folder / "state")
    options = [word for override in overrides for word in ("-S", override)]
    command = [sys.executable, "-m", "flows.cli", "run", *options, "--workspace", str(folder / "orchestrated")]
    return measure("orchestrated", command, {"TITHE_STATE": str(folder / "state")})


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the platform costs.")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind")
    parser.add_argument("--set", "-S", action="append", default=[], metavar="KEY=VALUE", help="change the default campaign")
    options = parser.parse_args()
    config = resolve_config(None, options.set)
    adopt_orphans()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile anew what it imports
    subprocess.run([sys.executable, "-m", "compileall", "-q", "flows", "tasks", "trainer"], cwd=REPOSITORY, check=True)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="tithe-overhead-") as name:
        place = Path(name)
        state = place / "state"
        os.environ["TITHE_STATE"] = str(state)
        subprocess.run([sys.executable, "-m", "flows.cli", "initialise"], cwd=REPOSITORY, check=True)
        for number in range(options.rounds):
            folder = place / str(number)
            runs = [lambda f=folder: bare(config, f), lambda f=folder: orchestrated(config, options.set, f, state)]
            for run in runs if number % 2 == 0 else reversed(runs):
                found.append(run())
                print(f"{found[-1].kind}: {found[-1].wall_seconds:.1f} s, {found[-1].cpu_seconds:.1f} s of CPU", flush=True)
    show(found, config)


def show(found: list[Measured], config: CampaignConfig) -> None:
    """Print medians and the difference, and keep the measurements."""
    wall, cpu = (
        {kind: statistics.median(getattr(m, field) for m in found if m.kind == kind) for kind in ("bare", "orchestrated")}
        for field in ("wall_seconds", "cpu_seconds")
    )
    table = Table(title="What Prefect, MLflow and DVC cost (medians)", title_justify="left")
    for column in ("", "bare", "orchestrated", "difference", "share"):
        table.add_column(column, justify="right" if column else "left")
    for label, values in (("wall seconds", wall), ("CPU seconds", cpu)):
        alone, together = values["bare"], values["orchestrated"]
        more = together - alone
        table.add_row(label, f"{alone:.1f}", f"{together:.1f}", f"{more:+.1f}", f"{100 * more / alone:.1f} %")
    Console().print(table)
    share = wall["orchestrated"] / wall["bare"] - 1
    print(f"{'below' if share < BOUND else 'NOT below'} {BOUND:.0%} of the bare campaign's wall time")
    write_json(
        RESULTS / "overhead.json",
        {"campaign": config.campaign.name, "share_of_wall": share, "runs": [asdict(measured) for measured in found]},
    )


if __name__ == "__main__":
    main()
