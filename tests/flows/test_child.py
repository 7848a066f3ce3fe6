"""Stage processes, really started: they end, are ended, die with the flow, and survivors are found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flows.child import THREADS, Child, Launcher, Lease, Limits, read_beat, signal_group, watch
from tasks.locks import Owner
from tasks.tracking import PARENT_TRACKS
from trainer.errors import BusyError
from trainer.files import read_json, write_json
from trainer.metrics import HEARTBEAT

PATIENCE_SECONDS = 240.0
LONG = Limits(PATIENCE_SECONDS, PATIENCE_SECONDS, PATIENCE_SECONDS)


@pytest.fixture(params=[pytest.param(False, id="new"), pytest.param(True, id="forked", marks=pytest.mark.smoke)])
def start(request: pytest.FixtureRequest, tiny: Any) -> Any:
    """Start the tiny train stage as a child, its inputs being there; forked or as a new interpreter."""
    launcher = Launcher(tiny.workspace.config, fork=request.param)

    def start_stage(**environment: str) -> Child:
        workspace = tiny.workspace
        arguments = [
            "--workspace",
            str(tiny.root),
            "--config",
            str(workspace.run / "config.json"),
            "--stages",
            "tiny_stages:STAGES",
        ]
        workspace.claim_run()
        log = workspace.run / "train" / "stage.log"
        prepare = launcher.start(["prepare", *arguments], log, {PARENT_TRACKS: "1"})
        assert prepare.wait(PATIENCE_SECONDS) == 0, log.read_text()
        return launcher.start(["train", *arguments], log, {PARENT_TRACKS: "1", **environment})

    return start_stage


def test_a_stage_runs_in_its_own_session_and_says_how_it_ended(start: Any, tiny: Any, eventually: Any) -> None:
    tiny.plan(wait_in="train")
    child = start()
    eventually(lambda: os.getsid(child.pid) == child.pid)
    tiny.plan()
    beats: list[Any] = []
    assert watch(child, tiny.workspace.run / "train", LONG, lambda: False, beats.append) == ("exited", 0)
    assert (tiny.root / "artifacts" / "policy" / "manifest.json").exists()
    assert str(tiny.root / "artifacts" / "policy") in (tiny.workspace.run / "train" / "stage.log").read_text()


def test_threads_of_its_own(start: Any, tiny: Any) -> None:
    assert start(**{THREADS: "3"}).wait(PATIENCE_SECONDS) == 0
    assert "threads: 3" in (tiny.workspace.run / "train" / "stage.log").read_text()


def test_a_stop_ends_it_after_a_checkpoint(start: Any, tiny: Any) -> None:
    tiny.plan(seconds=0.3, steps=100)
    run = tiny.workspace.run / "train"
    child = start()
    ending, code = watch(child, run, LONG, lambda: (run / "checkpoint.json").exists(), lambda beat: None)
    assert (ending, code) == ("stopped", 75)
    assert read_json(run / "checkpoint.json")["stopped"]
    assert read_json(run / "record.json")["status"] == "KILLED"


def test_silence_ends_it(start: Any, tiny: Any) -> None:
    tiny.plan(hang_at=2)
    child = start()
    limits = Limits(PATIENCE_SECONDS, silence_seconds=1, grace_seconds=PATIENCE_SECONDS)
    ending, _ = watch(child, tiny.workspace.run / "train", limits, lambda: False, lambda beat: None)
    assert ending == "silent"
    assert not Owner.of(child.pid).is_alive or child.wait(0) is not None


def test_the_total_time_ends_it_even_while_it_gives_signs_of_life(start: Any, tiny: Any) -> None:
    tiny.plan(seconds=0.05, steps=10_000)
    limits = Limits(2, PATIENCE_SECONDS, PATIENCE_SECONDS)
    child = start()
    tiny.wait_for_step(1)  # by then it heeds signals, however slow the machine is
    ending, code = watch(child, tiny.workspace.run / "train", limits, lambda: False, lambda beat: None)
    assert (ending, code) == ("late", 75)


def test_a_stop_before_it_can_listen_is_not_lost(start: Any, tiny: Any) -> None:
    tiny.plan(wait_in="train")
    child = start()
    signal_group(child.pid, signal.SIGTERM)
    assert child.wait(PATIENCE_SECONDS) in (-signal.SIGTERM, 75)


def test_a_heartbeat_of_another_process_is_no_sign_of_life(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 7) is None
    write_json(tmp_path / HEARTBEAT, {"pid": 8, "time": 1.0})
    assert read_beat(tmp_path, 7) is None
    assert read_beat(tmp_path, 8) == {"pid": 8, "time": 1.0}


def test_an_interruption_of_the_watch_leaves_nothing_running(start: Any, tiny: Any) -> None:
    tiny.plan(seconds=0.1, steps=10_000)
    child = start()

    def interrupt(beat: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch(child, tiny.workspace.run / "train", LONG, lambda: False, interrupt)
    assert child.wait(5) == 75


FLOW = """
import sys
from pathlib import Path
from flows.session import open_session, run_plainly
from flows.workspaces import resolve_config, resolve_workspace

