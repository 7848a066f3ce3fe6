"""The optional stage reward_model: from a file of pairs to a model that the verifier takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import reward_model
from tasks.registry import STAGES, StagePaths, get_stage, optional_stages
from tasks.sources import pair_files, reward_files
from trainer.config import CampaignConfig
from trainer.config.schema import LearnedReward, Reward
from trainer.errors import ConfigError, DataError
from trainer.reward import build_verifier
from trainer.types import Prompt

Build = Callable[[dict[str, Any]], CampaignConfig]
ROWS = [{"prompt": f"q{i}", "chosen": f"thanks {i}", "rejected": f"go away {i}"} for i in range(80)]
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "epochs": 2, "max_tokens": 64, "separator": " "}


def test_pairs_become_a_reward_model(
    campaign: Build, stage_paths: Callable[..., StagePaths], write_jsonl: Callable[[str, list[Any]], Path]
) -> None:
    config = campaign({"reward_training": {"pairs": str(write_jsonl("pairs.jsonl", ROWS)), **SMALL}})
    paths = stage_paths("reward_model")
    facts = reward_model.run(config, paths)
    assert facts["heldout_accuracy"] > 0.9
    assert json.loads((paths.out / "accuracy.json").read_text()) == facts
    assert (paths.run / "metrics.jsonl").is_file()
    verifier = build_verifier(Reward(verifier="reward_model", reward_model=LearnedReward(model=str(paths.out))))
    prompt = Prompt("0" * 16, "main", "train", "q3", (1,), "")
    polite, rude = verifier.score([(prompt, "thanks 3"), (prompt, "go away 3")])
    verifier.close()
    assert polite.score > rude.score


def test_pairs_that_teach_nothing_are_refused(
    campaign: Build, stage_paths: Callable[..., StagePaths], write_jsonl: Callable[[str, list[Any]], Path]
) -> None:
    noise = [{"prompt": f"q{i}", "chosen": "ab"[i % 2], "rejected": "ba"[i % 2]} for i in range(60)]
    options = {"pairs": str(write_jsonl("pairs.jsonl", noise)), **SMALL, "min_heldout_accuracy": 0.95}
    with pytest.raises(DataError, match="min_heldout_accuracy"):
        reward_model.run(campaign({"reward_training": options}), stage_paths())


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"prompt": "q", "chosen": "a"}], r"pairs.jsonl:1: has no text in field 'rejected'"),
        ([*ROWS[:2], {"prompt": "q", "chosen": "a", "rejected": "a"}], r"pairs.jsonl:3: .*equal"),
        (ROWS[:1], "too few"),
    ],
)
def test_bad_pairs_are_named(
    rows: list[Any],
    problem: str,
    campaign: Build,
    stage_paths: Callable[..., StagePaths],
    write_jsonl: Callable[[str, list[Any]], Path],
) -> None:
    config = campaign({"reward_training": {"pairs": str(write_jsonl("pairs.jsonl", rows)), **SMALL}})
    with pytest.raises(DataError, match=problem):
        reward_model.run(config, stage_paths())


def test_the_stage_is_outside_the_dag_until_asked_for(campaign: Build) -> None:
    assert "reward_model" not in [stage.name for stage in STAGES]
    assert optional_stages(campaign({})) == ()
    config = campaign({"reward_training": {"pairs": "pairs.jsonl"}})
    assert [stage.name for stage in optional_stages(config)] == ["reward_model"]
    assert get_stage("reward_model").artifact == "reward_model"


def test_without_its_section_it_says_so(campaign: Build, stage_paths: Callable[..., StagePaths]) -> None:
    with pytest.raises(ConfigError, match="reward_training"):
        reward_model.run(campaign({}), stage_paths())


def test_files_that_decide_verdicts_are_known(campaign: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.files.REPOSITORY", tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "judge.py").write_text("def f(*a): return 1.0\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    parts = [
        {"verifier": "python", "function": "mine.judge:f"},
        {"verifier": "reward_model", "reward_model": {"model": "model"}},
    ]
    config = campaign({"reward": {"verifier": "mix", "parts": parts}, "reward_training": {"pairs": "mine/judge.py"}})
    assert [path.name for path in reward_files(config)] == ["judge.py", "config.json"]
    assert [path.name for path in pair_files(config)] == ["judge.py"]
    assert reward_files(campaign({})) == []
