"""Prepare: what becomes of every row, good, double, too long or bad."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prepare import run, split_of
from tasks.registry import STAGES, StagePaths
from tasks.workspace import Workspace
from trainer.config import CampaignConfig
from trainer.errors import ConfigError, DataError
from trainer.policy.tokenizer import build_tokenizer, tokenizer_hash
from trainer.prompts import SPLITS, read_prompts
from trainer.types import Prompt

Campaign = Callable[[dict[str, Any]], CampaignConfig]
Paths = Callable[..., StagePaths]
Write = Callable[[str, list[Any]], Path]


def sums(number: int, start: int = 10) -> list[dict[str, Any]]:
    return [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(start, start + number)]


def from_file(path: Path, **settings: Any) -> dict[str, Any]:
    return {"prepare": {"sources": [{"source": f"jsonl:{path}", **settings}]}}


def all_prompts(directory: Path) -> list[Prompt]:
    return [prompt for split in SPLITS for prompt in read_prompts(directory, split)]


def test_reasoning_gym_rows_keep_what_their_scorer_needs(campaign: Campaign, stage_paths: Paths) -> None:
    import reasoning_gym

    config, paths = campaign({}), stage_paths()
    facts = run(config, paths)
    prompts = all_prompts(paths.out)
    assert facts["num_prompts"] == {split: len(read_prompts(paths.out, split)) for split in SPLITS}
    assert facts["tokenizer_hash"] == tokenizer_hash(build_tokenizer(config.base))
    counts = facts["sources"]["main"]
    assert counts["rows"] == 120 == counts["duplicates"] + len(prompts)
    for prompt in prompts:
        assert eval(prompt.text[:-1]) == int(prompt.answer)
        assert build_tokenizer(config.base).decode(list(prompt.token_ids)) == prompt.text
        scorer = reasoning_gym.get_score_answer_fn(prompt.scorer["task"])
        assert scorer(prompt.answer, prompt.scorer["entry"]) == 1.0


def test_two_runs_write_the_same_bytes_and_another_seed_others(campaign: Campaign, stage_paths: Paths) -> None:
    one, two, other = stage_paths("one"), stage_paths("two"), stage_paths("other")
    run(campaign({}), one)
    run(campaign({}), two)
    run(campaign({"campaign": {"seed": 1}}), other)
    for split in SPLITS:
        assert (one.out / f"{split}.jsonl").read_bytes() == (two.out / f"{split}.jsonl").read_bytes()
    assert (one.out / "train.jsonl").read_bytes() != (other.out / "train.jsonl").read_bytes()


@given(st.lists(st.text(min_size=1), min_size=1), st.floats(0.01, 0.5), st.floats(0, 0.49))
def test_no_prompt_is_in_two_splits(texts: list[str], heldout: float, test: float) -> None:
    seen: dict[str, str] = {}
    for text in texts + texts[::-1]:
        assert seen.setdefault(text, split_of(text, heldout, test)) == split_of(text, heldout, test)


@given(st.text(), st.floats(0.01, 0.4), st.floats(0, 0.4), st.floats(0, 0.1))
def test_a_larger_test_share_takes_from_train_only(text: str, heldout: float, test: float, more: float) -> None:
    before, after = split_of(text, heldout, test), split_of(text, heldout, test + more)
    assert before == after or (before, after) == ("train", "test")


def test_splits_have_the_size_asked_for() -> None:
    found = [split_of(f"prompt {i}", 0.1, 0.2) for i in range(20000)]
    assert found.count("heldout") == pytest.approx(2000, abs=4 * (20000 * 0.1 * 0.9) ** 0.5)
    assert found.count("test") == pytest.approx(4000, abs=4 * (20000 * 0.2 * 0.8) ** 0.5)


def test_split_does_not_depend_on_order_or_on_other_rows(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    one, two = stage_paths("one"), stage_paths("two")
    run(campaign(from_file(write_jsonl("one.jsonl", sums(80)))), one)
    run(campaign(from_file(write_jsonl("two.jsonl", sums(80)[::-1] + sums(30, 200)))), two)
    first, second = ({p.text: p.split for p in all_prompts(paths.out)} for paths in (one, two))
    assert first.items() <= second.items()


def test_duplicates_and_long_prompts_are_dropped_and_counted(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    rows = [*sums(60), *sums(3), {"question": "10+10=", "answer": "21"}, {"question": "1+" * 20 + "1=", "answer": "21"}]
    paths = stage_paths()
    facts = run(campaign(lay(from_file(write_jsonl("a.jsonl", rows)), max_prompt_tokens=10)), paths)
    counts = facts["sources"]["main"]
    assert (counts["rows"], counts["duplicates"], counts["conflicting_duplicates"], counts["too_long"]) == (65, 4, 1, 1)
    assert counts["train"] + counts["heldout"] + counts["test"] == 60 == len({p.id for p in all_prompts(paths.out)})
    [event] = [json.loads(line) for line in (paths.run / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "drop"
    assert event["reason"] == "source main: 4 duplicates and 1 over-long prompts of 65 rows"


def lay(difference: dict[str, Any], **prepare: Any) -> dict[str, Any]:
    return {**difference, "prepare": {**difference["prepare"], **prepare}}


def test_a_prompt_in_two_sources_stays_in_the_first(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    sources = [{"name": name, "source": f"jsonl:{write_jsonl(name, rows)}"} for name, rows in (("a", sums(60)), ("b", sums(100)))]
    paths = stage_paths()
    facts = run(campaign({"prepare": {"sources": sources}}), paths)
    assert facts["sources"]["b"]["duplicates"] == 60
    assert {p.source for p in all_prompts(paths.out) if int(p.answer) < 140} == {"a"}


def test_answer_is_taken_out_by_the_pattern(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    rows = [{**row, "answer": f"Think.\nIt is easy.\n#### {row['answer']}"} for row in sums(60)]
    paths = stage_paths()
    run(campaign(from_file(write_jsonl("a.jsonl", rows), answer_pattern="#### (.+)$")), paths)
    assert {p.text: p.answer for p in all_prompts(paths.out)} == {row["question"]: row["answer"] for row in sums(60)}


def test_nested_fields(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": r["question"]}], "reward_model": {"ground_truth": r["answer"]}} for r in sums(60)
    ]
    settings = {"prompt_template": "{prompt[0][content]}", "answer_field": "reward_model.ground_truth"}
    paths = stage_paths()
    run(campaign(from_file(write_jsonl("a.jsonl", rows), **settings)), paths)
    assert {p.text: p.answer for p in all_prompts(paths.out)} == {row["question"]: row["answer"] for row in sums(60)}


def test_num_rows_takes_the_first(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    paths = stage_paths()
    run(campaign(from_file(write_jsonl("a.jsonl", [*sums(60), "broken"]), num_rows=60)), paths)
    assert len(all_prompts(paths.out)) == 60


def test_chat_template_wraps_the_prompt_and_brings_its_own_bos(
    campaign: Campaign, stage_paths: Paths, write_jsonl: Write, chat_base: Path
) -> None:
    difference = from_file(write_jsonl("a.jsonl", sums(60)), chat_template=True, system_prompt="Add.")
    difference["base"] = {"source": f"hf:{chat_base}"}
    paths = stage_paths()
    run(campaign(difference), paths)
    prompt = next(p for p in all_prompts(paths.out) if p.answer == "20")
    assert prompt.text == "<s><|system|>Add.<|user|>10+10=<|assistant|>"
    assert prompt.token_ids[0] == 0 != prompt.token_ids[1]


def test_bare_prompt_gets_the_tokenizers_bos(campaign: Campaign, stage_paths: Paths, write_jsonl: Write, chat_base: Path) -> None:
    difference = from_file(write_jsonl("a.jsonl", sums(60)))
    difference["base"] = {"source": f"hf:{chat_base}"}
    paths = stage_paths()
    run(campaign(difference), paths)
    assert all(p.token_ids[0] == 0 and len(p.token_ids) == 1 + len(p.text) for p in all_prompts(paths.out))


def test_chat_template_does_not_move_a_prompt_to_another_split(
    campaign: Campaign, stage_paths: Paths, write_jsonl: Write, chat_base: Path
) -> None:
    splits = []
    for chat in (False, True):
        difference = from_file(write_jsonl("a.jsonl", sums(60)), chat_template=chat)
        difference["base"] = {"source": f"hf:{chat_base}"}
        paths = stage_paths(f"chat-{chat}")
        run(campaign(difference), paths)
        splits.append({p.answer: p.split for p in all_prompts(paths.out)})
    assert splits[0] == splits[1]


def test_base_without_chat_template(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    with pytest.raises(
        ConfigError, match=r"prepare\.sources\.0\.chat_template = True: .*no chat template; set chat_template: false"
    ):
        run(campaign(from_file(write_jsonl("a.jsonl", sums(60)), chat_template=True)), stage_paths())


def test_bad_rows_are_all_reported_with_file_and_line(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    rows: list[Any] = sums(60)
    rows[2] = '{"question": "1+1=", "answer": "2"'
    rows[4] = {"question": "1+1="}
    rows[6] = {"question": "1+1=", "answer": "  "}
    rows[8] = {"question": "one+1=", "answer": "2"}
    rows[10] = {"answer": "2"}
    rows[12] = ["1+1=", "2"]
    rows[14] = {"question": None, "answer": "2"}
    rows[16] = {"question": "1+1=", "answer": ["2"]}
    rows[17] = {"question": "1+1=", "answer": True}
    path = write_jsonl("a.jsonl", rows)
    paths = stage_paths()
    with pytest.raises(DataError) as caught:
        run(campaign(from_file(path)), paths)
    lines = str(caught.value).splitlines()
    for line, (number, problem) in zip(
        lines,
        [
            (3, "is not JSON (Expecting ',' delimiter at column 35)"),
            (5, "has no answer in field 'answer'"),
            (7, "has no answer in field 'answer'"),
            (9, "the tokenizer has no token for 'eno'"),
            (11, "has nothing in field 'question', which prompt_template needs"),
            (13, "is a JSON list, not an object with fields"),
            (15, "has nothing in field 'question', which prompt_template needs"),
            (17, "has a list in field 'answer'; an answer is text or a number"),
            (18, "has a bool in field 'answer'; an answer is text or a number"),
        ],
        strict=False,
    ):
        assert line == f"{path}:{number}: {problem}"
    assert lines[-1] == "9 of 60 rows are bad; fix or remove them, nothing was written"
    assert list(paths.out.iterdir()) == []


def test_many_bad_rows_are_counted_and_the_first_ten_shown(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    with pytest.raises(DataError) as caught:
        run(campaign(from_file(write_jsonl("a.jsonl", ["{"] * 30 + sums(10)))), stage_paths())
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "30 of 40 rows are bad (20 more not shown); fix or remove them, nothing was written"


def test_line_that_is_not_utf8(campaign: Campaign, stage_paths: Paths, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"question": "1+1=", "answer": "2"}\n{"question": "\xff", "answer": "2"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: is not UTF-8 text"):
        run(campaign(from_file(path)), stage_paths())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[" * 100_000, "cannot be read (maximum recursion depth"),
        ('{"question": "1+1=", "answer": ' + "9" * 5000 + "}", "cannot be read (Exceeds the limit"),
        ('{"question": "1+\\ud800=", "answer": "2"}', "holds half a surrogate pair"),
        ('{"question": "1+1=", "answer": "\\ud800"}', "holds half a surrogate pair"),
        ('{"question": "1+1=", "answer": NaN}', "has nan in field 'answer'"),
    ],
)
def test_a_row_that_json_takes_and_nobody_else_is_bad(
    line: str, problem: str, campaign: Campaign, stage_paths: Paths, write_jsonl: Write
) -> None:
    with pytest.raises(DataError) as caught:
        run(campaign(from_file(write_jsonl("a.jsonl", [*sums(60), line]))), stage_paths())
    assert f"a.jsonl:61: {problem}" in str(caught.value).splitlines()[0]


def test_an_escaped_character_is_text(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    assert run(
        campaign(from_file(write_jsonl("a.jsonl", [*sums(60), '{"question": "\\u0031+1=", "answer": "2"}']))), stage_paths()
    )


def test_pattern_that_finds_nothing_in_a_row(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    rows = [{**row, "answer": f"#### {row['answer']}"} for row in sums(60)]
    rows[3]["answer"] = "forgotten"
    with pytest.raises(
        DataError, match=r"a\.jsonl:4: has no answer: answer_pattern '#### \(\.\+\)\$' finds nothing in 'forgotten'"
    ):
        run(campaign(from_file(write_jsonl("a.jsonl", rows), answer_pattern="#### (.+)$")), stage_paths())


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"prompt_template": "{problem}"}, "prompt_template"), ({"answer_field": "solution"}, "answer_field")],
)
def test_field_that_no_row_has_is_a_configuration_error(
    settings: dict[str, str], key: str, campaign: Campaign, stage_paths: Paths, write_jsonl: Write
) -> None:
    with pytest.raises(ConfigError, match=rf"prepare\.sources\.0\.{key} = .*they have \['answer', 'question'\]"):
        run(campaign(from_file(write_jsonl("a.jsonl", sums(60)), **settings)), stage_paths())


def test_reasoning_gym_field_that_no_row_has(campaign: Campaign, stage_paths: Paths) -> None:
    source = {"source": "reasoning_gym:leg_counting", "num_rows": 5, "prompt_template": "{expression}="}
    with pytest.raises(
        ConfigError, match=r"prompt_template = '\{expression\}=': 'expression': the rows have no such field; .*'animals'"
    ):
        run(campaign({"prepare": {"sources": [source]}}), stage_paths())


def test_empty_file(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: is empty; give a file with at least one row"):
        run(campaign(from_file(write_jsonl("a.jsonl", []))), stage_paths())


def test_file_of_blank_lines(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: is empty; give a source with at least one row"):
        run(campaign(from_file(write_jsonl("a.jsonl", ["", "  "]))), stage_paths())


def test_nothing_left_after_filtering(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    difference = lay(from_file(write_jsonl("a.jsonl", sums(60))), max_prompt_tokens=2)
    with pytest.raises(
        DataError, match=r"leaves no prompt to train on: of 60 rows 0 are duplicates, 60 have more than max_prompt_tokens = 2"
    ):
        run(campaign(difference), stage_paths())


@pytest.mark.parametrize("split", ["heldout", "test"])
def test_empty_split_names_its_fraction(split: str, campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    difference = lay(from_file(write_jsonl("a.jsonl", sums(60))), **{f"{split}_fraction": 1e-9})
    with pytest.raises(DataError, match=rf"split {split} is empty: .*raise prepare\.{split}_fraction"):
        run(campaign(difference), stage_paths())


def test_test_fraction_zero_writes_an_empty_test_split(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    paths = stage_paths()
    run(campaign(lay(from_file(write_jsonl("a.jsonl", sums(60))), test_fraction=0)), paths)
    assert read_prompts(paths.out, "test") == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"source": "jsonl:no/such.jsonl"}, r"sources\.0\.source = 'jsonl:no/such\.jsonl': there is no /.*/no/such\.jsonl"),
        ({"source": "jsonl:tests"}, r"source = 'jsonl:tests': is a directory; name a file, or use hf:<directory>"),
        (
            {"source": "reasoning_gym:basic_aritmetic", "num_rows": 5},
            r"no such reasoning_gym task; did you mean 'basic_arithmetic'\?",
        ),
        (
            {"source": "reasoning_gym:basic_arithmetic", "num_rows": 5, "options": {"max_term": 3}},
            r"options\.max_term = 3: unknown setting of basic_arithmetic; did you mean 'max_terms'\?",
        ),
        (
            {"source": "reasoning_gym:basic_arithmetic", "num_rows": 5, "options": {"min_terms": 0}},
            r"options = \{'min_terms': 0\}: basic_arithmetic refuses them \(min_terms must be positive\)",
        ),
        (
            {"source": "reasoning_gym:basic_arithmetic", "num_rows": 5, "options": {"seed": 3}},
            r"options\.seed = 3: cannot be set here; it follows from campaign\.seed",
        ),
    ],
)
def test_source_that_does_not_exist(source: dict[str, Any], problem: str, campaign: Campaign, stage_paths: Paths) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(campaign({"prepare": {"sources": [source]}}), stage_paths())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"prompt_template": "{question"}, "is no format string"),
        ({"prompt_template": "{}"}, "needs a field of the row by its name"),
        ({"prompt_template": "no field"}, "needs a field of the row by its name"),
        ({"prompt_template": "{question:>99999999}"}, "a width is a number of at most 4096 characters"),
        ({"prompt_template": "{question:.5000}"}, "a width is a number of at most 4096 characters"),
        ({"prompt_template": "{question:{width}}"}, "a width is a number of at most 4096 characters"),
        ({"answer_pattern": "(.+"}, "is no regular expression"),
        ({"answer_pattern": "####.+"}, "has no group"),
    ],
)
def test_bad_template_and_pattern_fail_while_the_configuration_is_read(
    settings: dict[str, str], problem: str, campaign: Campaign
) -> None:
    with pytest.raises(ConfigError, match=rf"prepare\.sources\.0\.{next(iter(settings))} = .*{re.escape(problem)}"):
        campaign(from_file(Path("a.jsonl"), **settings))


def test_changed_file_makes_the_prompts_stale(campaign: Campaign, write_jsonl: Write, tmp_path: Path) -> None:
    config = campaign(from_file(write_jsonl("a.jsonl", sums(60))))
    before = Workspace(tmp_path, config).key(STAGES[0])
    assert Workspace(tmp_path, config).key(STAGES[0]) == before
    write_jsonl("a.jsonl", sums(61))
    assert Workspace(tmp_path, config).key(STAGES[0]) != before


def test_scorer_fields_carry_a_rows_tests_to_the_verifier(campaign: Campaign, stage_paths: Paths, write_jsonl: Write) -> None:
    rows = [{"question": f"{i}+{i}=", "meta": {"tests": [f"assert f() == {i}"]}, "name": "f"} for i in range(10, 20)]
    path = write_jsonl("rows.jsonl", rows)
    paths = stage_paths()
    run(campaign(from_file(path, scorer_fields={"tests": "meta.tests", "entry_point": "name"})), paths)
    prompts = all_prompts(paths.out)
    assert len(prompts) == 10
    assert {prompt.answer for prompt in prompts} == {""}
    for prompt in prompts:
        assert prompt.scorer == {"kind": "fields", "tests": [f"assert f() == {prompt.text[:2]}"], "entry_point": "f"}
    with pytest.raises(ConfigError, match=r"scorer_fields\.tests"):
        run(campaign(from_file(path, scorer_fields={"tests": "nothing"})), stage_paths("other"))
    some = write_jsonl("some.jsonl", [*rows, {"question": "no tests"}])
    with pytest.raises(DataError, match=r"some\.jsonl:11: .*scorer_fields\.tests"):
        run(campaign(from_file(some, scorer_fields={"tests": "meta.tests"})), stage_paths("third"))
