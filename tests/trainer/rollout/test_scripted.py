"""The scripted fake keeps the sampler's contract."""

from __future__ import annotations

import time

import pytest

from trainer.rollout.scripted import ScriptedSampler
from trainer.types import Request, Sampler, SamplingParams

PARAMS = SamplingParams(1.0, 4, (9,))


def test_it_says_what_the_table_says() -> None:
    sampler: Sampler = ScriptedSampler({"a": [[1, 9, 3], [2] * 6]}, logprob=-0.5, version=2)
    first, second, third = sampler.generate([Request("a", (5,), 0, index) for index in range(3)], PARAMS)
    assert (first.token_ids, first.finish_reason, first.logprobs) == ((1, 9), "stop", (-0.5, -0.5))
    assert (second.token_ids, second.finish_reason) == ((2, 2, 2, 2), "length")
    assert third.token_ids == first.token_ids
    assert first.policy_version == 2


def test_a_function_sees_the_policy_version() -> None:
    sampler = ScriptedSampler(lambda prompt, index, version: [version, index], logprob=lambda p, s, i, token: -float(token))
    sampler.load_policy(7)
    (completion,) = sampler.generate([Request("a", (5,), 0, 3)], PARAMS)
    assert completion.token_ids == (7, 3)
    assert completion.logprobs == (-7.0, -3.0)
    assert sampler.score([((1,), (4, 2))], 1.0) == [[-4.0, -2.0]]


def test_it_can_be_slow_and_it_can_fail() -> None:
    sampler = ScriptedSampler({"a": [[1]]}, delay_seconds=0.05, fail_at=1, failure=OSError("gone"))
    start = time.monotonic()
    sampler.generate([Request("a", (5,), 0)], PARAMS)
    assert time.monotonic() - start >= 0.05
    with pytest.raises(OSError, match="gone"):
        sampler.generate([Request("a", (5,), 0)], PARAMS)
    assert len(sampler.calls) == 2
    sampler.close()
    with pytest.raises(AssertionError):
        sampler.generate([], PARAMS)
