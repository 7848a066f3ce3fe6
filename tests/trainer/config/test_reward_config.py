"""The reward section: what is refused, and with which advice."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config import validate
from trainer.config.load import lay_over
from trainer.config.schema import Reward
from trainer.errors import ConfigError

SMALL: dict[str, Any] = {
    "campaign": {"name": "small"},
    "prepare": {"sources": [{"source": "jsonl:x.jsonl"}]},
    "base": {"source": "hf:x"},
    "train": {"method": "full", "optimizer": {"learning_rate": 1e-6}, "stages": [{"steps": 1}]},
}


def reward(**options: Any) -> Reward:
    return validate(lay_over(SMALL, {"reward": options})).reward


@pytest.mark.parametrize(
    ("options", "key", "advice"),
    [
        ({"verifier": "maths"}, "reward.verifier", "math"),
        ({"verifier": "mix"}, "reward.parts", "belong together"),
        ({"verifier": "exact", "parts": [{"verifier": "exact"}]}, "reward.parts", "belong together"),
        ({"verifier": "mix", "parts": [{"verifier": "mix"}]}, "reward.parts.0.verifier", "side by side"),
        ({"verifier": "mix", "parts": [{"verifier": "exact"}, {"verifier": "exact"}]}, "reward.parts", "a name of its own"),
        ({"verifier": "mix", "parts": [{"verifier": "format", "gate": True}]}, "reward.parts", "add a part that is none"),
        ({"verifier": "regex"}, "reward.pattern", "set it"),
        ({"verifier": "regex", "pattern": "("}, "reward.pattern", "regular expression"),
        ({"verifier": "python", "function": "judge.f"}, "reward.function", "package.module:name"),
        ({"verifier": "python"}, "reward.function", "set it"),
        ({"verifier": "http"}, "reward.http.url", "set it"),
        ({"verifier": "http", "http": {"url": "judge.example"}}, "reward.http.url", "pattern"),
        ({"verifier": "reward_model"}, "reward.reward_model.model", "set it"),
        ({"verifier": "length", "length": {"max_length": 10, "buffer": 20}}, "reward.length.buffer", "at most"),
        ({"verifier": "code"}, "prepare.sources.0.scorer_fields", "tests"),
        ({"verifier": "mix", "parts": [{"verifier": "reasoning_gym"}]}, "reward.parts.0.verifier", "exact or math"),
        ({"verifier": "mix", "parts": [{"verifier": "exact", "wieght": 2}]}, "reward.parts.0.wieght", "'weight'"),
        ({"code": {"sandbox": "none"}}, "reward.code.sandbox", "none-i-accept-the-risk"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], key: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        reward(**options)
    assert caught.value.key == key
    assert advice in str(caught.value)


def test_one_verifier_needs_no_parts_and_a_mix_names_its_own() -> None:
    assert reward(verifier="math").judges == (reward(verifier="math"),)
    parts = [{"verifier": "exact"}, {"verifier": "exact", "name": "boxed", "extract": "boxed"}]
    assert [part.label for part in reward(verifier="mix", parts=parts).parts] == ["exact", "boxed"]
