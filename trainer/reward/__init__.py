"""Rewards: `build_verifier(config.reward)` gives the judge of a campaign's answers. Importable without torch.

config.schema.Reward      what a recipe says             verifiers    one verifier each, and their mix
judges, math_answers      what is right                  pool, child  workers that can be killed
code, isolation, sandbox  programs, jailed               reward_model a learned judge (torch)
summary                   verdicts as metrics            hacking      when a reward is gamed
"""

from __future__ import annotations

import os
from typing import Any

from trainer.config.schema import Judge, Reward
from trainer.reward.summary import summarise
from trainer.reward.verifiers import CodeVerifier, LocalVerifier, MixVerifier, PoolVerifier, judge_length
from trainer.types import Verifier


def build_verifier(reward: Reward) -> Verifier:
    """Return the verifier that the configuration asks for. Its workers begin to start; the first answer waits for them.

    Raises:
        ConfigError: code is to be judged on a machine that cannot isolate it.
    """
    num_workers = reward.num_workers or len(os.sched_getaffinity(0))
    if not reward.parts:
        return build_one(reward, reward.verifier, "reward", num_workers)
    parts = [(part, build_one(part, part.label, f"reward.parts.{index}", num_workers)) for index, part in enumerate(reward.parts)]
    return MixVerifier(parts, reward.gate_score)


def build_one(judge: Judge, name: str, key: str, num_workers: int) -> Verifier:
    """Return the verifier of one judge.

    Args:
        name: of its term in samples and metrics.
        key: its place in the configuration.
        num_workers: processes that judge at the same time.
    """
    if judge.verifier == "exact" and judge.extract == "whole":
        from trainer.reward.judges import exact

        return LocalVerifier(judge, name, lambda prompt, answer: exact(prompt.answer, answer))
    if judge.verifier == "length":
        return LocalVerifier(judge, name, judge_length(judge))
    if judge.verifier == "code":
        return CodeVerifier(judge, name, key, num_workers)
    if judge.verifier == "reward_model":
        from trainer.reward.reward_model import RewardModelVerifier

        return RewardModelVerifier(judge, name, f"{key}.reward_model")
    http = judge.http
    options: dict[str, dict[str, Any]] = {
        "exact": {"extract": judge.extract},
        "reasoning_gym": {"extract": judge.extract},
        "math": {},
        "regex": {"pattern": judge.pattern},
        "format": {"pattern": judge.pattern},
        "python": {"function": judge.function},
        "http": {**http.model_dump(exclude={"concurrency"}), "deadline_seconds": judge.timeout_seconds},
    }
    return PoolVerifier(
        judge,
        name,
        f"trainer.reward.judges:make_{judge.verifier}",
        options[judge.verifier],
        f"{key}.function" if judge.verifier == "python" else f"{key}.verifier",
        http.concurrency if judge.verifier == "http" else num_workers,
        keeps_clock=judge.verifier == "http",
    )


def size_warnings(verifier: Verifier, num_policy_parameters: int) -> list[str]:
    """Return a sentence for every learned reward below a third of the policy's size."""
    parts = [part for _, part in verifier.parts] if isinstance(verifier, MixVerifier) else [verifier]
    found = [part.size_warning(num_policy_parameters) for part in parts if hasattr(part, "size_warning")]
    return [sentence for sentence in found if sentence]


__all__ = ["build_verifier", "size_warnings", "summarise"]
