"""Prompts on disk: `prompts/<split>.jsonl`, one Prompt a line, in the order in which `prepare` found them.

A scorer's entry can hold what JSON has no word for (tuples, mappings with integer keys); it comes back as it went in, because
a task's own scorer compares such things. Equal prompts give equal bytes. Importable without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainer.errors import DataError
from trainer.files import canonical_json, write_text
from trainer.types import Prompt

SPLITS = ("train", "heldout", "test")
_TUPLE, _MAPPING = "__tuple__", "__mapping__"
_FIELDS = tuple(field.name for field in fields(Prompt))


def pack(value: Any) -> Any:
    """Return a value in JSON's own types, tuples and mappings with other keys than strings marked as such."""
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {str(key): pack(item) for key, item in value.items()}
        return {_MAPPING: [[pack(key), pack(item)] for key, item in value.items()]}
    return value


def unpack(value: Any) -> Any:
    """Undo `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(unpack(item) for item in value[_TUPLE])
        if value.keys() == {_MAPPING}:
            return {unpack(key): unpack(item) for key, item in value[_MAPPING]}
        return {key: unpack(item) for key, item in value.items()}
    return value


def prompt_line(prompt: Prompt) -> str:
    """Return the JSON line of a prompt, without the newline."""
    record = {name: getattr(prompt, name) for name in _FIELDS}
    return canonical_json({**record, "token_ids": list(prompt.token_ids), "scorer": pack(prompt.scorer)})


def prompt_path(directory: Path, split: str) -> Path:
    return directory / f"{split}.jsonl"


def write_prompts(directory: Path, split: str, prompts: Iterable[Prompt]) -> Path:
    """Write the prompts of one split.

    Args:
        directory: the prompts artifact.
        split: `train`, `heldout` or `test`.

    Returns:
        The file's path.
    """
    path = prompt_path(directory, split)
    write_text(path, "".join(prompt_line(prompt) + "\n" for prompt in prompts))
    return path


def read_prompts(directory: Path, split: str, sources: Sequence[str] | None = None) -> list[Prompt]:
    """Read the prompts of one split, in the file's order.

    Args:
        directory: the prompts artifact.
        split: `train`, `heldout` or `test`.
        sources: names of prepare.sources to keep; None keeps all.

    Raises:
        DataError: the file is missing, or a line is no prompt.
    """
    path = prompt_path(directory, split)
    if not path.is_file():
        raise DataError(str(path), "no such prompts file; run `python -m tasks prepare` first")
    prompts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                prompt = Prompt(**{**record, "token_ids": tuple(record["token_ids"]), "scorer": unpack(record["scorer"])})
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise DataError(f"{path}:{number}", f"is not a prompt ({error}); run prepare again") from None
            if sources is None or prompt.source in sources:
                prompts.append(prompt)
    return prompts
