"""The async schedule: sampler processes fill the experience pool, this process learns from it.

    pool -> groups young enough -> learner -> consumption log -> metrics -> checkpoint
                                      |-> every sync_every optimizer steps: policies/vNNNNNN -> samplers

*Lag.* A group is learnt from only while the learner is at most `max_policy_update_lag` optimizer steps ahead of the policy that
sampled it. When there is none, the learner hands its policy over at once and waits.

*Going on.* The consumption log is written in the same transaction that takes the groups out of the pool. A run that was killed
loads its checkpoint and learns the logged steps after it again, which gives the same bits; so nothing that was used is lost or
used twice, and versions that samplers hold stay what they were.

*Waiting.* Every wait has a deadline, and ends with the name of who was waited for.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil
import torch

from trainer.config import CampaignConfig, as_tree
from trainer.errors import CheckpointError, ResourceError, StalledError, TitheError
from trainer.experience.database import Database
from trainer.experience.pool import Claim, Pool, Worker
from trainer.learn.learner import StepStats
from trainer.metrics import RunWriter
from trainer.policy.forward import completion_logprobs
from trainer.policy.versions import SCORES, PolicyStore, weights_sha256
from trainer.rollout.probe import Probe, read_probe
from trainer.schedule.judge import reward_metrics
from trainer.schedule.prompts import StagePosition, locate
from trainer.schedule.replay import THREADS
from trainer.schedule.sampler_process import Assignment
from trainer.schedule.stop import StopWish
from trainer.schedule.supervisor import Supervisor, end_leftovers
from trainer.schedule.sync import Clock, Crew, Run, SyncSchedule, costs
from trainer.schedule.terms import LEARNER, POLICIES, make_terms, open_database, threads_each
from trainer.types import Group, Request, derive_seed

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.03
_READ_SECONDS = 0.1  # between two looks for groups that can be read while the learner learns
_CLAIM_SECONDS = 0.5  # while too few groups are ready, claims (which bring back and drop) are tried so often
_HURRY_SECONDS = 5.0  # of silence, from which a sampler is ended when the run is to stop and cannot because of a lock

_REMEMBERED_STEPS = 20
_KNOBS = {
    "kl": "raise train.algorithm.kl.coefficient or lower train.optimizer.learning_rate",
    "effective_sample_fraction": "samples are too old: lower train.pool.capacity or train.sync.sync_every",
    "throughput": "see sampler/*/busy_fraction and time/* for who is slower than before",
    "lag": "samplers run far ahead: lower train.pool.capacity or train.sync.sync_every",
}


@dataclass(frozen=True)
class Places:
    """Where samplers find what they need."""

    base: str
    prompts: str


def lag_metrics(lags: Sequence[int], bound: int) -> dict[str, float]:
    """Return a step's lag histogram: the share of samples up to each quarter of the bound, and the extremes."""
    edges = sorted({0, *(bound * quarter // 4 for quarter in (1, 2, 3, 4))})
    shares, below = {}, 0
    for edge in edges:
        up_to = sum(lag <= edge for lag in lags)
        shares[f"lag/share_to_{edge:02d}"] = (up_to - below) / len(lags)
        below = up_to
    return {"lag/min": float(min(lags)), "lag/max": float(max(lags)), "lag/median": float(median(lags)), **shares}


class AsyncSchedule(SyncSchedule):
    """Runs all RL stages with samplers in processes of their own.

    Args:
        config: the campaign's.
        crew: the learner, and a sampler and a verifier of this process for held-out prompts.
        run: the run directory.
        wish: set when somebody asks to stop.
        places: what sampler processes read.
        first_look: see SyncSchedule.
    """

    def __init__(
        self,
        config: CampaignConfig,
        crew: Crew,
        run: Run,
        wish: StopWish,
        places: Places,
        first_look: Callable[[RunWriter], None] | None = None,
    ):
        super().__init__(config.train, config.campaign.seed, crew, run, wish, first_look)
        self.config, self.places = config, places
        self.terms = make_terms(config.train)
        by_id = {prompt.id: prompt for prompt in crew.prompts}
        lease = config.train.watchdog.deadline_seconds
        end_leftovers(run.directory)
        database = open_database(config.train, run.directory, self._lost)
        self.pool = Pool(database, run.identity, by_id, LEARNER, lease)
        self.pools = [self.pool]  # whose claims are kept
        self.store = PolicyStore(run.directory / POLICIES, config.train.sync.keep)
        self.handed_over = -1  # version
        self.doing, self.step = "starting", 0
        self.known_versions: dict[int, str] = {}
        self.rates: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self.alarmed: set[str] = set()  # names past their thresholds
        self.unready_seconds = 0.0  # in the pool's transactions while too few groups were there
        self.supervisor = Supervisor([], self.pool, config.train.watchdog, self.writer)
        self._ended, self._thread = threading.Event(), threading.get_ident()
        database.waiting = self._while_waiting

    @property
    def num_processes(self) -> int:
        """Sampler processes that share the cores with this one."""
        return self.train.sampler.processes

    def run(self) -> None:
        """Train to the end of the last RL stage.

        Raises:
            StopRequested: somebody asked; a checkpoint was written. StalledError: a wait passed its deadline.
            MismatchError: a sampler does not give the learner's log-probs. Else as SyncSchedule.run.
        """
        self._thread = threading.get_ident()
        self.pool.enlist("learner", self._lives)
        threads = self._share_threads()
        self.pool.release_learner()
        beats = threading.Thread(target=self._give_signs_of_life, name="signs-of-life", daemon=True)
        beats.start()
        try:
            done = self._resume()
            if done < self.total:
                self._run_from(done, threads)
            self._record_version(self.total)
            self.pool.database.checkpoint()
            self.writer.heartbeat("trained", self.total, self.total)
        finally:
            try:
                self._stop_sampling()
            finally:
                self._ended.set()
                beats.join()
                with suppress(TitheError):  # what ends the run is said already
                    self.pool.forget_worker(LEARNER)
                self.pool.close()

    def _lives(self, other: Worker) -> bool:
        """Whether an earlier learner may still be at work; of another machine's only its silence is known."""
        if other.host != socket.gethostname():
            return other.age_seconds < self.train.watchdog.deadline_seconds
        try:
            process = psutil.Process(other.pid)
            is_other = process.create_time() > other.beat_at + 60  # the number was given to a new process
            return process.status() != psutil.STATUS_ZOMBIE and not is_other
        except psutil.NoSuchProcess:
            return False

    def _run_from(self, done: int, threads: int) -> None:
        self._make_probe()
        self._hand_over(done)
        self.supervisor = Supervisor(self._assignments(threads), self.pool, self.train.watchdog, self.writer)
        self.supervisor.start()
        self._train_from(done)

    def _stop_sampling(self) -> None:
        self.supervisor.stop()

    def _train_from(self, done: int) -> None:
        if done == 0 and self.first_look:
            self.first_look(self.writer)
        if done == 0 and self._looks_at_heldout(0):
            self.writer.metrics(0, self._heldout(0))
        for step in range(done + 1, self.total + 1):
            metrics = self._async_step(step)
            self.writer.metrics(step, metrics)
            self._alarms(step, metrics)
            if self._looks_at_heldout(step):
                self._watch()
            if step % self.train.checkpoints.every_steps == 0 or step == self.total:
                self._checkpoint(step)
            self._stop_if_asked(step)

    def _async_step(self, step: int) -> dict[str, float]:
        """Wait for young enough groups, learn, write down what was used."""
        learner, clock = self.crew.learner, Clock()
        position = self._begin(step)
        spent, self.unready_seconds = self.pool.database.spent_seconds, 0.0
        with clock("wait"):
            self._say("waiting for samples", step)
            claim = self._wait_for_groups(step, position)
        self.supervisor.check()
        before = learner.version
        with clock("learn"), ThreadPoolExecutor(1, "read-ahead") as reader:
            self._say("learning", step)
            learnt = threading.Event()
            ahead = reader.submit(self._read_ahead, learnt, position.index)
            try:
                stats = learner.step(claim.groups, step)
            finally:
                learnt.set()
            ahead.result()
        with clock("log"):
            self.pool.consume(claim, step, before, stats.version)
        with clock("hand_over"):
            if stats.version - self.handed_over >= self.train.sync.sync_every and step < self.total:
                self._hand_over(step)
        metrics = self._metrics(step, position, claim.groups, stats, clock, before)
        seconds = sum(clock.seconds.values())
        metrics["pool/wait_fraction"] = (self.pool.database.spent_seconds - spent - self.unready_seconds) / seconds
        return metrics | self._pool_metrics()

    def _read_ahead(self, learnt: threading.Event, stage: int) -> None:
        """Read what the samplers deliver until the step is learnt."""
        while True:
            self.pool.read_ahead(2 * self.terms.groups_per_step, stage)
            if learnt.wait(_READ_SECONDS):
                return

    def _begin(self, step: int) -> StagePosition:
        position = locate(self.train.stages, step)
        if position.step == 1 and position.index > 0:
            self.crew.learner.begin_stage(position.stage)
        return position

    def _metrics(
        self, step: int, position: StagePosition, groups: Sequence[Group], stats: StepStats, clock: Clock, before: int
    ) -> dict[str, float]:
        samples = [sample for group in groups for sample in group.samples]
        lags = [before - sample.completion.policy_version for sample in samples]
        bound = self.train.sync.max_policy_update_lag
        assert max(lags) <= bound, f"step {step} used a sample {max(lags)} optimizer steps old; the bound is {bound}"
        metrics = {**stats.metrics, **reward_metrics(samples, self.train.batch.group_size), **costs(samples, clock)}
        metrics |= {**lag_metrics(lags, bound), "stage/index": position.index}
        metrics |= self._watch_anchors(step, position, samples, metrics)
        return metrics | self._heldout(step) if self._looks_at_heldout(step) else metrics

    def _pool_metrics(self) -> dict[str, float]:
        """Return the pool's filling, what was dropped, and how the samplers are."""
        counts, size = self.pool.counts(), self.train.batch.group_size
        live = sum(counts.get(state, 0) for state in ("open", "sampling", "ready", "learning"))
        metrics: dict[str, float] = {"pool/ready_samples": counts.get("ready", 0) * size, "pool/live_samples": live * size}
        metrics |= {f"drop/{cause}_samples": counts.get(f"drop/{cause}", 0) for cause in ("stale", "late", "abandoned")}
        samplers = [worker for worker in self.pool.workers() if worker.kind == "sampler"]
        for worker in samplers:
            busy, idle = worker.facts.get("busy_seconds", 0.0), worker.facts.get("idle_seconds", 0.0)
            metrics[f"sampler/{worker.id}/age_seconds"] = worker.age_seconds
            metrics[f"sampler/{worker.id}/version"] = worker.version
            metrics[f"sampler/{worker.id}/busy_fraction"] = busy / (busy + idle) if busy + idle else 0.0
            metrics[f"sampler/{worker.id}/tokens_per_second"] = worker.facts.get("tokens", 0) / busy if busy else 0.0
        if samplers:
            metrics["mismatch/probe"] = max(float(worker.facts.get("mismatch", 0.0)) for worker in samplers)
        return metrics

    # -- waiting --------------------------------------------------------------------------------------------------------

    def _wait_for_groups(self, step: int, position: StagePosition) -> Claim:
        """Return the groups of a step, all of them young enough.

        Raises:
            StopRequested: somebody asked. StalledError: no sample came within the deadline.
        """
        oldest = self.crew.learner.version - self.train.sync.max_policy_update_lag
        pause, moved_at, seen = _PAUSE_SECONDS, time.monotonic(), None
        claimed_at = 0.0
        while True:
            began, before = time.monotonic(), self.pool.database.spent_seconds
            claim, ready = None, self.pool.num_ready(position.index) >= self.terms.groups_per_step
            if ready or began - claimed_at > _CLAIM_SECONDS:
                claimed_at = began
                claim = self.pool.claim(self.terms.groups_per_step, position.index, oldest)
            if claim is not None:
                return claim
            self.pool.read_ahead(self.terms.groups_per_step, position.index)
            self._stop_if_asked(step - 1)
            if self.crew.learner.version > self.handed_over:
                self._hand_over(step - 1)
            self.supervisor.check()
            self.writer.heartbeat("waiting for samples", step, self.total)
            now = self._progress()
            if now != seen or self.supervisor.is_starting:
                seen, moved_at = now, time.monotonic()
            waited = time.monotonic() - moved_at
            if waited > self.train.watchdog.deadline_seconds and not self.supervisor.is_watching:
                self.writer.event("stop", f"no sample came for {waited:.0f} s: {self.supervisor.describe()}", step=step)
                raise StalledError(
                    f"step {step}: the samplers",
                    f"delivered nothing for {waited:.0f} s ({self.supervisor.describe()})",
                    f"see {self.place.directory / 'samplers'}",
                )
            self.unready_seconds += self.pool.database.spent_seconds - before  # the samplers are waited for, not the pool
            self._pause(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _progress(self) -> Any:
        """Return what changes while samplers get anything done, starting included."""
        finished = tuple((w.id, w.pid, w.facts.get("finished")) for w in self.supervisor.workers if w.kind == "sampler")
        return finished, tuple((child.process.pid, child.starts) for child in self.supervisor.children)

    def _say(self, doing: str, step: int) -> None:
        self.doing, self.step = doing, step
        self.writer.heartbeat(doing, step, self.total)

    def _give_signs_of_life(self) -> None:
        """Beat and keep the claims from a thread, so that a long step is not taken for a dead learner."""
        every = min(5.0, self.train.watchdog.deadline_seconds / 4)
        while not self._ended.is_set():
            try:
                self.supervisor.look()
                self.pool.beat("learner", self.doing, self.crew.learner.version)
                for pool in self.pools:
                    pool.renew()
            except (StalledError, ResourceError):
                return  # the main thread meets the same, and says it
            self._ended.wait(every)

    def _while_waiting(self, reason: str) -> None:
        """End who froze inside a transaction, so that what it locked is free again."""
        if threading.get_ident() == self._thread:
            self.writer.heartbeat(f"waiting for the pool: {reason}", self.step, self.total)
            self.supervisor.end_silent(_HURRY_SECONDS if self.wish else None)

    def _lost(self, reason: str) -> None:
        self.writer.event("warning", f"lost the pool's database and tries again: {reason}")

    # -- handing over -----------------------------------------------------------------------------------------------------

    def _make_probe(self) -> None:
        """Make the fixed completions of the probe, once a run, with the policy that training begins with."""
        path = self.store.root / SCORES
        if path.exists():
            return
        sampling, learner = self.train.sampling, self.crew.learner
        chosen = self.crew.prompts[: self.train.sync.probe_prompts]
        requests = [Request(p.id, p.token_ids, derive_seed(self.seed, "probe", p.id)) for p in chosen]
        completions = self.crew.sampler.generate(requests, self._params(1, sampling.temperature))
        sequences = tuple((p.token_ids, c.token_ids) for p, c in zip(chosen, completions, strict=True))
        base, plain = (completion_logprobs(learner.policy.model, sequences, t, 0) for t in (sampling.temperature, 1.0))
        rows = (tuple(tuple(row) for row in scores) for scores in (base, plain))
        Probe(sequences, sampling.temperature, *rows).write(path)

    def _hand_over(self, step: int) -> None:
        """Publish the learner's weights as a version, unless it was published already."""
        learner = self.crew.learner
        probe = read_probe(self.store.root / SCORES)
        scores = completion_logprobs(learner.policy.model, probe.sequences, probe.temperature, 0)
        plain = scores if probe.temperature == 1 else completion_logprobs(learner.policy.model, probe.sequences, 1.0, 0)
        in_use = {worker.version for worker in self.pool.workers() if worker.kind == "sampler"}
        self.store.publish(learner.policy, learner.version, step, scores, plain, in_use)
        self._record_version(step)
        self.pool.set_learner_version(learner.version)
        self.handed_over = learner.version
        self.writer.event("sync", f"handed over policy version {learner.version}", step=step, version=learner.version)

    def _record_version(self, step: int) -> None:
        """Write down the hash of the learner's weights, and say so when the same version had other weights before."""
        version = self.crew.learner.version
        if not self.pool.record_version(version, step, weights_sha256(self.crew.learner.policy)):
            reason = f"policy version {version} has other weights than before this run was stopped: another machine, or threads?"
            self.writer.event("alarm", reason, step=step, signal="not_bit_identical", version=version)

    def _assignments(self, threads: int) -> list[Assignment]:
        where = {"run": str(self.place.directory.resolve()), "identity": self.place.identity, "threads": threads}
        where |= {"base": self.places.base, "prompts": self.places.prompts, "config": as_tree(self.config)}
        return [Assignment(name=f"s{i}", parent_pid=os.getpid(), **where) for i in range(self.train.sampler.processes)]  # type: ignore[arg-type]

    def _share_threads(self) -> int:
        """Share the cores between learner and samplers; a run keeps its number, on which sums depend to the last bit."""
        known = self.pool.fact(THREADS)
        threads = self.config.machine.threads or len(os.sched_getaffinity(0))
        each = int(known) if known else threads_each(threads, self.num_processes)
        if known is None:
            self.pool.set_fact(THREADS, str(each))
        torch.set_num_threads(each)
        return each

    # -- going on -----------------------------------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Go on from the newest whole checkpoint and the consumption log after it; return the last step that was used."""
        done = super()._resume()
        logged = self.pool.steps(after=done)
        known = self.pool.last_step()
        if known < done:
            raise CheckpointError(
                f"{self.place.directory}: its newest checkpoint is of step {done}, the consumption log of "
                f"{self.pool.database.where} ends at step {known}: the pool was removed or replaced, and samples would be used "
                f"twice. Put it back, or remove {self.place.directory} to begin anew"
            )
        if logged:
            self.writer.event(
                "resume", f"learning the {len(logged)} steps of the consumption log after step {done} again", step=done
            )
        self.known_versions = self.pool.versions()
        for entry in logged:
            done = self._learn_again(entry.step, entry.group_ids, entry.version_before, entry.version_after)
        self.pool.set_learner_version(self.crew.learner.version)
        return done

    def _learn_again(self, step: int, group_ids: Sequence[int], before: int, after: int) -> int:
        if step == 1 and self._looks_at_heldout(0):
            self.writer.metrics(0, self._heldout(0))
        learner, clock = self.crew.learner, Clock()
        position = self._begin(step)
        with clock("learn"):
            self._say("learning a logged step again", step)
            groups = self.pool.groups(group_ids)
            was = learner.version
            stats = learner.step(groups, step)
        if (was, stats.version) != (before, after):
            raise CheckpointError(
                f"step {step} of the consumption log led from version {before} to {after}, learning it again from {was} to "
                f"{stats.version}: the checkpoint is not of this pool. Remove {self.place.directory} to begin anew"
            )
        if stats.version in self.known_versions:
            self._record_version(step)
        self.writer.metrics(step, self._metrics(step, position, groups, stats, clock, before))
        if step % self.train.checkpoints.every_steps == 0:
            self._checkpoint(step)
        self._stop_if_asked(step)
        return step

    def _checkpoint(self, step: int) -> None:
        self.pool.database.checkpoint()
        super()._checkpoint(step)

    def _alarms(self, step: int, metrics: dict[str, float]) -> None:
        """Write an event for every watched value that passes its threshold, once for each time that it does."""
        alarms, bound = self.train.alarms, self.train.sync.max_policy_update_lag
        rate = metrics["throughput/samples_per_second"]
        usual = median(self.rates) if len(self.rates) == _REMEMBERED_STEPS else 0.0
        ess = metrics.get("off_policy/effective_sample_fraction", 1.0)
        watched = [
            ("effective_sample_fraction", ess, alarms.effective_sample_fraction, ess < alarms.effective_sample_fraction),
            ("throughput", rate, alarms.throughput_drop * usual, rate < alarms.throughput_drop * usual),
            ("lag", metrics["lag/mean"], alarms.lag_fraction * bound, metrics["lag/mean"] > alarms.lag_fraction * bound > 0),
        ]
        for name, value, threshold, passed in watched:
            if passed and name not in self.alarmed:
                reason = f"{name} is {value:.3g}, past its threshold {threshold:.3g}; {_KNOBS[name]}"
                self.writer.event("alarm", reason, step=step, signal=name, value=value, threshold=threshold)
        self.alarmed = {name for name, _, _, passed in watched if passed}
        self.rates.append(rate)


def forget_experience(config: CampaignConfig, run: Run) -> None:
    """Remove the pool and the handed-over policies of a run that ended well and is to be trained anew."""
    import shutil

    end_leftovers(run.directory)
    database: Database = open_database(config.train, run.directory)
    database.remove()
    database.close()
    shutil.rmtree(run.directory / POLICIES, ignore_errors=True)
