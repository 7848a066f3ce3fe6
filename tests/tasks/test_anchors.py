"""Stage anchors over real artifacts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.anchors import describe, origin_of
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from tests.trainer.rollout.vllm_fake import FakeVllm
from trainer.anchors.store import AnchorStore, open_anchors
from trainer.config import load_config
from trainer.errors import ModelError
from trainer.files import read_json, read_manifest
from trainer.metrics import read_lines
from trainer.policy.load import load_model
from trainer.policy.policy import build_policy
from trainer.policy.versions import PolicyStore

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


def stored(workspace: Workspace) -> AnchorStore:
    return open_anchors(workspace.artifact("anchors"), origin_of(read_manifest(workspace.artifact("base")) or {}))


def test_eight_bit_anchors_say_how_far_off_they_are(tmp_path: Path) -> None:
    exact, rough = make(tmp_path / "exact"), make(tmp_path / "rough", "anchors.reference=int8_streamed")
    one, other = (stored(workspace).take(range(24)) for workspace in (exact, rough))
    assert one.completions == other.completions, "the base draws them either way"
    apart = float((one.logprobs_T - other.logprobs_T).abs().mean())
    assert 0 < apart < 0.02
    (event,) = read_lines(rough.run / "anchors" / "events.jsonl")
    assert event["kind"] == "reference"
    assert 0 < event["error"] < 0.02
    assert read_lines(rough.run / "anchors" / "metrics.jsonl")[0]["metrics"]["anchors/reference_error"] == event["error"]
    assert "scored by the reference (int8_streamed)" in describe(rough.artifact("anchors"))[0]


def test_anchors_behind_vllm_are_those_of_the_base(tmp_path: Path) -> None:
    exact = make(tmp_path / "exact")
    config = load_config(REPOSITORY / "params.yaml", [*TINY, "train.method=lora"])
    server = FakeVllm(
        build_policy(load_model(exact.artifact("base")), config.train, 0), PolicyStore(tmp_path / "none", 2), max_logprobs=8
    )
    try:
        served = make(tmp_path / "served", "anchors.reference=vllm", f'train.sampler.vllm.urls=["{server.url}"]')
    finally:
        server.die()
    one, other = (stored(workspace).take(range(24)) for workspace in (exact, served))
    assert one.completions == other.completions
    assert torch.equal(one.top_ids_TK, other.top_ids_TK)
    assert torch.allclose(one.top_logprobs_TK, other.top_logprobs_TK, atol=1e-4)
    assert torch.allclose(one.tail_T, other.tail_T, atol=1e-2)
    assert (read_manifest(served.artifact("anchors")) or {})["reference"] == "vllm"


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
