"""Prompts from sources: read, fill the template, tokenise, drop what is double or too long, split by hash, write.

    sources -> rows -> text and answer -> token ids -> prompts/{train,heldout,test}.jsonl

Which split a prompt lands in follows from its text alone, not from its place, the seed or the other rows: new rows never move
an old one, and no prompt is in two splits. A bad row stops the stage with its file and line. What is dropped is counted, per
source, in the manifest and in events.jsonl. Run alone: `python -m tasks.prepare`.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

from tasks.registry import StagePaths
from tasks.sources import BadRow, Row, read_rows
from trainer.config import CampaignConfig
from trainer.config.schema import Prepare, PromptSource
from trainer.errors import ConfigError, DataError
from trainer.files import sha256_text
from trainer.metrics import RunWriter
from trainer.prompts import SPLITS, write_prompts
from trainer.types import Prompt, derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHOWN_BAD_ROWS = 10
_ROWS_A_BEAT = 1000
_NO_TEXT = object()


class RowProblem(ValueError):
    """Why one row cannot become a prompt."""


@dataclass
class SourceCounts:
    """What became of one source's rows: rows = duplicates + too_long + train + heldout + test."""

    rows: int = 0
    duplicates: int = 0
    conflicting_duplicates: int = 0  # among the duplicates: those with another gold answer than the first
    too_long: int = 0
    train: int = 0
    heldout: int = 0
    test: int = 0


def split_of(text: str, heldout_fraction: float, test_fraction: float) -> Literal["train", "heldout", "test"]:
    """Return the split of a prompt from the hash of its text.

    The hash is a point in [0, 1): held-out is taken from the low end and test from the high end, so that a change of one
    fraction moves no prompt between the two.
    """
    point = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
    if point < heldout_fraction:
        return "heldout"
    return "test" if point >= 1 - test_fraction else "train"


def look_up(fields: dict[str, Any], name: str) -> Any:
    """Return a row's field; `reward_model.ground_truth` reaches into a nested one."""
    if name in fields:
        return fields[name]
    node: Any = fields
    for part in name.split("."):
        if not isinstance(node, dict) or part not in node:
            return _NO_TEXT
        node = node[part]
    return node


def top_field(name: str) -> str:
    """Return the row's field that a template's field starts at: `prompt` of `prompt[0][content]`."""
    return re.split(r"[.\[]", name)[0]


def render(source: PromptSource, row: Row) -> str:
    """Return the row's prompt text, before any chat template.

    Raises:
        RowProblem: a field is missing or null, or the text is empty.
    """
    for _, name, _, _ in Formatter().parse(source.prompt_template):
        if name and row.fields.get(top_field(name)) is None:
            raise RowProblem(f"has nothing in field {top_field(name)!r}, which prompt_template needs")
    try:
        text = source.prompt_template.format_map(row.fields)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise RowProblem(f"does not fit prompt_template {source.prompt_template!r} ({error})") from None
    if source.remove_whitespace:
        text = re.sub(r"\s+", "", text)
    if not text.strip():
        raise RowProblem("gives an empty prompt")
    return text


