"""Sharded weights on 1 and 2 ranks (gloo, torchrun): the same losses and decisions, and restoring on another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.memory.kit import loss_of, make_model, make_works
from trainer.config.schema import Optimizer
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term
from trainer.engine.stateless import StatelessEngine
from trainer.memory.build import resident

pytestmark = pytest.mark.smoke
REPOSITORY = Path(__file__).resolve().parents[3]


def run(ranks: int, out: Path, *arguments: str) -> dict[str, Any]:
    script = Path(__file__).with_name("sharded_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script), str(out)]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(out, weights_only=False)
    return found


def alone(kind: str, dtype: str, rule: Any, clipping: Any) -> tuple[list[float], list[float]]:
    residency = resident(make_model(kind, getattr(torch, dtype)), block_elements=10**9)
    config = Optimizer(kind="stateless", rule=rule, learning_rate=1e-3, clipping=clipping, max_grad_norm=0.05)
    engine = StatelessEngine(residency, config, Heartbeat(0.0, 1), 1.0, seed=7)
    terms = [Term(work, partial(loss_of, index)) for index, work in enumerate(make_works(3))]
    outcomes = [engine.step(terms, 1e-3, number) for number in range(3)]
    return [outcome.loss for outcome in outcomes], [outcome.norm for outcome in outcomes]


@pytest.mark.parametrize(
    ("kind", "dtype", "rule", "clipping"),
    [
        ("llama", "float32", "rms", "per_layer"),
        ("llama_tied", "float32", "sgd", "two_pass"),
        ("qwen3_moe", "bfloat16", "sign", "previous"),
    ],
)
def test_ranks_change_nothing_but_the_order_of_sums(kind: str, dtype: str, rule: str, clipping: str, tmp_path: Path) -> None:
    one = run(1, tmp_path / "one", kind, dtype, rule, clipping)
    two = run(2, tmp_path / "two", kind, dtype, rule, clipping)
    losses, norms = alone(kind, dtype, rule, clipping)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for found in (one, two):
        assert found["losses"] == pytest.approx(losses, rel=tolerance)
        assert found["norms"] == pytest.approx(norms, rel=tolerance)
        for layer, ranks in found["skipped"].items():
            assert set(ranks) == {(False, layer, True)}, "a NaN on one rank changes no weight on any, and all say so"
        assert found["facts"]["previous_norm"] == found["norms"][-1]
    assert one["metrics"]["update/relative"] == pytest.approx(two["metrics"]["update/relative"], rel=tolerance)
    if dtype == "float32":
        torch.testing.assert_close(one["logits"], two["logits"], rtol=1e-3, atol=1e-5)
    assert two["metrics"]["memory/shard_bytes"] <= 0.6 * one["metrics"]["memory/shard_bytes"]


def test_a_checkpoint_restores_on_another_number_of_ranks(tmp_path: Path) -> None:
    settings = ("llama", "float32", "rms", "per_layer")
    run(2, tmp_path / "start", *settings)
    one = run(1, tmp_path / "one", *settings, str(tmp_path / "start"))
    three = run(3, tmp_path / "three", *settings, str(tmp_path / "start"))
    assert one["losses"] == pytest.approx(three["losses"], rel=1e-5)
