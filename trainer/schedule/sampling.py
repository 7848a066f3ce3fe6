"""What a sampler process of the async schedule does.

    newest policy -> probe -> orders from the pool -> completions -> verifier -> groups into the pool
                                      next orders -> completions -> ...    (the verifier works in a thread beside)

It follows the learner through files and the pool alone, so it can run on another machine that sees the run directory and the
pool's database. It gives a sign of life with every completion; without one for the deadline it is taken for dead and its orders
go to others. It ends when the learner ends, and on SIGTERM at once: what it was sampling goes back.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import FP8_ON_CPU, CampaignConfig
from trainer.errors import ConfigError, StalledError, StopRequested
from trainer.experience.pool import Order, Pool
from trainer.files import sha256_text
from trainer.metrics import RunWriter
from trainer.policy.load import check_vocabulary, eos_token_ids, load_model
from trainer.policy.policy import build_policy
from trainer.policy.tokenizer import load_tokenizer
from trainer.policy.versions import PolicyStore
from trainer.prompts import read_prompts
from trainer.reward import build_verifier
from trainer.rollout.follower import Follower, FollowingSampler
from trainer.rollout.quantised import write_quantised
from trainer.rollout.sync_choice import choose, measure_both, table
from trainer.rollout.vllm import VllmSampler
from trainer.rollout.vllm_http import Server
from trainer.rollout.vllm_server import VllmServer, running_servers
from trainer.schedule.judge import group, judge
from trainer.schedule.sampler_process import STARTING, Assignment
from trainer.schedule.terms import (
    LEARNER,
    POLICIES,
    OrderBook,
    groups_per_claim,
    make_terms,
    open_database,
    probe_tolerance,
)
from trainer.types import Completion, Sampler, SamplingParams, Verifier

SYNC_MODE = "sync_mode"  # fact of the pool: what `sync.mode: auto` took
_BEAT_SECONDS, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 0.01, 0.1
_MOST_JUDGED = 2  # claims that are being judged while the next one is sampled


@dataclass(frozen=True)
class Judging:
    """What turns completions into judged samples."""

    tokenizer: Any
    verifier: Verifier
    eos_token_ids: tuple[int, ...]


class SamplerLoop:
    """The loop of one sampler.

    Args:
        name: of this sampler in the pool.
        config: the campaign's.
        pool: the experience pool.
        follower: loads policies into its sampler.
        book: turns orders into requests.
        crew: tokenizer, verifier, EOS ids.
        writer: of this sampler's own run directory.
        parent_pid: see Assignment.
    """

    def __init__(
        self,
        name: str,
        config: CampaignConfig,
        pool: Pool,
        follower: Follower,
        book: OrderBook,
        crew: Judging,
        writer: RunWriter,
        parent_pid: int = 0,
    ):
        self.name, self.config, self.pool, self.follower, self.book, self.crew = name, config, pool, follower, book, crew
        self.writer, self.parent_pid = writer, parent_pid
        self.terms, self.num_groups = make_terms(config.train), groups_per_claim(config.train)
        self.facts: dict[str, float] = {"finished": 0, "samples": 0, "tokens": 0, "busy_seconds": 0.0, "idle_seconds": 0.0}
        self.server: VllmServer | None = None  # ends with this process
        self.judges, self.judged = ThreadPoolExecutor(1, "judge"), deque[Future[None]]()
        self._beat_at, self._finished = 0.0, 0
        self._learner_beat: float | None = None
        self._learner_seen = 0.0  # when that changed, by the clock of this process: the pool's may jump
        follower.on_progress(self._on_progress)

    def run(self) -> None:
        """Sample until told to stop.

        Raises:
            StopRequested: by a signal, or because the learner is gone. StalledError: the learner is silent.
            MismatchError: the probe is off.
        """
        pause = _PAUSE_SECONDS
        while True:
            if self.parent_pid and os.getppid() != self.parent_pid:
                raise StopRequested("the learner is gone")
            self._choose_mode()
            if self.follower.follow():
                reason = f"loaded policy version {self.follower.version}, probe {self.follower.mismatch:.1e} off"
                self.writer.event("sync", reason, version=self.follower.version, mismatch=self.follower.mismatch)
            if self.follower.version < 0:
                self._beat("waiting for the first policy")
                self._check_learner()
                time.sleep(_LONGEST_PAUSE_SECONDS)
                continue
            self._await_judges()
            began = time.monotonic()
            taken = self.pool.take_orders(self.num_groups, self.follower.version, self.terms, self.book.prompt_of)
            if taken.orders:
                self._beat("sampling", now=True)
                self._fulfil(taken.orders)
                self.facts["busy_seconds"] += time.monotonic() - began
                pause = _PAUSE_SECONDS
                continue
            self._beat(f"waiting: {taken.denial}")
            self._check_learner()
            time.sleep(pause)
            self.facts["idle_seconds"] += time.monotonic() - began
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def _fulfil(self, orders: Sequence[Order]) -> None:
        """Sample some groups of one RL stage after the other, and have them judged and delivered meanwhile."""
        for stage in sorted({order.stage for order in orders}):
            mine = [order for order in orders if order.stage == stage]
            requests = [request for order in mine for request in self.book.requests(order)]
            params = self._params(stage)
            completions = [
                replace(completion, sampler_id=self.name) for completion in self.follower.sampler.generate(requests, params)
            ]
            self.facts["tokens"] += sum(len(completion.token_ids) for completion in completions)
            self.judged.append(self.judges.submit(self._deliver, mine, completions))

    def _deliver(self, orders: Sequence[Order], completions: Sequence[Completion]) -> None:
        """Judge completions and put them into the pool; runs in the judges' thread."""
        prompts = [self.book.by_id[completion.prompt_id] for completion in completions]
        samples = judge(prompts, completions, self.crew.tokenizer, self.crew.verifier)
        groups = group(samples, self.config.train.batch.group_size)
        for order in self.pool.deliver(list(zip(orders, groups, strict=True))):
            self.writer.event("drop", f"group {order.group_id} was delivered after its lease had ended", cause="late")
        self.facts["samples"] += len(samples)

    def _await_judges(self) -> None:
        """Wait until few enough claims are being judged, giving signs of life; what a judge raised is raised here."""
        while self.judged:
            done, _ = wait([self.judged[0]], _BEAT_SECONDS if len(self.judged) > _MOST_JUDGED else 0)
            if done:
                self.judged.popleft().result()
            elif len(self.judged) <= _MOST_JUDGED:
                return
            else:
                self._beat("judging")

    def _choose_mode(self) -> None:
        """With `sync.mode: auto`, find the faster way into this engine once a run, as soon as there is a policy."""
        sampler, newest, train = self.follower.sampler, self.follower.store.newest(), self.config.train
        if train.sync.mode != "auto" or self.follower.version >= 0 or newest is None or not isinstance(sampler, VllmSampler):
            return
        known = self.pool.fact(SYNC_MODE)
        if known is None:
            self._beat("measuring how policies reach the engine", now=True)
            orders = [Order(-1, 0, ordinal, self.book.prompt_of(0, ordinal), 0) for ordinal in range(self.num_groups)]
            requests = [request for order in orders for request in self.book.requests(order)]
            params = self._params(0)
            trials = measure_both(self.follower, newest.version, requests, params)
            syncs = train.batch.optimizer_steps_per_step / train.sync.sync_every  # in a step
            samples = train.batch.samples_per_step / syncs / max(train.sampler.processes, 1)
            per_sync = samples * params.max_completion_tokens / 2  # as long as nobody knows better
            known = choose(trials, per_sync).mode
            self.pool.set_fact(SYNC_MODE, known)
            reason = f"measured how policies reach this engine, takes {known}:\n{table(trials, per_sync)}"
            self.writer.event("sync", reason, mode=known, trials=[trial.facts() for trial in trials])
        sampler.switch("merge" if known == "merge" else "adapter")

    def _params(self, stage: int) -> SamplingParams:
        sampling = self.config.train.sampling
        cap = self.config.train.stages[stage].max_completion_tokens or sampling.max_completion_tokens
        return SamplingParams(sampling.temperature, cap, self.crew.eos_token_ids)

    def _on_progress(self, finished: int, total: int) -> None:
        self.facts["finished"] += max(finished - self._finished, 0)
        self._finished = finished if finished < total else 0
        self._beat(f"sampling: {finished} of {total} completions")

    def _beat(self, doing: str, now: bool = False) -> None:
        """Give a sign of life, and keep the claims, at most once a second unless it is due now."""
        if now or time.monotonic() - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = time.monotonic()
            self.writer.heartbeat(doing)  # first: this one waits for no lock
            self.pool.renew()
            self.pool.beat("sampler", doing, self.follower.version, mismatch=self.follower.mismatch, **self.facts)

    def _check_learner(self) -> None:
        """Stop when the learner, which is waited for, has been silent for longer than it may have to wait for the pool."""
        learner = next((worker for worker in self.pool.workers() if worker.id == LEARNER), None)
        if learner is None or learner.beat_at != self._learner_beat:
            self._learner_beat, self._learner_seen = learner.beat_at if learner else None, time.monotonic()
            return
        silent = time.monotonic() - self._learner_seen
        if silent > self.pool.database.patience_seconds:
            raise StalledError(
                f"the learner (pid {learner.pid} on {learner.host}, last seen {learner.doing})",
                f"has given no sign of life for {silent:.0f} s",
                "start the run again: it goes on from its checkpoint and its pool",
            )

    def close(self) -> None:
        """Give back what is held and end the verifier's processes."""
        self.judges.shutdown(wait=False, cancel_futures=True)  # what it still delivers is somebody else's by then
        self.pool.release(self.name)
        self.crew.verifier.close()
        self.follower.sampler.close()
        if self.server is not None:
            self.server.close()
        self.pool.close()


