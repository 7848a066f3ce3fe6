"""Runs the trials of a sweep, several at a time, with no orchestrator in sight: what the Prefect flow and the plain loop share.

    resolve_sweep      a recipe and axes -> the sweep, checked before anything starts, and how many trials run at a time
    Runner.run         every trial that is not done, in threads of this process; each trial is a session (flows.session) in a
                       workspace of its own, so its stages are processes, and all of them are forked from one that holds torch
    Runner.run_trial   one trial: what comes before training is made by one trial and taken from the cache by all others;
                       a trial that Optuna finds hopeless is stopped

A trial that fails, is killed or is refused costs that trial alone. What is done is in files (tasks.sweep): the same command again
runs what is missing. Stopping is a wish that goes on to every running trial, which writes a checkpoint and ends.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.child import THREADS, Launcher, has_accelerator
from flows.session import Beat, Session, StageResult, Stop, open_session, run_plainly, signals_ask
from flows.workspaces import resolve_config
from tasks.command import limit_threads, load_stages
from tasks.locks import hold
from tasks.record import PRUNED, Status, finish, read_record, write_record
from tasks.registry import Stage
from tasks.search import is_hopeless, propose
from tasks.sweep import OUTCOME, Outcome, Spec, Sweep, Trial, make_sweep, short_keys, sweep_name
from tasks.tracking import Shipper, is_behind
from tasks.workspace import campaigns_directory, params_of, state_directory
from trainer.config import CampaignConfig
from trainer.errors import BusyError, ConfigError, StopRequested, TitheError, name_os_error
from trainer.files import canonical_json, sha256_text, write_json
from trainer.metrics import METRICS

POLL_SECONDS, LOOK_SECONDS = 0.2, 1.0
_MOST_WORKERS = 4  # unless asked for more: every trial holds a model

OnBeat = Callable[[Trial, Stage, Beat], None]
Perform = Callable[[Trial], Outcome | None]


@dataclass(frozen=True)
class Asked:
    """What a person asked for."""

    spec: Spec
    recipe: Path | None = None
    overrides: tuple[str, ...] = ()
    workers: int = 0  # 0: as many as there are cores, one where there is an accelerator
    name: str = ""
    root: Path | None = None
    stages_name: str = ""


def resolve_sweep(asked: Asked) -> tuple[Sweep, int]:
    """Return the sweep that was asked for and the number of trials at a time; writes nothing.

    Raises:
        ConfigError, ConfigErrors: what is wrong with it, all of it where that is possible.
    """
    config = resolve_config(asked.recipe, asked.overrides)
    name = asked.name or sweep_name(config, asked.spec)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", name):
        raise ConfigError("--name", name, "is no name; use lower-case letters, digits and . _ -, at most 63")
    root = (asked.root or campaigns_directory() / name).resolve()
    stages = load_stages(asked.stages_name) if asked.stages_name else ()
    cores = len(os.sched_getaffinity(0))
    workers = asked.workers or default_workers(config, cores)
    threads = max(1, cores // workers)
    return make_sweep(config, asked.spec, root, threads, stages, asked.stages_name), workers


def default_workers(config: CampaignConfig, cores: int) -> int:
    """Return how many trials run at a time where nobody said: they share the cores; an accelerator is not shared."""
    if config.machine.device != "cpu" and has_accelerator():
        return 1
    return max(1, min(_MOST_WORKERS, cores // (config.machine.threads or 1)))


def before_training(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages whose artifacts the cache gives to every trial that would make the same."""
    artifacts = [stage.artifact for stage in stages]
    return tuple(stages[: artifacts.index("policy")] if "policy" in artifacts else ())


