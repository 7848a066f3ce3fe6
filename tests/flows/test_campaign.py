"""The flow in a real Prefect server: states, retries, artifacts, cancellation, and a server that is away."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flows.campaign import artifact_key
from flows.server import PrivateServer
from tasks.locks import Owner, hold
from tasks.record import read_record
from trainer.files import read_json

pytestmark = pytest.mark.smoke


def flow_run(api: Any, run_id: str) -> dict[str, Any]:
    """Return the newest flow run of a campaign's run id."""
    body = {"flow_runs": {"name": {"any_": [run_id]}}, "sort": "START_TIME_DESC"}
    found = api("flow_runs/filter", body)
    return dict(found[0]) if found else {}


def task_runs(api: Any, flow_run_id: str) -> dict[str, dict[str, Any]]:
    found = api("task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
    return {run["name"]: run for run in found}


def state_names(api: Any, run: dict[str, Any]) -> dict[str, str]:
    return {name: task["state"]["name"] for name, task in task_runs(api, run["id"]).items()}


def artifact_types(api: Any, run: dict[str, Any]) -> set[tuple[str, str]]:
    found = api("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    return {(artifact["key"], artifact["type"]) for artifact in found}


def test_a_campaign_shows_in_prefect_and_a_second_run_as_cached(
    tiny: Any, api: Any, prefect_server: str, eventually: Any
) -> None:
    tiny.plan(seconds=1.2, steps=5, alarm_at=2)  # long enough for a progress artifact
    done = tiny.run("--no-tracking", PREFECT_API_URL=prefect_server)
    assert done.returncode == 0, done.stderr
    assert "90.0 % (85.0 % to 95.0 %)" in done.stdout
    run = flow_run(api, tiny.workspace.run_id)
    assert run["state"]["name"] == "Completed"
    assert state_names(api, run) == dict.fromkeys(["prepare", "train", "evaluate", "report"], "Completed")
    assert artifact_types(api, run) == {
        ("tiny-train", "progress"),
        ("tiny-stages", "table"),
        ("tiny-evaluation", "table"),
        ("tiny-report", "markdown"),
    }
    asked = {"filter": {"event": {"name": ["tithe.alarm.kl"]}, "resource": {"id": [f"tithe.run.{tiny.workspace.run_id}"]}}}
    (event,) = eventually(lambda: api("events/filter", asked)["events"])
    assert (event["payload"]["step"], event["payload"]["value"], event["payload"]["threshold"]) == (2, 0.4, 0.3)
    again = tiny.run("--no-tracking", PREFECT_API_URL=prefect_server)
    assert again.returncode == 0, again.stderr
    cached = flow_run(api, tiny.workspace.run_id)
    assert cached["id"] != run["id"]
    assert state_names(api, cached) == dict.fromkeys(["prepare", "train", "evaluate", "report"], "Cached")
    assert tiny.made == ["prepare", "train", "evaluate", "report"]


def test_a_crash_is_retried_and_a_mistake_is_not(tiny: Any, second: Any, api: Any, prefect_server: str) -> None:
    tiny.plan(crash_at=2)
    done = tiny.run("--no-tracking", PREFECT_API_URL=prefect_server)
    assert done.returncode == 0, done.stderr
    assert "trying again (1 of 2)" in done.stdout
    run = flow_run(api, tiny.workspace.run_id)
    assert task_runs(api, run["id"])["train"]["run_count"] == 2
    second.plan(config_error=True)
    done = second.run("--no-tracking", PREFECT_API_URL=prefect_server)
    assert done.returncode == 2
    assert "error: train: train.lora.rank = 3: planned mistake" in done.stderr
    assert "Traceback" not in done.stderr
    failed = flow_run(api, second.workspace.run_id)
    assert failed["state"]["name"] == "Failed"
    assert "planned mistake" in failed["state"]["message"]
    assert task_runs(api, failed["id"])["train"]["run_count"] == 1
    assert second.made == ["prepare", "train"] or second.made == ["train"]


def test_cancelling_in_prefect_ends_the_stage_after_a_checkpoint(tiny: Any, api: Any, prefect_server: str) -> None:
    tiny.plan(seconds=0.2, steps=10_000)
    process = tiny.start("--no-tracking", PREFECT_API_URL=prefect_server)
    stage = Owner.of(tiny.wait_for_step(2))
    run = flow_run(api, tiny.workspace.run_id)
    api(f"flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said
    assert "stopped: the flow run was set to Cancelling in Prefect" in said
    assert not stage.is_alive
    assert read_json(tiny.workspace.run / "train" / "checkpoint.json")["stopped"]
    run = flow_run(api, tiny.workspace.run_id)
    assert run["state"]["name"] == "Cancelled"
    assert state_names(api, run) == {"prepare": "Completed", "train": "Cancelled"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_command_ends_the_stage_after_a_checkpoint(tiny: Any, api: Any, prefect_server: str, number: int) -> None:
    tiny.plan(seconds=0.2, steps=10_000)
    process = tiny.start("--no-tracking", PREFECT_API_URL=prefect_server)
    stage = Owner.of(tiny.wait_for_step(2))
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said
    assert "Traceback" not in said
    assert not stage.is_alive
    assert read_json(tiny.workspace.run / "train" / "checkpoint.json")["stopped"]
    assert flow_run(api, tiny.workspace.run_id)["state"]["name"] == "Cancelled"
    record = read_record(tiny.workspace.run)
    assert record is not None
    assert record.status == "KILLED"


def test_a_stop_while_prefects_database_is_made_does_not_wait_for_it(tiny: Any, tmp_path: Path, eventually: Any) -> None:
    fresh = tmp_path / "fresh"
    tiny.plan(wait_in="prepare")
    process = tiny.start("--no-tracking", TITHE_STATE=str(fresh))
    eventually((fresh / "prefect" / "private-server.log").exists)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said
    assert "stopped: stopped by SIGTERM" in said
    assert not (fresh / "prefect" / "initialised").exists()
    assert tiny.made in ([], ["prepare"])


def test_stages_go_ahead_while_prefects_database_is_made(tiny: Any, tmp_path: Path, eventually: Any) -> None:
    fresh = tmp_path / "fresh"
    (fresh / "prefect").mkdir(parents=True)
    with hold(fresh / "prefect.lock", "another makes the database"):
        process = tiny.start("--no-tracking", TITHE_STATE=str(fresh))
        eventually(lambda: tiny.made == ["prepare", "train", "evaluate", "report"])
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said


def test_no_server_anywhere_means_a_private_one_with_its_history_kept(tiny: Any, state: Path, prefect_server: str) -> None:
    done = tiny.run("--no-tracking")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    with sqlite3.connect(state / "prefect" / "prefect.db") as database:
        found = database.execute("select state_name from flow_run where name = ?", (tiny.workspace.run_id,)).fetchall()
    database.close()
    assert found == [("Completed",)]


def test_an_unreachable_server_is_one_line_and_the_campaign_runs(tiny: Any) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # and never listens
        port = listener.getsockname()[1]
        done = tiny.run("--no-tracking", PREFECT_API_URL=f"http://127.0.0.1:{port}/api")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "does not answer" in warnings[0]
    assert tiny.made == ["prepare", "train", "evaluate", "report"]


def test_a_server_that_dies_meanwhile_costs_nothing(tiny: Any, state: Path, tmp_path: Path, prefect_server: str) -> None:
    tiny.plan(wait_at=3)
    server = PrivateServer()
    try:
        server.wait_ready()
        process = tiny.start("--no-tracking", PREFECT_API_URL=server.api_url, PREFECT_CLIENT_MAX_RETRIES="0")
        tiny.wait_for_step(2)
    finally:
        server.stop()
    tiny.plan()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "the campaign goes on without it" in said
    assert tiny.made == ["prepare", "train", "evaluate", "report"]


def test_a_name_becomes_a_key() -> None:
    assert artifact_key("my.campaign_1", "train") == "my-campaign-1-train"
