"""What a sampler process of the async schedule does.

    newest policy -> probe -> orders from the pool -> completions -> verifier -> groups into the pool

It follows the learner through files and the pool alone, so it can run on another machine that sees the run directory and the
pool's database. It gives a sign of life with every completion; without one for the deadline it is taken for dead and its orders
go to others. It ends when the learner ends, and on SIGTERM at once: what it was sampling goes back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import CampaignConfig
from trainer.errors import StalledError, StopRequested
from trainer.experience.pool import Order, Pool
from trainer.metrics import RunWriter
from trainer.policy.load import check_vocabulary, eos_token_ids, load_model
from trainer.policy.policy import build_policy
from trainer.policy.tokenizer import load_tokenizer
from trainer.policy.versions import PolicyStore
from trainer.prompts import read_prompts
from trainer.reward import build_verifier
from trainer.rollout.follower import Follower, FollowingSampler
from trainer.rollout.vllm import Server, VllmSampler
from trainer.rollout.vllm_server import VllmServer
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
from trainer.types import Sampler, SamplingParams, Verifier

_BEAT_SECONDS, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 0.02, 0.25


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
        self._beat_at = 0.0
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
            if self.follower.follow():
                reason = f"loaded policy version {self.follower.version}, probe {self.follower.mismatch:.1e} off"
                self.writer.event("sync", reason, version=self.follower.version, mismatch=self.follower.mismatch)
            if self.follower.version < 0:
                self._beat("waiting for the first policy")
                self._check_learner()
                time.sleep(_LONGEST_PAUSE_SECONDS)
                continue
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
        """Sample, judge and deliver some groups of one RL stage after the other."""
        train = self.config.train
        for stage in sorted({order.stage for order in orders}):
            mine = [order for order in orders if order.stage == stage]
            requests = [request for order in mine for request in self.book.requests(order)]
            cap = train.stages[stage].max_completion_tokens or train.sampling.max_completion_tokens
            params = SamplingParams(train.sampling.temperature, cap, self.crew.eos_token_ids)
            completions = [
                replace(completion, sampler_id=self.name) for completion in self.follower.sampler.generate(requests, params)
            ]
            self._beat("judging", now=True)
            prompts = [self.book.by_id[request.prompt_id] for request in requests]
            samples = judge(prompts, completions, self.crew.tokenizer, self.crew.verifier)
            groups = group(samples, train.batch.group_size)
            late = self.pool.deliver(list(zip(mine, groups, strict=True)))
            for order in late:
                self.writer.event("drop", f"group {order.group_id} was delivered after its lease had ended", cause="late")
            self.facts["samples"] += len(samples)
            self.facts["tokens"] += sum(len(completion.token_ids) for completion in completions)

    def _on_progress(self, finished: int, total: int) -> None:
        self.facts["finished"] += 1
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
        sampler, server = build_vllm(assignment, config, store, longest, writer)
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
    assignment: Assignment, config: CampaignConfig, store: PolicyStore, longest_prompt: int, writer: RunWriter
) -> tuple[VllmSampler, VllmServer | None]:
    """Return a sampler over the configured servers, or over one that is started here."""
    train, vllm = config.train, config.train.sampler.vllm
    server: VllmServer | None = None
    urls, model = list(vllm.urls), vllm.model
    if not urls:
        caps = [stage.max_completion_tokens or train.sampling.max_completion_tokens for stage in train.stages]
        server = VllmServer(config, Path(assignment.base), assignment.directory, longest_prompt + max(caps))
        server.wait(lambda: writer.heartbeat(f"{STARTING} vLLM"))
        urls, model = [server.url], str(Path(assignment.base).resolve())
    elif not model:
        model = Server(urls[0], 30.0).ask("/v1/models")["data"][0]["id"]
    sampler = VllmSampler(
        urls,
        store,
        Path(assignment.base),
        model,
        train.sync.mode,
        vllm.concurrency,
        train.watchdog.deadline_seconds,
        assignment.directory / "merged",
        config.merge.max_shard_bytes,
    )
    return sampler, server
