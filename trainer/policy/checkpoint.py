"""Checkpoints that can be trusted: written beside, fsynced, renamed, with sha256 manifest; a damaged one is passed over.

    checkpoints/step_000120/   manifest.json (identity, facts, hashes) and one safetensors file per part (weights, optimizer, ...)

A checkpoint belongs to one run, by the identity of its parameters and inputs; another run's is refused by name.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer.errors import CheckpointError
from trainer.files import MANIFEST, damage, new_directory, read_manifest, write_manifest

Tensors = Mapping[str, torch.Tensor]
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    parts: dict[str, dict[str, torch.Tensor]]  # part name -> tensor name -> tensor, on the host
    facts: dict[str, Any]  # small numbers: versions, cursors, coefficients


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file; a failing disk is an OSError with its errno, as for every other file."""
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, path)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def checkpoint_directories(root: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every checkpoint, newest first."""
    found = [(int(match[1]), path) for path in root.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def checkpoint_facts(root: Path) -> list[dict[str, Any]]:
    """Return the facts of every checkpoint with a readable manifest, newest first."""
    manifests = (read_manifest(directory) for _, directory in checkpoint_directories(root))
    return [manifest["facts"] for manifest in manifests if manifest is not None]


def save_checkpoint(
    root: Path, step: int, identity: str, parts: Mapping[str, Tensors], facts: Mapping[str, Any], keep: int
) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`.

    Args:
        root: the run's `checkpoints` directory.
        step: the last step that is in it.
        identity: of the run (StagePaths.identity).
        parts: tensors by file and name.
        facts: JSON values.
        keep: at least 1; older ones go only after the new one is safe on the disk.

    Raises:
        ResourceError: the disk is full; the older checkpoints are untouched.
    """
    target = root / f"step_{step:06d}"
    with new_directory(target) as directory:
        for part, tensors in parts.items():
            write_tensors(directory / f"{part}.safetensors", tensors)
        write_manifest(directory, {"step": step, "identity": identity, "facts": dict(facts)})
    for _, old in checkpoint_directories(root)[keep:]:
        (old / MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed one is never taken for whole
        shutil.rmtree(old, ignore_errors=True)
    return target


def load_newest(root: Path, identity: str, refused: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that is whole, or None where there is none at all.

    Args:
        root: the run's `checkpoints` directory.
        identity: of the run that asks.
        refused: told why a damaged checkpoint is passed over.

    Raises:
        CheckpointError: a checkpoint of another run, or none of those there are is whole.
    """
    directories = checkpoint_directories(root)
    for step, directory in directories:
        wrong = damage(directory)
        if wrong is not None:
            refused(f"{directory.name} is damaged and passed over: {wrong}")
            continue
        manifest = read_manifest(directory)
        assert manifest is not None
        if manifest["identity"] != identity:
            raise CheckpointError(
                f"{directory} belongs to another run (identity {manifest['identity'][:12]}, this one is {identity[:12]}): "
                f"its parameters or inputs were others. Remove {root} to begin anew, or choose another run directory"
            )
        parts = {path.stem: load_file(path) for path in sorted(directory.glob("*.safetensors"))}
        return Checkpoint(step, parts, manifest["facts"])
    if directories:
        raise CheckpointError(f"{root}: none of its {len(directories)} checkpoints is whole; remove the directory to begin anew")
    return None
