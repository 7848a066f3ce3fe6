"""dvc.yaml says what the registry says. DVC at work: tests/flows/test_dvc.py."""

from __future__ import annotations

from pathlib import Path

from tasks.artifacts import committable, pipeline, prepare_workspace, render
from tasks.registry import STAGES
from tasks.workspace import REPOSITORY, Workspace, pick
from trainer.config import load_config, read_yaml

DEFAULT = Workspace(REPOSITORY, load_config(REPOSITORY / "params.yaml"))


def test_dvc_yaml_is_the_registry() -> None:
    said = (REPOSITORY / "dvc.yaml").read_text(encoding="utf-8")
    assert said == render(DEFAULT), "dvc.yaml is not what tasks/registry.py says; run `tithe dvc-yaml`"


def test_every_key_that_a_stage_depends_on_stands_in_params_yaml() -> None:
    """DVC refuses to run a stage whose parameters it cannot find."""
    tree = read_yaml(REPOSITORY / "params.yaml")
    for stage in STAGES:
        for key in stage.params:
            pick(tree, key)


def test_every_code_dependency_is_there() -> None:
    for stage in STAGES:
        for name in stage.code:
            assert (REPOSITORY / name).exists(), f"{stage.name}: {name}"


def test_a_campaigns_workspace_points_back_to_the_code(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, DEFAULT.config)
    for stage in pipeline(workspace)["stages"].values():
        code = [dep for dep in stage["deps"] if not dep.startswith("artifacts/")]
        assert code
        assert all((tmp_path / dep).resolve().is_file() for dep in code)
        assert not any("__pycache__" in dep for dep in code)


def test_of_a_params_yaml_that_became_wrong_nothing_is_committed(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, DEFAULT.config)
    for text in ("train: {no_such_key: 1}", "train: [never closed"):
        (tmp_path / "params.yaml").write_text(text)
        assert committable(workspace) == []


def test_the_resolved_params_of_a_workspace_are_the_same_campaign(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, DEFAULT.config)
    prepare_workspace(workspace)
    assert load_config(tmp_path / "params.yaml") == DEFAULT.config
