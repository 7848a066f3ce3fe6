"""A campaign without Prefect: retries that heal, mistakes that are not tried again, resuming, locks, the cache."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from typing import Any

import pytest

from flows.child import Lease
from flows.session import StageFailed, StageResult, Stop, open_session, run_plainly, signals_ask
from tasks.artifacts import cache_directory
from tasks.record import read_record
from tasks.tracking import PARENT_TRACKS
from tasks.workspace import Workspace
from trainer.errors import BusyError, StopRequested
from trainer.files import read_json
from trainer.metrics import read_lines

pytestmark = pytest.mark.smoke


class Heard:
    """What a run said and which results it gave."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.results: dict[str, StageResult] = {}

    def run(self, workspace: Workspace, force: tuple[str, ...] = ()) -> None:
        with open_session(workspace, self.said.append, force, tracking=False, fork=False) as session:
            run_plainly(session, lambda stage, beat: None, self.keep)

    def keep(self, result: StageResult) -> None:
        self.results[result.stage] = result

    @property
    def how(self) -> dict[str, str]:
        return {name: result.how for name, result in self.results.items()}


ALL = ["prepare", "train", "evaluate", "report"]


def test_a_campaign_runs_once_and_is_current_then(tiny: Any) -> None:
    first, second = Heard(), Heard()
    first.run(tiny.workspace)
    assert first.how == dict.fromkeys(ALL, "made")
    assert tiny.made == ALL
    record = read_record(tiny.workspace.run)
    assert record is not None
    second.run(tiny.workspace)
    assert second.how == dict.fromkeys(ALL, "cached")
    assert tiny.made == ALL
    assert read_record(tiny.workspace.run) == record  # nothing happened, so nothing new is told


def test_a_changed_learning_rate_runs_from_train_on(tiny: Any) -> None:
    Heard().run(tiny.workspace)
    tiny.overrides.append("train.optimizer.learning_rate=5e-5")
    second = Heard()
    second.run(tiny.workspace)
    # the tiny evaluation is the same as before, so the report is still right
    assert second.how == {"prepare": "cached", "train": "made", "evaluate": "made", "report": "cached"}


def test_force_runs_a_current_stage_again(tiny: Any) -> None:
    Heard().run(tiny.workspace)
    second = Heard()
    second.run(tiny.workspace, force=("evaluate",))
    assert second.how["evaluate"] == "made"
    assert second.how["train"] == "cached"


