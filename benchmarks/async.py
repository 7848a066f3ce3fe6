"""Async against sync when sampling and learning take equal time: both are slowed to a known delay, so the machine hardly matters.

    python -m benchmarks.async [--seconds 2] [--steps 24]

A step of sync is sampling and then learning, two delays; a step of async is the longer of the two, so the limit is 2.0. Expected:
at least 1.8. The learner, the pool, the hand-over with its probe and the consumption log are the real ones, on a tiny model; only
time is added. Writes benchmarks/results/async.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import CampaignConfig, validate
from trainer.config.load import lay_over
from trainer.errors import StopRequested
from trainer.experience.pool import Pool
from trainer.learn.learner import Learner
from trainer.metrics import RunWriter, read_lines
from trainer.policy.policy import Policy, build_policy
from trainer.policy.versions import PolicyStore
from trainer.rollout.embedded import EmbeddedSampler
from trainer.rollout.follower import Follower, FollowingSampler
from trainer.schedule.asynchronous import AsyncSchedule, Places
from trainer.schedule.sampling import Judging, SamplerLoop
from trainer.schedule.stop import StopWish
from trainer.schedule.sync import Crew, Run, SyncSchedule
from trainer.schedule.terms import OrderBook, open_database
from trainer.types import Prompt, Verdict

EOS, IDENTITY, WARM_STEPS = 1, "b" * 64, 4
PROMPTS = [Prompt(f"p{i}", "main", "train", f"p{i}", tuple(2 + (i * 7 + j) % 17 for j in range(3)), "x") for i in range(64)]
RESULTS = Path(__file__).parent / "results"
TREE: dict[str, Any] = {
    "campaign": {"name": "bench"},
    "prepare": {"sources": [{"source": "jsonl:nowhere"}]},
    "base": {"source": "scratch"},
    "machine": {"threads": 1},
    "train": {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"learning_rate": 1e-3},
        "batch": {"prompts_per_step": 8, "group_size": 4},
        "sampling": {"max_completion_tokens": 5},
        "sampler": {"slots": 32, "processes": 0},
        "heldout": {"every_steps": 0},
        "checkpoints": {"every_steps": 1000},
    },
}


class Words:
    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return " ".join(str(token) for token in ids)


class Thirds:
    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [Verdict("ok", float(sum(int(word) for word in text.split()) % 3 == 0)) for _, text in answers]

    def close(self) -> None:
        pass


def slowed(work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Return work that takes exactly so long, or longer if it must."""

    def slow(*arguments: Any, **options: Any) -> Any:
        end = time.perf_counter() + seconds
        result = work(*arguments, **options)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return slow


def tiny_policy(config: CampaignConfig) -> Policy:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": EOS, "pad_token_id": EOS}
    return build_policy(LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None)), config.train, seed=3)


def steps_per_hour(directory: Path) -> float:
    """Return the rate over the steps after the first few."""
    times = [line["time"] for line in read_lines(directory / "metrics.jsonl")][WARM_STEPS:]
    return 3600 * (len(times) - 1) / (times[-1] - times[0])


def measure(schedule: str, root: Path, seconds: float, steps: int) -> float:
    directory = root / schedule
    difference = {"train": {"schedule": schedule, "stages": [{"steps": steps}]}}
    difference["train"]["pool"] = {"url": f"sqlite:///{directory}/experience.db", "capacity": 256}
    config = validate(lay_over(TREE, difference))
    policy = tiny_policy(config)
    learner = Learner(policy, config.train, 0, None, RunWriter(directory).event)
    learner.step = slowed(learner.step, seconds)  # type: ignore[method-assign]
    sampler = EmbeddedSampler(policy.model, 32, EOS)
    crew = Crew(learner, sampler, Thirds(), Words(), PROMPTS, [], (EOS,))
    if schedule == "sync":
        sampler.generate = slowed(sampler.generate, seconds)  # type: ignore[method-assign]
        SyncSchedule(config.train, 0, crew, Run(directory, IDENTITY), StopWish()).run()
        return steps_per_hour(directory)
    runner = AsyncSchedule(config, crew, Run(directory, IDENTITY), StopWish(), Places("", ""))
    store = PolicyStore(directory / "policies", 3)
    following = FollowingSampler(tiny_policy(config), store, 32, EOS)
    following.generate = slowed(following.generate, seconds)  # type: ignore[method-assign]
    pool = Pool(open_database(config.train, directory), IDENTITY, {p.id: p for p in PROMPTS}, "s0", 60.0)
    book = OrderBook(PROMPTS, config.train, 0)
    judging = Judging(Words(), Thirds(), (EOS,))
    loop = SamplerLoop("s0", config, pool, Follower(following, store, 1e-3), book, judging, RunWriter(directory / "samplers"))

    def sample() -> None:
        try:
            loop.run()
        except StopRequested:
            loop.close()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        runner.run()
    finally:
        loop.parent_pid = -1
        thread.join()
    return steps_per_hour(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="that sampling and learning of a step take, each")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rates = {name: measure(name, Path(directory), options.seconds, options.steps) for name in ("sync", "async")}
    result = {f"{name}_steps_per_hour": rate for name, rate in rates.items()}
    result |= {"ratio": rates["async"] / rates["sync"], "seconds": options.seconds, "steps": options.steps}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "async.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"async {rates['async']:,.0f} steps an hour, sync {rates['sync']:,.0f}: {result['ratio']:.2f}x (limit 2.0)")


if __name__ == "__main__":
    main()
