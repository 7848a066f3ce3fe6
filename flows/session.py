"""A campaign from its first stage to its last, with no orchestrator in sight: what the Prefect flow and the plain loop share.

    open_session     take the workspace's lock, write its files, begin the record, the shipper to MLflow and the launcher
    Session.attempt  bring one stage up to date: it is current, or in the cache, or its process runs once
    Session.go_ahead start stage after stage while Prefect still starts; `attempt` takes over what it began
    StageFailed      how an attempt ended badly, and whether another can heal it
    Session.close    tell DVC what is finished, tell MLflow how it ended

Stopping is a wish (`Session.stop`), read twice a second by whoever waits for a stage: set by Ctrl-C, by SIGTERM, by Prefect.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from flows import gate
from flows.child import THREADS, Child, Launcher, Lease, Limits, end, watch
from tasks.artifacts import commit, prepare_workspace, restore
from tasks.command import limit_threads
from tasks.locks import hold
from tasks.record import RECORD, Status, add_tags, config_hash, finish, read_record
from tasks.registry import Stage, optional_stages
from tasks.stage import close_record
from tasks.tracking import CLOSE_SECONDS, LOG, PARENT_TRACKS, Shipper, begin_campaign, is_behind
from tasks.workspace import Workspace
from trainer.errors import StopRequested, TitheError

RETRY_SECONDS = (1, 10)
STOPPED_SECONDS = 5.0  # what a person who stops a campaign waits for MLflow, which goes on by itself
_HEALING_CODES = (1, 7, 11, 255)  # a crash, a lock that a survivor held, a rank that died, a fork server that was killed

Beat = dict[str, Any]
How = Literal["made", "cached", "restored"]


class StageFailed(TitheError):
    """An attempt at a stage ended badly.

    Args:
        heals: whether the same again may end well.
    """

    def __init__(self, stage: str, problem: str, exit_code: int, heals: bool):
        super().__init__(f"{stage}: {problem}")
        self.stage, self.exit_code, self.heals = stage, exit_code, heals


@dataclass(frozen=True)
class StageResult:
    stage: str
    how: How
    seconds: float
    attempts: int = 1


@dataclass
class Stop:
    """Whether the campaign is to stop, and who said so."""

    reason: str = ""

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def __bool__(self) -> bool:
        return bool(self.reason)

    def error(self) -> StopRequested:
        return StopRequested(f"{self.reason}; run the same command again to go on")


@contextmanager
def signals_ask(stop: Stop) -> Iterator[None]:
    """Turn SIGTERM and the first SIGINT into a wish; a second SIGINT interrupts at once. Only on the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.ask(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Job:
    """A stage's running process."""

    stage: Stage
    child: Child
    lease: Lease
    log: Path
    begun: int  # bytes of the log before it
    started: float


@dataclass
class Session:
    workspace: Workspace
    launcher: Launcher
    say: Callable[[str], None]
    tracking: bool = True
    force: frozenset[str] = frozenset()
    stop: Stop = field(default_factory=Stop)
    threads: int = 0  # of a stage's process; 0 leaves it to the configuration
    results: dict[str, StageResult] = field(default_factory=dict)
    _attempts: dict[str, int] = field(default_factory=dict)
    _shipper: Shipper | None = None
    _begun: bool = False
    _ahead: Job | None = None
    _commit: Future[None] | None = None

    @property
    def limits(self) -> Limits:
        limits = self.workspace.config.limits
        return Limits(limits.stage_hours * 3600, limits.silence_seconds, limits.grace_seconds)

    @property
    def retries(self) -> int:
        return self.workspace.config.limits.retries

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The campaign's stages in order, the optional ones that its configuration asks for first."""
        return (*optional_stages(self.workspace.config), *self.workspace.stages)

    def chosen(self, only: Collection[str]) -> tuple[Stage, ...]:
        """The stages of that name, in order; all when none is named."""
        return tuple(stage for stage in self.stages if not only or stage.name in only)

    def begin(self) -> None:
        """Write that the campaign runs, and begin to ship. A finished one that has nothing left to do stays as it is."""
        if not self._begun:
            self._begun = True
            begin_campaign(self.workspace)
            self.ship()

    def ship(self) -> None:
        """Start the process that sends what MLflow lacks, unless there is one."""
        if self.tracking and self._shipper is None:
            self._shipper = Shipper(self.workspace.root, self.workspace.run)

    def attempt(self, stage: Stage, on_beat: Callable[[Beat], None]) -> StageResult:
        """Bring a stage up to date.

        Raises:
            StageFailed: its process ended badly. StopRequested: the campaign is to stop, and the stage has.
        """
        if self.stop:
            raise self.stop.error()
        number = self._attempts[stage.name] = self._attempts.get(stage.name, 0) + 1
        if stage.name in self.results:  # made ahead
            return self.results[stage.name]
        ahead = self._take_ahead(stage)
        found = self._found(stage, number) if ahead is None and stage.name not in self.force else None
        if found is not None:
            return found
        job = ahead or self._start(stage, number)
        self._see_through(job, on_beat)
        return self._done(stage, "made", job.started, number)

    def go_ahead(self) -> None:
        """Start the first stage that has something to do, and the next when that one has ended well.

        For while Prefect still starts: asked again and again, it never waits for a stage. What it began, `attempt` takes over.
        """
        job = self._ahead
        if job is not None:
            if job.child.wait(0) != 0:  # still at work; a failed one is left to its `attempt`
                return
            self._ahead = None
            job.lease.drop()
            self._done(job.stage, "made", job.started, 1)
        for stage in self.stages:
            if self.stop:
                return
            if stage.name in self.results:
                continue
            result = None if stage.name in self.force else self._found(stage, 1)
            if result is None:
                self._ahead = self._start(stage, 1)
                return

    def _found(self, stage: Stage, number: int) -> StageResult | None:
        """Return the result of a stage that need not run: it is current, or in the cache."""
        started = time.monotonic()
        current = self.workspace.is_current(stage)
        if not current and not restore(self.workspace, stage):
            return None
        close_record(self.workspace, stage)
        return self._done(stage, "cached" if current else "restored", started, number)

    def _take_ahead(self, stage: Stage) -> Job | None:
        if self._ahead is None or self._ahead.stage is not stage:
            return None
        job, self._ahead = self._ahead, None
        return job

    def _done(self, stage: Stage, how: How, started: float, attempts: int) -> StageResult:
        result = self.results.setdefault(stage.name, StageResult(stage.name, how, time.monotonic() - started, attempts))
        if stage is self.stages[-1] and self._commit is None:  # beside what Prefect still has to do
            with_dvc = ThreadPoolExecutor(1, "commit")
            self._commit = with_dvc.submit(self.commit)
            with_dvc.shutdown(wait=False)
            if self._shipper is not None:
                self._shipper.hurry()
        return result

    def tries_again(self, error: StageFailed) -> bool:
        """Whether a failed stage gets another attempt; says so."""
        number = self._attempts[error.stage]
        if not error.heals or number > self.retries or self.stop:
            return False
        self.say(f"{error}\n{error.stage}: trying again ({number} of {self.retries})")
        return True

    def _start(self, stage: Stage, number: int) -> Job:
        """Start a stage's process, after ending one that an earlier run left behind."""
        self.begin()
        log = self.workspace.run / stage.name / LOG
        lease = Lease(self.workspace.root / ".tithe" / f"{stage.name}.lease")
        if lease.end_survivor(self.limits.grace_seconds):
            self.say(f"{stage.name}: ended a process that an earlier run had left behind")
        begun = log.stat().st_size if log.exists() else 0
        environment = {PARENT_TRACKS: "1"} | ({THREADS: str(self.threads)} if self.threads else {})
        child = self.launcher.start(self._arguments(stage, number), log, environment)
        lease.take(child)
        return Job(stage, child, lease, log, begun, time.monotonic())

    def _see_through(self, job: Job, on_beat: Callable[[Beat], None]) -> None:
        """Wait until a stage's process has ended well.

        Raises:
            StageFailed, StopRequested.
        """
        name = job.stage.name
        ending, code = watch(job.child, self.workspace.run / name, self.limits, lambda: bool(self.stop), on_beat)
        job.lease.drop()
        if ending == "exited" and code == 0:
            return
        if ending == "stopped":
            raise self.stop.error()
        if ending == "exited" and code == StopRequested.exit_code:
            self.stop.ask(f"{name} was asked to stop")
            raise self.stop.error()
        raise failure(name, ending, code, job.log, job.begun, self.limits)

    def _arguments(self, stage: Stage, number: int) -> list[str]:
        place = ["--workspace", str(self.workspace.root), "--config", str(self.workspace.run / "config.json")]
        arguments = [stage.name, *place, "--run-dir", str(self.workspace.run)]
        if self.workspace.stages_name:
            arguments += ["--stages", self.workspace.stages_name]
        return [*arguments, "--force"] if stage.name in self.force and number == 1 else arguments

    def commit(self) -> None:
        """Tell DVC which artifacts are finished, and write their hashes down; a failure is said and costs nothing."""
        try:
            self._note(commit(self.workspace))
        except (TitheError, OSError) as error:  # DVC's, or a full disk's
            self.say(f"{error}. The artifacts are whole; `dvc commit -f` records them")

    def _note(self, hashes: Mapping[str, str]) -> None:
        """Write DVC's hashes into the records of campaign and stages."""
        if read_record(self.workspace.run) is None:
            return
        names = {stage.artifact: stage.name for stage in self.workspace.stages}
        add_tags(self.workspace.run, {f"dvc.{artifact}": md5 for artifact, md5 in hashes.items()})
        for artifact, md5 in hashes.items():
            run = self.workspace.run / names[artifact]
            record = read_record(run)
            if record and record.artifact and record.status == "FINISHED":
                add_tags(run, {"dvc.md5": md5})

    def close(self, status: Status, error: str | None = None) -> None:
        """Commit what is finished, write how the campaign ended, and let MLflow catch up."""
        if self._ahead is not None:
            end(self._ahead.child, self.limits.grace_seconds)
            self._ahead.lease.drop()
        if self._commit is None:
            self.commit()
        else:
            self._commit.result()
        if self._begun:
            add_tags(self.workspace.run, {f"stage.{result.stage}": result.how for result in self.results.values()})
            finish(self.workspace.run, status, error=error)
        if self._shipper is not None:
            self._shipper.close(STOPPED_SECONDS if status == "KILLED" else CLOSE_SECONDS)


def failure(stage: str, ending: str, code: int | None, log: Path, begun: int, limits: Limits) -> StageFailed:
    """Return what an attempt's end means: in its own words where it left any, and where to read on."""
    if ending == "silent":
        return StageFailed(stage, f"gave no sign of life for {limits.silence_seconds:.0f} s and was stopped; log: {log}", 1, True)
    if ending == "late":
        hours = limits.total_seconds / 3600
        return StageFailed(stage, f"took longer than limits.stage_hours = {hours:g} and was stopped; log: {log}", 1, False)
    assert code is not None
    said = last_words(log, begun)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return StageFailed(stage, f"was killed by {name}{_memory_hint(code)}; log: {log}", 1, True)
    problem = said or f"ended with exit code {code}"
    return StageFailed(stage, f"{problem}; log: {log}", code, code in _HEALING_CODES)


def _memory_hint(code: int) -> str:
    return " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""


def last_words(log: Path, begun: int) -> str:
    """Return the `error:` lines of an attempt, or the last line of its traceback."""
    with suppress(FileNotFoundError), open(log, "rb") as file:
        file.seek(begun)
        lines = file.read()[-65536:].decode("utf-8", "replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors:
            return "\n".join(errors)
        if any(line.startswith("Traceback") for line in lines):
            return next((line for line in reversed(lines) if line and not line.startswith(" ")), "")
    return ""


@contextmanager
def open_session(
    workspace: Workspace,
    say: Callable[[str], None],
    force: Sequence[str] = (),
    tracking: bool = True,
    fork: bool | None = None,
    force_plan: bool = False,
    launcher: Launcher | None = None,
) -> Iterator[Session]:
    """Open a campaign's session, and close it with the truth about how it ended.

    Args:
        say: takes one-line messages for a person.
        force: names of stages to run even when they are current.
        tracking: whether to mirror to MLflow.
        fork: see `Launcher`.
        force_plan: start it although the plan says that it does not fit.
        launcher: one that several sessions share; None makes one.

    Raises:
        BusyError: another campaign runs in the workspace. ResourceError: it does not fit this machine.
    """
    limit_threads(workspace.config)
    os.environ.pop(PARENT_TRACKS, None)
    fix = "wait for it, stop it, or give this one a workspace of its own: -S campaign.name=<another>"
    with hold(workspace.root / ".tithe" / "campaign.lock", f"a campaign already runs in {workspace.root}", fix):
        workspace.claim_run()
        launcher = launcher or Launcher(workspace.config, fork)
        if not is_done(workspace):
            launcher.warm()
            gate.before(workspace, say, force_plan, launcher)
        prepare_workspace(workspace)
        session = Session(workspace, launcher, say, tracking, frozenset(force))
        if not is_done(workspace):
            session.begin()
        elif any(is_behind(path.parent) for path in (workspace.root / "runs").glob(f"*/{RECORD}")):
            session.ship()
        status: Status = "FAILED"
        problem: str | None = None
        try:
            launcher.warm()
            with signals_ask(session.stop):
                yield session
            status = "FINISHED"
            if session._begun:
                gate.after(workspace, say)
        except (StopRequested, KeyboardInterrupt) as stop:
            status, problem = "KILLED", str(stop)
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            session.close(status, problem)


def is_done(workspace: Workspace) -> bool:
    """Whether the campaign's record says that this very configuration ended well."""
    record = read_record(workspace.run)
    return record is not None and record.status == "FINISHED" and record.identity == config_hash(workspace.config)


def run_plainly(
    session: Session,
    on_beat: Callable[[Stage, Beat], None],
    on_result: Callable[[StageResult], None],
    only: Collection[str] = (),
) -> None:
    """Run the stages in order without any orchestrator, trying again what can heal.

    Args:
        only: names of stages to run; empty for all.

    Raises:
        StageFailed, StopRequested.
    """
    for stage in session.chosen(only):
        for retry in count():
            try:
                on_result(session.attempt(stage, partial(on_beat, stage)))
                break
            except StageFailed as error:
                if not session.tries_again(error):
                    raise
                pause(session.stop, retry_delay(retry))


def retry_delay(retry: int) -> int:
    return RETRY_SECONDS[min(retry, len(RETRY_SECONDS) - 1)]


def pause(stop: Stop, seconds: float) -> None:
    """Wait, unless the campaign is to stop."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not stop:
        time.sleep(0.1)