@dataclass
class Runner:
    """Runs a sweep.

    Args:
        workers: trials at the same time.
        say: takes one-line messages for a person.
        on_beat: called with the heartbeats of every running trial, from its thread.
    """

    sweep: Sweep
    workers: int
    say: Callable[[str], None]
    on_beat: OnBeat = lambda trial, stage, beat: None
    tracking: bool = True
    fork: bool | None = None
    stop: Stop = field(default_factory=Stop)
    on_end: Callable[[Trial, Outcome | None], None] = lambda trial, outcome: None

    def __post_init__(self) -> None:
        self._launcher = Launcher(self.sweep.config, self.fork)
        self._all_threads = 0 if THREADS in os.environ else self.workers * self.sweep.threads
        self._active: dict[int, Session] = {}
        self._pruned: dict[int, Outcome] = {}
        self._looked: dict[int, tuple[float, int]] = {}  # trial -> when its curve was read, and how long the file was
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Begin to load what the trials' stages need, without waiting for it: beside the start of Prefect, too."""
        limit_threads(self.sweep.config_of())
        self._launcher.warm()

    def run(self, perform: Perform | None = None) -> None:
        """Run every trial that is not done.

        Args:
            perform: runs one trial, around `run_trial`; None is `run_trial` itself.

        Raises:
            StopRequested: somebody asked. TitheError: trials failed. BusyError: the sweep runs already.
        """
        with hold(self.sweep.root / ".tithe" / "sweep.lock", f"the sweep {self.sweep.name} already runs"):
            self.sweep.write()
            waiting = [trial for trial in self.sweep.trials if not self.sweep.is_done(trial)]
            if not waiting and not self._wants_more():
                if self.tracking and is_behind(self.sweep.root):
                    Shipper(self.sweep.root, self.sweep.root).close()
            else:
                with self._recorded():
                    self._run(waiting, perform or self.run_trial)
        if self.stop:
            raise self.stop.error()
        failed = [trial for trial in self.sweep.trials if (o := self.sweep.outcome(trial)) is not None and o.state == "failed"]
        if failed:
            names = ", ".join(f"{trial.number} ({trial.name})" for trial in failed[:5])
            more = f" and {len(failed) - 5} more" if len(failed) > 5 else ""
            raise TitheError(
                f"{len(failed)} of {len(self.sweep.trials)} trials failed: {names}{more}; the same command tries them again"
            )

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Write that the sweep runs and how it ended, and let MLflow follow."""
        self.warm()
        self.sweep.begin()
        shipper = Shipper(self.sweep.root, self.sweep.root) if self.tracking else None
        status: Status = "FAILED"
        try:
            with signals_ask(self.stop):
                yield
            done = any(outcome.state != "failed" for _, outcome in self.sweep.ranking())
            status = "KILLED" if self.stop else "FINISHED" if done else "FAILED"
        except KeyboardInterrupt:
            status = "KILLED"
            self.stop.ask("interrupted")
        finally:
            finish(self.sweep.root, status, final=self._final(), error=self.stop.reason or None)
            if shipper is not None:
                shipper.close()

    def _final(self) -> dict[str, float]:
        ranking = self.sweep.ranking()
        states = [outcome.state for _, outcome in ranking]
        final = {f"trials/{state}": float(states.count(state)) for state in ("done", "pruned", "failed")}
        if ranking and ranking[0][1].state == "done" and ranking[0][1].result is not None:
            final |= {f"best/{self.sweep.spec.objective}": ranking[0][1].result, "best/trial": float(ranking[0][0].number)}
        return final

    def _run(self, waiting: list[Trial], perform: Perform) -> None:
        """Keep `workers` trials going until there is none left, or the sweep is to stop."""
        running: dict[Future[Outcome | None], Trial] = {}
        with ThreadPoolExecutor(self.workers, thread_name_prefix="trial") as pool:
            try:
                while True:
                    while len(running) < self.workers and not self.stop and (trial := self._next(waiting)) is not None:
                        running[pool.submit(copy_context().run, perform, trial)] = trial
                    if not running:
                        return
                    ended, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
                    for future in ended:
                        self.on_end(running.pop(future), future.result())
                    self._pass_on_the_wish()
            except BaseException:
                self.stop.ask("the sweep was interrupted")
                self._pass_on_the_wish()
                raise

    def _pass_on_the_wish(self) -> None:
        if self.stop:
            with self._lock:
                for session in self._active.values():
                    session.stop.ask(self.stop.reason)

    def _wants_more(self) -> bool:
        return self.sweep.spec.kind == "optuna" and len(self.sweep.trials) < self.sweep.spec.num_trials

    def _next(self, waiting: list[Trial]) -> Trial | None:
        """Return the next trial to run, one that Optuna proposes where all known ones are done or run."""
        if waiting:
            return waiting.pop(0)
        if not self._wants_more():
            return None
        values = propose(self.sweep.spec.parsed, self.sweep.known(), self.sweep.spec.seed)
        self.sweep, trial = self.sweep.with_trial(values)
        return trial

    # -- one trial --------------------------------------------------------------------------------------------------------

    def run_trial(self, trial: Trial) -> Outcome | None:
        """Run a trial and return how it ended; None when it was stopped and must run again."""
        began = time.monotonic()
        place = self.sweep.place(trial)
        try:
            (place / OUTCOME).unlink(missing_ok=True)
            workspace = self.sweep.workspace(trial)
            self.sweep.write_trial(trial)
            say = partial(self._say, trial)
            with (
                open_session(workspace, say, (), tracking=False, launcher=self._launcher) as session,
                self._known(trial, session),
            ):
                self._bring_up_to_date(trial, session)
            outcome = self._result(trial)
        except StopRequested:
            if trial.number not in self._pruned:
                return None
            outcome = self._pruned.pop(trial.number)
        except TitheError as error:
            outcome = Outcome("failed", error=str(error))
        except OSError as error:
            outcome = Outcome("failed", error=str(name_os_error(error)))
        outcome = replace(outcome, seconds=round(time.monotonic() - began, 1))
        write_json(place / OUTCOME, asdict(outcome))
        self._sum_up(trial, outcome)
        return outcome

    def _say(self, trial: Trial, text: str) -> None:
        self.say(f"trial {trial.number}: {text}")

    @contextmanager
    def _known(self, trial: Trial, session: Session) -> Iterator[None]:
        """Let a wish to stop reach the trial."""
        with self._lock:
            self._active[trial.number] = session
            if self.stop:
                session.stop.ask(self.stop.reason)
        try:
            yield
        finally:
            with self._lock:
                del self._active[trial.number]

    def _bring_up_to_date(self, trial: Trial, session: Session) -> None:
        shared = before_training(session.workspace.stages)

        def beat(stage: Stage, beat: Beat) -> None:
            self.on_beat(trial, stage, beat)
            if self.sweep.spec.kind == "optuna" and self.sweep.spec.prune and stage.artifact == "policy":
                self._look(trial, session)

        def result(result: StageResult) -> None:
            if result.how == "made":
                made.append(result.stage)

        made: list[str] = []
        if not all(session.workspace.is_current(stage) for stage in shared):
            with turn(session, shared):
                session.threads = self._threads_of(shared)
                run_plainly(session, beat, result, [stage.name for stage in shared])
                session.threads = 0
                if made:
                    session.commit()  # now, so that the others find it
        rest = [stage.name for stage in session.stages if stage not in shared]
        run_plainly(session, beat, result, rest)

    def _threads_of(self, shared: Sequence[Stage]) -> int:
        """Return the threads for stages that all trials share: every core, since the others wait for them; else 0."""
        axes = [axis.key for axis in self.sweep.spec.parsed]
        params = [key for stage in shared for key in stage.params]
        apart = any(f"{axis}.".startswith(f"{key}.") or f"{key}.".startswith(f"{axis}.") for axis in axes for key in params)
        return 0 if apart else self._all_threads

    def _look(self, trial: Trial, session: Session) -> None:
        """Stop a trial that is worse than the others were at the same step."""
        path = session.workspace.run / "train" / METRICS
        size = path.stat().st_size if path.exists() else 0
        then, before = self._looked.get(trial.number, (0.0, 0))
        if size == before or time.monotonic() - then < LOOK_SECONDS:
            return
        self._looked[trial.number] = (time.monotonic(), size)
        curve = self.sweep.curve(trial)
        total = sum(stage.steps for stage in session.workspace.config.train.stages)
        if not curve or max(curve) >= total:
            return
        others = [known for number, known in enumerate(self.sweep.known()) if number != trial.number]
        if is_hopeless(self.sweep.spec.parsed, others, curve, total):
            step = max(curve)
            reason = f"{PRUNED}{step} of {total}: {self.sweep.spec.objective} {curve[step]:.3g} is below the others' median"
            self._pruned[trial.number] = Outcome("pruned", curve[step], step, reason)
            session.stop.ask(reason)

    def _result(self, trial: Trial) -> Outcome:
        curve = self.sweep.curve(trial)
        if not curve:
            return Outcome("failed", error=f"its metrics have no {self.sweep.spec.objective}; choose another --objective")
        return Outcome("done", curve[max(curve)], max(curve))

    def _sum_up(self, trial: Trial, outcome: Outcome) -> None:
        """Write the result beside what MLflow gets of the trial."""
        run = self.sweep.run_of(trial)
        record = read_record(run) if run is not None else None
        if run is not None and record is not None:
            final = {"objective": outcome.result} if outcome.result is not None else {}
            tags = {**record.tags, "outcome": outcome.state}
            write_record(run, replace(record, final=final, tags=tags, error=outcome.error))


@contextmanager
def turn(session: Session, shared: Sequence[Stage]) -> Iterator[None]:
    """Wait until nobody else, of this sweep or another, makes the artifacts that this trial shares with others.

    Raises:
        StopRequested: the trial is to stop.
    """
    params = {stage.name: params_of(stage, session.workspace.config) for stage in shared}
    path = state_directory() / "shared" / f"{sha256_text(canonical_json(params))[:16]}.lock"
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold(path, "somebody makes the same artifacts"))
                break
            except BusyError:
                if session.stop:
                    raise session.stop.error() from None
                time.sleep(POLL_SECONDS)
        yield


def rows_of(sweep: Sweep) -> list[dict[str, Any]]:
    """Return a table's rows: the trials, the best first, then those that must still run."""
    rows = []
    ended, names = sweep.ranking(), short_keys([axis.key for axis in sweep.spec.parsed])
    for trial, outcome in [*ended, *((t, None) for t in sweep.trials if sweep.outcome(t) is None)]:
        row: dict[str, Any] = {"trial": trial.number, **dict(zip(names, trial.values.values(), strict=True))}
        row["state"] = outcome.state if outcome else "to run"
        row[sweep.spec.objective] = "-" if outcome is None or outcome.result is None else f"{outcome.result:.4g}"
        row["step"] = "-" if outcome is None or outcome.step is None else outcome.step
        row["seconds"] = f"{outcome.seconds:.0f}" if outcome else "-"
        rows.append(row)
    return rows
