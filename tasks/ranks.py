"""A stage over several processes: torchrun's own launcher (torch elastic) starts the ranks, here or on several machines.

    launch      in the stage's process: writes down what there is to do, starts the ranks here, waits, says how it ended
    main        `python -m tasks.ranks <run>/ranks/assignment.json`: one rank, started by it (or by torchrun on another machine)

    <run>/ranks/assignment.json   configuration and paths, for every rank
    <run>/ranks/<rank>/           run directory of a rank; the first one writes the stage's own
    <run>/ranks/<rank>.json       how it ended

On SIGTERM the stage passes the wish on; ranks stop together, after a checkpoint. A rank that dies takes the others with it: the
launcher ends them, and the kernel does when the stage itself is killed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from tasks.registry import StagePaths
from tasks.workspace import REPOSITORY
from trainer.config import CampaignConfig, as_tree, validate
from trainer.errors import ConfigError, RankError, StopRequested, TitheError, first_line
from trainer.files import read_json, write_json
from trainer.metrics import STAGE_PID, RunWriter
from trainer.processes import die_with_parent, return_blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.engine.team import Team

RANKS, ASSIGNMENT, STOP = "ranks", "assignment.json", "stop"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "imed out")  # words of gloo and NCCL


@dataclass(frozen=True)
class Rank:
    """This process as one of a team."""

    team: Team
    mesh: DeviceMesh
    first_run: Path  # the stage's run directory, which the first rank writes


@dataclass(frozen=True)
class Assignment:
    """All that a rank needs to know."""

    config: dict[str, Any]
    inputs: dict[str, str]
    out: str
    run: str
    identity: str
    stage_pid: int
    num_ranks: int  # on this machine

    @property
    def paths(self) -> StagePaths:
        return StagePaths({name: Path(path) for name, path in self.inputs.items()}, Path(self.out), Path(self.run), self.identity)


# -- the stage's process ----------------------------------------------------------------------------------------------------


def ranks_here(config: CampaignConfig) -> int:
    """Return the number of ranks on this machine."""
    import torch

    gpus, asked = torch.cuda.device_count() if config.machine.device != "cpu" else 0, config.machine.ranks
    if gpus and asked > gpus:
        raise ConfigError("machine.ranks", asked, f"NCCL takes one rank a GPU, and here are {gpus}; lower it, or set device: cpu")
    return asked or gpus or 1


def launch(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Run the train stage over ranks and return its facts.

    Raises:
        RankError: a rank died. Any TitheError that a rank ended with.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder, machine, count = paths.run / RANKS, config.machine, ranks_here(config)
    shutil.rmtree(folder, ignore_errors=True)
    inputs = {name: str(path.resolve()) for name, path in paths.inputs.items()}
    place = (str(paths.out.resolve()), str(paths.run.resolve()), paths.identity)
    write_json(folder / ASSIGNMENT, asdict(Assignment(as_tree(config), inputs, *place, os.getpid(), count)))
    endpoint, meeting = machine.rendezvous or "localhost:0", paths.identity[:16]
    if machine.nodes > 1:
        RunWriter(paths.run).event("ranks", _invitation(folder, machine.nodes, count, endpoint, meeting))
    start = LaunchConfig(
        min_nodes=machine.nodes,
        max_nodes=machine.nodes,
        nproc_per_node=count,
        run_id=meeting,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"timeout": int(machine.patience_seconds)},
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGUSR2",  # nobody sends it: the wish to stop is passed on below, without a deadline
        local_addr="localhost" if machine.nodes == 1 else None,
    )
    threads = max((machine.threads or os.cpu_count() or 1) // count, 1)
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    failed: Mapping[int, Any] = {}
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), STAGE_PID: str(os.getpid())}
    with _environment(**ours), _passing_on_stop(folder):
        try:
            elastic_launch(start, sys.executable)("-m", "tasks.ranks", str(folder / ASSIGNMENT))
        except ChildFailedError as error:
            failed = error.failures
    if failed:
        raise _reason(folder, {rank: (failure.pid, failure.exitcode) for rank, failure in failed.items()})
    facts: dict[str, Any] = read_json(folder / "0.json")["facts"]
    return facts


def _invitation(folder: Path, nodes: int, count: int, endpoint: str, meeting: str) -> str:
    """Return what is to be run on each of the other machines, which see the run directory and the inputs under the same paths."""
    options = [f"--nnodes={nodes}", f"--nproc-per-node={count}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    command = ["python", "-m", "torch.distributed.run", *options, f"--rdzv-id={meeting}", "-m", "tasks.ranks"]
    said = shlex.join([*command, str(folder / ASSIGNMENT)])
    return f"waiting for {nodes - 1} more machines; on each, in this repository: {said}"


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Have environment variables for the processes that are started in this block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _passing_on_stop(folder: Path) -> Iterator[None]:
    """Give SIGTERM and SIGINT to the ranks, those too that are not there yet, instead of ending here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        (folder / STOP).write_text(signal.Signals(number).name, encoding="utf-8")
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if "tasks.ranks" in child.cmdline():
                    child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(folder: Path, failed: Mapping[int, tuple[int, int]]) -> TitheError:
    """Return why the ranks ended: the failure that the others followed.

    Args:
        failed: process id and exit code (negative: a signal) by rank, of those that the launcher saw fail first.
    """
    ends = {int(path.stem): read_json(path) for path in folder.glob("[0-9]*.json")}
    named = [end for _, end in sorted(ends.items()) if end["exit_code"] and not end["follows"]]
    killed = {rank: pid_code for rank, pid_code in failed.items() if rank not in ends and pid_code[1] < 0}
    if (folder / STOP).exists() and not any(end["named"] for end in named):
        return StopRequested(f"stopped by {(folder / STOP).read_text()}; run the same command again to go on")
    if killed:
        rank, (pid, code) = min(killed.items())
        return RankError(
            f"rank {rank} (pid {pid}) was ended by {signal.Signals(-code).name}, and the others with it; "
            "run the same command again to go on from the last checkpoint"
        )
    if named and named[0]["named"]:
        error = StopRequested if named[0]["exit_code"] == StopRequested.exit_code else TitheError
        reason = error(named[0]["message"])
        reason.exit_code = named[0]["exit_code"]
        return reason
    if named:
        return RankError(f"rank {named[0]['rank']} failed: {named[0]['message']}; its traceback is in the stage's log")
    if ends:
        waited = next(iter(ends.values()))["message"]
        return RankError(f"the ranks lost each other: {waited}; run the same command again to go on from the last checkpoint")
    pid, code = next(iter(failed.values()))
    return RankError(f"rank {min(failed)} (pid {pid}) ended with exit code {code} before it began; see the stage's log")


