"""Which way a policy takes into the engine: both are tried once on the engine at hand, and timed.

    adapter   loads in no time; every token pays for the low-rank products
    merge     costs a copy of the backbone at every sync; its tokens are the bare model's

What counts is a whole period from one sync to the next: seconds of the sync plus seconds of the tokens sampled in between. A way
that fails (the engine refuses it, or the probe is off) is out of the choice, with its reason in the table.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.errors import MismatchError, ModelError, StalledError
from trainer.rollout.follower import Follower
from trainer.rollout.vllm import Mode, VllmSampler
from trainer.types import Request, SamplingParams


@dataclass(frozen=True)
class Trial:
    mode: Mode
    sync_seconds: float  # load and probe
    tokens_per_second: float
    mismatch: float  # of the probe, nats a token
    problem: str = ""  # why it cannot be used

    def period_seconds(self, tokens_per_sync: float) -> float:
        """Return what a sync and the tokens until the next one take."""
        return self.sync_seconds + tokens_per_sync / self.tokens_per_second

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def choose(trials: Sequence[Trial], tokens_per_sync: float) -> Trial:
    """Return the trial with the shortest period among those without a problem.

    Raises:
        MismatchError: there is none.
    """
    usable = [trial for trial in trials if not trial.problem]
    if not usable:
        reasons = "; ".join(f"{trial.mode}: {trial.problem}" for trial in trials)
        raise MismatchError(f"no way of bringing a policy to this engine passes ({reasons})")
    return min(usable, key=lambda trial: trial.period_seconds(tokens_per_sync))


def table(trials: Sequence[Trial], tokens_per_sync: float) -> str:
    """Return the trials as a text table, one line a way."""
    lines = [f"{'sync.mode':9}  {'sync s':>8}  {'tokens/s':>9}  {'mismatch':>9}  period of {tokens_per_sync:,.0f} tokens, s"]
    for trial in trials:
        if trial.problem:
            lines.append(f"{trial.mode:9}  {trial.problem}")
            continue
        numbers = f"{trial.sync_seconds:8.3f}  {trial.tokens_per_second:9,.0f}  {trial.mismatch:9.1e}"
        lines.append(f"{trial.mode:9}  {numbers}  {trial.period_seconds(tokens_per_sync):.2f}")
    return "\n".join(lines)


def measure(follower: Follower, version: int, mode: Mode, requests: Sequence[Request], params: SamplingParams) -> Trial:
    """Bring a version to the engine in one way, sample, and take it back.

    Args:
        follower: its sampler is changed to `mode` and left without a policy.
        version: must be in the store.
        requests: sampled for the rate.
    """
    sampler = follower.sampler
    assert isinstance(sampler, VllmSampler)
    sampler.switch(mode)
    began = time.monotonic()
    mismatch = math.inf
    try:
        follower.load(version)
        loaded, mismatch = time.monotonic(), follower.mismatch
        completions = sampler.generate(requests, params)
        ended = time.monotonic()
    except (MismatchError, ModelError, StalledError) as error:
        return Trial(mode, math.inf, 0.0, mismatch, str(error))
    finally:
        follower.forget()
        sampler.switch(mode)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return Trial(mode, loaded - began, num_tokens / max(ended - loaded, 1e-9), mismatch)


def measure_both(follower: Follower, version: int, requests: Sequence[Request], params: SamplingParams) -> list[Trial]:
    """Return a trial of each way, after an untimed one, because an engine's first requests are slow."""
    measure(follower, version, "adapter", requests, params)
    return [measure(follower, version, mode, requests, params) for mode in ("adapter", "merge")]
