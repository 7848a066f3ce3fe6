"""The sync schedule: sample, then learn, in one process, until the last RL stage ends.

    prompts of the step -> requests -> sampler -> verifier -> groups -> learner -> metrics -> checkpoint

Everything that a step draws is decided by the campaign's seed and the step's number, so a run that was killed and started
again from a checkpoint goes on to the same bits. A wish to stop is heard between phases, never inside an optimizer step.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from trainer.anchors.guard import AnchorGuard
from trainer.config.schema import Train
from trainer.engine.team import ALONE, Team
from trainer.errors import DivergedError
from trainer.learn.learner import Learner
from trainer.metrics import METRICS, RESULT, RunWriter, read_lines
from trainer.policy.checkpoint import checkpoint_facts, load_newest, save_checkpoint
from trainer.processes import forget_peak_memory, peak_memory_bytes
from trainer.reward.hacking import watch
from trainer.reward.summary import part_shares
from trainer.schedule.judge import group, judge, reward_metrics
from trainer.schedule.prompts import PromptCursor, StagePosition, locate, make_requests
from trainer.schedule.stop import StopWish
from trainer.types import Prompt, Request, Sample, Sampler, SamplingParams, Verifier, derive_seed

CHECKPOINTS = "checkpoints"
AGREES_WITHIN = 0.05  # nats; float32 is at 1e-5, bfloat16 at about 1e-2
BROKEN_ABOVE = 0.5  # nats
CORRECT_AT = 1.0 - 1e-9  # score from which a held-out answer counts as correct


@dataclass(frozen=True)
class Crew:
    """Who does the work."""

    learner: Learner
    sampler: Sampler
    verifier: Verifier
    tokenizer: Any
    prompts: Sequence[Prompt]  # of the train split
    heldout: Sequence[Prompt]  # already cut to heldout.num_prompts
    eos_token_ids: tuple[int, ...]
    anchors: AnchorGuard | None = None  # where the KL term is anchored


@dataclass(frozen=True)
class Run:
    """Where the run lives and whose it is."""

    directory: Path  # of this rank
    identity: str
    team: Team = ALONE
    first_directory: Path | None = None  # of the first rank, which writes the checkpoints; None: it is this one

    @property
    def checkpoints(self) -> Path:
        return (self.first_directory or self.directory) / CHECKPOINTS


def begin_anew_after_success(run: Run) -> None:
    """Drop the checkpoints of a run that ended well: starting it again means training again, not exporting again."""
    result = run.directory / RESULT
    if run.team.is_first and result.exists():
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        result.unlink()
    run.team.wait()


class Clock:
    """Seconds spent in each phase of a step, and the most memory held in it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}  # of this process; left out where the kernel does not let a peak begin anew
        self.highest = peak_memory_bytes()  # since the step before: also while loading, writing, looking at held-out prompts

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin, is_apart = time.perf_counter(), forget_peak_memory()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        self.highest = max(self.highest, peak_memory_bytes())
        if is_apart:
            self.peaks[phase] = max(self.peaks.get(phase, 0.0), peak_memory_bytes())


