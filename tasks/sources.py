"""Where prompts come from: every kind of source becomes one stream of rows, good ones and bad ones.

    reasoning_gym:<task>   rows drawn from the task's generator; its metadata's fields stand beside question and answer
    jsonl:<file>           one JSON object a line; blank lines are no rows
    parquet:<file>         one row a record, read in batches
    hf:<name or folder>    `datasets`: a folder written by save_to_disk, a folder with Parquet or JSONL files, or a hub name

A relative path begins at the repository's root, where every stage runs, wherever it is started. A row that cannot be read
becomes a BadRow with its place; nothing is dropped here. Heavy libraries are imported only by the kind that needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config import CampaignConfig
from trainer.config.schema import PromptSource
from trainer.errors import NOBODYS_FAULT, ConfigError, DataError, first_line, nearest
from trainer.files import MANIFEST, place_of
from trainer.reward.judges import reasoning_gym_tasks

_OF_A_MODEL = (".json", ".safetensors", ".bin", ".gguf", ".model", ".txt", ".jinja")
_HF_OPTIONS = ("config", "split", "revision")
_RESERVED = {"seed": "it follows from campaign.seed", "size": "it is num_rows"}


@dataclass(frozen=True)
class Row:
    where: str  # "data/train.jsonl:12"
    fields: dict[str, Any]
    scorer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadRow:
    where: str
    problem: str


def read_rows(source: PromptSource, key: str, seed: int) -> Iterator[Row | BadRow]:
    """Return the rows of a source, at most `num_rows`, in its own order.

    Args:
        source: the entry of prepare.sources.
        key: its dotted configuration key, for messages.
        seed: only reasoning_gym draws.

    Raises:
        ConfigError: the source or one of its options does not exist. DataError: the source cannot be read at all.
    """
    readers = {"reasoning_gym": _reasoning_gym, "jsonl": _jsonl, "parquet": _parquet, "hf": _hugging_face}
    rows = readers[source.kind](source, key, seed)
    for count, row in enumerate(rows, start=1):
        yield row
        if count == source.num_rows:
            return


def find(locator: str) -> Path | None:
    """Return where a path of the configuration lies, or None."""
    return place if (place := place_of(locator)).exists() else None


def local_files(source: PromptSource) -> list[Path]:
    """Return the files on this machine that a source reads, in sorted order: their content decides the prompts."""
    path = None if source.kind == "reasoning_gym" else find(source.locator)
    if path is None:
        return []
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def prompt_files(config: CampaignConfig) -> list[Path]:
    """Return the files on this machine that all sources of a campaign read."""
    return [path for source in config.prepare.sources for path in local_files(source)]


def base_files(config: CampaignConfig) -> list[Path]:
    """Return the files of a local base: weights put in place of others are another model. A hub name has a revision instead."""
    if config.base.kind == "scratch" or config.base.locator.startswith("package:"):
        return []
    directory = find(config.base.locator)
    return sorted(p for p in directory.glob("*") if p.is_file() and p.suffix in _OF_A_MODEL) if directory is not None else []


def prepare_files(config: CampaignConfig) -> list[Path]:
    """Return the files that decide prompts: those of the sources, and of a local base what its tokenizer may be read from."""
    return prompt_files(config) + [path for path in base_files(config) if path.suffix not in (".safetensors", ".bin")]


def reward_files(config: CampaignConfig) -> list[Path]:
    """Return the files on this machine that decide verdicts: a reward model's, and the module of a function of the user's."""
    files: list[Path] = []
    for judge in config.reward.judges:
        if judge.verifier == "reward_model" and (directory := find(judge.reward_model.model)) is not None:
            files += sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST)
        if judge.verifier == "python" and judge.function is not None:
            module = find(judge.function.partition(":")[0].replace(".", "/") + ".py")
            files += [module] if module is not None else []
    return files


def pair_files(config: CampaignConfig) -> list[Path]:
    """Return the file of preference pairs, and the files of a local base of the reward model."""
    options = config.reward_training
    if options is None:
        return []
    places = [find(options.pairs), find(options.base) if options.base != "scratch" else None]
    return [
        file for place in places if place for file in ([place] if place.is_file() else sorted(place.rglob("*"))) if file.is_file()
    ]


def _find_file(source: PromptSource, key: str) -> Path:
    path = place_of(source.locator)
    if not path.exists():
        raise ConfigError(f"{key}.source", source.source, f"there is no {path}; give the right path")
    if not path.is_file():
        what = "is a directory; name a file, or use hf:<directory>" if path.is_dir() else "is no regular file; name one"
        raise ConfigError(f"{key}.source", source.source, what)
    if path.stat().st_size == 0:
        raise DataError(source.locator, "is empty; give a file with at least one row")
    return path


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(str(path), f"cannot be opened ({error.strerror}); make it readable") from error


def _jsonl(source: PromptSource, key: str, seed: int) -> Iterator[Row | BadRow]:
    path = _find_file(source, key)
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{source.locator}:{number}"
            text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
            if not text:
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                yield BadRow(where, f"is not JSON ({error.msg} at column {error.colno})")
                continue
            except UnicodeDecodeError as error:
                yield BadRow(where, f"is not UTF-8 text ({error.reason} at byte {error.start})")
                continue
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets by the thousand
                yield BadRow(where, f"cannot be read ({first_line(error)[:100]})")
                continue
            if b"\\u" in text and not _is_text(record):
                yield BadRow(where, "holds half a surrogate pair (\\ud800 to \\udfff), which is no text")
                continue
            yield _as_row(where, record)


def _is_text(record: Any) -> bool:
    """Whether every string of a record can be written; JSON may escape what is no character."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_row(where: str, record: Any) -> Row | BadRow:
    if isinstance(record, dict):
        return Row(where, record)
    return BadRow(where, f"is a JSON {type(record).__name__}, not an object with fields")


