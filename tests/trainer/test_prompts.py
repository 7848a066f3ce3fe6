"""Prompts come back from disk as they went in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.errors import DataError
from trainer.prompts import pack, read_prompts, unpack, write_prompts
from trainer.types import Prompt


def prompt(text: str, source: str = "main") -> Prompt:
    scorer = {"kind": "reasoning_gym", "entry": {"metadata": {"grid": ((1, 2), (3, 4)), "colours": {1: [2], 2: [1]}}}}
    return Prompt(id=text, source=source, split="train", text=text, token_ids=(1, 2), answer="é", scorer=scorer)


def test_prompts_come_back_equal_and_in_order(tmp_path: Path) -> None:
    prompts = [prompt("b"), prompt("a", "other"), prompt("c")]
    write_prompts(tmp_path, "train", prompts)
    assert read_prompts(tmp_path, "train") == prompts
    assert [p.text for p in read_prompts(tmp_path, "train", sources=["main"])] == ["b", "c"]


def test_tuples_and_integer_keys_survive() -> None:
    value = {"a": (1, [2, (3,)]), "b": {1: {"c": None}}}
    assert unpack(pack(value)) == value
    assert isinstance(unpack(pack(value))["a"], tuple)


def test_missing_file_names_the_stage_to_run(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=re.escape(f"{tmp_path / 'test.jsonl'}: no such prompts file; run `python -m tasks prepare`")
    ):
        read_prompts(tmp_path, "test")


def test_broken_line_is_named(tmp_path: Path) -> None:
    path = write_prompts(tmp_path, "train", [prompt("a")])
    path.write_text(path.read_text() + '{"id": "x"}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:2: is not a prompt"):
        read_prompts(tmp_path, "train")