def build(assignment: Assignment, config: CampaignConfig, writer: RunWriter) -> SamplerLoop:
    """Load everything that a sampler needs."""
    torch.set_num_threads(assignment.threads)
    run, train = Path(assignment.run), config.train
    prompts = read_prompts(Path(assignment.prompts), "train")
    book = OrderBook(prompts, train, config.campaign.seed)

    def lost(reason: str) -> None:
        writer.event("warning", f"lost the pool's database and tries again: {reason}")

    def waiting(reason: str) -> None:
        writer.heartbeat(f"waiting for the pool: {reason}")
        if assignment.parent_pid and os.getppid() != assignment.parent_pid:
            raise StopRequested("the learner is gone")

    database = open_database(train, run, lost, waiting)
    pool = Pool(database, assignment.identity, book.by_id, assignment.name, train.watchdog.deadline_seconds)
    pool.release(assignment.name)
    tokenizer = load_tokenizer(Path(assignment.base))
    base = load_model(Path(assignment.base), config.base.dtype, config.machine.device)
    check_vocabulary(base, tokenizer, Path(assignment.base))
    eos = eos_token_ids(base, tokenizer)
    store = PolicyStore(run / POLICIES, train.sync.keep)
    sampler: Sampler
    if train.sampler.kind == "vllm":
        longest = max(len(prompt.token_ids) for prompt in prompts)
        sampler, server = build_vllm(assignment, config, store, longest, base.config.vocab_size, writer)
    else:
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        policy = build_policy(base, train, config.campaign.seed)
        sampler, server = FollowingSampler(policy, store, train.sampler.slots, pad), None
    follower = Follower(sampler, store, probe_tolerance(config))
    crew = Judging(tokenizer, build_verifier(config.reward), eos)
    loop = SamplerLoop(assignment.name, config, pool, follower, book, crew, writer, assignment.parent_pid)
    loop.server = server
    return loop


