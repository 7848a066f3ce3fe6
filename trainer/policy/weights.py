"""Tensors of a model directory, read one at a time and written shard by shard; no model is built.

    WeightReader(directory)          names, shapes and types from the headers; `read(name)` maps one tensor
    write_shards(directory, plan)    safetensors files of at most so many bytes, with the index that transformers expects

At no time is more than one shard in memory.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.errors import ModelError
from trainer.files import disk_full_is_named, write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_safetensors(path: Path) -> Any:
    """Open one safetensors file; a damaged one is a ModelError."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; the directory is not complete") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: is damaged ({error}); make or copy it again") from error


class WeightReader:
    """The weights of a Hugging Face model directory, by name.

    Args:
        directory: holds `model.safetensors`, or shards and their index.

    Raises:
        ModelError: there are no safetensors, a shard is missing or damaged, or the index names what no shard has.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = self._read_index()
        for name, file in self._file_of.items():
            if name not in self._names_in(file):
                raise ModelError(f"{directory / file}: lacks {name}, which {INDEX} says it has; copy the model again")

    def _read_index(self) -> dict[str, str]:
        if (self.directory / INDEX).is_file():
            try:
                index: dict[str, str] = json.loads((self.directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ModelError(f"{self.directory / INDEX}: is no index of shards ({error}); copy the model again") from error
            return index
        if (self.directory / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        raise ModelError(f"{self.directory}: has no weights ({SINGLE}, or shards with {INDEX})")

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = open_safetensors(self.directory / file)
        return self._files[file]

    def _names_in(self, file: str) -> set[str]:
        return set(self._open(file).keys())

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, in the order of the files."""
        return tuple(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        code = self._open(self._file_of[name]).get_slice(name).get_dtype()
        if code not in _TYPES:
            raise ModelError(
                f"{self.directory / self._file_of[name]}: {name} has type {code}; give a model that is not quantised"
            )
        return _TYPES[code]


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its size is known before its values are."""

    name: str
    size_bytes: int
    make: Callable[[], Tensor]


def plan_shards(plan: Sequence[PlannedTensor], max_shard_bytes: int) -> list[list[PlannedTensor]]:
    """Return consecutive tensors in shards of at most `max_shard_bytes`; a larger tensor has a shard of its own."""
    shards: list[list[PlannedTensor]] = []
    room = -1
    for tensor in plan:
        if tensor.size_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.size_bytes
    return shards


def write_shards(
    directory: Path, plan: Sequence[PlannedTensor], max_shard_bytes: int, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write tensors as safetensors, one file or shards with an index.

    Args:
        plan: unique names, in the order in which they are made and written.
        progress: called with (shards written, shards in all).
    """
    shards = plan_shards(plan, max_shard_bytes)
    width = len(shards)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if width == 1 else f"model-{number:05d}-of-{width:05d}.safetensors"
        _save({tensor.name: tensor.make().contiguous() for tensor in shard}, directory / file)
        weight_map |= {tensor.name: file for tensor in shard}
        if progress is not None:
            progress(number, width)
    if width > 1:
        total = sum(tensor.size_bytes for tensor in plan)
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    with disk_full_is_named(path):
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # it hides the number of an operating system's error in its text
            if "StorageFull" in str(error) or "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise
