"""The colocated schedule: learner and sampler in one process over one backbone; sampling takes turns between micro-batches.

    learner.step: micro-batch, turns, micro-batch, turns, ...      waiting for samples: nothing but turns
    a turn: one token in every slot -> completions -> verifier (in a thread) -> groups into the experience pool

Everything else is the async schedule's: pool, bounded lag, consumption log, going on, replay.

*Two adapters, one backbone.* A completion is sampled from one policy from its first token to its last, while the learner moves
on. So the sampler has trained weights of its own, taken from the learner whenever it begins with new groups; for the span of its
turns the model's parameters point at them. The reference is the same backbone with its adapter off.

*Who goes first.* Training: turns come between its micro-batches, so many and no more, and none while the pool is above its
watermarks. When the device is short of memory, sampling gives back what it holds. A learner that waits for samples gives it all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from trainer.config import CampaignConfig
from trainer.experience.pool import Order, Pool
from trainer.learn.plain import PlainEngine
from trainer.learn.reference import AdapterOff
from trainer.metrics import RunWriter
from trainer.policy.forward import completion_logprobs, scoring
from trainer.policy.policy import Policy
from trainer.policy.versions import SCORES
from trainer.rollout.embedded import EmbeddedSampler, Generation
from trainer.rollout.probe import Look, Scores, check, read_probe
from trainer.schedule.asynchronous import AsyncSchedule, Places
from trainer.schedule.judge import group, judge
from trainer.schedule.stop import StopWish
from trainer.schedule.sync import Crew, Run
from trainer.schedule.terms import OrderBook, groups_per_claim, make_terms, probe_tolerance
from trainer.types import Completion, Sample, SamplingParams

SAMPLER = "s0"  # its name in the pool
_BEAT_SECONDS, _DENIED_SECONDS, _SHORT_SECONDS = 1.0, 0.02, 1.0
_WAITING_TURNS, _WAITING_SECONDS = 64, 0.5
_MOST_JUDGED = 2  # claims that are being judged while the next is sampled


class LentWeights:
    """A second set of trained weights for the same model.

    Args:
        policy: whose parameters are lent; its frozen ones are shared.
    """

    def __init__(self, policy: Policy):
        self.parameters = list(policy.trainable.values())
        self.tensors = [parameter.detach().clone() for parameter in self.parameters]

    def take(self) -> None:
        """Copy the policy's weights as they are now."""
        for tensor, parameter in zip(self.tensors, self.parameters, strict=True):
            tensor.copy_(parameter.detach())

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Have the model compute with these weights; never while a gradient is under way."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for index, parameter in enumerate(self.parameters):
            self.tensors[index], parameter.data = parameter.data, self.tensors[index]


def backbone_bytes(models: Sequence[torch.nn.Module], policy: Policy) -> tuple[int, int]:
    """Return the bytes of the policy's frozen weights, and those of all distinct frozen weights behind several models."""
    trained = {parameter.data_ptr() for parameter in policy.trainable.values()}

    def frozen(model: torch.nn.Module) -> dict[int, int]:
        storages = [parameter.untyped_storage() for parameter in model.parameters() if parameter.data_ptr() not in trained]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    together: dict[int, int] = {}
    for model in models:
        together |= frozen(model)
    return sum(frozen(policy.model).values()), sum(together.values())


