"""Sources that are not JSONL: Parquet, and Hugging Face datasets in each local form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tasks.sources import Row, local_files, read_rows
from trainer.config.schema import PromptSource
from trainer.errors import ConfigError, DataError

ROWS = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(7)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def fields(source: str, **settings: Any) -> list[dict[str, Any]]:
    rows = list(read_rows(PromptSource(source=source, **settings), "prepare.sources.0", seed=1))
    assert all(isinstance(row, Row) for row in rows)
    return [row.fields for row in rows if isinstance(row, Row)]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert fields(f"parquet:{path}") == ROWS
    assert fields(f"parquet:{path}", num_rows=3) == ROWS[:3]
    [first, *_] = read_rows(PromptSource(source=f"parquet:{path}"), "", 0)
    assert first.where == f"{path}:1"


def test_file_that_is_not_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("question,answer\n")
    with pytest.raises(DataError, match=r"a\.parquet: is not a Parquet file that can be read"):
        fields(f"parquet:{path}")


def test_saved_dataset(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "several"))
    assert fields(f"hf:{tmp_path / 'one'}") == ROWS
    assert fields(f"hf:{tmp_path / 'several'}", options={"split": "test"}) == ROWS[:1]
    with pytest.raises(ConfigError, match=r"options\.split = 'dev': no such split; there are \['test', 'train'\]"):
        fields(f"hf:{tmp_path / 'several'}", options={"split": "dev"})


def test_folder_with_jsonl(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.Dataset.from_list(ROWS).to_json(folder / "train.jsonl")
    assert fields(f"hf:{folder}") == ROWS
    assert local_files(PromptSource(source=f"hf:{folder}")) == [folder / "train.jsonl"]


def test_hub_name_without_network_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"^hf:nobody/nothing-at-all: is no local directory and cannot be had .*save_to_disk"):
        fields("hf:nobody/nothing-at-all")


def test_unknown_option() -> None:
    with pytest.raises(ConfigError, match=r"options\.splt = 'train': unknown option; did you mean 'split'\?"):
        fields("hf:nobody/nothing", options={"splt": "train"})


def test_a_relative_path_begins_at_the_repository_wherever_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    for place, answer in ((repository, "1"), (elsewhere, "2")):
        place.mkdir()
        (place / "a.jsonl").write_text(f'\ufeff{{"question": "1", "answer": "{answer}"}}\n\n')
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("trainer.files.REPOSITORY", repository)
    assert fields("jsonl:a.jsonl") == [{"question": "1", "answer": "1"}]
    assert local_files(PromptSource(source="jsonl:a.jsonl")) == [repository / "a.jsonl"]
    (repository / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=rf"'jsonl:a\.jsonl': there is no {repository}/a\.jsonl; give the right path"):
        fields("jsonl:a.jsonl")
