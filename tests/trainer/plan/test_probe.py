"""This machine: its memory inside control groups of both versions, and a probe that is kept or not trusted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.files import write_json, write_text
from trainer.plan import probe
from trainer.plan.probe import ROUND_FIGURES, free_memory_bytes, memory_groups, memory_limit_bytes, quick_local


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_text(folder / name.replace("__", "."), f"{content}\n")


def test_the_limit_of_any_group_above_counts_and_file_pages_do_not(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", memory__max=8000, memory__current=3000, memory__stat="anon 500\ninactive_file 1000\nactive_file 500")
    group(root / "a" / "b", memory__max="max", memory__current=2000, memory__stat="inactive_file 0")
    write_text(tmp_path / "own", "0::/a/b\n")
    assert memory_groups(root, tmp_path / "own") == [(8000.0, 1500.0)]


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    files = {"memory__limit_in_bytes": 5000, "memory__usage_in_bytes": 900, "memory__stat": "total_inactive_file 300"}
    group(root / "memory" / "job", **files)
    group(root / "memory", memory__limit_in_bytes=2**62, memory__usage_in_bytes=10)
    write_text(tmp_path / "own", "9:name=systemd:/\n4:memory:/job\n")
    assert memory_groups(root, tmp_path / "own") == [(5000.0, 600.0), (float(2**62), 10.0)]


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert memory_groups(tmp_path, tmp_path / "missing") == []


def test_memory_is_the_narrowest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "memory_groups", lambda: [(2e9, 0.5e9), (1.8e9, 0.1e9)])
    assert free_memory_bytes() <= 1.5e9
    swap = probe.psutil.swap_memory().total
    assert memory_limit_bytes() == 1.8e9 + swap


def test_a_probe_of_another_version_is_not_trusted(tmp_path: Path) -> None:
    write_json(tmp_path / "hardware.json", {"name": "local", "unknown": 1})
    found = quick_local(tmp_path)
    assert found is not None
    assert found.notes == (ROUND_FIGURES,)
    write_text(tmp_path / "hardware.json", "{")
    assert quick_local(tmp_path / "not" / "there") is not None


def test_a_gpu_that_nothing_describes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "gpu_without_torch", lambda: None)
    assert quick_local(tmp_path, on_cpu=False) is None
    monkeypatch.setattr(probe, "gpu_without_torch", lambda: ("NVIDIA H100 80GB HBM3", 85.5e9))
    found = quick_local(tmp_path, on_cpu=False)
    assert found is not None
    assert (found.device.kind, found.device.memory_bytes) == ("cuda", 85.5e9)
    assert found.device.training_flops > 3e14  # the library's


def test_a_block_in_bfloat16_is_measured_beside_one_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def block(dtype: object) -> Callable[[], None]:
        return lambda: done.append(dtype)

    monkeypatch.setattr(probe, "_block", block)
    taken = iter([3.0, 1.0, 1.5, 2.0] + [9.0] * 12)
    monkeypatch.setattr(probe, "processor_seconds", lambda work: next(taken))
    assert probe.bfloat16_speed() == 1.5, "the best of each"
    assert len(set(done)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_that_is_measured_computes(dtype: torch.dtype) -> None:
    probe._block(dtype, sequences=1, length=4, hidden=16, heads=2)()