def build_vllm(
    assignment: Assignment, config: CampaignConfig, store: PolicyStore, longest_prompt: int, vocabulary: int, writer: RunWriter
) -> tuple[VllmSampler, VllmServer | None]:
    """Return a sampler over the configured servers, or over one that is started here."""
    train, vllm, base = config.train, config.train.sampler.vllm, Path(assignment.base)
    deadline = train.watchdog.deadline_seconds
    server: VllmServer | None = None
    if vllm.urls:
        servers, model = running_servers(config, lambda: writer.heartbeat(f"{STARTING}: waiting for vLLM"))
    else:
        backbone = quantised_backbone(assignment, config, base, writer)
        caps = [stage.max_completion_tokens or train.sampling.max_completion_tokens for stage in train.stages]
        more = {"--quantization": "fp8"} if train.sampler.quantization == "fp8" else {}
        server = VllmServer(config, backbone, assignment.directory, longest_prompt + max(caps), more, assignment.threads)
        server.wait(lambda: writer.heartbeat(f"{STARTING} vLLM"))
        servers, model = [Server(server.url, deadline)], server.name
    sampler = VllmSampler(
        servers,
        store,
        base,
        model,
        "merge" if train.sync.mode == "merge" else "adapter",
        vllm.concurrency,
        deadline,
        assignment.directory / "merged",
        config.merge.max_shard_bytes,
        namespace=f"{config.campaign.name}-{sha256_text(assignment.run)[:8]}-{assignment.name}",
        life=secrets.token_hex(3),
        vocabulary=vocabulary,
        shared=server is None,
        ended=server.ended if server is not None else lambda: None,
    )
    sampler.event = writer.event
    return sampler, server


def quantised_backbone(assignment: Assignment, config: CampaignConfig, base: Path, writer: RunWriter) -> Path:
    """Return the directory that the engine loads: the base, or a copy with matrices of fewer bits."""
    kind = config.train.sampler.quantization
    on_gpu = config.machine.device != "cpu" and torch.cuda.is_available()
    if kind == "fp8" and not on_gpu:
        raise ConfigError("train.sampler.quantization", kind, FP8_ON_CPU)
    if kind == "none" or kind == "fp8":
        return base
    writer.heartbeat(f"{STARTING}: quantising the backbone")
    if not on_gpu:
        writer.event(
            "warning", f"no GPU here, where vLLM puts no adapter on {kind} matrices: it gets them rounded to {kind} and back"
        )
    target = assignment.directory / f"backbone-{kind}"
    return write_quantised(base, target, kind, not on_gpu, config.merge.max_shard_bytes)
