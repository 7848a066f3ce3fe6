"""The look at the reward: real verifier, scripted sampler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config.schema import Reward
from trainer.errors import ConfigError
from trainer.metrics import RunWriter, read_lines
from trainer.policy.tokenizer import character_tokenizer
from trainer.reward import build_verifier
from trainer.reward.preflight import PreflightReport
from trainer.rollout.scripted import ScriptedSampler
from trainer.schedule.judge import judge, reward_metrics
from trainer.schedule.preflight import look, record
from trainer.types import AnswerText, Prompt, Request, SamplingParams

TOKENIZER = character_tokenizer("0123456789+=")
EOS = TOKENIZER.eos_token_id
PROMPTS = [Prompt(f"{i:016d}", "main", "train", f"{i}+{i}=", (3, 4), str(2 * i)) for i in range(1, 5)]
PARAMS = SamplingParams(1.0, 6, (EOS,))


def say(*answers: str) -> list[list[int]]:
    return [[*TOKENIZER.encode(answer, add_special_tokens=False), EOS] for answer in answers]


def report(script: dict[str, list[list[int]]]) -> PreflightReport:
    verifier = build_verifier(Reward(verifier="exact"))
    return look(PROMPTS, ScriptedSampler(script), TOKENIZER, verifier, PARAMS, 4, 64, seed=0)


def test_a_base_that_is_sometimes_right_is_good() -> None:
    found = report({prompt.id: say(prompt.answer, "0", "99", prompt.answer) for prompt in PROMPTS})
    assert (found.verdict, found.num_prompts, found.group_size) == ("good", 4, 4)
    assert found.reward_mean == 0.5
    assert found.distinct_fraction == 0.75
    assert found.disagreement_fraction == found.truncated_fraction == 0


def test_a_base_that_is_never_right_stops_the_run_only_where_asked(tmp_path: Path) -> None:
    found = report({prompt.id: say("0") for prompt in PROMPTS})
    assert found.verdict == "stop"
    writer = RunWriter(tmp_path)
    record(found, writer, stop=False)
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["kind"] == "alarm"
    assert "easier prompts" in event["reason"]
    assert json.loads((tmp_path / "preflight.json").read_text())["verdict"] == "stop"
    with pytest.raises(ConfigError, match=r"preflight\.stop"):
        record(found, writer, stop=True)


def test_completions_that_are_cut_are_counted() -> None:
    assert report({prompt.id: [[3] * 9] for prompt in PROMPTS}).truncated_fraction == 1


def test_length_is_judged_by_the_tokens_that_were_sampled() -> None:
    options = {"verifier": "length", "length": {"max_length": 4, "buffer": 2}}
    verifier = build_verifier(Reward.model_validate(options))
    sampler = ScriptedSampler({PROMPTS[0].id: say("1", "123")})
    requests = [Request(PROMPTS[0].id, PROMPTS[0].token_ids, 0, index) for index in range(2)]
    short, long = judge([PROMPTS[0]] * 2, sampler.generate(requests, PARAMS), TOKENIZER, verifier)
    assert (short.reward, long.reward) == (0.0, -1.0)
    assert isinstance(long.text, AnswerText)
    metrics = reward_metrics([short, long], group_size=2)
    assert metrics["reward/part_length"] == -0.5
    assert metrics["answers/distinct_fraction"] == 1