# -- one rank ---------------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Work as one rank; RANK, WORLD_SIZE and the like are in the environment."""
    return_blocks()
    assignment = Assignment(**read_json(Path(arguments[0])))
    rank = int(os.environ["RANK"])
    end = Path(assignment.run) / RANKS / f"{rank}.json"
    # who may have ended already is known by the stage alone; on another machine torchrun says nothing of itself
    parent = int(os.environ.get(STAGE_PID) or os.getppid())
    os.environ[STAGE_PID] = str(assignment.stage_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage
    signal.signal(signal.SIGTERM, _stop)
    try:
        die_with_parent(lambda: os.getppid() == parent, signal.SIGKILL)
        if (Path(assignment.run) / RANKS / STOP).exists():
            raise StopRequested("stopped before it began; run the same command again to go on")
        facts = _work(assignment, rank)
    except TitheError as error:
        write_json(end, {"rank": rank, **_ending(error)})
        return error.exit_code
    except Exception as error:
        write_json(end, {"rank": rank, **_ending(error)})
        raise
    write_json(end, {"rank": rank, "exit_code": 0, "follows": False, "facts": facts})
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise StopRequested(f"stopped by {signal.Signals(number).name}; run the same command again to go on")


def _work(assignment: Assignment, number: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from tasks.train import train
    from trainer.engine.team import Team
    from trainer.policy.load import pick_device

    config, paths = validate(assignment.config), assignment.paths
    device = pick_device(config.machine.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    patience = timedelta(seconds=config.machine.patience_seconds)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl", timeout=patience)
    team = Team(dist.new_group(backend="gloo", timeout=patience))
    rank = Rank(team, init_device_mesh(device.type, (team.size,)), paths.run)
    own = paths if team.is_first else replace(paths, run=paths.run / RANKS / str(number))
    try:
        facts = train(config, own, rank)
    except StopRequested:
        team.wait()  # for the first rank's checkpoint: the launcher ends all when one is gone
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    team.wait()
    dist.destroy_process_group()
    return facts


def _ending(error: Exception) -> dict[str, Any]:
    """Return how a rank ended, for the stage; `follows`: only because another rank is gone."""
    import torch.distributed as dist

    named = isinstance(error, TitheError)
    lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST))
    message = str(error) if named else f"{type(error).__name__}: {first_line(error)}"
    code = error.exit_code if isinstance(error, TitheError) else 1
    return {"exit_code": code, "message": message, "named": named, "follows": lost or isinstance(error, RankError)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
