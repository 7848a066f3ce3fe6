"""Sweeps, really: shared stages made once, trials that fail or are stopped, what a second command does, MLflow and Prefect."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.trials import Asked, Runner, resolve_sweep
from tasks.compare import differing, from_files, table
from tasks.doctor import look
from tasks.lineage import lineage
from tasks.record import read_record
from tasks.runs import read_run
from tasks.sweep import Outcome, Spec, Sweep, Trial
from tasks.tracking import Sidecar, is_behind, read_rows, tracking_uri
from trainer.errors import BusyError, StopRequested, TitheError
from trainer.files import read_json, read_manifest, write_json
from trainer.metrics import read_lines

pytestmark = pytest.mark.smoke

STAGES_NAME = "tiny_stages:STAGES"
RATES = "train.optimizer.learning_rate=1e-4,2e-4,4e-4"
Make = Callable[..., Runner]


@pytest.fixture
def sweep(tiny: Any, tmp_path: Path) -> Make:
    """A sweep of the tiny campaign in a folder of the test."""

    def make(*axes: str, kind: Any = "grid", trials: int = 0, workers: int = 2, tracking: bool = False, **wishes: Any) -> Runner:
        root = tmp_path / "sweep"
        for number in range(8):
            place = root / f"{number:03d}"
            write_json(place / "tiny.json", {**wishes, **wishes.get(f"trial{number}", {})})
        spec = Spec(kind, axes or (RATES,), trials, seed=1)
        asked = Asked(spec, None, (*tiny.overrides, "train.stages=[{steps: 5}]"), workers, "tiny-sweep", root, STAGES_NAME)
        found, at_a_time = resolve_sweep(asked)
        said: list[str] = []
        return Runner(found, at_a_time, said.append, tracking=tracking, fork=False)

    return make


def outcomes(sweep: Sweep) -> list[str]:
    return [outcome.state if (outcome := sweep.outcome(trial)) else "to run" for trial in sweep.trials]


def made(sweep: Sweep, stage: str) -> int:
    """How often a stage really ran, in all trials together."""
    files = sweep.root.glob("*/made.txt")
    return sum(file.read_text().split().count(stage) for file in files)


def test_shared_stages_are_made_once_and_a_second_command_does_nothing(sweep: Make) -> None:
    runner = sweep()
    runner.run()
    done = runner.sweep
    assert outcomes(done) == ["done"] * 3
    assert (made(done, "prepare"), made(done, "train"), made(done, "evaluate")) == (1, 3, 3)
    manifests = [read_manifest(done.workspace(trial).artifact("prompts")) for trial in done.trials]
    assert all(manifest is not None and manifest == manifests[0] for manifest in manifests)
    policies = [read_manifest(done.workspace(trial).artifact("policy")) for trial in done.trials]
    assert len({policy["content_sha256"] for policy in policies if policy}) == 3
    assert [(trial.number, outcome.result) for trial, outcome in done.ranking()] == [(2, 0.4), (1, 0.2), (0, 0.1)]
    record = read_record(done.root)
    assert record is not None
    assert (record.kind, record.status) == ("sweep", "FINISHED")
    assert record.final == {
        "trials/done": 3,
        "trials/pruned": 0,
        "trials/failed": 0,
        "best/heldout/reward_mean": 0.4,
        "best/trial": 2,
    }
    again = sweep()
    again.run()
    assert (made(again.sweep, "prepare"), made(again.sweep, "train")) == (1, 3)
    assert read_record(done.root) == record  # nothing happened, so nothing new is told
    shutil.rmtree(done.workspace(done.trials[1]).artifact("policy"))
    sweep().run()
    assert made(again.sweep, "train") == 4  # only what is missing


def said(sweep: Sweep, trial: int, stage: str) -> str:
    return (sweep.workspace(sweep.trials[trial]).run / stage / "stage.log").read_text()


def test_what_all_trials_wait_for_has_all_cores(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    runner = sweep()
    threads = runner.sweep.threads
    runner.run()
    maker = next(n for n in range(3) if (runner.sweep.root / f"{n:03d}" / "made.txt").read_text().startswith("prepare"))
    assert f"threads: {2 * threads}" in said(runner.sweep, maker, "prepare")
    assert all(f"threads: {threads}\n" in said(runner.sweep, n, "train") for n in range(3))


def test_what_trials_make_apart_shares_the_cores(sweep: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    runner = sweep("prepare.heldout_fraction=0.1,0.2")
    runner.run()
    assert all(f"threads: {runner.sweep.threads}\n" in said(runner.sweep, n, "prepare") for n in range(2))


def test_a_failed_trial_ends_no_sweep_and_the_same_command_tries_it_again(sweep: Make, tmp_path: Path) -> None:
    runner = sweep(trial1={"config_error": True})
    with pytest.raises(TitheError, match=r"1 of 3 trials failed: 1 \(learning_rate=2e-4\)"):
        runner.run()
    assert outcomes(runner.sweep) == ["done", "failed", "done"]
    outcome = runner.sweep.outcome(runner.sweep.trials[1])
    assert outcome is not None
    assert "planned mistake" in (outcome.error or "")
    again = sweep()
    again.run()
    assert outcomes(again.sweep) == ["done"] * 3
    assert made(again.sweep, "train") == 4  # three, and the failed one a second time


def test_a_killed_stage_costs_its_trial_a_second_attempt(sweep: Make) -> None:
    runner = sweep(trial0={"kill_at": 3})
    runner.run()
    assert outcomes(runner.sweep) == ["done"] * 3


def test_a_wish_to_stop_reaches_all_trials_and_the_same_command_goes_on(sweep: Make, eventually: Any) -> None:
    runner = sweep(seconds=0.2, steps=10_000)
    import threading

    def ask() -> None:
        eventually(lambda: len(list(runner.sweep.root.glob("*/runs/*/train/checkpoint.json"))) == 2)
        runner.stop.ask("somebody asked")

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(StopRequested, match="somebody asked"):
        runner.run()
    thread.join()
    assert outcomes(runner.sweep) == ["to run"] * 3
    record = read_record(runner.sweep.root)
    assert record is not None
    assert record.status == "KILLED"
    again = sweep(steps=200, seconds=0.0, tell=True)
    again.run()
    assert outcomes(again.sweep) == ["done"] * 3
    first = [read_manifest(again.sweep.workspace(trial).artifact("policy")) for trial in again.sweep.trials[:2]]
    assert all(manifest and manifest["resumed_from"] > 0 for manifest in first)


def test_two_commands_for_one_sweep_do_not_meet(sweep: Make) -> None:
    first, second = sweep(), sweep()

    def meanwhile(trial: Trial) -> Outcome | None:
        with pytest.raises(BusyError, match="already runs"):
            second.run()
        return first.run_trial(trial)

    first.run(meanwhile)
    assert outcomes(first.sweep) == ["done"] * 3


def test_optuna_proposes_and_stops_what_is_hopeless(sweep: Make) -> None:
    axis = "train.optimizer.learning_rate=1e-5..1e-3:log"
    runner = sweep(axis, kind="optuna", trials=3)
    runner.run()
    assert outcomes(runner.sweep) == ["done"] * 3
    best = max(float(trial.values["train.optimizer.learning_rate"]) for trial in runner.sweep.trials)
    assert runner.sweep.ranking()[0][1].result == pytest.approx(best * 1e3)
    # the fourth is far below the others, and slow enough to be looked at
    runner.sweep.with_trial({"train.optimizer.learning_rate": "1.0e-7"})
    slow = sweep(axis, kind="optuna", trials=4, trial3={"seconds": 60})
    slow.run()
    outcome = slow.sweep.outcome(slow.sweep.trials[3])
    assert outcome is not None
    assert outcome.state == "pruned"
    assert "below the others' median" in (outcome.error or "")
    facts = read_run(slow.sweep.workspace(slow.sweep.trials[3]).run)
    assert facts.status == "pruned"
    text = "\n".join(lineage(facts.run).lines())
    assert f"{facts.run.name}  pruned at step" in text
    assert "not made: stage train was killed: " in text
    assert not [line for line in look(facts.run).lines if "go on" in line]
    again = sweep(axis, kind="optuna", trials=4)
    again.run()
    assert made(again.sweep, "train") == 4  # pruned is done


def test_mlflow_shows_the_trials_as_children_of_the_sweep(sweep: Make, mlflow_store: None, eventually: Any) -> None:
    from mlflow.tracking import MlflowClient

    runner = sweep(tracking=True)
    runner.run()
    eventually(lambda: not is_behind(runner.sweep.root))
    client = MlflowClient(tracking_uri=tracking_uri())
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    parent = client.get_run(Sidecar.read(runner.sweep.root).run_id)  # by its id: the store has the sweeps of other tests too
    assert parent.data.tags["kind"] == "sweep"
    trials = client.search_runs([experiment.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {run.info.run_name for run in trials} == {"learning_rate=1e-4", "learning_rate=2e-4", "learning_rate=4e-4"}
    assert {run.data.params["sweep.train.optimizer.learning_rate"] for run in trials} == {"1e-4", "2e-4", "4e-4"}
    assert {round(run.data.metrics["objective"], 6) for run in trials} == {0.1, 0.2, 0.4}
    assert all(run.info.status == "FINISHED" for run in (parent, *trials))
    history = client.get_metric_history(trials[0].info.run_id, "heldout/reward_mean")
    assert [point.step for point in history] == [1, 2, 3, 4, 5]
    assert parent.data.metrics["best/heldout/reward_mean"] == 0.4
    # what `tithe compare` reads from files and what MLflow's comparison shows are one
    runs_on_disk = [runner.sweep.workspace(trial).run for trial in runner.sweep.trials]
    files, store = from_files([read_run(run) for run in runs_on_disk]), read_rows(runs_on_disk)
    assert [(row.name, row.status, dict(row.params)) for row in files] == [(r.name, r.status, dict(r.params)) for r in store]
    assert [dict(row.curves) for row in files] == [dict(row.curves) for row in store]
    assert differing(store) == ["train.optimizer.learning_rate"]
    assert [line["run"] for line in table(store, "heldout/reward_mean")] == [
        "learning_rate=4e-4",
        "learning_rate=2e-4",
        "learning_rate=1e-4",
    ]


def command(root: Path, overrides: list[str], *words: str) -> list[str]:
    chosen = [word for override in overrides for word in ("-S", override)]
    place = ["--workspace", str(root), "--stages", STAGES_NAME, "--no-fork", "--no-tracking"]
    return [sys.executable, "-m", "flows.cli", "sweep", *words, *chosen, *place]


def test_the_command_shows_in_prefect_one_task_per_trial(tiny: Any, tmp_path: Path, api: Any, prefect_server: str) -> None:
    root = tmp_path / "in-prefect"
    done = subprocess.run(
        command(root, tiny.overrides, "--grid", RATES, "--workers", "2"),
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "best: trial 2 (learning_rate=4e-4)" in done.stdout
    (run,) = api("flow_runs/filter", {"flow_runs": {"name": {"any_": ["in-prefect"]}}})
    assert run["state"]["name"] == "Completed"
    tasks = api("task_runs/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {task["name"]: task["state"]["name"] for task in tasks} == {
        "0 learning_rate=1e-4": "Completed",
        "1 learning_rate=2e-4": "Completed",
        "2 learning_rate=4e-4": "Completed",
    }
    artifacts = api("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    assert {artifact["type"] for artifact in artifacts} == {"table", "progress"}


def test_ctrl_c_ends_the_command_with_its_word_and_nothing_left_running(tiny: Any, tmp_path: Path, eventually: Any) -> None:
    root = tmp_path / "stopped"
    for number in range(3):
        write_json(root / f"{number:03d}" / "tiny.json", {"seconds": 0.2, "steps": 10_000})
    process = subprocess.Popen(
        command(root, tiny.overrides, RATES, "--plain", "--workers", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    beats = eventually(lambda: len(found := list(root.glob("*/runs/*/train/checkpoint.json"))) == 2 and found)
    pids = [json.loads((beat.parent / "heartbeat").read_text())["pid"] for beat in beats]
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said
    assert "run the same command again to go on" in said
    assert "Traceback" not in said
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert all(json.loads(beat.read_text())["stopped"] for beat in beats)


def test_a_killed_sweep_goes_on_with_what_is_missing(tiny: Any, tmp_path: Path, eventually: Any) -> None:
    root = tmp_path / "killed"
    places = [root / f"{number:03d}" for number in range(3)]

    def plan(seconds: float) -> None:
        for place in places:
            write_json(place / "tiny.json", {"seconds": seconds, "steps": 60, "tell": True})

    plan(0.5)
    words = command(root, tiny.overrides, RATES, "--plain", "--workers", "2")
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    eventually(lambda: len(list(root.glob("*/runs/*/train/checkpoint.json"))) == 2)
    process.kill()
    process.communicate(timeout=240)
    plan(0.01)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = [(place / "made.txt").read_text().split() for place in places]
    assert [stages.count("train") for stages in made] == [2, 2, 1]
    assert [stages.count("evaluate") for stages in made] == [1, 1, 1]
    assert sum(stages.count("prepare") for stages in made) == 1
    for place in places:
        (metrics,) = place.glob("runs/*/train/metrics.jsonl")
        assert [line["step"] for line in read_lines(metrics)] == list(range(1, 61))
    resumed = [read_json(place / "artifacts" / "policy" / "manifest.json")["resumed_from"] for place in places]
    assert [step > 0 for step in resumed] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--random", "3", "--grid", RATES], "three ways"),
        (["a.yaml", "b.yaml", RATES], "two recipes"),
        (["nowhere.yaml", RATES], "no such file"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_each(tiny: Any, tmp_path: Path, words: list[str], problem: str) -> None:
    done = subprocess.run(
        command(tmp_path / "never", tiny.overrides, *words), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "never").exists()


def test_the_form_of_a_deployment_asks_what_the_command_asks() -> None:
    from flows.sweep import asked_for, sweep

    form = sweep.parameters.model_dump()["properties"]
    assert list(form)[:4] == ["recipe", "axes", "search", "trials"]
    assert "params.yaml" in form["recipe"]["enum"]
    assert form["search"]["enum"] == ["grid", "random", "optuna"]
    assert all(field["description"] for field in form.values())
    values = {name: field["default"] for name, field in form.items()}
    asked = asked_for(**{**values, "axes": [" campaign.seed=0,1 ", ""]})
    assert asked.spec == Spec("grid", ("campaign.seed=0,1",))
    found, workers = resolve_sweep(asked)
    assert [trial.name for trial in found.trials] == ["seed=0", "seed=1"]
    assert workers >= 1
