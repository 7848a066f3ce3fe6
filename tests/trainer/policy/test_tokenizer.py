"""Text to ids and back, and tokenizers told apart by what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import load_config
from trainer.config.schema import Base, ScratchModel
from trainer.errors import ModelError
from trainer.plan.request import base_model
from trainer.policy.tokenizer import (
    build_tokenizer,
    character_tokenizer,
    encode,
    load_tokenizer,
    resolve_directory,
    tokenizer_hash,
)

PARAMS = Path(__file__).resolve().parents[3] / "params.yaml"


def test_every_character_is_one_token_and_comes_back() -> None:
    tokenizer = character_tokenizer("0123456789+= ")
    ids = encode(tokenizer, "12 + 34=")
    assert len(ids) == 8
    assert len(set(ids)) == 7
    assert tokenizer.decode(ids) == "12 + 34="


def test_a_saved_tokenizer_has_the_same_hash_and_ids(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(Base(source="scratch", scratch=ScratchModel(alphabet="0123456789+=")))
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert tokenizer_hash(loaded) == tokenizer_hash(tokenizer)
    assert encode(loaded, "98+7=") == encode(tokenizer, "98+7=")
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_another_alphabet_or_order_is_another_tokenizer() -> None:
    hashes = {tokenizer_hash(character_tokenizer(a)) for a in ("0123456789+=", "0123456789=+", "0123456789+")}
    assert len(hashes) == 3


def test_a_character_without_a_token_is_named() -> None:
    with pytest.raises(ValueError, match=r"no token for '\*x'"):
        encode(character_tokenizer("0123456789"), "1*2x")


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer_config.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer.json", "[]")],
)
def test_a_broken_tokenizer_file_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    character_tokenizer("0123").save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=r"no tokenizer that can be loaded \(.+\); add its tokenizer files$"):
        load_tokenizer(tmp_path)


def test_a_broken_gguf_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF garbage")
    with pytest.raises(ModelError, match=r"no tokenizer that can be loaded"):
        build_tokenizer(Base(source=f"gguf:{tmp_path}"))


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("source", ["hf:./missing", "gguf:missing", "hf:/missing/model", "hf:package:no_such_package_here"])
def test_a_missing_directory_is_named_without_asking_a_hub(source: str) -> None:
    with pytest.raises(ModelError, match=r"no such directory|no Python package"):
        resolve_directory(Base(source=source))


def test_a_hub_name_without_network_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"neither a local directory nor to be had from the hub.*set HF_HOME"):
        resolve_directory(Base(source="hf:nobody/no-such-model"))


def test_a_relative_directory_begins_at_the_repository_wherever_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    for place in (repository, elsewhere):
        (place / "models").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("trainer.files.REPOSITORY", repository)
    assert resolve_directory(Base(source="hf:models")) == repository / "models"
    assert base_model(load_config(PARAMS, ["base.source=hf:models"])) == str(repository / "models")
