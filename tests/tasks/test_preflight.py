"""`python -m tasks.preflight` in a small workspace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.preflight import main, run_preflight
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, as_tree
from trainer.errors import DataError
from trainer.files import write_json

Campaign = Callable[[dict[str, Any]], CampaignConfig]
SMALL = {
    "base": {"scratch": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "steps": 3, "decay_steps": 1, "batch_size": 8}},
    "preflight": {"num_prompts": 4},
}


def test_without_prompts_it_says_what_to_run(campaign: Campaign, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="python -m tasks prepare"):
        run_preflight(Workspace(tmp_path, campaign(SMALL)))


def test_an_untrained_base_learns_nothing(campaign: Campaign, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = Workspace(tmp_path, campaign(SMALL))
    for name in ("prepare", "base"):
        run_stage(workspace, get_stage(name))
    write_json(tmp_path / "config.json", as_tree(workspace.config))
    code = main(["--workspace", str(tmp_path), "--config", str(tmp_path / "config.json"), "--no-tracking"])
    said = capsys.readouterr().out
    report = json.loads((workspace.run / "preflight" / "preflight.json").read_text())
    assert report["num_prompts"] == 4
    assert report["verdict"] in said
    assert (code == 2) == (report["verdict"] == "stop")
    assert report["disagreement_fraction"] == 0