def _parquet(source: PromptSource, key: str, seed: int) -> Iterator[Row | BadRow]:
    path = _find_file(source, key)
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield _as_row(f"{source.locator}:{number}", record)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(source.locator, f"is not a Parquet file that can be read ({first_line(error)})") from error


def _hugging_face(source: PromptSource, key: str, seed: int) -> Iterator[Row | BadRow]:
    for name in source.options:
        if name not in _HF_OPTIONS:
            raise ConfigError(f"{key}.options.{name}", source.options[name], "unknown option; " + nearest(name, _HF_OPTIONS))
    split = str(source.options.get("split", "train"))
    data = _load_hugging_face(source, key, split)
    for number, record in enumerate(data, start=1):
        yield _as_row(f"{source.locator}[{split}]:{number}", record)


def _load_hugging_face(source: PromptSource, key: str, split: str) -> Any:
    """Return the `datasets.Dataset` of one split, from a local directory or the hub."""
    import datasets

    path = find(source.locator)
    config = source.options.get("config")
    try:
        if path is not None and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            data = datasets.load_from_disk(str(path))
            if isinstance(data, datasets.Dataset):
                return data
        else:
            data = datasets.load_dataset(
                str(path or source.locator),
                name=str(config) if config is not None else None,
                revision=str(source.options["revision"]) if "revision" in source.options else None,
            )
    except NOBODYS_FAULT:
        raise
    except Exception as error:
        what = "cannot be read" if path else "is no local directory and cannot be had from the hub"
        fix = (
            "give a folder written by save_to_disk, or one with .parquet or .jsonl files"
            if path
            else "check the name and the network, or save the dataset where there is one (save_to_disk) and set hf:<folder>"
        )
        raise DataError(source.source, f"{what} ({type(error).__name__}: {first_line(error)}); {fix}") from error
    if split not in data:
        raise ConfigError(f"{key}.options.split", split, f"no such split; there are {sorted(data)}")
    return data[split]


def _reasoning_gym(source: PromptSource, key: str, seed: int) -> Iterator[Row | BadRow]:
    task, size = source.locator, source.num_rows
    assert size is not None  # the schema asks for it
    dataset = _make_task(source, key, size, seed)
    for index in range(size):
        try:
            entry = dataset[index]
        except NOBODYS_FAULT:
            raise
        except Exception as error:
            raise ConfigError(
                f"{key}.options", source.options, f"{task} cannot draw row {index + 1} with them ({first_line(error)})"
            ) from error
        fields = {**entry["metadata"], "question": entry["question"], "answer": entry["answer"]}
        yield Row(f"{source.source}:{index + 1}", fields, {"kind": "reasoning_gym", "task": task, "entry": entry})


def _make_task(source: PromptSource, key: str, size: int, seed: int) -> Any:
    import dataclasses

    task, tasks = source.locator, reasoning_gym_tasks()
    if task not in tasks:
        raise ConfigError(f"{key}.source", source.source, "no such reasoning_gym task; " + nearest(task, tasks))
    valid = {f.name for f in dataclasses.fields(tasks[task][1])}
    for name, value in source.options.items():
        if name in _RESERVED:
            raise ConfigError(f"{key}.options.{name}", value, f"cannot be set here; {_RESERVED[name]}")
        if name not in valid:
            raise ConfigError(
                f"{key}.options.{name}", value, f"unknown setting of {task}; " + nearest(name, valid - {*_RESERVED})
            )
    try:
        import reasoning_gym

        # Some generators hand their seed to numpy, which takes 32 bits.
        return reasoning_gym.create_dataset(task, size=size, seed=seed % 2**31, **source.options)
    except NOBODYS_FAULT:
        raise
    except Exception as error:
        raise ConfigError(f"{key}.options", source.options, f"{task} refuses them ({first_line(error)})") from error
