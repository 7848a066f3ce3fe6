"""DeepSpeed ZeRO-3 on 2 ranks (gloo, torchrun) beside the plain engine: the same losses, norms, decisions, weights and scores."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.trainer.engine.zero3_run import CASES
from trainer.engine import zero3
from trainer.errors import ConfigError, ModelError

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by kind of model; the self-test has passed on the way."""
    pytest.importorskip("deepspeed", reason="pip install 'tithe[deepspeed]'")
    folder = tmp_path_factory.mktemp("zero3")
    script = Path(__file__).with_name("zero3_run.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", CASES)
def test_ranks_change_nothing_but_the_order_of_sums(kind: str, found: list[dict[str, Any]]) -> None:
    half = CASES[kind].get("dtype") == "bfloat16"
    for case in (rank[kind] for rank in found):
        plain, cut = case["plain"], case["zero3"]
        assert case["held_whole"] == 0, "between passes a rank has pieces only"
        assert case["num_trainable"][0] == case["num_trainable"][1]
        assert cut["applied"] == plain["applied"] == [True, False, True], "a NaN on one rank stops the step on all"
        assert cut["culprit"] == plain["culprit"]
        assert cut["losses"] == pytest.approx(plain["losses"], rel=1e-2 if half else 1e-5)
        assert cut["norms"] == pytest.approx(plain["norms"], rel=1e-2 if half else 1e-5, nan_ok=True)
        assert math.isnan(cut["norms"][1])
        assert cut["scores"] == pytest.approx(plain["scores"], abs=5e-2 if half else 1e-4)
        assert cut["weights"] == pytest.approx(plain["weights"], abs=1e-2 if half else 1e-4)
        assert cut["state"] == pytest.approx(plain["state"], rel=5e-2, abs=2e-2 if half else 1e-5)
    applied = [{name: rank[kind]["zero3"][name] for name in ("losses", "scores", "weights")} for rank in found]
    assert applied[0] == applied[1], "the same floats on all ranks"


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tithe\[deepspeed\]'"):
        zero3.check_installed()


def test_experts_that_are_modules_are_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(ModelError, match=r"0\.experts of this model are modules of their own"):
        zero3._refuse_lists_of_experts(nn.Sequential(Block()))


def test_the_self_test_measures_relative_to_what_is_expected() -> None:
    assert zero3._apart(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 4.4])) == pytest.approx(0.1)
    assert not zero3._apart(torch.tensor([1.0]), torch.tensor([math.nan])) <= zero3.AGREES_WITHIN
