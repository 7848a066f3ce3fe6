"""The train stage on a GPU, end to end: base, sampling, learning, a policy that plain transformers loads; killed, it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, as_tree, validate
from trainer.config.load import lay_over
from trainer.metrics import read_lines

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
REPOSITORY = Path(__file__).parents[2]
CAMPAIGN: dict[str, Any] = {
    "campaign": {"name": "cuda"},
    "prepare": {"heldout_fraction": 0.2},
    "base": {
        "source": "scratch",
        "scratch": {
            "alphabet": "0123456789+=",
            "hidden_size": 64,
            "num_heads": 2,
            "steps": 200,
            "decay_steps": 0,
            "batch_size": 32,
            "learning_rate": 5e-3,
        },
    },
    "anchors": {"num_prompts": 8, "top_k": 4},
    "train": {
        "optimizer": {"kind": "stateless", "rule": "rms", "learning_rate": 1e-3},
        "method": "full",
        "memory": {"weights": "tiered", "source": "host", "resident_layers": 1},
        "algorithm": {"kl": {"reference": "anchors", "coefficient": 0.01, "anchor_batch_size": 4}},
        "batch": {"prompts_per_step": 8, "group_size": 8},
        "sampling": {"max_completion_tokens": 4},
        "heldout": {"every_steps": 4, "num_prompts": 8},
        "checkpoints": {"every_steps": 2},
        "stages": [{"steps": 8}],
    },
    "reward": {"verifier": "exact"},
    "preflight": {"num_prompts": 0},
    "machine": {"device": DEVICE},
}
ADAPTER = {
    "train": {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "memory": {"weights": "resident", "resident_layers": 0},
    }
}
INT8 = {"train": {"algorithm": {"kl": {"reference": "int8_streamed"}}, "memory": {"source": "disk"}}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "sums.jsonl"
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in sums))
    return path


@pytest.fixture(scope="module")
def root(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which prompts, base and anchors are made already, on the device."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("prepare", "base", "anchors"):
        run_stage(Workspace(folder, campaign(rows, {})), get_stage(name))
    return folder


def campaign(rows: Path, difference: dict[str, Any]) -> CampaignConfig:
    source = {"source": f"jsonl:{rows}", "prompt_template": "{question}", "answer_field": "answer"}
    return validate(lay_over(lay_over(CAMPAIGN, {"prepare": {"sources": [source]}}), difference))


def place(root: Path, rows: Path, difference: dict[str, Any], run: Path) -> Workspace:
    return Workspace(root, campaign(rows, difference), run)


def lines(workspace: Workspace) -> list[dict[str, float]]:
    return [line["metrics"] for line in read_lines(workspace.run / "train" / "metrics.jsonl")]


@pytest.mark.parametrize("difference", [{}, ADAPTER, INT8], ids=["stateless", "adapter", "int8"])
def test_the_stage_trains_on_the_device(difference: dict[str, Any], root: Path, rows: Path, tmp_path: Path) -> None:
    workspace = place(root, rows, difference, tmp_path / "run")
    run_stage(workspace, get_stage("train"), force=True)
    found = lines(workspace)[1:]
    assert len(found) == 8
    assert max(line.get("mismatch/max_abs_logprob", 0.0) for line in found) < 1e-3, "sampler and learner agree"
    assert all(line["memory/device_peak_bytes"] > 0 for line in found)
    assert all(line["update/skipped"] == 0 for line in found)
    if not difference:
        policy = AutoModelForCausalLM.from_pretrained(workspace.artifact("policy"))
        base = AutoModelForCausalLM.from_pretrained(workspace.artifact("base"))
        assert any(not torch.equal(a, b) for a, b in zip(policy.parameters(), base.parameters(), strict=True))


def test_killed_it_goes_on_from_its_checkpoint(root: Path, rows: Path, tmp_path: Path) -> None:
    longer = {"train": {"stages": [{"steps": 40}]}}
    whole, killed = (place(root, rows, longer, tmp_path / name) for name in ("whole", "killed"))
    run_stage(whole, get_stage("train"), force=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(as_tree(killed.config)))
    command = [sys.executable, "-m", "tasks.train", "--workspace", str(root), "--config", str(file)]
    command += ["--run-dir", str(killed.run), "--no-tracking", "--force"]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
    deadline = time.monotonic() + 240
    while len(read_lines(killed.run / "train" / "metrics.jsonl")) < 8:
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run_stage(killed, get_stage("train"), force=True)
    events = [line["kind"] for line in read_lines(killed.run / "train" / "events.jsonl")]
    assert events.count("resume") == 1
    one, other = lines(whole), lines(killed)
    assert len(one) == len(other) == 41
    for key in ("reward/mean", "grad/norm", "entropy"):
        expected = [line.get(key, 0.0) for line in one]
        assert [line.get(key, 0.0) for line in other] == pytest.approx(expected, rel=1e-3, abs=1e-4)
