"""Checkpoints: whole or refused, the one before used, another run's named, old ones kept until the new one is safe."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.errors import CheckpointError, ResourceError
from trainer.files import MANIFEST, damage, read_json, write_json
from trainer.policy.checkpoint import checkpoint_directories, load_newest, save_checkpoint

ME = "a" * 64


def save(root: Path, step: int, keep: int = 3, size: int = 10) -> Path:
    parts = {"weights": {"w": torch.full((size,), float(step))}, "optimizer": {"w/exp_avg": torch.ones(3)}}
    return save_checkpoint(root, step, ME, parts, {"version": 8 * step}, keep)


def steps(root: Path) -> list[int]:
    return [step for step, _ in checkpoint_directories(root)]


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none", ME, pytest.fail) is None
    save(tmp_path, 3)
    assert save(tmp_path, 12).name == "step_000012"
    found = load_newest(tmp_path, ME, pytest.fail)
    assert found is not None
    assert (found.step, found.facts) == (12, {"version": 96})
    assert found.parts["weights"]["w"].tolist() == [12.0] * 10
    assert found.parts.keys() == {"weights", "optimizer"}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [5, 4]
    assert steps(tmp_path) == sorted(steps(tmp_path), reverse=True)
    save(tmp_path, 1_000_000, keep=2)
    assert steps(tmp_path) == [1_000_000, 5], "more digits still sort by number"


def truncate(directory: Path) -> None:
    path = directory / "weights.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(directory: Path) -> None:
    path = directory / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose_a_file(directory: Path) -> None:
    (directory / "optimizer.safetensors").unlink()


def lose_the_manifest(directory: Path) -> None:
    (directory / MANIFEST).unlink()


@pytest.mark.parametrize("harm", [truncate, flip_a_bit, lose_a_file, lose_the_manifest])
def test_a_damaged_one_is_refused_and_the_one_before_it_used(tmp_path: Path, harm) -> None:  # type: ignore[no-untyped-def]
    save(tmp_path, 10)
    harm(save(tmp_path, 20))
    refused: list[str] = []
    found = load_newest(tmp_path, ME, refused.append)
    assert found is not None
    assert found.step == 10
    assert len(refused) == 1
    assert refused[0].startswith("step_000020 is damaged and passed over:")


def test_none_that_is_whole_is_an_error_not_a_start_from_zero(tmp_path: Path) -> None:
    for step in (1, 2):
        truncate(save(tmp_path, step))
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole; remove the directory") as error:
        load_newest(tmp_path, ME, lambda reason: None)
    assert error.value.exit_code == 6


def test_another_runs_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    target = save(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"step_000005 belongs to another run \(identity aaaaaaaaaaaa, this one is bbbb"):
        load_newest(tmp_path, "b" * 64, pytest.fail)
    manifest = read_json(target / MANIFEST)
    write_json(target / MANIFEST, {**manifest, "identity": "b" * 64})
    assert load_newest(tmp_path, "b" * 64, pytest.fail) is not None


def test_a_crash_while_writing_leaves_nothing_that_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial = tmp_path / ".step_000002.partial"
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"half")
    found = load_newest(tmp_path, ME, pytest.fail)
    assert found is not None
    assert found.step == 1
    save(tmp_path, 2)
    assert not partial.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    target = tmp_path / "small"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(target)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs more rights than these")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_full_disk_is_named_and_the_old_checkpoint_stands(small_disk: Path) -> None:
    old = save(small_disk, 1, size=20_000)
    with pytest.raises(ResourceError, match="step_000002: no space left on the disk; nothing written before is lost") as error:
        save(small_disk, 2, size=60_000)
    assert error.value.exit_code == 8
    assert damage(old) is None
    assert sorted(path.name for path in small_disk.iterdir()) == ["step_000001"], "no litter that would keep the disk full"
    found = load_newest(small_disk, ME, pytest.fail)
    assert found is not None
    assert found.step == 1
