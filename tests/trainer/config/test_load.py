"""The configuration's promises: a mistake names its key, its value and the fix, in under a second and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import RECIPES
from trainer.config import CampaignConfig, as_tree, load_config, read_yaml, validate
from trainer.errors import ConfigError, ConfigErrors

REPOSITORY = Path(__file__).resolve().parents[3]
PARAMS = REPOSITORY / "params.yaml"


def load(*overrides: str) -> CampaignConfig:
    return load_config(PARAMS, overrides)


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_default_campaign_is_valid_and_means_what_it_says() -> None:
    config = load()
    assert config.campaign.name == "quickstart"
    assert config.train.batch.samples_per_step == 512
    assert config.train.batch.optimizer_steps_per_step == 8


def test_resolved_configuration_survives_json() -> None:
    config = load("train.optimizer.learning_rate=3e-5")
    assert validate(json.loads(json.dumps(as_tree(config)))) == config


def test_nothing_writes_to_a_configuration_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().train.batch.group_size = 4  # type: ignore[misc]


# --- unknown keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("train.batch.group_sise=4", "train.batch.group_sise", "'group_size'"),
        ("trian={}", "trian", "'train'"),
        ("train.algorithm.kl.coeficient=0.1", "train.algorithm.kl.coeficient", "'coefficient'"),
        ("train.stages.0.step=3", "train.stages.0.step", "'steps'"),
        ("prepare.sources.0.promt_template=x", "prepare.sources.0.promt_template", "'prompt_template'"),
        ("base.scratch.hiden_size=64", "base.scratch.hiden_size", "'hidden_size'"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(override: str, key: str, suggestion: str) -> None:
    error = refused(override)
    assert error.key == key
    assert "unknown key" in error.problem
    assert f"did you mean {suggestion}" in error.problem


def test_unknown_key_like_no_other_lists_the_valid_ones() -> None:
    error = refused("merge.zzz=1")
    assert "valid here: dtype, max_shard_bytes" in error.problem


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        load("train.batch.group_sise=4", "anchors.top_k=0")
    assert {error.key for error in caught.value.errors} == {"train.batch.group_sise", "anchors.top_k"}
    assert len(str(caught.value).splitlines()) == 2


# --- types and ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.batch.group_size=eight", "train.batch.group_size", "eight"),
        ("train.batch.group_size='8'", "train.batch.group_size", "8"),
        ("train.batch.group_size=8.5", "train.batch.group_size", 8.5),
        ("train.optimizer.learning_rate=-1", "train.optimizer.learning_rate", -1),
        ("train.optimizer.learning_rate=0", "train.optimizer.learning_rate", 0),
        ("train.optimizer.learning_rate=", "train.optimizer.learning_rate", None),
        ("train.activation_checkpointing=1", "train.activation_checkpointing", 1),
        ("train.method=qlora", "train.method", "qlora"),
        ("train.stages=[]", "train.stages", []),
        ("prepare.heldout_fraction=0", "prepare.heldout_fraction", 0),
        ("prepare.heldout_fraction=1", "prepare.heldout_fraction", 1),
        ("campaign.name=My Campaign", "campaign.name", "My Campaign"),
        ("campaign.seed=-1", "campaign.seed", -1),
        ("evaluate.confidence=1", "evaluate.confidence", 1),
        ("train.checkpoints.keep=1", "train.checkpoints.keep", 1),
    ],
)
def test_wrong_type_or_range_names_key_and_value(override: str, key: str, value: Any) -> None:
    error = refused(override)
    assert (error.key, error.value) == (key, value)
    assert str(error).startswith(f"{key} = {value!r}: ")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("campaign.name=2024-13-45", "campaign.name"),
        ("campaign.name=2024-01-02", "campaign.name"),
        ("campaign.seed=" + "9" * 5000, "campaign.seed"),
        ("campaign={1: 2}", "campaign"),
        ("campaign=!!set {a, b}", "campaign"),
        ('base.scratch.alphabet="\\ud800"', "base.scratch.alphabet"),
        ("train.stages=" + "[" * 2000 + "]" * 2000, "train.stages"),
        ("prepare.sources.²=x", "prepare.sources.²"),
        ("train..method=full", "-S"),
        ("x" + ".a" * 3000 + "=1", "-S"),
    ],
)
def test_what_is_no_text_number_or_list_of_them_names_its_key(override: str, key: str) -> None:
    error = refused(override)
    assert error.key == key
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 500


def test_an_alias_that_holds_itself_is_refused() -> None:
    assert "alias" in refused("train.stages=&a {a: *a}").problem


def test_a_list_with_one_wrong_entry_is_one_mistake() -> None:
    error = refused("train.stages.0.steps=none")
    assert (error.key, len(str(error).splitlines())) == ("train.stages.0.steps", 1)
    assert "at least 1 item" in refused("train.stages=[]").problem


def test_a_recipe_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for path in (tmp_path, tmp_path / "loop.yaml", PARAMS / "x.yaml", tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert caught.value.key == "recipe"
    with pytest.raises(ConfigError, match="month"):
        load_config(write(tmp_path / "date.yaml", "campaign: {name: 2024-13-45}"))


def test_not_a_number_is_no_learning_rate() -> None:
    assert refused("train.optimizer.learning_rate=.nan").key == "train.optimizer.learning_rate"
    assert refused("train.optimizer.learning_rate=.inf").key == "train.optimizer.learning_rate"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(tmp_path / "x.yaml", "campaign: {name: x}\n"))
    assert {"prepare", "base", "train"} <= {one.key for one in caught.value.errors}


# --- combinations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["train.batch.group_size=1"], "train.batch.group_size", "at least 2"),
        (["train.sampling.top_p=0.9"], "train.sampling.top_p", "set top_p: 1.0"),
        (["train.sampling.top_k=50"], "train.sampling.top_k", "set top_k: 0"),
        (["train.sampling.repetition_penalty=1.1"], "train.sampling.repetition_penalty", "set repetition_penalty: 1.0"),
        (["train.batch.minibatches=1000"], "train.batch.minibatches", "512"),
        (["anchors.num_prompts=0"], "train.algorithm.kl.reference", "exact"),
        (["anchors.audit_relative=0", "anchors.audit_absolute=0"], "anchors.audit_absolute", "above 0"),
        (["anchors.source=policy", "anchors.audit_every=0"], "anchors.audit_every", "drift from the reference"),
        (
            ["train.algorithm.kl.reference=exact", "train.algorithm.kl.direction=reference_to_policy"],
            "train.algorithm.kl.direction",
            "estimator: k3",
        ),
        (["prepare.heldout_fraction=0.6", "prepare.test_fraction=0.4"], "prepare.heldout_fraction", "lower one"),
        (["prepare.sources.0.num_rows="], "prepare.sources.0.num_rows", "how many rows"),
        (["prepare.sources.0.source=jsonl:x.jsonl"], "reward.verifier", "exact or math"),
        (["prepare.sources.0.source=csv:x.csv"], "prepare.sources.0.source", "jsonl:<file>"),
        (["prepare.sources.0.system_prompt=hi"], "prepare.sources.0.system_prompt", "chat_template: true"),
        (["train.stages.0.sources=[other]"], "train.stages.0.sources", "prepare.sources"),
        (["evaluate.samples_per_prompt=4"], "evaluate.pass_at", "raise samples_per_prompt"),
        (["base.scratch.num_heads=3"], "base.scratch.hidden_size", "multiple of num_heads"),
        (["base.scratch.steps=10"], "base.scratch.decay_steps", "at most"),
        (["base.scratch.alphabet='0011'"], "base.scratch.alphabet", "once"),
        (["base.source='hf:'"], "base.source", "hf:<directory or hub name>"),
        (["train.stages=[{steps: 1}, {steps: 2}]"], "train.stages", "name of its own"),
    ],
)
def test_a_combination_without_sense_says_what_to_set_instead(overrides: list[str], key: str, fix: str) -> None:
    error = refused(*overrides)
    assert error.key == key
    assert fix in error.problem


@pytest.mark.parametrize(
    ("key", "address", "shown", "fix"),
    [
        (
            "train.pool.url",
            "postgresql://tithe:s3cret@pool/tithe",
            "postgresql://tithe:***@pool/tithe",
            "PGPASSWORD or in ~/.pgpass",
        ),
        ("train.pool.url", "mysql://tithe:s3cret@pool/tithe", "mysql://tithe:***@pool/tithe", "PGPASSWORD"),
        ("train.pool.url", "postgresql://pool/tithe?password=s3cret", "postgresql://pool/tithe?password=***", "PGPASSWORD"),
        ("train.pool.url", "postgresql://tithe:a s3cret@pool/tithe", "postgresql://tithe:***@pool/tithe", "PGPASSWORD"),
        ("train.pool.url", "postgresql://tithe:s3%40cret@pool/tithe", "postgresql://tithe:***@pool/tithe", "PGPASSWORD"),
        ("reward.http.url", "https://me:s3cret@judge/", "https://me:***@judge/", "token_variable"),
        ("train.sampler.vllm.urls", "[http://me:s3cret@gpu:8000]", "http://me:***@gpu:8000", "token_variable"),
    ],
)
def test_a_password_in_an_address_is_refused_and_not_repeated(key: str, address: str, shown: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PARAMS, [f"{key}={address}"])
    assert caught.value.key.startswith(key)
    assert caught.value.value == shown
    assert fix in caught.value.problem
    assert "cret" not in str(caught.value)


def test_a_password_under_a_misspelt_key_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"train\.pool\.urll = 'postgresql://me:\*\*\*@pool/x': unknown key"):
        load_config(PARAMS, ["train.pool.urll=postgresql://me:s3cret@pool/x"])


def test_allowed_but_seldom_meant_choices_are_warned_about() -> None:
    assert load().warnings() == []
    lora = load("train.method=lora", "train.lora.dropout=0.1", "base.source=hf:x", "train.optimizer.learning_rate=1e-7")
    assert [sentence.split(" ")[0] for sentence in lora.warnings()] == ["train.lora.dropout", "train.optimizer.learning_rate"]
    full = load("base.source=hf:x", "train.optimizer.learning_rate=1e-3")
    assert "high" in full.warnings()[0]


# --- recipes and overrides --------------------------------------------------------------------------------------------


def test_a_recipe_is_a_difference_from_the_default_campaign(tmp_path: Path) -> None:
    recipe = write(
        tmp_path / "mine.yaml",
        "campaign: {name: mine}\ntrain:\n  optimizer: {learning_rate: 1e-6}\n"
        "  stages: [{name: a, steps: 1}, {name: b, steps: 2}]\n",
    )
    config = load_config(recipe, params=PARAMS)
    default = load()
    assert config.campaign.name == "mine"
    assert config.train.optimizer.learning_rate == 1e-6
    assert [stage.name for stage in config.train.stages] == ["a", "b"]  # a list replaces
    assert config.train.batch == default.train.batch  # what the recipe does not say stays
    assert config.prepare == default.prepare


def test_overrides_come_last_and_reach_into_lists(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "train: {stages: [{steps: 1}]}\n")
    config = load_config(recipe, ["train.stages.0.steps=7", "prepare.sources.0.options.max_digits=3"], PARAMS)
    assert config.train.stages[0].steps == 7
    assert config.prepare.sources[0].options["max_digits"] == 3
    assert config.prepare.sources[0].options["min_digits"] == 2


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("train.stages.1.steps=7", "'1' is not an index of this list of 1"),
        ("train.stages.first.steps=7", "'first' is not an index"),
        ("train.method.lora=1", "nothing below 'full'"),
        ("train.method", "expected key=value"),
        ("=1", "expected key=value"),
        ("campaign.name='x", "not a YAML value"),
    ],
)
def test_a_wrong_override_says_why(override: str, fragment: str) -> None:
    assert fragment in str(refused(override))


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001"])
def test_a_small_number_is_a_number(tmp_path: Path, text: str) -> None:
    recipe = write(tmp_path / "x.yaml", f"train: {{optimizer: {{learning_rate: {text}}}}}\n")
    assert load_config(recipe, params=PARAMS).train.optimizer.learning_rate == 1e-6
    assert load(f"train.optimizer.learning_rate={text}").train.optimizer.learning_rate == 1e-6


def test_every_shipped_recipe_is_valid() -> None:
    assert len(RECIPES) >= 6
    for recipe in RECIPES:
        load_config(recipe, params=PARAMS)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_missing_recipe_names_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path / "smollm2.yaml", "{}\n")
    with pytest.raises(ConfigError, match=r"no such file; did you mean .*smollm2\.yaml"):
        read_yaml(tmp_path / "smolm2.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "nowhere" / "x.yaml")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"train:\n  batch: [1, 2\n", "is not YAML: line"),
        (b"campaign: {name: a}\ncampaign: {name: b}\n", "is not YAML"),
        (b"- a\n- b\n", "must be a mapping"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, fragment: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=fragment) as caught:
        load_config(path, params=PARAMS)
    assert caught.value.value == str(path)


def test_an_empty_recipe_is_the_default_campaign(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "x.yaml", "# nothing\n"), params=PARAMS) == load()


def test_a_date_is_refused_as_a_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quote it"):
        load_config(write(tmp_path / "x.yaml", "campaign: {name: 2026-01-01}\n"), params=PARAMS)


# --- speed ------------------------------------------------------------------------------------------------------------


def test_a_mistake_is_found_before_anything_heavy_is_imported() -> None:
    script = """
import sys
from trainer.config import load_config
from trainer.errors import ConfigError
import tasks.command
try:
    load_config(__import__("pathlib").Path("params.yaml"), ["train.batch.group_sise=8"])
except ConfigError as error:
    print(error)
print(sorted({"torch", "transformers", "peft", "numpy", "prefect", "mlflow", "dvc", "datasets"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[1] == "[]"
    assert "did you mean 'group_size'?" in done.stdout


def test_a_stage_with_a_wrong_configuration_ends_with_code_2(tmp_path: Path) -> None:
    write(tmp_path / "params.yaml", PARAMS.read_text(encoding="utf-8") + "surprise: 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "tasks", "prepare", "--workspace", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: surprise = 1: unknown key")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.yaml"]
