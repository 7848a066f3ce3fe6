"""Misfortunes on purpose. After each: nothing that was finished is lost, nothing runs twice, and the same command goes on.

Kills of the flow, the worker and Prefect's server under `tithe up` are in test_deployments.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.flow_runs import settle
from flows.server import PrivateServer, free_port
from flows.up import mlflow_server
from tasks.locks import Owner
from tasks.tracking import is_behind
from tasks.workspace import Workspace
from trainer.files import read_json
from trainer.metrics import read_lines

pytestmark = pytest.mark.smoke

ALL = ["prepare", "train", "evaluate", "report"]


def kill_all(flow: subprocess.Popen[str], stage: Owner | None) -> None:
    """Kill a flow and its stage as a power cut would: neither gets to say a word."""
    for pid in [flow.pid, *([stage.pid] if stage and stage.is_alive else [])]:
        with suppress(ProcessLookupError):  # it ended by itself in between
            os.killpg(pid, signal.SIGKILL)
    flow.communicate(timeout=240)


def stage_owner(root: Path, stage: str) -> Owner | None:
    """Return who runs a stage in a workspace."""
    try:
        return Owner.from_json(read_json(root / ".tithe" / f"{stage}.lease"))
    except (FileNotFoundError, ValueError, KeyError):
        return None


def manifests(workspace: Workspace) -> dict[str, int]:
    """Return when each finished artifact was written."""
    found = {stage.name: workspace.artifact(stage.artifact) / "manifest.json" for stage in workspace.stages}
    return {name: path.stat().st_mtime_ns for name, path in found.items() if path.exists()}


def test_killed_in_each_stage_it_goes_on_from_that_stage(tiny: Any, eventually: Any) -> None:
    for number, stage in enumerate(ALL):
        tiny.plan(wait_in=stage, steps=3)
        before = manifests(tiny.workspace)
        process = tiny.start("--plain", "--no-tracking")
        eventually(lambda stage=stage: tiny.made[-1:] == [stage] and stage_owner(tiny.root, stage) is not None)
        kill_all(process, stage_owner(tiny.root, stage))
        after = manifests(tiny.workspace)
        assert list(after) == ALL[:number], "the stage that was killed has no artifact"
        assert {name: after[name] for name in before} == before, "what was finished before is not touched"
    tiny.plan(steps=3)
    done = tiny.run("--plain", "--no-tracking")
    assert done.returncode == 0, done.stderr
    assert "resuming attempt 4, which ended KILLED: prepare, train, evaluate current" in done.stdout
    # each stage ran once when it was killed and once to its end; only the report had to run in the last round
    assert tiny.made == ["prepare", "prepare", "train", "train", "evaluate", "evaluate", "report", "report"]


def test_prefect_killed_meanwhile_hears_afterwards_how_it_ended(tiny: Any, state: Path, prefect_server: str, api: Any) -> None:
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
    body = {"flow_runs": {"name": {"any_": [tiny.workspace.run_id]}}}
    assert api("flow_runs/filter", body)[0]["state"]["name"] == "Running", "it could not be told"
    given: dict[str, str] = {}
    deadline = time.monotonic() + 300
    while not given and time.monotonic() < deadline:
        given = settle(prefect_server)
        time.sleep(0.5)
    assert list(given.values()) == ["Completed"]
    assert api("flow_runs/filter", body)[0]["state"]["name"] == "Completed"
    assert settle(prefect_server) == {}
    assert tiny.made == ALL


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(target)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs more rights than these")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_full_disk_ends_it_with_one_line_and_space_lets_it_go_on(tiny: Any, small_disk: Path) -> None:
    tiny.root = small_disk / "campaign"
    tiny.plan(steps=8, ballast_bytes=200_000, tell=True)
    full = tiny.run("--plain", "--no-tracking")
    assert full.returncode == 8, full.stderr
    assert "no space left on the disk" in full.stderr
    assert "Traceback" not in full.stderr
    reached = read_json(tiny.workspace.run / "train" / "checkpoint.json")["step"]
    assert reached >= 1
    tiny.plan(steps=8, ballast_bytes=0, tell=True)
    done = tiny.run("--plain", "--no-tracking")
    assert done.returncode == 0, done.stderr
    assert read_json(tiny.root / "artifacts" / "policy" / "manifest.json")["resumed_from"] == reached
    assert [line["step"] for line in read_lines(tiny.workspace.run / "train" / "metrics.jsonl")] == list(range(1, 9))
    assert tiny.made == ["prepare", "train", "train", "evaluate", "report"]


def test_a_clock_that_jumps_stops_nothing(tiny: Any, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    path = os.pathsep.join([str(Path(__file__).parent / "clock"), os.environ["PYTHONPATH"]])
    tiny.overrides.append("limits.silence_seconds=30")
    tiny.plan(wait_at=3, steps=20)
    process = tiny.start("--plain", "--no-tracking", PYTHONPATH=path, TEST_CLOCK=str(clock))
    tiny.wait_for_step(2)
    clock.write_text("86400")
    tiny.plan(seconds=0.2, wait_at=9, steps=20)
    tiny.wait_for_step(8)
    clock.write_text("-86400")
    tiny.plan(seconds=0.2, steps=20)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "attempt" not in said
    assert tiny.made == ALL
    assert [line["step"] for line in read_lines(tiny.workspace.run / "train" / "metrics.jsonl")] == list(range(1, 21))


def test_two_campaigns_at_once_in_one_repository_share_what_is_the_same(tiny: Any, second: Any) -> None:
    for campaign in (tiny, second):
        campaign.plan(seconds=0.2, steps=5)
    second.overrides.append("train.optimizer.learning_rate=5e-5")
    processes = [campaign.start("--plain") for campaign in (tiny, second)]
    for process in processes:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    for campaign in (tiny, second):
        assert campaign.made[-3:] == ["train", "evaluate", "report"]
        assert campaign.made.count("train") == 1
        again = campaign.run("--plain", "--no-tracking")
        assert again.returncode == 0, again.stderr
        assert campaign.made.count("train") == 1


def test_mlflow_away_from_the_start_gets_everything_once_it_is_there(tiny: Any, mlflow_store: None) -> None:
    import httpx

    port = free_port()
    address = f"http://127.0.0.1:{port}"
    done = tiny.run("--plain", MLFLOW_TRACKING_URI=address)
    assert done.returncode == 0, done.stderr
    assert tiny.made == ALL
    assert is_behind(tiny.workspace.run)
    server = mlflow_server(port)
    try:
        server.wait_ready()
        sync = ["sync", *tiny.place()]
        sent = subprocess.run(
            [sys.executable, "-m", "flows.cli", *sync],
            env={**os.environ, "MLFLOW_TRACKING_URI": address},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert sent.returncode == 0, sent.stderr
        assert not is_behind(tiny.workspace.run), "there is nothing to send a second time"
        api = f"{address}/api/2.0/mlflow"
        named = httpx.get(f"{api}/experiments/get-by-name", params={"experiment_name": "tiny"}, timeout=60).json()
        wanted = {"experiment_ids": [named["experiment"]["experiment_id"]]}
        runs = httpx.post(f"{api}/runs/search", json=wanted, timeout=60).json()["runs"]
        (campaign,) = [run["info"] for run in runs if run["info"]["run_name"] == tiny.workspace.run_id]
        assert campaign["status"] == "FINISHED"
        child = {"key": "mlflow.parentRunId", "value": campaign["run_id"]}
        mine = [run for run in runs if child in run["data"]["tags"]]
        assert sorted(run["info"]["run_name"] for run in mine) == sorted(ALL)
        assert {run["info"]["status"] for run in mine} == {"FINISHED"}
        (train,) = [run["info"]["run_id"] for run in mine if run["info"]["run_name"] == "train"]
        asked = {"run_id": train, "metric_key": "reward/mean"}
        history = httpx.get(f"{api}/metrics/get-history", params=asked, timeout=60).json()["metrics"]
        assert [int(point["step"]) for point in history] == [1, 2, 3, 4, 5]
    finally:
        server.stop()
