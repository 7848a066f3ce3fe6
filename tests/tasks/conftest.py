"""Helpers of the stage tests: a small campaign, a stage's paths, a word-piece tokenizer with a chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.record import begin, finish
from tasks.registry import Stage, StagePaths
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, validate
from trainer.config.load import lay_over
from trainer.files import new_directory, read_manifest, write_manifest

_SMALL: dict[str, Any] = {
    "campaign": {"name": "small"},
    "prepare": {
        "sources": [
            {
                "source": "reasoning_gym:basic_arithmetic",
                "num_rows": 120,
                "prompt_template": "{expression}=",
                "remove_whitespace": True,
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2, "operators": ["+"]},
            }
        ],
        "heldout_fraction": 0.2,
    },
    "base": {"source": "scratch", "scratch": {"alphabet": "0123456789+-()="}},
    "train": {"method": "full", "optimizer": {"learning_rate": 1e-4}, "stages": [{"steps": 1}]},
    "reward": {"verifier": "exact"},
}


@pytest.fixture
def campaign() -> Callable[[dict[str, Any]], CampaignConfig]:
    """A small campaign with a difference laid over it."""

    def build(difference: dict[str, Any]) -> CampaignConfig:
        return validate(lay_over(_SMALL, difference))

    return build


@pytest.fixture
def stage_paths(tmp_path: Path) -> Callable[..., StagePaths]:
    """A stage's paths below the test's folder; inputs by name."""

    def build(name: str = "stage", **inputs: Path) -> StagePaths:
        out, run = tmp_path / name, tmp_path / "runs" / name
        out.mkdir(parents=True)
        run.mkdir(parents=True)
        return StagePaths(inputs=inputs, out=out, run=run, identity="0" * 64)

    return build


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[str, list[Any]], Path]:
    """Write rows to a JSONL file; a string is written as it is, as a broken line would be."""

    def write(name: str, rows: list[Any]) -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def chat_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer that has BOS and a chat template, as an instruct model's has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        token: index for index, token in enumerate(["<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>", *letters])
    }
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=["<|user|>", "<|system|>", "<|assistant|>"],
    )
    tokenizer.chat_template = (
        "<s>{% for turn in messages %}<|{{ turn.role }}|>{{ turn.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    directory = tmp_path_factory.mktemp("chat-base")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def put_artifact() -> Callable[..., Path]:
    """Put an artifact in place with the manifest and the record that its stage would have left."""

    def put(workspace: Workspace, stage: Stage, files: Path | str = "x", **facts: Any) -> Path:
        inputs = {name: (read_manifest(workspace.artifact(name)) or {})["content_sha256"] for name in stage.inputs}
        target, run = workspace.artifact(stage.artifact), workspace.run / stage.name
        with new_directory(target) as out:
            if isinstance(files, Path):
                shutil.copytree(files, out, dirs_exist_ok=True)
            else:
                (out / "file").write_text(files + stage.name)
            manifest = write_manifest(out, {"stage": stage.name, "key": workspace.key(stage), "inputs": inputs, **facts})
        begin(run, "stage", stage.name, workspace.config, "i", {}, {})
        place = {"path": str(target), "content_sha256": manifest["content_sha256"], "upload": stage.upload}
        finish(run, "FINISHED", artifact=place)
        return target

    return put
