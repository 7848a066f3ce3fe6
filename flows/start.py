"""From a valid configuration to a running campaign: session, server, Prefect, and what is said about it.

What takes long starts early and side by side: the process that stages are forked from, Prefect's server and `import prefect`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from flows.console import Console
from flows.flow_runs import directory, settle
from flows.leave import Leave
from flows.server import PrivateServer, ServerError, find_server, private_server, settings
from flows.session import Session, Stop, open_session, run_plainly
from flows.summary import comparison, mlflow_link, report_page
from flows.trials import Asked, Runner, resolve_sweep, rows_of
from flows.workspaces import resolve_config
from tasks.locks import Owner
from tasks.record import truth
from tasks.registry import get_stage
from tasks.sweep import Sweep
from tasks.workspace import Workspace
from trainer.errors import StopRequested, TitheError
from trainer.files import read_json, read_manifest
from trainer.metrics import HEARTBEAT
from trainer.processes import importing

DRAIN_SECONDS = 10.0


def run_campaign(
    workspace: Workspace,
    force: Sequence[str],
    plain: bool,
    tracking: bool,
    leave: Leave,
    fork: bool | None = None,
    force_plan: bool = False,
) -> None:
    """Run a campaign and show what came out.

    Raises:
        TitheError: how it failed or was stopped.
    """
    for name in force:
        get_stage(name, workspace.stages)
    with Console() as console:
        console.say(f"campaign {workspace.run_id} in {workspace.root}")
        tell_from_where(workspace, console)
        try:
            with open_session(workspace, console.say, force, tracking, fork, force_plan) as session:
                try:
                    if plain or not orchestrated(session, console, leave):
                        run_plainly(session, console.beat, console.result)
                except KeyboardInterrupt:
                    raise StopRequested("interrupted; run the same command again to go on") from None
        finally:
            if not plain:
                tell_prefect()
    show_end(workspace, console)


def tell_prefect() -> None:
    """Tell a Prefect that was away how the campaign ended, if it is back; else the next `tithe up` does (flows/flow_runs.py)."""
    if any(directory().glob("*.json")):
        with suppress(ServerError, httpx.HTTPError):
            server = find_server()
            if server is not None:
                settle(server, over=True)


def orchestrated(session: Session, console: Console, leave: Leave) -> bool:
    """Run the campaign in Prefect, and return whether Prefect was there to the end. What failed by itself raises."""

    def run() -> None:
        from flows.campaign import run_in_prefect

        run_in_prefect(session, console.beat, console.result)

    return in_prefect(run, session.go_ahead, session.stop, console, leave)


def in_prefect(run: Callable[[], None], meanwhile: Callable[[], None], stop: Stop, console: Console, leave: Leave) -> bool:
    """Do something with Prefect, and return whether Prefect was there to the end. What failed by itself raises.

    Args:
        run: raises PrefectAway where Prefect was what failed.
        meanwhile: done while a private server still starts.
    """
    os.environ.update(settings())
    try:
        with api(stop, meanwhile) as server:
            meanwhile()
            with importing():
                from flows.campaign import PrefectAway, drain

            if server is not None:
                server.wait_ready(stop=stop, meanwhile=meanwhile)
            if stop:
                raise stop.error()
            try:
                run()
            except PrefectAway as error:
                console.say(f"warning: {error}; the campaign goes on without it, and nothing is lost")
                return False
            finally:
                leave.at_once = not drain(DRAIN_SECONDS)
                with suppress(httpx.HTTPError):
                    settle(os.environ["PREFECT_API_URL"], over=True)
    except ServerError as error:
        console.say(f"warning: {error}; the campaign goes on without Prefect, and nothing is lost")
        return False
    return True


def run_sweep(asked: Asked, plain: bool, tracking: bool, leave: Leave, fork: bool | None = None) -> None:
    """Run a sweep and show how its trials rank.

    Raises:
        TitheError: how it failed or was stopped.
    """
    sweep, workers = resolve_sweep(asked)
    with Console() as console:
        runner = Runner(sweep, workers, console.say, console.trial_beat, tracking, fork, on_end=console.trial_end)
        many = max(len(sweep.trials), sweep.spec.num_trials)
        done = sum(sweep.is_done(trial) for trial in sweep.trials)
        console.say(f"sweep {sweep.name} in {sweep.root}: {many} trials, {done} done, {workers} at a time")
        try:

            def run() -> None:
                from flows.sweep import run_in_prefect

                run_in_prefect(runner)

            if done < many:
                runner.warm()
            if plain or done == many or not in_prefect(run, lambda: None, runner.stop, console, leave):
                runner.run()
        except KeyboardInterrupt:
            raise StopRequested("interrupted; run the same command again to go on") from None
        finally:
            show_trials(runner.sweep, console)


def show_trials(sweep: Sweep, console: Console) -> None:
    """Print how the trials rank, and what to do with the best."""
    rows = rows_of(sweep)
    if rows:
        console.table(rows, f"{sweep.name}, by {sweep.spec.objective}")
    ranking = sweep.ranking()
    if ranking and ranking[0][1].state == "done":
        best = sweep.workspace(ranking[0][0])
        console.say(f"best: trial {ranking[0][0].number} ({ranking[0][0].name}) in {best.run}")
        console.say(f"next: {program('tithe')} compare {shlex.quote(_near(sweep.root))}")


@contextmanager
def api(stop: Stop, meanwhile: Callable[[], None]) -> Iterator[PrivateServer | None]:
    """Make PREFECT_API_URL name a server: one that runs already (gives None), or a private one that is starting."""
    found = find_server()
    before = os.environ.get("PREFECT_API_URL")
    try:
        if found is not None:
            os.environ["PREFECT_API_URL"] = found
            yield None
        else:
            with private_server(stop, meanwhile) as server:
                os.environ["PREFECT_API_URL"] = server.api_url
                yield server
    finally:
        if before is None:
            os.environ.pop("PREFECT_API_URL", None)
        else:
            os.environ["PREFECT_API_URL"] = before


def tell_from_where(workspace: Workspace, console: Console) -> None:
    """Say what an earlier run left to go on from."""
    checkpoints = sorted(workspace.run.glob("*/checkpoints/step_*"))
    record = truth(workspace.run) if workspace.run.is_dir() else None
    if record is None or record.status == "FINISHED":
        return
    current = [stage.name for stage in workspace.stages if workspace.is_current(stage)]
    text = f"resuming attempt {record.attempt}, which ended {record.status}: {', '.join(current) or 'nothing'} current"
    newest = checkpoints[-1] if checkpoints else None
    if newest is not None and newest.parent.parent.name not in current:
        text += f"; {newest.parent.parent.name} goes on from {newest.name}"
    console.say(text)


def show_end(workspace: Workspace, console: Console) -> None:
    """Print before and after, where the report lies, and what to do next."""
    rows = comparison(workspace)
    if rows:
        console.table(rows, "base beside trained")
    page = report_page(workspace)
    if page is not None:
        console.say(f"report: {page}")
    link = mlflow_link(workspace)
    if link:
        console.say(f"MLflow: {link}")
    for line in next_commands(workspace):
        console.say(line)


def next_commands(workspace: Workspace) -> list[str]:
    """Return what a person may type next, so that it works in their shell as it is: the programs need not be on its PATH."""
    tithe, dvc = program("tithe"), program("dvc")
    folder = "" if workspace.root == Path.cwd() else f"--cd {shlex.quote(_near(workspace.root))} "
    commands = {} if mlflow_link(workspace) else {f"{tithe} up": "browse this run in Prefect and MLflow"}
    if is_of_the_default(workspace):
        other = f"{tithe} run -S train.optimizer.learning_rate=3e-4 -S campaign.name=faster"
        commands[other] = "another campaign beside this one"
    else:
        commands[f"{tithe} doctor {shlex.quote(_near(workspace.run))}"] = "healthy, or what ails it and which key to turn"
    commands[f"{dvc} {folder}repro"] = "nothing to do now; after a change, only what depends on it"
    width = max(map(len, commands))
    return [f"{'' if n else 'next:':5} {text:<{width}}  # {why}" for n, (text, why) in enumerate(commands.items())]


def is_of_the_default(workspace: Workspace) -> bool:
    """Whether a campaign is called as the default one; not where params.yaml was edited meanwhile and is wrong now."""
    try:
        return workspace.config.campaign.name == resolve_config(None).campaign.name
    except TitheError:
        return False


def program(name: str) -> str:
    """Return how a shell finds a program of this environment: by its name when it is on the PATH, else by where it lies."""
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if not own.exists() or (found is not None and Path(found).absolute() == own.absolute()):
        return name
    return shlex.quote(_near(own))


def _near(path: Path) -> str:
    """Return a path from here, unless it only leads up and away."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def show_status(workspace: Workspace) -> None:
    """Print of each stage whether it is current, and what runs; and what was planned beside what was measured so far."""
    from tasks.plan import beside

    console = Console()
    rows = []
    for stage in workspace.stages:
        manifest = read_manifest(workspace.artifact(stage.artifact))
        state = "missing" if manifest is None else "current" if workspace.is_current(stage) else "stale"
        rows.append({"stage": stage.name, "artifact": state, "now": doing(workspace, stage.name)})
    console.table(rows, f"{workspace.run_id} in {workspace.root}")
    compared = [dict(zip(("", "planned", "measured", "off by"), row, strict=True)) for row in beside(workspace.run)]
    if compared:
        console.table(compared, "planned beside measured")


def doing(workspace: Workspace, stage: str) -> str:
    """Return what the process of a stage does at the moment, or nothing."""
    try:
        owner = Owner.from_json(read_json(workspace.root / ".tithe" / f"{stage}.lease"))
        beat = read_json(workspace.run / stage / HEARTBEAT)
    except (FileNotFoundError, ValueError, KeyError):
        return ""
    if not owner.is_alive or beat["pid"] != owner.pid:
        return ""
    return f"{beat['doing']}, step {beat['step']} of {beat['total']} (pid {owner.pid})"
