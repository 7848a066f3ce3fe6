"""A result's key changes with what it is made from, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks import workspace as module
from tasks.registry import STAGES, get_stage
from tasks.workspace import Workspace, params_of
from trainer.config import load_config
from trainer.errors import BusyError, ConfigError, DataError, without_password
from trainer.files import write_manifest

PARAMS = Path(__file__).resolve().parents[2] / "params.yaml"


def workspace(root: Path, *overrides: str, run: Path | None = None) -> Workspace:
    return Workspace(root, load_config(PARAMS, overrides), run)


def make(place: Workspace, stage_name: str, content: str) -> None:
    """Put an artifact in place as the stage would."""
    stage = get_stage(stage_name)
    directory = place.artifact(stage.artifact)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data").write_text(content, encoding="utf-8")
    write_manifest(directory, {"stage": stage.name, "key": place.key(stage)})


def test_the_stages_are_in_an_order_that_works() -> None:
    made: set[str] = set()
    for stage in STAGES:
        assert set(stage.inputs) <= made, stage.name
        made.add(stage.artifact)
    assert [stage.name for stage in STAGES] == ["prepare", "base", "anchors", "train", "merge", "evaluate", "report"]


def test_every_parameter_and_source_file_of_a_stage_exists() -> None:
    config = load_config(PARAMS)
    for stage in STAGES:
        assert set(params_of(stage, config)) == set(stage.params)
        for name in stage.code:
            assert (module.REPOSITORY / name).exists(), f"{stage.name} depends on {name}"


def test_an_unknown_stage_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'evaluate'"):
        get_stage("evalute")


@pytest.mark.parametrize(
    ("override", "touched"),
    [
        ("campaign.seed=1", {"prepare", "base"}),
        ("prepare.max_prompt_tokens=9", {"prepare"}),
        ("base.scratch.steps=701", {"base"}),
        ("base.scratch.alphabet='0123456789+=-'", {"prepare", "base"}),
        ("train.optimizer.learning_rate=3.25e-5", set()),
        ("machine.threads=1", set()),
        ("report.num_examples=3", set()),
    ],
)
def test_a_key_follows_its_own_part_of_the_configuration(tmp_path: Path, override: str, touched: set[str]) -> None:
    old, new = workspace(tmp_path), workspace(tmp_path, override)
    make(old, "prepare", "prompts")
    changed = {name for name in ("prepare", "base") if old.key(get_stage(name)) != new.key(get_stage(name))}
    assert changed == touched


def test_a_key_follows_the_files_of_a_local_base(tmp_path: Path) -> None:
    """Other weights in the same place are another base; another tokenizer makes other prompts too."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "notes.md"):
        (model / name).write_text("old")
    here = workspace(tmp_path, f"base.source=hf:{model}")
    make(here, "prepare", "prompts")
    before = {name: here.key(get_stage(name)) for name in ("prepare", "base")}
    for file, touched in {"notes.md": set(), "model.safetensors": {"base"}, "tokenizer.json": {"prepare", "base"}}.items():
        (model / file).write_text("new words")
        now = {name: here.key(get_stage(name)) for name in before}
        assert {name for name in now if now[name] != before[name]} == touched, file
        before = now


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("postgresql://tithe:se/cr@db.example:5432/x", "postgresql://tithe:***@db.example:5432/x"),  # wrong: / is written %2F
        ("at postgresql+psycopg://tithe:s3:c@ret@db:5432/x: no", "at postgresql+psycopg://tithe:***@db:5432/x: no"),
        ("http://user:word@mlflow:5000 and http://mlflow:5000/ab", "http://user:***@mlflow:5000 and http://mlflow:5000/ab"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("postgresql://me@db/x?sslmode=require&password=s3cret no", "postgresql://me@db/x?sslmode=require&password=*** no"),
    ],
)
def test_no_password_is_told(text: str, said: str) -> None:
    assert without_password(text) == said


def test_a_key_follows_the_content_of_its_inputs_and_not_their_names_or_times(tmp_path: Path) -> None:
    one, two, three = (workspace(tmp_path / name) for name in ("one", "two", "three"))
    make(one, "prepare", "prompts")
    make(two, "prepare", "prompts")
    make(three, "prepare", "others")
    base = get_stage("base")
    assert one.key(base) == two.key(base)
    assert one.key(base) != three.key(base)


def test_a_key_follows_the_code_and_the_identity_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    (repository / "trainer" / "policy").mkdir(parents=True)
    (repository / "tasks").mkdir()
    (repository / "tasks" / "base.py").write_text("a = 1\n", encoding="utf-8")
    monkeypatch.setattr(module, "REPOSITORY", repository)
    place, stage = workspace(tmp_path), get_stage("base")
    _make_without_code(place)
    key, identity = place.key(stage), place.identity(stage)
    (repository / "trainer" / "policy" / "new.py").write_text("b = 2\n", encoding="utf-8")
    assert place.key(stage) != key
    assert place.identity(stage) == identity


def _make_without_code(place: Workspace) -> None:
    directory = place.artifact("prompts")
    directory.mkdir(parents=True)
    (directory / "data").write_text("prompts", encoding="utf-8")
    write_manifest(directory, {"stage": "prepare"})


def test_an_artifact_is_current_only_while_it_is_whole_and_its_key_fits(tmp_path: Path) -> None:
    place, prepare, base = workspace(tmp_path), get_stage("prepare"), get_stage("base")
    assert not place.is_current(prepare)
    make(place, "prepare", "prompts")
    make(place, "base", "weights")
    assert place.is_current(prepare)
    assert place.is_current(base)
    assert not workspace(tmp_path, "base.scratch.steps=701").is_current(base)
    make(place, "prepare", "others")
    assert not place.is_current(base)  # its input is another one
    (place.artifact("prompts") / "data").write_text("damaged", encoding="utf-8")
    assert not place.is_current(prepare)


def test_a_missing_input_names_the_stage_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="run `python -m tasks prepare` first"):
        workspace(tmp_path).key(get_stage("base"))


def test_a_run_directory_is_found_again_and_another_training_gets_another(tmp_path: Path) -> None:
    one = workspace(tmp_path)
    assert one.run == workspace(tmp_path, "machine.threads=1", "evaluate.num_prompts=3").run
    assert one.run != workspace(tmp_path, "train.optimizer.learning_rate=3.25e-5").run
    assert one.run.parent == tmp_path / "runs"
    assert one.run.name.startswith("quickstart-")


def test_a_run_directory_of_another_configuration_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    one = workspace(tmp_path, run=run)
    one.claim_run()
    one.claim_run()  # again is fine
    before = (run / "config.json").read_bytes()
    with pytest.raises(BusyError, match="belongs to run quickstart-"):
        workspace(tmp_path, "train.optimizer.learning_rate=3.25e-5", run=run).claim_run()
    assert (run / "config.json").read_bytes() == before


@pytest.mark.parametrize("text", ["{", '{"campaign": {"name": "old", "colour": "red"}}'])
def test_a_run_directory_of_another_version_is_refused(tmp_path: Path, text: str) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BusyError, match="is no configuration of this version"):
        workspace(tmp_path, run=run).claim_run()
    assert (run / "config.json").read_text(encoding="utf-8") == text


def test_a_directory_with_other_files_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x", encoding="utf-8")
    with pytest.raises(BusyError, match="is not empty"):
        workspace(tmp_path, run=tmp_path).claim_run()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