def available_bytes(device: torch.device) -> int:
    """Return the memory of a device that nobody uses."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else int(psutil.virtual_memory().available)


@dataclass(frozen=True)
class _Judged:
    orders: list[Order]
    samples: Future[list[Sample]]


class Turns:
    """The sampling half, in small pieces.

    Args:
        config: the campaign's.
        crew: of the run; its learner's policy is sampled from.
        pool: with this sampler's name.
        writer: takes the events.
        probe: what to score after new weights were taken, and what the learner says of it.
    """

    def __init__(
        self, config: CampaignConfig, crew: Crew, pool: Pool, writer: RunWriter, probe: Callable[[], tuple[Any, Scores]]
    ):
        train = config.train
        self.config, self.train, self.crew, self.pool, self.writer, self.probe = config, train, crew, pool, writer, probe
        policy = crew.learner.policy
        pad = getattr(crew.sampler, "pad_token_id", 0)
        self.sampler = EmbeddedSampler(policy.model, train.sampler.slots, pad, version=-1, progress=self._on_progress)
        self.weights, self.device = LentWeights(policy), policy.device
        self.book = OrderBook(crew.prompts, train, config.campaign.seed)
        self.terms, self.num_groups = make_terms(train), groups_per_claim(train)
        self.backlog: deque[list[Order]] = deque()  # claimed, not begun
        self.orders: list[Order] = []  # of the generation
        self.generation: Generation | None = None
        self.judged: deque[_Judged] = deque()
        self.judges = ThreadPoolExecutor(1, "judge")
        self.facts: dict[str, float] = {"finished": 0, "samples": 0, "tokens": 0, "busy_seconds": 0.0, "idle_seconds": 0.0}
        self.mismatch, self.probed = 0.0, -1
        self.look: Look | None = None
        self.doing, self.seconds = "starting", 0.0
        self._beat_at = self._ask_at = 0.0
        self._ended_at = time.monotonic()
        pool.release(pool.worker)

    def turn(self, num_turns: int) -> bool:
        """Take so many turns at most; return whether there was anything to do."""
        began = time.monotonic()
        self.facts["idle_seconds"] += began - self._ended_at
        try:
            moved = self._collect()
            moved = self._sample(num_turns) or moved
        except torch.OutOfMemoryError:
            self.give_back("the device's memory is exhausted")
            moved = False
        self._beat()
        self._ended_at = time.monotonic()
        self.facts["busy_seconds" if moved else "idle_seconds"] += self._ended_at - began
        self.seconds += self._ended_at - began
        return moved

    def _sample(self, num_turns: int) -> bool:
        least = self.train.colocated.min_available_memory_bytes
        if time.monotonic() < self._ask_at:
            return False
        if least and (free := available_bytes(self.device)) < least:
            self.give_back(f"{free} bytes are free, train.colocated.min_available_memory_bytes is {least}")
            return False
        if self.generation is None and not self._begin():
            return False
        generation = self.generation
        assert generation is not None
        with self.weights.lent(), scoring(self.sampler.model):
            for _ in range(num_turns):
                if generation.turn():
                    self._judge(generation.completions())
                    break
        return True

    def _begin(self) -> bool:
        """Claim groups, take the learner's weights, begin to sample; return whether there was something to begin."""
        if len(self.judged) >= _MOST_JUDGED:
            self.doing = "waiting for the verifier"
            return False
        learner = self.crew.learner
        if learner.version != self.sampler.version:
            self._take_weights()
        if not self.backlog:
            taken = self.pool.take_orders(self.num_groups, self.sampler.version, self.terms, self.book.prompt_of)
            if not taken.orders:
                self.doing, self._ask_at = f"waiting: {taken.denial}", time.monotonic() + _DENIED_SECONDS
                return False
            for stage in sorted({order.stage for order in taken.orders}):
                self.backlog.append([order for order in taken.orders if order.stage == stage])
        self.orders = self.backlog.popleft()
        cap = self.train.stages[self.orders[0].stage].max_completion_tokens or self.train.sampling.max_completion_tokens
        params = SamplingParams(self.train.sampling.temperature, cap, self.crew.eos_token_ids)
        requests = [request for order in self.orders for request in self.book.requests(order)]
        self.generation, self.doing = Generation(self.sampler, requests, params), "sampling"
        return True

    def _take_weights(self) -> None:
        """Take the learner's weights, and probe them when the last probe is `sync_every` optimizer steps old."""
        version = self.crew.learner.version
        self.weights.take()
        self.sampler.version = version
        if self.probed < 0 or version - self.probed >= self.train.sync.sync_every:
            probe, expected = self.probe()
            with self.weights.lent(), scoring(self.sampler.model):
                given = self.sampler.score(probe.sequences, probe.temperature)
            self.mismatch = check(given, probe, version, expected, self.look, probe_tolerance(self.config))
            self.probed, self.look = version, Look(version, expected, given)

    def _judge(self, completions: Sequence[Completion]) -> None:
        named = [replace(completion, sampler_id=self.pool.worker) for completion in completions]
        prompts = [self.book.by_id[completion.prompt_id] for completion in named]
        future = self.judges.submit(judge, prompts, named, self.crew.tokenizer, self.crew.verifier)
        self.judged.append(_Judged(self.orders, future))
        self.facts["tokens"] += sum(len(completion.token_ids) for completion in named)
        self.generation, self.orders = None, []

    def _collect(self, wait: bool = False) -> bool:
        """Deliver what has been judged; return whether there was any."""
        delivered = False
        while self.judged and (wait or self.judged[0].samples.done()):
            judged = self.judged.popleft()
            samples = judged.samples.result()
            groups = group(samples, self.train.batch.group_size)
            for order in self.pool.deliver(list(zip(judged.orders, groups, strict=True))):
                self.writer.event("drop", f"group {order.group_id} was delivered after its lease had ended", cause="late")
            self.facts["samples"] += len(samples)
            delivered = True
        return delivered

    def settle(self) -> None:
        """Have everything judged that has been sampled, so that the verifier is free."""
        self._collect(wait=True)

    def give_back(self, reason: str) -> None:
        """Give up what is being sampled, its cache and its groups; training needs the memory."""
        self.settle()
        self.doing, self._ask_at = f"waiting: {reason}", time.monotonic() + _SHORT_SECONDS
        if self.generation is not None or self.backlog:
            returned = self.pool.release(self.pool.worker)
            self.writer.event("yield", f"sampling gave {returned} groups back: {reason}", returned_groups=returned)
        self.generation, self.orders = None, []
        self.backlog.clear()

    def close(self) -> None:
        self.judges.shutdown(wait=True, cancel_futures=True)
        self.judged.clear()
        self.generation = None
        self.pool.release(self.pool.worker)
        self.pool.forget_worker(self.pool.worker)

    def _on_progress(self, finished: int, total: int) -> None:
        self.facts["finished"] += 1

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= _BEAT_SECONDS:
            self._beat_at = time.monotonic()
            self.pool.beat("sampler", self.doing, self.sampler.version, mismatch=self.mismatch, **self.facts)