def gold_answer(source: PromptSource, row: Row) -> str:
    """Return the row's gold answer as text.

    Raises:
        RowProblem: there is none, or answer_pattern does not find it. A reasoning_gym row may have none: its scorer judges.
    """
    value = look_up(row.fields, source.answer_field)
    if row.scorer and (value is _NO_TEXT or value is None):
        return ""
    if value is _NO_TEXT or value is None or (isinstance(value, str) and not value.strip()):
        raise RowProblem(f"has no answer in field {source.answer_field!r}")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise RowProblem(f"has a {type(value).__name__} in field {source.answer_field!r}; an answer is text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowProblem(f"has {value} in field {source.answer_field!r}; an answer is text or a finite number")
    text = str(value)
    if source.answer_pattern is not None:
        match = re.search(source.answer_pattern, text)
        if match is None or match.group(1) is None:
            raise RowProblem(f"has no answer: answer_pattern {source.answer_pattern!r} finds nothing in {text[-60:]!r}")
        text = match.group(1)
    if not text.strip():
        raise RowProblem(f"has no answer in field {source.answer_field!r}")
    return text.strip()


def with_scorer(source: PromptSource, row: Row) -> Row:
    """Return the row with the scorer data that `scorer_fields` names.

    Raises:
        RowProblem: a field is missing.
    """
    if not source.scorer_fields:
        return row
    data: dict[str, Any] = {"kind": "fields"}
    for name, field in source.scorer_fields.items():
        value = look_up(row.fields, field)
        if value is _NO_TEXT or value is None:
            raise RowProblem(f"has nothing in field {field!r}, which scorer_fields.{name} needs")
        data[name] = value
    return replace(row, scorer={**data, **row.scorer})


class PromptEncoder:
    """Turns a prompt's text into what the model is shown, and into token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added = tokenizer.encode("", add_special_tokens=True)
        starts = tokenizer.bos_token_id is not None and added[:1] == [tokenizer.bos_token_id]
        self.prefix = (tokenizer.bos_token_id,) if starts else ()

    def show(self, source: PromptSource, key: str, text: str) -> str:
        """Return the text inside the chat template, or as it is."""
        if not source.chat_template:
            return text
        if not self.tokenizer.chat_template:
            raise ConfigError(f"{key}.chat_template", True, "the base's tokenizer has no chat template; set chat_template: false")
        turns = [{"role": "user", "content": text}]
        if source.system_prompt is not None:
            turns.insert(0, {"role": "system", "content": source.system_prompt})
        from jinja2 import TemplateError

        try:
            shown = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ConfigError(
                f"{key}.chat_template", True, f"the tokenizer's chat template refuses the turns ({error}); see system_prompt"
            ) from error
        assert isinstance(shown, str)
        return shown

    def encode(self, source: PromptSource, shown: str) -> tuple[int, ...]:
        """Return the token ids; a chat template brings its own special tokens, a bare text gets the tokenizer's BOS if any.

        Raises:
            RowProblem: the tokenizer has no token for some of the text.
        """
        from trainer.policy.tokenizer import encode

        try:
            ids = encode(self.tokenizer, shown)
        except ValueError as error:
            raise RowProblem(str(error)) from None
        lost = self._lost(shown)
        if lost:
            raise RowProblem(f"the tokenizer has no token for {lost!r}")
        return ids if source.chat_template else self.prefix + ids

    def _lost(self, text: str) -> str:
        """Return the characters that a tokenizer without an unknown token leaves out in silence."""
        if self.tokenizer.unk_token_id is not None or not self.tokenizer.is_fast:
            return ""
        spans = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        covered = {index for start, end in spans for index in range(start, end)}
        return "".join(sorted({c for i, c in enumerate(text) if i not in covered and not c.isspace()}))


@dataclass(frozen=True)
class _Candidate:
    where: str
    bare: str
    shown: str
    answer: str
    token_ids: tuple[int, ...]
    scorer: dict[str, Any]


def read_source(
    source: PromptSource, key: str, seed: int, encoder: PromptEncoder, progress: Callable[[int], None]
) -> tuple[list[_Candidate], list[BadRow]]:
    """Return a source's usable rows and its bad ones.

    Raises:
        ConfigError: no row at all has a field that the configuration names.
    """
    good: list[_Candidate] = []
    bad: list[BadRow] = []
    first: Row | None = None
    for count, row in enumerate(read_rows(source, key, seed)):
        if count % _ROWS_A_BEAT == 0:
            progress(count)
        if isinstance(row, BadRow):
            bad.append(row)
            continue
        first = first or row
        try:
            bare = render(source, row)
            row = with_scorer(source, row)
            answer = gold_answer(source, row)
            shown = encoder.show(source, key, bare)
            good.append(_Candidate(row.where, bare, shown, answer, encoder.encode(source, shown), row.scorer))
        except RowProblem as problem:
            bad.append(BadRow(row.where, str(problem)))
    if not good and first is not None:
        _check_fields(source, key, first)
    if not good and not bad:
        raise DataError(source.source, "is empty; give a source with at least one row")
    return good, bad


def _check_fields(source: PromptSource, key: str, row: Row) -> None:
    """Say that a field is missing from the configuration's point of view: no row has it."""
    has = f"the rows have no such field; they have {sorted(row.fields)}"
    for name in [top_field(name) for _, name, _, _ in Formatter().parse(source.prompt_template) if name]:
        if name not in row.fields:
            raise ConfigError(f"{key}.prompt_template", source.prompt_template, f"{name!r}: {has}")
    for name, field in source.scorer_fields.items():
        if look_up(row.fields, field) is _NO_TEXT:
            raise ConfigError(f"{key}.scorer_fields.{name}", field, has)
    if not row.scorer and not source.scorer_fields and look_up(row.fields, source.answer_field) is _NO_TEXT:
        raise ConfigError(f"{key}.answer_field", source.answer_field, has)


def report_bad_rows(bad: list[BadRow], num_rows: int) -> None:
    """Raise a DataError that lists the first bad rows and counts all."""
    if bad:
        lines = [bad[0].problem, *(f"{row.where}: {row.problem}" for row in bad[1:_SHOWN_BAD_ROWS])]
        more = f" ({len(bad) - _SHOWN_BAD_ROWS} more not shown)" if len(bad) > _SHOWN_BAD_ROWS else ""
        lines.append(f"{len(bad)} of {num_rows} rows are bad{more}; fix or remove them, nothing was written")
        raise DataError(bad[0].where, "\n".join(lines))


def keep(prepare: Prepare, found: list[tuple[PromptSource, list[_Candidate]]]) -> tuple[list[Prompt], dict[str, SourceCounts]]:
    """Drop duplicates and over-long prompts, give the others their split, and count all."""
    answers: dict[str, str] = {}
    prompts: list[Prompt] = []
    counts = {source.name: SourceCounts() for source, _ in found}
    for source, candidates in found:
        count = counts[source.name]
        for candidate in candidates:
            count.rows += 1
            if candidate.shown in answers:
                count.duplicates += 1
                count.conflicting_duplicates += answers[candidate.shown] != candidate.answer
                continue
            answers[candidate.shown] = candidate.answer
            if len(candidate.token_ids) > prepare.max_prompt_tokens:
                count.too_long += 1
                continue
            split = split_of(candidate.bare, prepare.heldout_fraction, prepare.test_fraction)
            setattr(count, split, getattr(count, split) + 1)
            name = sha256_text(candidate.shown)[:16]
            prompts.append(
                Prompt(name, source.name, split, candidate.shown, candidate.token_ids, candidate.answer, candidate.scorer)
            )
    assert len({prompt.id for prompt in prompts}) == len(prompts), "two prompts share an id"
    return prompts, counts


def check_splits(prepare: Prepare, counts: dict[str, SourceCounts]) -> None:
    """Refuse a source that leaves nothing to train on, and an empty split that somebody will read."""
    for source in prepare.sources:
        count = counts[source.name]
        if count.train == 0:
            raise DataError(
                source.source,
                f"source {source.name!r} leaves no prompt to train on: of {count.rows} rows {count.duplicates} are duplicates, "
                f"{count.too_long} have more than max_prompt_tokens = {prepare.max_prompt_tokens} tokens, "
                f"{count.heldout + count.test} are held out; give more rows or raise the limit",
            )
    total = sum(count.train + count.heldout + count.test for count in counts.values())
    for split, fraction in (("heldout", prepare.heldout_fraction), ("test", prepare.test_fraction)):
        if fraction > 0 and not any(getattr(count, split) for count in counts.values()):
            raise DataError(
                ", ".join(source.source for source in prepare.sources),
                f"split {split} is empty: none of {total} prompts fell into its share of {fraction}; "
                f"give more rows or raise prepare.{split}_fraction",
            )


def drop_events(counts: dict[str, SourceCounts]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, count in counts.items():
        if count.duplicates or count.too_long:
            reason = f"source {name}: {count.duplicates} duplicates and {count.too_long} over-long prompts of {count.rows} rows"
            yield reason, {"source": name, "duplicates": count.duplicates, "too_long": count.too_long}


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Make the prompts artifact.

    Returns:
        The tokenizer's hash, the number of prompts in each split, and each source's counts.

    Raises:
        ConfigError: a source, option or field does not exist. DataError: bad rows, an empty source or an empty split.
    """
    from trainer.policy.tokenizer import build_tokenizer, tokenizer_hash

    writer = RunWriter(paths.run, resume_step=0)
    tokenizer = build_tokenizer(config.base)
    encoder = PromptEncoder(tokenizer)
    found: list[tuple[PromptSource, list[_Candidate]]] = []
    bad: list[BadRow] = []
    for index, source in enumerate(config.prepare.sources):

        def beat(count: int, source: PromptSource = source) -> None:
            writer.heartbeat(f"reading {source.source}", count, source.num_rows or 0)

        seed = derive_seed(config.campaign.seed, "prepare", source.name)
        good, wrong = read_source(source, f"prepare.sources.{index}", seed, encoder, beat)
        found.append((source, good))
        bad += wrong
    report_bad_rows(bad, len(bad) + sum(len(candidates) for _, candidates in found))
    prompts, counts = keep(config.prepare, found)
    check_splits(config.prepare, counts)
    for split in SPLITS:
        write_prompts(paths.out, split, [prompt for prompt in prompts if prompt.split == split])
    for reason, facts in drop_events(counts):
        writer.event("drop", reason, **facts)
    return {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "num_prompts": {split: sum(prompt.split == split for prompt in prompts) for split in SPLITS},
        "longest_prompt_tokens": max(len(prompt.token_ids) for prompt in prompts),
        "sources": {name: asdict(count) for name, count in counts.items()},
    }


if __name__ == "__main__":
    from tasks.command import main

    sys.exit(main(["prepare", *sys.argv[1:]]))
