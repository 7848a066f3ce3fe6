"""Lineage: one tree with hashes, which says when an artifact is another run's by now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.lineage import Node, lineage
from tasks.record import begin, config_hash, finish
from tasks.registry import STAGES, Stage
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import CampaignConfig, as_tree, load_config
from trainer.files import new_directory, read_manifest, write_json, write_manifest

CONFIG: CampaignConfig = load_config(REPOSITORY / "params.yaml")


def make(workspace: Workspace, stage: Stage, text: str = "x") -> None:
    """Put an artifact in place with the manifest and the record that its stage would have left."""
    inputs = {name: (read_manifest(workspace.artifact(name)) or {})["content_sha256"] for name in stage.inputs}
    with new_directory(workspace.artifact(stage.artifact)) as out:
        (out / "file").write_text(text + stage.name)
        manifest = write_manifest(out, {"stage": stage.name, "key": workspace.key(stage), "inputs": inputs, "num_prompts": 7})
    run = workspace.run / stage.name
    begin(run, "stage", stage.name, CONFIG, "i", {}, {})
    place = str(workspace.artifact(stage.artifact))
    finish(run, "FINISHED", artifact={"path": place, "content_sha256": manifest["content_sha256"], "upload": ""})


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


def test_the_tree_reaches_from_the_evaluation_to_the_source(workspace: Workspace) -> None:
    for stage in STAGES:
        make(workspace, stage)
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


def test_a_half_finished_run_is_shown_as_far_as_it_came(workspace: Workspace) -> None:
    for stage in STAGES[:4]:
        make(workspace, stage)
    tree = lineage(workspace.run)
    assert "not made yet" in find(tree, "evaluation").says
    assert find(tree, "policy", "anchors").sha256


def test_what_another_run_has_replaced_or_somebody_damaged_is_said(workspace: Workspace) -> None:
    for stage in STAGES:
        make(workspace, stage)
    target = workspace.artifact("policy")
    with new_directory(target) as out:
        (out / "file").write_text("another")
        write_manifest(out, {"stage": "train", "key": "k", "inputs": {}})
    text = "\n".join(lineage(workspace.run).lines())
    assert "was replaced since by another run's" in text
    (workspace.artifact("base") / "file").write_text("y" * len("xbase"))
    assert "DAMAGED" in "\n".join(lineage(workspace.run).lines())


def test_an_artifact_from_older_code_says_so(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in STAGES:
        make(workspace, stage)
    assert "has changed since" not in "\n".join(lineage(workspace.run).lines())
    monkeypatch.setattr("tasks.workspace.code_digest", lambda stage: "0" * 64)
    assert "the code or an input has changed since" in "\n".join(lineage(workspace.run).lines())
