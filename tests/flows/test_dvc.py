"""DVC, really: nothing to do after a run, the right things after a change, and patience with its lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tasks.artifacts import commit, committable, prepare_workspace
from tasks.record import read_record
from tasks.tracking import PARENT_TRACKS, Sidecar, is_behind
from tasks.workspace import REPOSITORY
from trainer.config import read_yaml
from trainer.config.load import lay_over

pytestmark = pytest.mark.smoke


def dvc(root: Path, *words: str) -> str:
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": bin_first, "DVC_NO_ANALYTICS": "1", PARENT_TRACKS: "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *words], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def change(root: Path, difference: dict[str, Any]) -> None:
    """Edit a workspace's params.yaml, as a person does."""
    tree = lay_over(read_yaml(root / "params.yaml"), difference)
    with open(root / "params.yaml", "w", encoding="utf-8") as file:
        YAML().dump(tree, file)


def test_repro_after_a_run_does_nothing_and_after_a_change_runs_from_there(tiny: Any) -> None:
    done = tiny.run("--plain", "--no-tracking")
    assert done.returncode == 0, done.stderr
    assert tiny.made == ["prepare", "train", "evaluate", "report"]
    said = dvc(tiny.root, "repro")
    assert said.count("didn't change, skipping") == 4, said
    assert tiny.made == ["prepare", "train", "evaluate", "report"]
    assert "up to date" in dvc(tiny.root, "status")
    assert "trained" in dvc(tiny.root, "metrics", "show")
    assert "reward_mean" in dvc(tiny.root, "plots", "show", "--json")
    change(tiny.root, {"train": {"optimizer": {"learning_rate": 5e-5}}})
    said = dvc(tiny.root, "repro", "--no-commit")
    assert "Stage 'prepare' didn't change, skipping" in said
    assert tiny.made[4:6] == ["train", "evaluate"]
    assert (tiny.root / "artifacts" / "policy" / "adapter.bin").read_text() == "5e-05"


def test_only_what_still_matches_params_and_code_is_committed(tiny: Any) -> None:
    assert tiny.run("--plain", "--no-tracking").returncode == 0
    workspace = tiny.workspace
    assert [stage.name for stage in committable(workspace)] == ["prepare", "train", "evaluate", "report"]
    change(tiny.root, {"train": {"optimizer": {"learning_rate": 5e-5}}})
    assert [stage.name for stage in committable(workspace)] == ["prepare", "evaluate", "report"]
    (tiny.root / "artifacts" / "evaluation" / "evaluation.json").write_text("{}")
    assert [stage.name for stage in committable(workspace)] == ["prepare"]
    (tiny.root / "params.yaml").write_text("train: 3\n")
    assert committable(workspace) == []


def test_a_commit_waits_for_dvcs_lock(tiny: Any) -> None:
    assert tiny.run("--plain", "--no-tracking").returncode == 0
    (tiny.root / "dvc.lock").unlink()
    # another dvc command that holds the lock for two seconds
    code = "import time, dvc.repo\nwith dvc.repo.Repo('.').lock:\n    print('held', flush=True)\n    time.sleep(2)"
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=tiny.root, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        hashes = commit(tiny.workspace)
    assert set(hashes) == {"prompts", "policy", "evaluation", "report"}
    assert all(md5.endswith(".dir") for md5 in hashes.values())


def test_a_commit_leaves_data_of_the_users_own_alone(tiny: Any) -> None:
    assert tiny.run("--plain", "--no-tracking").returncode == 0
    own = tiny.root / "own.txt"
    own.write_text("first")
    dvc(tiny.root, "add", "--quiet", "own.txt")
    before = (tiny.root / "own.txt.dvc").read_text()
    own.unlink()  # a link into the cache, perhaps
    own.write_text("second, which nobody wants to keep yet")
    assert set(commit(tiny.workspace)) == {"prompts", "policy", "evaluation", "report"}
    assert (tiny.root / "own.txt.dvc").read_text() == before


def test_stages_by_hand_or_under_dvc_are_tracked_just_the_same(tiny: Any, mlflow_store: None, eventually: Any) -> None:
    tiny.root.joinpath("params.yaml").write_text("")
    prepare_workspace(tiny.workspace)
    for stage in ("prepare", "train"):
        command = [sys.executable, "-m", "tasks", stage, "--workspace", str(tiny.root), "--stages", tiny.workspace.stages_name]
        subprocess.run(command, cwd=REPOSITORY, check=True, timeout=300)
    run = tiny.workspace.run
    eventually(lambda: not is_behind(run))
    found = [Sidecar.read(place) for place in (run, run / "prepare", run / "train")]
    assert len({sidecar.run_id for sidecar in found}) == 3
    assert found[2].cursor.last_step == 5
    campaign = read_record(run)
    assert campaign is not None
    assert (campaign.status, campaign.attempt) == ("FINISHED", 2)  # two commands, one campaign