class ColocatedSchedule(AsyncSchedule):
    """Runs all RL stages, learning and sampling by turns.

    Args:
        config: the campaign's.
        crew: learner, sampler, verifier; the policy has an adapter.
        run: the run directory.
        wish: set when somebody asks to stop.
        first_look: see SyncSchedule.
    """

    def __init__(
        self,
        config: CampaignConfig,
        crew: Crew,
        run: Run,
        wish: StopWish,
        first_look: Callable[[RunWriter], None] | None = None,
    ):
        super().__init__(config, crew, run, wish, Places("", ""), first_look)
        self.turns: Turns | None = None

    @property
    def num_processes(self) -> int:
        return 0

    def _run_from(self, done: int, threads: int) -> None:
        self._make_probe()
        by_id = {prompt.id: prompt for prompt in self.crew.prompts}
        pool = Pool(self.pool.database, self.place.identity, by_id, SAMPLER, self.pool.lease_seconds)
        self.turns = Turns(self.config, self.crew, pool, self.writer, self._probe)
        self.pools.append(pool)
        engine = self.crew.learner.engine
        assert isinstance(engine, PlainEngine)
        turns, num_turns = self.turns, self.train.colocated.decode_turns
        engine.between = lambda: turns.turn(num_turns)
        self._hand_over(done)
        try:
            self._train_from(done)
        finally:
            engine.between = lambda: None

    def _stop_sampling(self) -> None:
        if self.turns is not None:
            self.turns.close()

    def _pause(self, seconds: float) -> None:
        """Sample until there is something new in the pool; sleep only where there is nothing to do."""
        assert self.turns is not None
        end, delivered = time.monotonic() + _WAITING_SECONDS, self.turns.facts["samples"]
        while time.monotonic() < end and self.turns.facts["samples"] == delivered and not self.wish:
            if not self.turns.turn(_WAITING_TURNS):
                time.sleep(seconds)
                return

    def _async_step(self, step: int) -> dict[str, float]:
        assert self.turns is not None
        spent = self.turns.seconds
        metrics = super()._async_step(step)
        models: list[torch.nn.Module] = [self.crew.learner.policy.model, self.turns.sampler.model]
        reference = self.crew.learner.reference
        if isinstance(reference, AdapterOff):
            models.append(reference.policy.model)
        once, together = backbone_bytes(models, self.crew.learner.policy)
        assert once == together, f"the backbone is there {together / once:.2f} times"
        facts = {"memory/backbone_bytes": together, "memory/backbone_copies": together / once}
        return metrics | facts | {"time/turns_seconds": self.turns.seconds - spent}

    def _heldout(self, step: int) -> dict[str, float]:
        if self.turns is not None:
            self.turns.settle()
        return super()._heldout(step)

    def _hand_over(self, step: int) -> None:
        """Write down what the learner's weights are; the sampler takes them by itself."""
        self._record_version(step)
        self.pool.set_learner_version(self.crew.learner.version)
        self.handed_over = self.crew.learner.version

    def _probe(self) -> tuple[Any, Scores]:
        """Return the probe, and the learner's log-probs of it now."""
        probe = read_probe(self.store.root / SCORES)
        return probe, completion_logprobs(self.crew.learner.policy.model, probe.sequences, probe.temperature, 0)
