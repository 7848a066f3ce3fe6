"""The doctor on recorded runs: real tiny runs, provoked into each symptom, and a healthy one.

Each folder of tests/recorded holds recipe.json (what was run), metrics.jsonl and events.jsonl as the run left them, cut to the
metrics that the rules read and to four digits.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.doctor import Health, look, signs_of
from tasks.locks import Owner
from tasks.record import begin, finish, read_record, write_record
from tasks.runs import read_run
from tasks.workspace import REPOSITORY
from trainer.config import as_tree, load_config
from trainer.diagnosis import Finding, Signs, diagnose, fall, reversals
from trainer.errors import DataError
from trainer.files import write_json
from trainer.metrics import HEARTBEAT

RECORDED = Path(__file__).parent.parent / "recorded"


def recorded(root: Path, name: str, status: Any = "FINISHED", error: str | None = None) -> Path:
    """Lay a recorded run out as a run directory."""
    recipe = json.loads((RECORDED / name / "recipe.json").read_text())
    config = load_config(REPOSITORY / recipe["recipe"], recipe["overrides"], REPOSITORY / "params.yaml")
    run = root / "runs" / name
    write_json(run / "config.json", as_tree(config))
    (run / "train").mkdir()
    for file in ("metrics.jsonl", "events.jsonl"):
        (run / "train" / file).write_text((RECORDED / name / file).read_text())
    for place, kind, what in ((run, "campaign", name), (run / "train", "stage", "train")):
        begin(place, kind, what, config, "i", {}, {})  # type: ignore[arg-type]
        if status != "RUNNING":
            finish(place, status, error=error)
    return run


def examine(root: Path, name: str, **more: Any) -> tuple[Health, dict[str, Finding]]:
    health = look(recorded(root, name, **more))
    return health, {finding.symptom: finding for finding in health.findings}


def test_a_healthy_run_is_called_so_and_its_pace_is_told(tmp_path: Path) -> None:
    health, found = examine(tmp_path, "healthy")
    assert health.is_healthy, found
    assert health.lines[0] == "healthy: finished, 40 of 40 training steps"
    assert "learning 91%" in health.lines[1]
    assert health.lines[-1].startswith("healthy")


def test_the_memory_of_this_machine_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    run = recorded(tmp_path, "healthy")
    assert signs_of(read_run(run)).host_bytes
    record = read_record(run / "train")
    assert record is not None
    write_record(run / "train", replace(record, owner={**record.owner, "host": "another"}))
    assert signs_of(read_run(run)).host_bytes is None


def test_weights_fetched_when_they_are_needed(tmp_path: Path) -> None:
    """Memory low, steps slow."""
    _, found = examine(tmp_path, "slow_tiers")
    finding = found["slow tiers"]
    assert finding.where == "transfer"
    assert "train.memory.prefetch: 2" in finding.knob
    assert "waiting for weights" in finding.evidence[0]


def test_reward_that_rises_and_falls_off_a_cliff(tmp_path: Path) -> None:
    health, found = examine(tmp_path, "collapse")
    finding = health.findings[0]
    assert finding.symptom == "collapse"
    assert "stale" in finding.says
    assert "anchors.refresh_every: 200, anchors.max_drift: 0.3" in finding.knob
    assert "40 steps ago" in finding.evidence[2]
    assert "no signal" not in found  # the end of it, and no cause


def test_everything_hangs(tmp_path: Path) -> None:
    _, found = examine(tmp_path, "hang")
    finding = found["hang"]
    assert "no sign of life" in " ".join(finding.evidence)
    assert "train.watchdog.deadline_seconds" in finding.knob


def test_a_stage_that_fell_silent_and_one_that_is_silent_now(tmp_path: Path) -> None:
    error = "StageFailed: train: gave no sign of life for 900 s and was stopped; log: stage.log"
    _, found = examine(tmp_path, "healthy", status="FAILED", error=error)
    assert found["hang"].where == "learner"
    run = recorded(tmp_path / "now", "healthy", status="RUNNING")
    beat = {"time": time.time() - 1000, "pid": os.getpid(), "step": 7, "total": 40, "doing": "learning"}
    write_json(run / "train" / HEARTBEAT, beat)
    (finding,) = look(run).findings
    assert "last heard 1000 s ago, learning" in finding.evidence[0]
    write_json(run / "train" / HEARTBEAT, {**beat, "time": time.time()})
    assert look(run).is_healthy
    assert look(run).lines[0].startswith("healthy: running")


def test_gradient_norms_that_jump(tmp_path: Path) -> None:
    _, found = examine(tmp_path, "gradient_jumps")
    finding = found["gradient jumps"]
    assert "times its neighbours'" in finding.evidence[0]
    assert "train.heartbeat.factor: 5" in finding.knob
    assert "train.optimizer.max_grad_norm" in finding.knob


def test_a_learner_that_waits_for_busy_samplers(tmp_path: Path) -> None:
    _, found = examine(tmp_path, "slow_sampling")
    finding = found["slow sampling"]
    assert finding.where == "sampler"
    assert "waits" in finding.evidence[0]
    assert "train.sampler.slots (2)" in finding.knob


def test_sampling_that_became_slower(tmp_path: Path) -> None:
    _, found = examine(tmp_path, "rollout_drop")
    assert "tokens a second at the end" in found["rollout drop"].evidence[0]


def test_a_policy_that_runs_away(tmp_path: Path) -> None:
    """Answers short and uniform, KL many times what it was."""
    health, _ = examine(tmp_path, "kl_explosion")
    finding = health.findings[0]
    assert finding.symptom == "KL explosion"
    assert "mean completion length fell" in " ".join(finding.evidence)
    assert "lower train.optimizer.learning_rate to 0.002" in finding.knob
    assert "from 0.001 to 0.01" in finding.knob


def test_samples_that_are_too_old(tmp_path: Path) -> None:
    _, found = examine(tmp_path, "lag_oscillation")
    finding = found["lag oscillation"]
    assert finding.where == "pool"
    assert "optimizer steps old" in finding.evidence[0]
    assert "train.sync.max_policy_update_lag from 64 to 20" in finding.knob


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir()))
def test_no_run_is_called_what_it_is_not(tmp_path: Path, name: str) -> None:
    """Each symptom shows in its own recording, and in those others only in which it really is."""
    also = {
        "collapse": {"KL explosion"},
        "kl_explosion": {"collapse"},
        "rollout_drop": {"slow sampling"},
    }
    _, found = examine(tmp_path, name)
    own = {"healthy": set[str](), "tiers_with_prefetch": set[str]()}.get(name, {name.replace("kl_", "KL_").replace("_", " ")})
    assert own <= set(found) <= own | also.get(name, set()), found


# -- rules that need a machine or a misfortune that no test should have ------------------------------------------------------


@pytest.fixture
def healthy(tmp_path: Path) -> Signs:
    return signs_of(read_run(recorded(tmp_path, "healthy")))


def with_series(signs: Signs, **series: list[float]) -> Signs:
    new = {name.replace("__", "/"): [(float(i), value) for i, value in enumerate(values, 1)] for name, values in series.items()}
    return replace(signs, series={**signs.series, **new})


def test_memory_that_runs_out(healthy: Signs) -> None:
    killed = replace(healthy, status="failed", error="train: was killed by SIGKILL (the kernel does that when memory runs out)")
    assert diagnose(killed)[0].where == "host memory"
    full = replace(with_series(healthy, memory__rss_bytes=[9.5e9] * 40), host_bytes=1e10)
    assert "9.5 GB of 10.0 GB" in diagnose(full)[0].evidence[0]
    growing = replace(with_series(healthy, memory__rss_bytes=[1e9 + 1e8 * n for n in range(40)]), host_bytes=1e10)
    assert "a step" in diagnose(growing)[0].evidence[0]
    assert diagnose(replace(healthy, host_bytes=1e10)) == []


def test_a_verifier_or_a_pool_that_sets_the_pace(healthy: Signs) -> None:
    slow = with_series(
        healthy, time__reward_seconds=[5.0] * 40, time__step_seconds=[8.0] * 40, reward__status_timeout_fraction=[0.2] * 40
    )
    (finding,) = diagnose(slow)
    assert (finding.symptom, finding.where) == ("slow reward", "reward")
    assert "20% of the judgements" in finding.evidence[1]
    (finding,) = diagnose(with_series(healthy, pool__wait_fraction=[0.4] * 40))
    assert finding.where == "pool"


def test_a_reward_without_signal_and_one_that_is_gamed(healthy: Signs) -> None:
    flat = with_series(healthy, reward__zero_variance_fraction=[1.0] * 40, reward__mean=[0.0] * 40)
    assert [finding.symptom for finding in diagnose(flat)] == ["no signal"]
    gamed = with_series(healthy, reward__mean=[0.4 + 0.01 * n for n in range(40)])
    heldout = [(float(step), 0.6 - 0.01 * step) for step in range(4, 41, 4)]
    gamed = replace(gamed, series={**gamed.series, "heldout/reward_mean": heldout})
    assert "gamed reward" in [finding.symptom for finding in diagnose(gamed)]


def test_steps_slower_than_planned_name_the_phase(healthy: Signs) -> None:
    seen = healthy.middle("time/learn_seconds")
    planned = {"step_seconds": healthy.middle("time/step_seconds") / 3, "learn_seconds": seen / 3, "sample_seconds": 1.0}
    (finding,) = diagnose(replace(healthy, planned=planned))
    assert (finding.symptom, finding.where) == ("slower than planned", "learner")


def test_two_steps_say_nothing_about_speed(healthy: Signs) -> None:
    young = replace(healthy, series={name: points[:2] for name, points in healthy.series.items()}, planned={"step_seconds": 1e-3})
    assert diagnose(young) == []
    assert [finding.symptom for finding in diagnose(replace(young, error="gave no sign of life"))] == ["hang"]


def test_curves_that_only_waver_have_not_fallen() -> None:
    assert fall([0.5, 0.6, 0.5, 0.62, 0.55, 0.6, 0.52, 0.6, 0.5, 0.58]) is None
    assert fall([0.1, 0.3, 0.5, 0.7, 0.9, 0.9]) is None
    assert fall([0.9, 0.1]) is None
    assert fall([0.1, 0.5, 0.8, 0.8, 0.1, 0.1, 0.1, 0.1]) is not None
    assert reversals([0.0, 1.0] * 3) is None
    assert (reversals([0, 1, 2, 3, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7]) or 0) == 2


# -- runs that are hardly there ----------------------------------------------------------------------------------------------


def test_a_run_without_steps_is_too_young_to_judge(tmp_path: Path) -> None:
    run = recorded(tmp_path, "healthy", status="RUNNING")
    (run / "train" / "metrics.jsonl").unlink()
    (run / "train" / "events.jsonl").unlink()
    health = look(run)
    assert health.is_healthy
    assert health.lines == ("healthy: running, 0 of 40 training steps", "too early to say more: the rules want 5 steps")


def test_torn_files_are_passed_over_and_counted(tmp_path: Path) -> None:
    run = recorded(tmp_path, "healthy")
    text = (run / "train" / "metrics.jsonl").read_text()
    (run / "train" / "metrics.jsonl").write_text('{"step": 1, "met\n' + text + '{"step": 3')
    (run / "train" / "events.jsonl").write_text('{"kind": \n[]\n')
    (run / "train" / HEARTBEAT).write_text("{")
    health = look(run)
    assert health.is_healthy
    assert "1 lines of its metrics are broken" in " ".join(health.lines)
    (run / "config.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        look(run)


def test_a_run_whose_process_was_killed_is_not_running(tmp_path: Path) -> None:
    run = recorded(tmp_path, "healthy", status="RUNNING")
    gone = replace(Owner.me(), started_ticks=1).to_json()
    for place in (run, run / "train"):
        record = read_run(run).stages["train"] if place.name == "train" else read_run(run).record
        assert record is not None
        write_record(place, replace(record, owner=gone, status="RUNNING"))
    assert look(run).lines[0].startswith("healthy: killed")
