"""A sweep's files: what it refuses before anything runs, which trials it has, how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.runs import locate_all
from tasks.sweep import OUTCOME, SWEEP, Outcome, Spec, Trial, make_sweep, read_sweep, read_trial, short_keys, sweep_name
from tasks.workspace import REPOSITORY
from trainer.config import CampaignConfig, as_tree, load_config
from trainer.errors import ConfigError, DataError
from trainer.files import write_json

CONFIG: CampaignConfig = load_config(REPOSITORY / "params.yaml")
RATES = "train.optimizer.learning_rate=1e-4,2e-4"


def test_a_grid_has_its_trials_at_once_and_each_has_its_configuration(tmp_path: Path) -> None:
    sweep = make_sweep(CONFIG, Spec("grid", (RATES, "campaign.seed=0,1")), tmp_path / "s", threads=1)
    assert [trial.name for trial in sweep.trials] == [
        "learning_rate=1e-4 seed=0",
        "learning_rate=1e-4 seed=1",
        "learning_rate=2e-4 seed=0",
        "learning_rate=2e-4 seed=1",
    ]
    config = sweep.config_of(sweep.trials[3])
    assert (config.train.optimizer.learning_rate, config.campaign.seed, config.machine.threads) == (2e-4, 1, 1)
    assert len({sweep.workspace(trial).run_id for trial in sweep.trials}) == 4
    assert not (tmp_path / "s").exists()  # nothing is written by looking


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        ((), "names no key"),
        (("train.batch.group_sise=4,8",), "did you mean 'group_size'"),
        (("no.such=1,2",), "unknown key"),
        (("train.batch.group_size=1,8",), "a group of one has no baseline"),
        (("train.optimizer.learning_rate=1e-4,fast",), "train.optimizer.learning_rate = 'fast'"),
        ((RATES, "train.optimizer.learning_rate=3e-4"), "named twice"),
        (("train.optimizer.learning_rate=1e-4,0.0001",), "is trial 0 again"),
        (("train.batch.group_sise=4,8", "campaign.seed=1,2"), "^train.batch.group_sise = 4: unknown key[^\n]*$"),
        (("campaign.name=a,b",), "nothing to compare"),
        (("machine.threads=1,2",), "changes no result"),
        (("train.optimizer=1,2",), "train.optimizer"),
    ],
)
def test_what_cannot_be_swept_is_refused_by_key_before_anything_starts(
    tmp_path: Path, axes: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_sweep(CONFIG, Spec("grid", axes), tmp_path / "s")


def test_one_combination_that_does_not_go_together_is_named(tmp_path: Path) -> None:
    """Each value is right by itself: 600 minibatches need more than 512 samples."""
    axes = ("train.batch.minibatches=4,600", "train.batch.prompts_per_step=64,128")
    with pytest.raises(ConfigError, match=r"minibatches=600 prompts_per_step=64.*trial 2 cannot run"):
        make_sweep(CONFIG, Spec("grid", axes), tmp_path / "s")


def test_an_objective_that_is_never_measured_is_refused(tmp_path: Path) -> None:
    config = load_config(REPOSITORY / "params.yaml", ["train.heldout.every_steps=0"])
    with pytest.raises(ConfigError, match=r"train\.heldout\.every_steps"):
        make_sweep(config, Spec("grid", (RATES,)), tmp_path / "s")
    with pytest.raises(ConfigError, match="at least one"):
        make_sweep(CONFIG, Spec("random", (RATES,)), tmp_path / "s")


def test_a_sweep_is_found_again_and_may_grow(tmp_path: Path) -> None:
    axes = ("train.optimizer.learning_rate=1e-5..1e-3:log",)
    first = make_sweep(CONFIG, Spec("random", axes, 2), tmp_path / "s")
    first.write()
    more = make_sweep(CONFIG, Spec("random", axes, 4), tmp_path / "s")
    assert more.trials[:2] == first.trials
    assert sweep_name(CONFIG, first.spec) == sweep_name(CONFIG, more.spec)
    assert sweep_name(CONFIG, Spec("random", axes, 2, seed=1)) != sweep_name(CONFIG, first.spec)
    with pytest.raises(ConfigError, match="holds another sweep"):
        make_sweep(CONFIG, Spec("grid", (RATES,)), tmp_path / "s")
    (tmp_path / "campaign").mkdir()
    (tmp_path / "campaign" / "params.yaml").touch()
    with pytest.raises(ConfigError, match="holds something else"):
        make_sweep(CONFIG, Spec("grid", (RATES,)), tmp_path / "campaign")


def test_what_optuna_proposed_is_remembered(tmp_path: Path) -> None:
    spec = Spec("optuna", ("train.optimizer.learning_rate=1e-5..1e-3:log",), 3)
    sweep = make_sweep(CONFIG, spec, tmp_path / "s")
    assert sweep.trials == ()
    sweep, trial = sweep.with_trial({"train.optimizer.learning_rate": "2e-5"})
    again = make_sweep(CONFIG, spec, tmp_path / "s")
    assert again.trials == (trial,)
    assert read_sweep(tmp_path / "s").trials == (trial,)


def test_a_trial_of_optunas_whose_values_do_not_go_together_hides_no_other(tmp_path: Path) -> None:
    """Each value is right by itself: 500 minibatches need more than the 64 samples of 8 prompts."""
    axes = ("train.batch.minibatches=4,500", "train.batch.prompts_per_step=8,64")
    sweep = make_sweep(CONFIG, Spec("optuna", axes, 2), tmp_path / "s", threads=1)
    assert sweep.config_of().machine.threads == 1  # also before there is a trial
    sweep, wrong = sweep.with_trial({"train.batch.minibatches": "500", "train.batch.prompts_per_step": "8"})
    sweep, right = sweep.with_trial({"train.batch.minibatches": "4", "train.batch.prompts_per_step": "8"})
    for trial, outcome in ((wrong, Outcome("failed", error="e")), (right, Outcome("done", 0.5, 60))):
        write_json(sweep.place(trial) / OUTCOME, outcome.__dict__)
    run = sweep.workspace(right).run
    write_json(run / "config.json", as_tree(sweep.config_of(right)))
    assert (sweep.run_of(wrong), sweep.run_of(right)) == (None, run)
    assert sweep.config_of().machine.threads == 1
    assert locate_all([str(tmp_path / "s")]) == [run]
    assert [known.state for known in sweep.known()] == ["failed", "done"]


def test_trials_rank_by_their_result(tmp_path: Path) -> None:
    sweep = make_sweep(CONFIG, Spec("grid", ("campaign.seed=0,1,2,3",)), tmp_path / "s")
    ends = [Outcome("done", 0.2, 60), Outcome("failed", error="e"), Outcome("done", 0.9, 60)]
    for trial, outcome in zip(sweep.trials, ends, strict=False):
        write_json(sweep.place(trial) / OUTCOME, outcome.__dict__)
    assert [trial.number for trial, _ in sweep.ranking()] == [2, 0, 1]
    assert sweep.outcome(sweep.trials[3]) is None
    assert not sweep.is_done(sweep.trials[1])  # failed: it is tried again
    (sweep.place(sweep.trials[0]) / OUTCOME).write_text('{"state": "do')
    assert sweep.outcome(sweep.trials[0]) is None  # torn: it runs again


@pytest.mark.parametrize("text", ["", "{", "[]", '{"spec": {}}', '{"spec": {"kind": "grid", "axes": []}, "trials": 3}'])
def test_a_damaged_sweep_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / SWEEP).write_text(text)
    with pytest.raises(DataError, match="cannot be read"):
        read_sweep(tmp_path)
    with pytest.raises(DataError, match="is no sweep"):
        read_sweep(tmp_path / "nowhere")


def test_short_keys_tell_keys_apart() -> None:
    assert short_keys(["train.optimizer.learning_rate", "campaign.seed"]) == ["learning_rate", "seed"]
    assert short_keys(["a.steps", "b.c.steps", "steps"]) == ["a.steps", "c.steps", "steps"]


def test_a_workspace_says_whose_trial_it_is(tmp_path: Path) -> None:
    sweep = make_sweep(CONFIG, Spec("grid", (RATES,)), tmp_path / "s")
    sweep.write_trial(sweep.trials[1])
    found = read_trial(sweep.place(sweep.trials[1]))
    assert found is not None
    assert (found["sweep"], found["number"], found["name"]) == ("s", 1, "learning_rate=2e-4")
    assert read_trial(tmp_path) is None
    (tmp_path / "trial.json").write_text(json.dumps({"sweep": 1}))
    assert read_trial(tmp_path) is None
    assert Trial(0, {}).name == ""
