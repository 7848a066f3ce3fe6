"""Lineage: one tree with hashes, which says when an artifact is another run's by now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.lineage import Node, lineage
from tasks.record import PRUNED, begin, config_hash, finish
from tasks.registry import STAGES
from tasks.workspace import REPOSITORY, Workspace, params_of
from trainer.config import CampaignConfig, as_tree, load_config
from trainer.files import new_directory, read_manifest, write_json, write_manifest

CONFIG: CampaignConfig = load_config(REPOSITORY / "params.yaml")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path, CONFIG)
    write_json(workspace.run / "config.json", as_tree(CONFIG))
    begin(
        workspace.run,
        "campaign",
        workspace.run_id,
        CONFIG,
        config_hash(CONFIG),
        {},
        {"workspace": str(tmp_path), "git.commit": "abc"},
    )
    return workspace


def find(node: Node, *path: str) -> Node:
    for name in path:
        node = next(child for child in node.children if child.name == name)
    return node


def names(tree: dict[str, Any]) -> set[str]:
    return {tree["name"]} | {name for child in tree.get("from", []) for name in names(child)}


def test_the_tree_reaches_from_the_evaluation_to_the_source(put_artifact: Any, workspace: Workspace) -> None:
    for stage in STAGES:
        put_artifact(workspace, stage)
    tree = lineage(workspace.run)
    assert find(tree, "configuration").sha256 == config_hash(CONFIG)
    assert "git abc" in find(tree, "code").says
    assert find(tree, "environment", "lock").sha256
    policy = find(tree, "evaluation", "merged", "policy")
    manifest = read_manifest(workspace.artifact("policy"))
    assert manifest is not None
    assert policy.sha256 == manifest["content_sha256"]
    assert {
        "configuration",
        "code",
        "environment",
        "evaluation",
        "merged",
        "policy",
        "anchors",
        "base",
        "prompts",
        "source",
    } <= names(tree.as_tree())
    text = "\n".join(tree.lines())
    assert text.count(policy.sha256[:12]) == 1
    assert "reasoning_gym:basic_arithmetic" in text


def test_a_half_finished_run_is_shown_as_far_as_it_came_with_why_it_ended(put_artifact: Any, workspace: Workspace) -> None:
    for stage in STAGES[:3]:
        put_artifact(workspace, stage)
    begin(workspace.run / "train", "stage", "train", CONFIG, "i", {}, {})
    finish(workspace.run / "train", "KILLED", error="stopped by SIGTERM after a checkpoint\nmore")
    finish(workspace.run, "KILLED", error="stopped by SIGINT")
    tree = lineage(workspace.run)
    assert tree.says == f"killed: stopped by SIGINT; workspace {workspace.root}"
    assert find(tree, "evaluation").says == "not made: the run did not come to stage evaluate"
    policy = find(tree, "evaluation", "merged", "policy")
    assert policy.says == "not made: stage train was killed: stopped by SIGTERM after a checkpoint"
    assert find(policy, "anchors").sha256
    assert find(policy, "base").says == "as above"


def test_what_another_run_made_in_the_same_workspace_is_not_a_stopped_runs(put_artifact: Any, workspace: Workspace) -> None:
    for stage in STAGES:
        put_artifact(workspace, stage, params=params_of(stage, CONFIG))
    config = load_config(REPOSITORY / "params.yaml", ["train.optimizer.learning_rate=1e-3"])
    other = Workspace(workspace.root, config)
    write_json(other.run / "config.json", as_tree(config))
    begin(other.run, "campaign", other.run_id, config, config_hash(config), {}, {"workspace": str(workspace.root)})
    begin(other.run / "train", "stage", "train", config, "i", {}, {})
    finish(other.run / "train", "FAILED", error="TrainError: diverged")
    tree = lineage(other.run)
    assert tree.says.startswith("running; ")
    assert find(tree, "evaluation").says.endswith(f"what lies in {workspace.artifact('evaluation')} is another run's")
    policy = find(tree, "evaluation", "merged", "policy")
    assert policy.says.startswith("not made: stage train was failed: TrainError: diverged; what lies in ")
    assert find(policy, "anchors").sha256  # shared: made with the same parameters from the same inputs
    assert "another run's" not in "\n".join(lineage(workspace.run).lines())


def test_a_pruned_trial_says_so_and_whose_trial_it_is(workspace: Workspace) -> None:
    write_json(workspace.root / "trial.json", {"sweep": "mine", "number": 3, "name": "learning_rate=0.1", "values": {}})
    finish(workspace.run, "KILLED", error=f"{PRUNED}5 of 12: below the others' median")
    says = (
        f"pruned at step 5 of 12: below the others' median; trial 3 (learning_rate=0.1) of sweep mine; workspace {workspace.root}"
    )
    assert lineage(workspace.run).says == says


@pytest.mark.parametrize("name", ["record.json", "evaluate/record.json"])
def test_a_damaged_record_is_no_traceback(put_artifact: Any, workspace: Workspace, name: str) -> None:
    for stage in STAGES:
        put_artifact(workspace, stage)
    (workspace.run / name).write_text("{")
    assert find(lineage(workspace.run), "evaluation", "merged", "policy").sha256
    (workspace.artifact("evaluation") / "manifest.json").write_text("{")
    says = find(lineage(workspace.run), "evaluation").says
    assert "not made" in says or "without its manifest" in says


def test_what_another_run_has_replaced_or_somebody_damaged_is_said(put_artifact: Any, workspace: Workspace) -> None:
    for stage in STAGES:
        put_artifact(workspace, stage)
    target = workspace.artifact("policy")
    with new_directory(target) as out:
        (out / "file").write_text("another")
        write_manifest(out, {"stage": "train", "key": "k", "inputs": {}})
    text = "\n".join(lineage(workspace.run).lines())
    assert "was replaced since by another run's" in text
    (workspace.artifact("base") / "file").write_text("y" * len("xbase"))
    assert "DAMAGED" in "\n".join(lineage(workspace.run).lines())


def test_an_artifact_from_older_code_says_so(put_artifact: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in STAGES:
        put_artifact(workspace, stage)
    assert "has changed since" not in "\n".join(lineage(workspace.run).lines())
    monkeypatch.setattr("tasks.workspace.code_digest", lambda stage: "0" * 64)
    assert "the code or an input has changed since" in "\n".join(lineage(workspace.run).lines())
