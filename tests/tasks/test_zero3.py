"""The train stage over ranks that share a backbone by DeepSpeed ZeRO-3: as in one process; killed, and resumed over fewer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.tasks.test_ranks import TWO_STAGES, meanwhile, metrics, ranks_of, told
from tests.tasks.test_train import campaign, events, inputs, run_train
from trainer.config.load import lay_over
from trainer.errors import ConfigError, RankError

pytestmark = pytest.mark.deepspeed
assert inputs  # a fixture

LORA = lay_over(TWO_STAGES, {"train": {"lora": {"dropout": 0.0}}})
COMPARED = ("loss/total", "reward/mean", "kl/mean", "grad/norm", "heldout/accuracy", "anchors/audit_exact", "policy/version")


def over(ranks: int, difference: dict[str, Any] | None = None) -> Any:
    shared = {"train": {"memory": {"weights": "zero3"}}, "machine": {"ranks": ranks, "threads": ranks}}
    return campaign(lay_over(lay_over(LORA, shared), difference or {}))


def assert_same(expected: Path, found: Path) -> None:
    assert len(metrics(found)) == len(metrics(expected)) == 6
    for one, other in zip(metrics(expected), metrics(found), strict=True):
        for key in [key for key in COMPARED if key in one]:
            assert other[key] == pytest.approx(one[key], rel=2e-3, abs=1e-5), key
    one, other = (load_file(run.with_name(f"{run.name}-policy") / "adapter_model.safetensors") for run in (expected, found))
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert weight.shape == other[name].shape
        assert (weight - other[name]).abs().max() < 1e-4, name


@pytest.fixture(scope="module")
def alone(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The campaign in one process, with the plain engine."""
    root = tmp_path_factory.mktemp("alone") / "run"
    run_train(inputs, root, campaign(LORA))
    return root


def test_two_ranks_learn_and_decide_as_one_process_does(inputs: dict[str, Path], alone: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run_train(inputs, tmp_path / "run", over(2))
    assert_same(alone, tmp_path / "run")
    assert told(tmp_path / "run") == told(alone)
    assert told(tmp_path / "run") == told(tmp_path / "run" / "ranks" / "1")
    assert not (tmp_path / "run" / "ranks" / "1" / "checkpoints").exists()


def test_a_rank_that_is_killed_is_named_and_another_number_goes_on(inputs: dict[str, Path], alone: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run = tmp_path / "run"
    with (
        meanwhile(run, lambda: ranks_of(os.getpid())[1].kill()),  # the line of step 2 is written; its checkpoint may not be
        pytest.raises(RankError, match=r"rank 1 \(pid \d+\) was ended by SIGKILL, and the others with it"),
    ):
        run_train(inputs, run, over(2, {"train": {"checkpoints": {"every_steps": 1}}}))
    run_train(inputs, run, over(1))
    [resumed] = events(run, "resume")
    assert resumed["step"] >= 1
    assert_same(alone, run)


@pytest.mark.parametrize(
    ("difference", "key", "words"),
    [
        ({"train": {"method": "full"}}, "memory.weights", "shares the backbone of an adapter; set method: lora"),
        ({"train": {"schedule": "async"}}, "schedule", "sample and learn in step; set schedule: sync"),
        ({"train": {"optimizer": {"offload": "nvme"}}}, "optimizer.offload", "set cpu or none"),
        ({"train": {"lora": {"dropout": 0.1}}}, "lora.dropout", "set 0"),
        ({"train": {"algorithm": {"kl": {"reference": "int8_streamed"}}}}, "kl.reference", "set exact or anchors"),
        ({"anchors": {"reference": "resident"}}, "anchors.reference", "set auto"),
        ({"train": {"memory": {"weights": "resident"}}}, "machine.ranks", "set train.memory.weights: sharded or zero3"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(difference: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        over(2, difference)
    assert key in str(error.value)
    assert words in str(error.value)