@pytest.mark.parametrize("wish", ["crash_at", "kill_at"])
def test_what_can_heal_is_tried_again_and_goes_on_from_the_checkpoint(tiny: Any, wish: str) -> None:
    tiny.plan(**{wish: 3}, tell=True)
    heard = Heard()
    heard.run(tiny.workspace)
    assert heard.results["train"].attempts == 2
    manifest = read_json(tiny.root / "artifacts" / "policy" / "manifest.json")
    assert manifest["resumed_from"] == 2
    lines = read_lines(tiny.workspace.run / "train" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    record = read_record(tiny.workspace.run / "train")
    assert record is not None
    assert (record.status, record.attempt) == ("FINISHED", 2)
    expected = "planned crash" if wish == "crash_at" else "SIGKILL"
    assert any(expected in text and "trying again (1 of 2)" in text for text in heard.said), heard.said


def test_silence_is_tried_again(tiny: Any) -> None:
    tiny.plan(hang_at=2)
    tiny.overrides.append("limits.silence_seconds=10")  # more than a healthy attempt is ever silent on a busy machine
    heard = Heard()
    heard.run(tiny.workspace)
    assert heard.results["train"].attempts == 2
    assert any("no sign of life" in text for text in heard.said)


def test_a_mistake_in_the_configuration_is_not_tried_again(tiny: Any) -> None:
    tiny.plan(config_error=True)
    heard = Heard()
    with pytest.raises(StageFailed) as caught:
        heard.run(tiny.workspace)
    assert caught.value.exit_code == 2
    assert not caught.value.heals
    assert "train.lora.rank = 3: planned mistake" in str(caught.value)
    assert "stage.log" in str(caught.value)
    assert tiny.made == ["prepare", "train"]
    campaign = read_record(tiny.workspace.run)
    assert campaign is not None
    assert campaign.status == "FAILED"


def test_retries_end(tiny: Any) -> None:
    tiny.plan(crash_at=3)
    tiny.overrides.append("limits.retries=0")
    with pytest.raises(StageFailed, match="planned crash"):
        Heard().run(tiny.workspace)


def test_a_signal_stops_after_a_checkpoint_and_the_next_run_goes_on(tiny: Any) -> None:
    tiny.plan(seconds=0.2, steps=10_000, tell=True)
    heard = Heard()

    def interrupt() -> None:
        tiny.wait_for_step(2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(StopRequested, match="SIGINT"):
        heard.run(tiny.workspace)
    thread.join()
    assert read_json(tiny.workspace.run / "train" / "checkpoint.json")["stopped"]
    record = read_record(tiny.workspace.run)
    assert record is not None
    assert record.status == "KILLED"
    tiny.plan(steps=8, tell=True)
    again = Heard()
    again.run(tiny.workspace)
    assert again.how == {"prepare": "cached", "train": "made", "evaluate": "made", "report": "made"}
    assert read_json(tiny.root / "artifacts" / "policy" / "manifest.json")["resumed_from"] >= 2


def test_a_second_campaign_in_the_same_workspace_is_refused(tiny: Any) -> None:
    with (
        open_session(tiny.workspace, print, tracking=False, fork=False),
        pytest.raises(BusyError, match=f"pid {os.getpid()}.*campaign.name"),
        open_session(tiny.workspace, print, tracking=False, fork=False),
    ):
        pass


def test_a_survivor_of_an_earlier_run_is_ended_before_a_second_writer_starts(tiny: Any) -> None:
    tiny.plan(hang_at=3, steps=6)
    workspace = tiny.workspace
    with open_session(workspace, print, tracking=False, fork=False) as session:
        session.attempt(workspace.stages[0], lambda beat: None)
        log = workspace.run / "train" / "stage.log"
        survivor = session.launcher.start(session._arguments(workspace.stages[1], 1), log, {PARENT_TRACKS: "1"})
        Lease(tiny.root / ".tithe" / "train.lease").take(survivor)
        assert tiny.wait_until_it_hangs() == survivor.pid
        said: list[str] = []
        session.say = said.append
        session.attempt(workspace.stages[1], lambda beat: None)
        assert survivor.wait(0) == 75
    assert any("left behind" in text for text in said)
    steps = [line["step"] for line in read_lines(workspace.run / "train" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_another_workspace_takes_what_the_cache_has_and_makes_what_it_lost(tiny: Any, second: Any) -> None:
    Heard().run(tiny.workspace)
    heard = Heard()
    heard.run(second.workspace)
    assert heard.how == {"prepare": "restored", "train": "made", "evaluate": "made", "report": "made"}
    assert second.workspace.is_current(second.workspace.stages[0])
    for file in (cache_directory() / "files").rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            file.write_bytes(b"damaged")
    shutil.rmtree(second.root / "artifacts")
    again = Heard()
    again.run(second.workspace)
    assert again.how["prepare"] == "made"


def test_two_campaigns_in_two_workspaces_at_once(tiny: Any, second: Any) -> None:
    for campaign in (tiny, second):
        campaign.plan(seconds=0.2, steps=5)
    processes = [campaign.start("--plain") for campaign in (tiny, second)]
    for process in processes:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    for campaign in (tiny, second):
        assert campaign.made[-3:] == ["train", "evaluate", "report"]


def test_a_second_interrupt_does_not_wait() -> None:
    stop = Stop()
    with signals_ask(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert "SIGTERM" in stop.reason
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