class SyncSchedule:
    """Runs all RL stages.

    Args:
        train: the configuration of training.
        seed: the campaign's.
        crew: sampler, verifier, learner and their data.
        run: the run directory; a checkpoint in it is gone on from.
        wish: set when somebody asks to stop.
        first_look: called before the first step of a run that begins anew (the pre-flight).
    """

    def __init__(
        self,
        train: Train,
        seed: int,
        crew: Crew,
        run: Run,
        wish: StopWish,
        first_look: Callable[[RunWriter], None] | None = None,
    ):
        self.train, self.seed, self.crew, self.place, self.wish = train, seed, crew, run, wish
        self.total = sum(stage.steps for stage in train.stages)
        self.cursors = [PromptCursor(crew.prompts, stage, train.batch.prompts_per_step, seed) for stage in train.stages]
        self.writer = RunWriter(run.directory)
        self.saved_step = 0
        self.kl_alarmed = False  # so that one excursion is one event
        self.first_look = first_look

    def run(self) -> None:
        """Train to the end of the last RL stage.

        Raises:
            StopRequested: somebody asked; a checkpoint was written. DivergedError: updates are not finite any more.
            ResourceError: the disk is full. CheckpointError: no checkpoint can be trusted.
        """
        done = self._resume()
        if done == 0 and self.first_look:
            self.first_look(self.writer)
        if done == 0 and self._looks_at_heldout(0):
            self.writer.metrics(0, self._heldout(0))
        for step in range(done + 1, self.total + 1):
            self.writer.metrics(step, self._step(step))
            if self._looks_at_heldout(step):
                self._watch()
            if step % self.train.checkpoints.every_steps == 0 or step == self.total:
                self._checkpoint(step)
            self._stop_if_asked(step)
        self.writer.heartbeat("trained", self.total, self.total)

    def _step(self, step: int) -> dict[str, float]:
        """Sample, judge, learn; return the step's metrics."""
        position = locate(self.train.stages, step)
        if position.step == 1 and position.index > 0:
            self.crew.learner.begin_stage(position.stage)
        clock = Clock()
        with clock("sample"):
            self.writer.heartbeat("sampling", step, self.total)
            prompts = self.cursors[position.index].take(position.step)
            requests = make_requests(prompts, self.train.batch.group_size, step, self.seed)
            completions = self.crew.sampler.generate(requests, self._params(step, self.train.sampling.temperature))
        self._stop_if_asked(step - 1)
        with clock("reward"):
            self.writer.heartbeat("judging", step, self.total)
            of_each = [prompt for prompt in prompts for _ in range(self.train.batch.group_size)]
            samples = judge(of_each, completions, self.crew.tokenizer, self.crew.verifier)
        self._stop_if_asked(step - 1)
        with clock("learn"):
            self.writer.heartbeat("learning", step, self.total)
            stats = self.crew.learner.step(group(samples, self.train.batch.group_size), step)
            self.crew.sampler.load_policy(stats.version)
        self._check_agreement(step, stats.metrics)
        seen = reward_metrics(samples, self.train.batch.group_size)
        metrics = {**stats.metrics, **seen, "stage/index": position.index}
        with clock("anchors"):
            metrics |= self._watch_anchors(step, position, samples, metrics)
        metrics |= costs(samples, clock)
        return metrics | self._heldout(step) if self._looks_at_heldout(step) else metrics

    def _watch_anchors(
        self, step: int, position: StagePosition, samples: Sequence[Sample], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Let the guards look at the anchors after a step, and return what they saw; a KL past its bound is an alarm."""
        found, guard, bound = dict[str, float](), self.crew.anchors, self.train.alarms.kl
        if guard is not None:
            found = guard.after_step(step, position.stage, samples, metrics, last=step == self.total)
        highest = max({**metrics, **found}.get(name, 0.0) for name in ("kl/mean", "anchors/audit_exact"))
        if highest > bound > 0 and not self.kl_alarmed:
            reason = f"KL to the reference is {highest:.3g} nats a token, past its bound train.alarms.kl {bound:g}"
            self.writer.event("alarm", reason, step=step, signal="kl", value=highest, threshold=bound)
        self.kl_alarmed = highest > bound > 0
        return found

    def _check_agreement(self, step: int, metrics: dict[str, float]) -> None:
        """Hold learner and sampler to the same log-probs for the same weights, before any update of the step.

        Raises:
            DivergedError: they are so far apart that the samples are not the policy's.
        """
        apart = metrics.get("mismatch/mean_abs_logprob", 0.0)
        sentence = f"learner and sampler are {apart:.3g} nats apart at a sampled token, on average, with the same weights"
        if apart > BROKEN_ABOVE:
            raise DivergedError(
                f"step {step}: {sentence}; nothing can be learned from such samples. The sampler's cache does not suit this "
                "model, or its files changed under the run; start again, and choose another base if it stays so"
            )
        if apart > AGREES_WITHIN and not (self.train.method == "lora" and self.train.lora.dropout > 0):
            self.writer.event("alarm", sentence, step=step, signal="mismatch")

    def _params(self, step: int, temperature: float) -> SamplingParams:
        cap = locate(self.train.stages, max(step, 1)).stage.max_completion_tokens or self.train.sampling.max_completion_tokens
        return SamplingParams(temperature, cap, self.crew.eos_token_ids)

    def _looks_at_heldout(self, step: int) -> bool:
        every = self.train.heldout.every_steps
        return bool(self.crew.heldout) and every > 0 and (step % every == 0 or step == self.total)

    def _heldout(self, step: int) -> dict[str, float]:
        """Answer the held-out prompts greedily and return how good that is."""
        prompts, begin = self.crew.heldout, time.perf_counter()
        self.writer.heartbeat("looking at held-out prompts", step, self.total)
        requests = [Request(p.id, p.token_ids, derive_seed(self.seed, "heldout", step, p.id)) for p in prompts]
        completions = self.crew.sampler.generate(requests, self._params(step, temperature=0.0))
        samples = judge(prompts, completions, self.crew.tokenizer, self.crew.verifier)
        return {
            "heldout/accuracy": sum(sample.reward >= CORRECT_AT for sample in samples) / len(samples),
            "heldout/reward_mean": sum(sample.reward for sample in samples) / len(samples),
            "heldout/length_mean": sum(len(sample.completion.token_ids) for sample in samples) / len(samples),
            **{f"heldout/{name}": value for name, value in part_shares([sample.verdict for sample in samples]).items()},
            "time/heldout_seconds": time.perf_counter() - begin,
        }

    def _watch(self) -> None:
        """Raise an alarm when the training reward rises at the cost of the held-out one."""
        for alarm in watch(read_lines(self.place.directory / METRICS)):
            self.writer.event("alarm", alarm.reason, step=alarm.step, signal=alarm.signal)

    # -- staying alive ----------------------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Go on from the newest whole checkpoint and return its step; 0 begins anew."""
        refused: list[str] = []
        found = load_newest(self.place.checkpoints, self.place.identity, refused.append)
        # Step 0 has a line of its own, so beginning anew removes everything from before it.
        self.writer = RunWriter(self.place.directory, resume_step=found.step if found else -1)
        for reason in refused:
            self.writer.event("rollback", reason)
        guard = self.crew.anchors
        if found is None:
            if guard is not None:
                guard.begin()
            return 0
        self.crew.learner.begin_stage(locate(self.train.stages, found.step).stage)
        self.crew.learner.load_state(found.parts, found.facts["learner"])
        self.crew.sampler.load_policy(self.crew.learner.version)
        self.saved_step = found.step
        self.kl_alarmed = found.facts["kl_alarmed"]
        if guard is not None:
            guard.load_state(found.facts["anchors"], found.step, locate(self.train.stages, found.step).stage)
        version = self.crew.learner.version
        self.writer.event("resume", f"from the checkpoint of step {found.step}", step=found.step, version=version)
        return found.step

    def _checkpoint(self, step: int) -> None:
        """Write a checkpoint of everything that the rest of the run depends on; the metrics go to the disk first."""
        self.writer.heartbeat("writing a checkpoint", step, self.total)
        self.writer.sync()
        position = locate(self.train.stages, step)
        parts, facts = self.crew.learner.state()
        cursor = {"stage": position.index, "step": position.step, "prompts": position.step * self.train.batch.prompts_per_step}
        facts = {"learner": facts, "cursor": cursor, "kl_alarmed": self.kl_alarmed}
        if self.crew.anchors is not None:
            facts["anchors"] = self.crew.anchors.state()
        keep = self.train.checkpoints.keep
        if self.place.team.is_first:
            save_checkpoint(self.place.checkpoints, step, self.place.identity, parts, facts, keep)
            if self.crew.anchors is not None:
                self.crew.anchors.prune({kept["anchors"]["version"] for kept in checkpoint_facts(self.place.checkpoints)})
        self.place.team.wait()
        self.saved_step = step

    def _stop_if_asked(self, step: int) -> None:
        """Stop here if somebody asked, after a checkpoint of the last finished step."""
        if self.wish:
            if step > self.saved_step:
                self._checkpoint(step)
            self.writer.event("stop", f"asked by {self.wish.signal_name}", step=step)
            raise self.wish.error()


def costs(samples: Sequence[Sample], clock: Clock) -> dict[str, float]:
    """Return what a step cost: seconds by phase, throughput, memory."""
    seconds = sum(clock.seconds.values())
    tokens = sum(len(sample.completion.token_ids) for sample in samples)
    spent = {f"time/{phase}_seconds": value for phase, value in clock.seconds.items()}
    metrics = {
        **spent,
        "time/step_seconds": seconds,
        "throughput/samples_per_second": len(samples) / seconds,
        "throughput/tokens_per_second": tokens / seconds,
        "memory/rss_bytes": float(psutil.Process().memory_info().rss),
        "memory/rss_peak_bytes": clock.highest,
        **{f"memory/{phase}_peak_bytes": value for phase, value in clock.peaks.items() if phase in ("sample", "learn")},
    }
    if torch.cuda.is_initialized():
        metrics["memory/device_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        metrics["memory/device_reserved_bytes"] = float(torch.cuda.max_memory_reserved())
    return metrics