if __name__ == "__main__":
    root, fork = Path(sys.argv[1]), sys.argv[2] == "fork"
    config = resolve_config(None, sys.argv[3:])
    workspace = resolve_workspace(config, root=root, stages_name="tiny_stages:STAGES")
    with open_session(workspace, print, tracking=False, fork=fork) as session:
        run_plainly(session, lambda stage, beat: None, print)
"""


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["new", "fork"])
def test_a_killed_flow_takes_its_stage_with_it_after_a_checkpoint(tiny: Any, tmp_path: Path, eventually: Any, how: str) -> None:
    tiny.plan(seconds=0.2, steps=10_000)
    program = tmp_path / "flow.py"
    program.write_text(textwrap.dedent(FLOW))
    flow = subprocess.Popen([sys.executable, str(program), str(tiny.root), how, *tiny.overrides], start_new_session=True)
    try:
        pid = tiny.wait_for_step(2)
        stage = Owner.of(pid)
        assert stage.is_alive
    finally:
        flow.kill()
        flow.wait()
    eventually(lambda: not stage.is_alive)
    checkpoint = json.loads((tiny.workspace.run / "train" / "checkpoint.json").read_text())
    assert checkpoint["stopped"]


@pytest.mark.smoke
def test_an_end_that_reaches_every_process_at_once_stops_after_a_checkpoint(tiny: Any, tmp_path: Path) -> None:
    """As Slurm, systemd and `timeout` end a job: the process that stages are forked from hears it too."""
    tiny.plan(seconds=0.2, steps=10_000)
    program = tmp_path / "flow.py"
    program.write_text(textwrap.dedent(FLOW))
    flow = subprocess.Popen(
        [sys.executable, str(program), str(tiny.root), "fork", *tiny.overrides], start_new_session=True, stderr=subprocess.PIPE
    )
    try:
        tiny.wait_for_step(2)
        os.killpg(flow.pid, signal.SIGTERM)
        _, said = flow.communicate(timeout=PATIENCE_SECONDS)
    finally:
        flow.kill()
        flow.wait()
    assert b"StopRequested: stopped by SIGTERM" in said
    assert json.loads((tiny.workspace.run / "train" / "checkpoint.json").read_text())["stopped"]
    assert read_json(tiny.workspace.run / "record.json")["status"] == "KILLED"


def test_a_survivor_is_ended_and_a_stranger_with_its_pid_is_not(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    assert not lease.end_survivor(1)
    survivor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        write_json(lease.path, {**Owner.of(survivor.pid).to_json(), "started_ticks": 1})  # a pid that was given away again
        assert not lease.end_survivor(1)
        assert survivor.poll() is None
        write_json(lease.path, Owner.of(survivor.pid).to_json())
        assert lease.end_survivor(PATIENCE_SECONDS)
        assert survivor.wait(PATIENCE_SECONDS) == -signal.SIGTERM
        assert not lease.path.exists()
    finally:
        survivor.kill()
        survivor.wait()


def test_a_lease_of_another_host_is_not_judged(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    write_json(lease.path, {"host": "another", "pid": 1, "started_ticks": 1})
    with pytest.raises(BusyError, match="another"):
        lease.end_survivor(1)
