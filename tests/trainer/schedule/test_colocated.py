"""The colocated schedule: one process, one backbone, turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.schedule.test_asynchronous import EOS, IDENTITY, LAG, PROMPTS, STEPS, Stage, Thirds, Words
from trainer.config.load import lay_over
from trainer.errors import ConfigError, StalledError, StopRequested
from trainer.learn.reference import AdapterOff
from trainer.metrics import read_lines
from trainer.policy.versions import weights_sha256
from trainer.rollout.embedded import EmbeddedSampler
from trainer.schedule import colocated
from trainer.schedule.colocated import ColocatedSchedule, LentWeights, backbone_bytes
from trainer.schedule.stop import StopWish
from trainer.schedule.sync import Crew, Run
from trainer.types import Prompt, Request, SamplingParams, Verdict

COLOCATED = {"train": {"schedule": "colocated", "colocated": {"decode_turns": 2}}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class EvenFirst:
    """Rewards a completion that begins with an even token: easy to learn."""

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [Verdict("ok", float(int(text.split()[0]) % 2 == 0 if text else 0)) for _, text in answers]

    def close(self) -> None:
        pass


def make(root: Path, difference: dict[str, Any] | None = None) -> Stage:
    return Stage(root, lay_over(COLOCATED, difference or {}))


def schedule(stage: Stage, wish: StopWish | None = None, verifier: Any = None) -> ColocatedSchedule:
    learner = stage.learner()
    sampler = EmbeddedSampler(learner.policy.model, 8, EOS)
    crew = Crew(learner, sampler, verifier or Thirds(), Words(), PROMPTS, PROMPTS[:4], (EOS,))
    return ColocatedSchedule(stage.config, crew, Run(stage.directory, IDENTITY), StopWish() if wish is None else wish)


def metrics(stage: Stage) -> list[dict[str, float]]:
    return [line["metrics"] for line in read_lines(stage.directory / "metrics.jsonl")]


def test_every_step_is_used_logged_and_replayed_with_one_backbone(tmp_path: Path) -> None:
    stage = make(tmp_path, {"train": {"heldout": {"every_steps": 4}, "algorithm": {"kl": {"reference": "exact"}}}})
    runner = schedule(stage)
    turns: list[int] = []
    run_from: Callable[[int], None] = runner._train_from

    def count(done: int) -> None:
        engine: Any = runner.crew.learner.engine
        between = engine.between
        engine.between = lambda: turns.append(between())
        run_from(done)

    runner._train_from = count  # type: ignore[method-assign]
    runner.run()
    stage.check_log()
    assert sum(turns) > STEPS  # sampling went on between micro-batches
    lines = metrics(stage)
    assert [line["memory/backbone_copies"] for line in lines[1:]] == [1.0] * STEPS
    assert all(line["lag/max"] <= LAG for line in lines[1:])
    assert max(line["lag/max"] for line in lines[1:]) > 0
    assert all(line["mismatch/probe"] < 1e-6 for line in lines[1:])
    assert "heldout/accuracy" in lines[4]
    stage.check_replay(weights_sha256(runner.crew.learner.policy))


def test_learner_sampler_and_reference_lie_in_the_same_memory(tmp_path: Path) -> None:
    stage = make(tmp_path, {"train": {"algorithm": {"kl": {"reference": "exact"}}}})
    runner = schedule(stage)
    runner.run()
    learner, turns = runner.crew.learner, runner.turns
    assert turns is not None
    assert isinstance(learner.reference, AdapterOff)
    models: list[Any] = [learner.policy.model, turns.sampler.model, learner.reference.policy.model]
    frozen = [{p.data_ptr() for p in model.parameters() if not p.requires_grad} for model in models]
    assert frozen[0] == frozen[1] == frozen[2]
    once, together = backbone_bytes(models, learner.policy)
    assert once == together > 0
    other = stage.learner().policy
    once, together = backbone_bytes([*models, other.model], learner.policy)
    assert together == pytest.approx(2 * once, rel=0.2)  # a second backbone is seen
    trained = {p.data_ptr() for p in learner.policy.trainable.values()}
    assert trained.isdisjoint(tensor.data_ptr() for tensor in turns.weights.tensors)


def test_a_completion_comes_from_one_policy_while_the_learner_moves_on(tmp_path: Path) -> None:
    from trainer.policy.forward import scoring
    from trainer.rollout.embedded import Generation

    policy = make(tmp_path).learner().policy
    sampler = EmbeddedSampler(policy.model, 4, EOS)
    requests = [Request(p.id, p.token_ids, 7 + i) for i, p in enumerate(PROMPTS[:6])]
    params = SamplingParams(1.0, 12, (EOS,))
    expected = sampler.generate(requests, params)
    weights = LentWeights(policy)
    generation, done = Generation(sampler, requests, params), False
    while not done:
        with weights.lent(), scoring(policy.model):
            done = generation.turn()
        with torch.no_grad():
            for parameter in policy.trainable.values():
                parameter.add_(0.05)
    assert generation.completions() == expected
    assert sampler.generate(requests, params) != expected
    weights.take()
    with weights.lent():
        assert sampler.generate(requests, params) != expected


def test_it_learns_and_keeps_the_lag_bound(tmp_path: Path) -> None:
    stage = make(tmp_path, {"train": {"stages": [{"steps": 40}], "optimizer": {"learning_rate": 2e-2}, "alarms": {"kl": 0}}})
    schedule(stage, verifier=EvenFirst()).run()
    lines = metrics(stage)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.15
    assert max(line["lag/max"] for line in lines) <= LAG


@pytest.mark.parametrize("checkpoints", [3, 100])
def test_a_learner_that_dies_goes_on_to_the_same_bits(tmp_path: Path, checkpoints: int) -> None:
    stage = make(tmp_path, {"train": {"checkpoints": {"every_steps": checkpoints}}})
    first = schedule(stage)
    step: Callable[..., Any] = first.crew.learner.step

    def dies(groups: Any, number: int) -> Any:
        stats = step(groups, number)
        if number == 5:
            raise RuntimeError("killed")
        return stats

    first.crew.learner.step = dies  # type: ignore[method-assign]
    first._stop_sampling = lambda: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="killed"):
        first.run()
    second = schedule(stage)
    second.run()
    stage.check_log()
    stage.check_replay(weights_sha256(second.crew.learner.policy))


def test_a_wish_to_stop_gives_all_groups_back_and_the_run_goes_on(tmp_path: Path) -> None:
    stage, wish = make(tmp_path), StopWish()
    first = schedule(stage, wish)
    step: Callable[..., Any] = first.crew.learner.step

    def asked(groups: Any, number: int) -> Any:
        wish.signal_name = "SIGTERM" if number == 4 else None
        return step(groups, number)

    first.crew.learner.step = asked  # type: ignore[method-assign]
    with pytest.raises(StopRequested, match="SIGTERM"):
        first.run()
    pool = stage.pool("test")
    assert pool.counts().get("sampling", 0) == 0
    pool.close()
    schedule(stage).run()
    stage.check_log()


def test_sampling_gives_way_when_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is short now and then: groups go back and are sampled again; when it stays short, the wait ends with a name."""
    asked: list[int] = []

    def free(device: torch.device) -> int:
        asked.append(1)
        return 0 if len(asked) % 5 == 0 else 2**62

    monkeypatch.setattr(colocated, "available_bytes", free)
    monkeypatch.setattr(colocated, "_SHORT_SECONDS", 0.01)
    stage = make(tmp_path / "short")
    schedule(stage).run()
    stage.check_log()
    events = [event for event in read_lines(stage.directory / "events.jsonl") if event["kind"] == "yield"]
    assert sum(event["returned_groups"] for event in events) > 0

    monkeypatch.setattr(colocated, "available_bytes", lambda device: 0)
    stage = make(tmp_path / "none", {"train": {"watchdog": {"deadline_seconds": 1.5}}})
    with pytest.raises(StalledError, match="min_available_memory_bytes"):
        schedule(stage).run()


def test_the_pool_is_not_filled_above_its_watermark(tmp_path: Path) -> None:
    stage = make(tmp_path, {"train": {"pool": {"capacity": 24}}})
    schedule(stage).run()
    assert max(line["pool/live_samples"] for line in metrics(stage)) <= 24
    stage.check_log()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        make(tmp_path, {"train": {"method": "full"}})
    assert error.value.key == "train.schedule"
    with pytest.raises(ConfigError) as error:
        make(tmp_path, {"train": {"sampler": {"kind": "vllm"}}})
    assert error.value.key == "train.sampler.kind"
