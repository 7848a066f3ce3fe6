"""The async schedule with its sampler in a thread: a tiny model, a real pool; processes are in tests/tasks/test_async.py."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import CampaignConfig, validate
from trainer.config.load import lay_over
from trainer.errors import CheckpointError, StalledError, StopRequested
from trainer.experience.pool import Pool
from trainer.learn.learner import Learner
from trainer.metrics import RunWriter, read_lines
from trainer.policy.policy import Policy, build_policy
from trainer.policy.versions import PolicyStore, weights_sha256
from trainer.rollout.embedded import EmbeddedSampler
from trainer.rollout.follower import Follower, FollowingSampler
from trainer.schedule.asynchronous import AsyncSchedule, Places, lag_metrics
from trainer.schedule.replay import replay
from trainer.schedule.sampling import Judging, SamplerLoop
from trainer.schedule.stop import StopWish
from trainer.schedule.sync import Crew, Run
from trainer.schedule.terms import OrderBook, groups_per_claim, make_terms, open_database, threads_each
from trainer.types import Prompt, Verdict

EOS, LAG, STEPS, GROUPS = 1, 6, 8, 4
IDENTITY = "a" * 64
PROMPTS = [Prompt(f"p{i}", "main", "train", f"p{i}", tuple(2 + (i * 7 + j) % 17 for j in range(3)), "x") for i in range(24)]
TREE: dict[str, Any] = {
    "campaign": {"name": "async"},
    "prepare": {"sources": [{"source": "jsonl:nowhere"}]},
    "base": {"source": "scratch"},
    "machine": {"threads": 1},
    "train": {
        "method": "lora",
        "schedule": "async",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"learning_rate": 1e-2},
        "algorithm": {"off_policy": {"mode": "decoupled"}},
        "batch": {"prompts_per_step": GROUPS, "group_size": 4, "minibatches": 2},
        "sampling": {"max_completion_tokens": 5},
        "sampler": {"slots": 8, "processes": 0},
        "sync": {"sync_every": 2, "max_policy_update_lag": LAG},
        "stages": [{"name": "one", "steps": 5}, {"name": "two", "steps": 3}],
        "heldout": {"every_steps": 0},
        "checkpoints": {"every_steps": 3},
    },
}


class Words:
    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(str(token) for token in ids)


class Thirds:
    """Rewards a completion by the sum of its tokens."""

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [Verdict("ok", float(sum(int(word) for word in text.split()) % 3 == 0)) for _, text in answers]

    def close(self) -> None:
        pass


def tiny_policy(config: CampaignConfig) -> Policy:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "initializer_range": 0.2, "max_position_embeddings": 64}
    sizes |= {"eos_token_id": EOS, "pad_token_id": EOS, "bos_token_id": None}
    return build_policy(LlamaForCausalLM(LlamaConfig(**sizes)), config.train, seed=3)


class Stage:
    """A train stage whose sampler is a thread; `learner_fails_at` is a learner that dies before it has written what it used."""

    def __init__(self, root: Path, difference: dict[str, Any] | None = None):
        url = {"train": {"pool": {"url": f"sqlite:///{root}/run/experience.db"}}}
        self.config = validate(lay_over(lay_over(TREE, url), difference or {}))
        self.directory = root / "run"

    def learner(self) -> Learner:
        return Learner(tiny_policy(self.config), self.config.train, 3, None, RunWriter(self.directory).event)

    def pool(self, worker: str) -> Pool:
        database = open_database(self.config.train, self.directory)
        return Pool(database, IDENTITY, {prompt.id: prompt for prompt in PROMPTS}, worker, 60.0)

    def schedule(self, wish: StopWish | None = None) -> AsyncSchedule:
        learner = self.learner()
        crew = Crew(learner, EmbeddedSampler(learner.policy.model, 8, EOS), Thirds(), Words(), PROMPTS, [], (EOS,))
        return AsyncSchedule(
            self.config, crew, Run(self.directory, IDENTITY), StopWish() if wish is None else wish, Places("", "")
        )

    def sampler(self, name: str = "s0") -> SamplerLoop:
        store = PolicyStore(self.directory / "policies", 3)
        follower = Follower(FollowingSampler(tiny_policy(self.config), store, 8, EOS), store, 1e-3)
        book = OrderBook(PROMPTS, self.config.train, 0)
        writer = RunWriter(self.directory / "samplers" / name)
        return SamplerLoop(name, self.config, self.pool(name), follower, book, Judging(Words(), Thirds(), (EOS,)), writer)

    def run_until_asked(self, number: int) -> None:
        """Run until somebody asks to stop in a step."""
        wish = StopWish()
        schedule = self.schedule(wish)
        step: Callable[..., Any] = schedule.crew.learner.step

        def asked(groups: Any, now: int) -> Any:
            wish.signal_name = "SIGTERM" if now == number else None
            return step(groups, now)

        schedule.crew.learner.step = asked  # type: ignore[method-assign]
        with pytest.raises(StopRequested, match="SIGTERM"):
            self.run(schedule)

    def run(self, schedule: AsyncSchedule, name: str = "s0", begin_at: Path | None = None) -> None:
        """Run a schedule, and a sampler in a thread that begins when a file is there."""
        loop = self.sampler(name)

        def sample() -> None:
            while begin_at is not None and not begin_at.exists() and not loop.parent_pid:
                time.sleep(0.02)
            with pytest.raises(StopRequested):
                loop.run()
            loop.close()

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            schedule.run()
        finally:
            loop.parent_pid = -1
            thread.join(300)
            assert not thread.is_alive()

    def check_log(self) -> None:
        pool = self.pool("test")
        steps = pool.steps()
        assert [step.step for step in steps] == list(range(1, STEPS + 1))
        used = Counter(group_id for step in steps for group_id in step.group_ids)
        assert len(used) == STEPS * GROUPS
        assert set(used.values()) == {1}
        assert pool.counts()["consumed"] == STEPS * GROUPS
        for step in steps:
            for group in pool.groups(step.group_ids):
                assert all(0 <= step.version_before - s.completion.policy_version <= LAG for s in group.samples)
        pool.close()

    def check_replay(self, digest: str) -> None:
        learner, pool = self.learner(), self.pool("replay")
        replayed = replay(learner, pool, self.config.train.stages)
        assert replayed.identical
        assert replayed.num_steps == STEPS
        assert weights_sha256(learner.policy) == digest
        pool.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_step_is_used_logged_measured_and_replayed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    schedule = stage.schedule()
    stage.run(schedule)
    stage.check_log()
    lines = read_lines(stage.directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        metrics = line["metrics"]
        assert 0 < metrics["off_policy/effective_sample_fraction"] <= 1
        assert 0 < metrics["off_policy/kept_fraction"] <= 1
        assert metrics["mismatch/mean_abs_logprob"] >= 0
        assert metrics["mismatch/probe"] < 1e-4
        assert metrics["lag/max"] <= LAG
        assert sum(value for name, value in metrics.items() if name.startswith("lag/share_to_")) == pytest.approx(1)
    assert max(line["metrics"]["lag/max"] for line in lines) > 0
    assert [line["metrics"]["stage/index"] for line in lines] == [0] * 5 + [1] * 3
    stage.check_replay(weights_sha256(schedule.crew.learner.policy))


@pytest.mark.parametrize("checkpoints", [3, 100])
def test_a_learner_that_dies_anywhere_goes_on_to_the_same_bits(tmp_path: Path, checkpoints: int) -> None:
    """Once before a step is learnt, once after it was learnt and before it was written down; with and without a checkpoint."""
    stage = Stage(tmp_path, {"train": {"checkpoints": {"every_steps": checkpoints}}})
    first = stage.schedule()
    step: Callable[..., Any] = first.crew.learner.step

    def dies(groups: Any, number: int) -> Any:
        if number == 5:
            raise RuntimeError("killed")
        return step(groups, number)

    first.crew.learner.step = dies  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        stage.run(first)
    second = stage.schedule()
    consume: Callable[..., Any] = second.pool.consume

    def forgets(claim: Any, number: int, *versions: int) -> None:
        if number == 7:
            raise RuntimeError("killed again")
        consume(claim, number, *versions)

    second.pool.consume = forgets  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed again"):
        stage.run(second)
    third = stage.schedule()
    stage.run(third)
    stage.check_log()
    assert [line["step"] for line in read_lines(stage.directory / "metrics.jsonl")] == list(range(1, STEPS + 1))
    signals = {event.get("signal") for event in read_lines(stage.directory / "events.jsonl")}
    assert "not_bit_identical" not in signals
    stage.check_replay(weights_sha256(third.crew.learner.policy))


def test_a_checkpoint_that_is_not_of_this_pool_is_refused(tmp_path: Path) -> None:
    from sqlalchemy import text

    stage = Stage(tmp_path)
    stage.run_until_asked(2)
    shutil.rmtree(stage.directory / "checkpoints")
    pool = stage.pool("test")
    pool.database.write(lambda session: session.execute(text("UPDATE steps SET version_after = 9 WHERE step = 2")))
    pool.close()
    with pytest.raises(CheckpointError, match=r"step 2 of the consumption log led from version 2 to 9.*not of this pool"):
        stage.schedule().run()


def test_a_wish_to_stop_writes_a_checkpoint_and_the_run_goes_on(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.run_until_asked(4)
    assert (stage.directory / "checkpoints" / "step_000004").is_dir()
    second = stage.schedule()
    stage.run(second)
    stage.check_log()
    stage.check_replay(weights_sha256(second.crew.learner.policy))


def test_a_changed_sample_is_noticed_by_the_replay(tmp_path: Path) -> None:
    from sqlalchemy import text

    stage = Stage(tmp_path)
    stage.run(stage.schedule())
    pool = stage.pool("test")
    pool.database.write(lambda session: session.execute(text("UPDATE samples SET reward = 1 - reward WHERE group_id = 1")))
    assert not replay(stage.learner(), pool, stage.config.train.stages).identical
    pool.close()


def test_a_wait_for_samples_that_never_come_ends_with_a_name(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"train": {"watchdog": {"deadline_seconds": 0.6}}})
    with pytest.raises(StalledError, match=r"step 1: the samplers delivered nothing for .* s"):
        stage.schedule().run()
    assert [event["kind"] for event in read_lines(stage.directory / "events.jsonl")][-1] == "stop"


def test_alarms_are_events_with_value_and_threshold(tmp_path: Path) -> None:
    alarms = {"effective_sample_fraction": 1.0, "lag_fraction": 0.01}
    stage = Stage(tmp_path, {"train": {"alarms": alarms}})
    stage.run(stage.schedule())
    events = [event for event in read_lines(stage.directory / "events.jsonl") if event["kind"] == "alarm"]
    assert {event["signal"] for event in events} == {"effective_sample_fraction", "lag"}
    assert all(event["threshold"] and event["step"] for event in events)


def test_looking_for_samples_that_are_not_there_is_no_wait_for_the_pool(tmp_path: Path) -> None:
    stage, begin_at, looks = Stage(tmp_path), tmp_path / "begin", []
    schedule = stage.schedule()
    num_ready, spent = schedule.pool.num_ready, schedule.pool.database._spent

    def slow(index: int) -> int:
        looks.append(index)
        if len(looks) > 3:
            begin_at.touch()
            return num_ready(index)
        spent[threading.get_ident()] = spent.get(threading.get_ident(), 0.0) + 1000.0
        return 0

    schedule.pool.num_ready = slow  # type: ignore[method-assign]
    stage.run(schedule, begin_at=begin_at)
    fractions = [line["metrics"]["pool/wait_fraction"] for line in read_lines(stage.directory / "metrics.jsonl")]
    assert len(fractions) == STEPS
    assert all(0 <= fraction <= 1 for fraction in fractions), fractions
    assert max(fractions) > 0


def test_an_alarm_is_told_once_for_each_time_that_it_strikes(tmp_path: Path) -> None:
    schedule = Stage(tmp_path).schedule()
    bound = schedule.train.alarms.lag_fraction * LAG
    rates = [*[10.0] * 20, 1.0, 1.0, 10.0, 1.0]  # the first say what is usual
    for step, rate in enumerate(rates, start=1):
        lag = 0.0 if step == 3 else bound + 1 if step < 6 else bound
        schedule._alarms(step, {"throughput/samples_per_second": rate, "lag/mean": lag})
    schedule.pool.close()
    told = [
        (event["signal"], event["step"]) for event in read_lines(tmp_path / "run" / "events.jsonl") if event["kind"] == "alarm"
    ]
    assert told == [("lag", 1), ("lag", 4), ("throughput", 21), ("throughput", 24)]


def test_the_lag_histogram_adds_up() -> None:
    metrics = lag_metrics([0, 0, 3, 8, 9, 32], 32)
    shares = {name: value * 6 for name, value in metrics.items() if name.startswith("lag/share_to_")}
    assert shares == pytest.approx(
        {"lag/share_to_00": 2, "lag/share_to_08": 2, "lag/share_to_16": 1, "lag/share_to_24": 0, "lag/share_to_32": 1}
    )
    assert (metrics["lag/min"], metrics["lag/median"], metrics["lag/max"]) == (0, 5.5, 32)


def test_terms_follow_the_configuration(tmp_path: Path) -> None:
    train = Stage(tmp_path, {"train": {"pool": {"capacity": 100, "high_watermark": 0.5, "low_watermark": 0.25}}}).config.train
    terms = make_terms(train)
    assert (terms.capacity_groups, terms.high_groups, terms.low_groups) == (25, 12, 6)
    assert terms.groups_per_stage == (20, 12)
    assert (terms.updates_per_step, terms.max_lag) == (2, LAG)
    assert groups_per_claim(train) == 2
    assert [threads_each(cores, samplers) for cores, samplers in ((2, 1), (8, 1), (1, 3), (9, 2))] == [1, 4, 1, 3]


def test_a_groups_requests_depend_on_its_number_alone(tmp_path: Path) -> None:
    from trainer.experience.pool import Order

    config = Stage(tmp_path).config
    book, again = OrderBook(PROMPTS, config.train, 0), OrderBook(list(reversed(PROMPTS)), config.train, 0)
    order = Order(9, 0, 3, book.prompt_of(0, 3), 1)
    assert book.requests(order) == again.requests(Order(77, 0, 3, order.prompt_id, 4))
    others = {
        request.seed for stage in (0, 1) for n in (3, 4) for request in book.requests(Order(1, stage, n, order.prompt_id, 1))
    }
    assert len(others) == 16


@pytest.mark.parametrize(
    ("difference", "key"),
    [
        ({"sync": {"sync_every": 9}}, "train.sync.sync_every"),
        ({"pool": {"capacity": 8}}, "train.pool.capacity"),
        ({"pool": {"low_watermark": 1.0, "high_watermark": 0.5}}, "train.pool.low_watermark"),
        ({"batch": {"passes": 4}}, "train.sync.max_policy_update_lag"),
        ({"pool": {"url": ""}}, "train.sampler.processes"),
        ({"pool": {"url": "mysql://x"}}, "train.pool.url"),
        ({"memory": {"weights": "tiered"}}, "train.memory.weights"),
        ({"schedule": "sync", "sampler": {"kind": "vllm"}}, "train.sampler.kind"),
        ({"method": "full", "sampler": {"kind": "vllm"}}, "train.sync.mode"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tmp_path: Path, difference: dict[str, Any], key: str) -> None:
    from trainer.errors import ConfigError

    with pytest.raises(ConfigError) as error:
        Stage(tmp_path, {"train": json.loads(json.dumps(difference))})
    assert error.value.key == key
