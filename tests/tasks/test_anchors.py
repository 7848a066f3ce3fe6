"""Stage anchors over real artifacts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.anchors import origin_of
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.anchors.store import open_anchors
from trainer.config import load_config
from trainer.errors import ModelError
from trainer.files import read_json, read_manifest
from trainer.metrics import read_lines

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = (
    "prepare.sources.0.num_rows=60",
    "base.scratch.steps=2",
    "base.scratch.warmup_steps=1",
    "base.scratch.decay_steps=1",
    "base.scratch.hidden_size=16",
    "base.scratch.num_layers=1",
    "anchors.num_prompts=12",
    "anchors.completions_per_prompt=2",
)


def make(root: Path, *overrides: str) -> Workspace:
    workspace = Workspace(root, load_config(REPOSITORY / "params.yaml", [*TINY, *overrides]))
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    return workspace


def test_anchors_of_a_campaign(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    base = read_manifest(workspace.artifact("base"))
    assert base is not None
    store = open_anchors(workspace.artifact("anchors"), origin_of(base))
    assert len(store) == 24
    assert (store.top_k, store.temperature) == (8, 1.0)
    assert store.manifest["policy_version"] == 0
    assert store.manifest["source"] == "reference"
    assert all(len(completion) <= 5 for completion in store.take(range(24)).completions)
    run = workspace.run / "anchors"
    assert read_lines(run / "metrics.jsonl")[0]["metrics"]["anchors/num_completions"] == 24
    assert read_json(run / "heartbeat")["step"] == 24
    assert read_json(run / "result.json")["num_tokens"] == store.manifest["num_tokens"]
    with pytest.raises(ModelError, match="come from model"):
        open_anchors(workspace.artifact("anchors"), origin_of({**base, "content_sha256": "0" * 64}))


def test_the_same_bytes_with_other_slots(tmp_path: Path) -> None:
    manifests = [
        read_manifest(make(tmp_path / str(slots), f"train.sampler.slots={slots}").artifact("anchors")) for slots in (5, 5, 24)
    ]
    one, two, three = (manifest for manifest in manifests if manifest is not None)
    assert one["content_sha256"] == two["content_sha256"]
    assert one["num_tokens"] == three["num_tokens"]


def test_no_anchors_is_an_empty_artifact(tmp_path: Path) -> None:
    workspace = make(tmp_path, "anchors.num_prompts=0", "train.algorithm.kl.reference=none")
    base = read_manifest(workspace.artifact("base"))
    assert base is not None
    assert len(open_anchors(workspace.artifact("anchors"), origin_of(base))) == 0
    assert [path.name for path in workspace.artifact("anchors").iterdir()] == ["manifest.json"]


def test_fewer_prompts_than_asked_for_is_said(tmp_path: Path) -> None:
    workspace = make(tmp_path, "anchors.num_prompts=500")
    (event,) = read_lines(workspace.run / "anchors" / "events.jsonl")
    assert event["kind"] == "warning"
    assert "anchors.num_prompts = 500" in event["reason"]


@pytest.mark.smoke
def test_the_module_runs_by_itself(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    command = [
        sys.executable,
        "-m",
        "tasks.anchors",
        "--workspace",
        str(tmp_path),
        "--config",
        str(workspace.run / "config.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*command, "--force", "--no-tracking"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"anchors: {workspace.artifact('anchors')}"
