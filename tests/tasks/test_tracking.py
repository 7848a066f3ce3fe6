"""MLflow, really: what a run directory holds arrives, once, whatever is away or dies meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.locks import Owner
from tasks.record import add_tags, begin, finish, flatten, read_record, truth
from tasks.tracking import Cursor, Mirror, Sidecar, TrackingError, as_value, clean_key, is_behind, its_turn, read_new
from tasks.workspace import REPOSITORY
from trainer.config import CampaignConfig, load_config
from trainer.files import write_json, write_manifest
from trainer.metrics import METRICS, RunWriter
from trainer.processes import free_port

CONFIG: CampaignConfig = load_config(REPOSITORY / "params.yaml")


# --- how far a file was sent: no MLflow needed ---------------------------------------------------------------------------


def lines(path: Path, steps: list[int], mode: str = "a") -> None:
    with open(path, mode) as file:
        for step in steps:
            file.write(json.dumps({"step": step, "time": time.time(), "metrics": {"m": float(step)}}) + "\n")


def test_a_run_directory_that_cannot_be_written_to_is_named_and_not_mlflow(tmp_path: Path) -> None:
    (tmp_path / ".mlflow.lock").mkdir()  # even for root, who may write everywhere
    with (
        pytest.raises(TrackingError, match=rf"{tmp_path} cannot be written to \(Is a directory\).*make it writable"),
        its_turn(tmp_path),
    ):
        pass


def steps_of(found: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in found]


def test_only_new_whole_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    assert read_new(path, Cursor()) == ([], Cursor())
    lines(path, [1, 2])
    with open(path, "a") as file:
        file.write('{"step": 3, "ti')
    found, cursor = read_new(path, Cursor())
    assert steps_of(found) == [1, 2]
    assert read_new(path, cursor)[0] == []
    with open(path, "a") as file:
        file.write('me": 1.0, "metrics": {}}\n')
    found, cursor = read_new(path, cursor)
    assert steps_of(found) == [3]


def test_a_file_cut_back_to_a_checkpoint_and_grown_again_sends_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    lines(path, [1, 2, 3, 4, 5])
    _, cursor = read_new(path, Cursor())
    RunWriter(tmp_path, resume_step=3)  # what a resumed stage does
    found, cursor = read_new(path, cursor)
    assert steps_of(found) == []
    for step in (4, 5, 6):
        lines(path, [step])
        found, cursor = read_new(path, cursor)
        assert steps_of(found) == ([6] if step == 6 else [])


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), min_size=1, max_size=8))
def test_whatever_is_cut_and_read_each_step_arrives_once_and_in_order(history: list[tuple[int, int, bool]]) -> None:
    """Each entry grows the file, perhaps cuts it back, and perhaps lets the shipper look."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, cursor, step, sent = Path(folder) / METRICS, Cursor(), 0, []
        for grow, cut, look in history:
            lines(path, list(range(step + 1, step + grow + 1)))
            step += grow
            if look:
                found, cursor = read_new(path, cursor)
                sent += steps_of(found)
            if cut:
                step = max(1, step - cut)
                RunWriter(Path(folder), resume_step=step)
        highest = step
        found, cursor = read_new(path, cursor)
        sent += steps_of(found)
        assert sent == sorted(set(sent))
        assert set(range(1, highest + 1)) <= set(sent)


def test_names_and_values_become_what_mlflow_takes() -> None:
    assert clean_key("eval/pass@1 [%]") == "eval/pass_1 ___"
    assert as_value([1, 2]) == "[1, 2]"
    assert as_value(None) == "null"
    assert len(as_value("x" * 10_000)) == 6000
    flat = flatten({"a": {"b": 1, "c": [1, 2]}, "s": [{"n": "x"}], "e": {}})
    assert flat == {"a.b": 1, "a.c": [1, 2], "s.0.n": "x", "e": {}}


# --- records -------------------------------------------------------------------------------------------------------------


def start_stage(run: Path, identity: str = "i") -> None:
    begin(run / "train", "stage", "train", CONFIG, identity, {"train.optimizer.learning_rate": 1e-4}, {"stage": "train"})


def start_campaign(run: Path) -> None:
    begin(run, "campaign", run.name, CONFIG, "c", {"campaign.name": "x"}, {"campaign": "x"})


def test_a_record_goes_on_after_a_failure_and_begins_anew_after_a_success(tmp_path: Path) -> None:
    start_stage(tmp_path)
    first = finish(tmp_path / "train", "FAILED", error="e")
    start_stage(tmp_path)
    second = finish(tmp_path / "train", "FINISHED")
    assert (second.id, second.attempt, second.error) == (first.id, 2, None)
    start_stage(tmp_path)
    third = read_record(tmp_path / "train")
    assert third is not None
    assert third.id != first.id
    start_stage(tmp_path, identity="another")
    fourth = read_record(tmp_path / "train")
    assert fourth is not None
    assert fourth.id != third.id


def test_a_stage_that_ends_while_it_is_looked_at_is_not_called_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_stage(tmp_path)

    def ends(owner: Owner) -> bool:
        finish(tmp_path / "train", "FINISHED")  # and its process goes
        return False

    monkeypatch.setattr(Owner, "is_alive", property(ends))
    record = truth(tmp_path / "train")
    assert record is not None
    assert record.status == "FINISHED"


def test_a_dead_owner_means_killed(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tasks.record import begin
from trainer.config import load_config
begin(Path({str(tmp_path)!r}), "stage", "train", load_config(Path("params.yaml")), "i", {{}}, {{}})
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True)
    record = truth(tmp_path)
    assert record is not None
    assert record.status == "KILLED"
    start_stage(tmp_path)
    alive = truth(tmp_path / "train")
    assert alive is not None
    assert alive.status == "RUNNING"


# --- a real store --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory whose MLflow store was made once, in a process of its own as always."""
    state = tmp_path_factory.mktemp("mlflow")
    environment = {**os.environ, "TITHE_STATE": str(state), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    subprocess.run([sys.executable, "-m", "tasks.tracking", "initialise"], cwd=REPOSITORY, env=environment, check=True)
    return state


@pytest.fixture
def mirror(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mirror:
    state = tmp_path / "state"
    state.mkdir()
    shutil.copy(empty_store / "mlflow.db", state / "mlflow.db")
    monkeypatch.setenv("TITHE_STATE", str(state))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Mirror(f"sqlite:///{state / 'mlflow.db'}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory in which a campaign and its train stage run."""
    run = tmp_path / "workspace" / "runs" / "quickstart-1234"
    start_campaign(run)
    write_json(run / "config.json", {"campaign": {"name": "quickstart"}})
    start_stage(run)
    return run


def artifact(run: Path) -> dict[str, Any]:
    folder = run.parent.parent / "artifacts" / "policy"
    folder.mkdir(parents=True)
    (folder / "adapter.bin").write_bytes(b"weights")
    manifest = write_manifest(folder, {"stage": "train"})
    return {"path": str(folder), "content_sha256": manifest["content_sha256"], "upload": "stage"}


def history(mirror: Mirror, run: Path, key: str) -> list[tuple[int, float]]:
    sidecar = Sidecar.read(run)
    return [(m.step, m.value) for m in mirror._client.get_metric_history(sidecar.run_id, key)]


@pytest.mark.smoke
def test_a_whole_campaign_arrives(mirror: Mirror, run: Path) -> None:
    writer = RunWriter(run / "train")
    writer.metrics(1, {"reward/mean": 0.5, "kl": float("nan"), "odd@name": 1.0})
    mirror.sync(run)
    client = mirror._client
    parent, child = (client.get_run(Sidecar.read(place).run_id) for place in (run, run / "train"))
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (parent.info.run_name, child.info.run_name) == ("quickstart-1234", "train")
    assert (parent.info.status, child.info.status) == ("RUNNING", "RUNNING")
    assert child.data.params == {"train.optimizer.learning_rate": "0.0001"}
    assert child.data.metrics["odd_name"] == 1.0
    assert child.data.tags["seed"] == "0"
    assert len(child.data.tags["config"]) == 64
    writer.metrics(2, {"reward/mean": 0.75})
    finish(run / "train", "FINISHED", final={"trained/pass": 0.9}, artifact=artifact(run))
    add_tags(run, {"dvc.policy": "abc.dir"})
    finish(run, "FINISHED")
    assert is_behind(run)
    mirror.sync(run)
    assert not is_behind(run)
    assert history(mirror, run / "train", "reward/mean") == [(1, 0.5), (2, 0.75)]
    parent, child = (client.get_run(r.info.run_id) for r in (parent, child))
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert parent.data.metrics["final/train/trained/pass"] == 0.9
    assert parent.data.tags["dvc.policy"] == "abc.dir"
    files = {file.path for file in client.list_artifacts(child.info.run_id, "policy")}
    assert files == {"policy/adapter.bin", "policy/manifest.json"}
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["config.json"]


@pytest.mark.smoke
def test_alarms_become_tags_of_stage_and_campaign(mirror: Mirror, run: Path) -> None:
    writer = RunWriter(run / "train")
    mirror.sync(run)
    for step, value in ((3, 0.4), (7, 0.5)):
        writer.event("alarm", f"KL to the reference is {value}", step=step, signal="kl", value=value, threshold=0.3)
    writer.event("sync", "handed over policy version 8", step=8)
    writer.event("alarm", "lag is 31, past its threshold 28.8", step=9, signal="lag", value=31.0, threshold=28.8)
    assert is_behind(run)
    mirror.sync(run)
    for place in (run, run / "train"):
        tags = mirror._client.get_run(Sidecar.read(place).run_id).data.tags
        assert tags["alarm.kl"] == "step 7: KL to the reference is 0.5"
        assert tags["alarm.lag"].startswith("step 9: lag is 31")
        assert tags["alarms"] == "kl, lag"
    RunWriter(run / "train", resume_step=8)  # the step of the second alarm is taken again
    mirror.sync(run)
    tags = mirror._client.get_run(Sidecar.read(run / "train").run_id).data.tags
    assert tags["alarms"] == "kl"
    assert "alarm.lag" not in tags


@pytest.mark.smoke
def test_a_resumed_stage_goes_on_in_the_same_run_without_double_steps(mirror: Mirror, run: Path) -> None:
    writer = RunWriter(run / "train")
    for step in range(1, 6):
        writer.metrics(step, {"m": float(step)})
    finish(run / "train", "FAILED", error="killed")
    mirror.sync(run)
    first = Sidecar.read(run / "train").run_id
    assert mirror._client.get_run(first).info.status == "FAILED"
    start_stage(run)
    writer = RunWriter(run / "train", resume_step=3)
    mirror.sync(run)
    assert mirror._client.get_run(first).info.status == "RUNNING"
    for step in (4, 5, 6):
        writer.metrics(step, {"m": float(step)})
        mirror.sync(run)
    finish(run / "train", "FINISHED")
    mirror.sync(run)
    assert Sidecar.read(run / "train").run_id == first
    assert history(mirror, run / "train", "m") == [(step, float(step)) for step in range(1, 7)]
    assert mirror._client.get_run(first).data.tags["attempt"] == "2"


@pytest.mark.smoke
def test_more_than_one_batch_arrives(mirror: Mirror, run: Path) -> None:
    writer = RunWriter(run / "train")
    for step in range(1, 71):
        writer.metrics(step, {f"m{n}": float(step) for n in range(40)})
    mirror.sync(run)
    assert len(history(mirror, run / "train", "m39")) == 70


@pytest.mark.smoke
def test_a_new_tag_is_all_that_is_sent(mirror: Mirror, run: Path) -> None:
    finish(run / "train", "FINISHED", final={"reward": 0.5})
    finish(run, "FINISHED")
    mirror.sync(run)
    before = mirror.row(run).final
    add_tags(run / "train", {"dvc.md5": "0123"})
    mirror.sync(run)
    stage = mirror._client.get_run(Sidecar.read(run / "train").run_id)
    assert stage.data.tags["dvc.md5"] == "0123"
    assert stage.data.tags["stage"] == "train"
    assert stage.info.status == "FINISHED"
    assert len(mirror._client.get_metric_history(stage.info.run_id, "final/reward")) == 1
    assert mirror.row(run).final == before == {"train/reward": 0.5}
    begin(run / "train", "stage", "train", CONFIG, "another", {}, {"stage": "train"})
    mirror.sync(run)
    assert mirror._client.get_run(Sidecar.read(run / "train").run_id).info.status == "RUNNING"


def test_a_run_deleted_in_mlflow_is_made_again(mirror: Mirror, run: Path) -> None:
    RunWriter(run / "train").metrics(1, {"m": 1.0})
    mirror.sync(run)
    mirror._client.delete_run(Sidecar.read(run / "train").run_id)
    finish(run / "train", "FINISHED")
    mirror.sync(run)
    assert mirror._client.get_run(Sidecar.read(run / "train").run_id).info.lifecycle_stage == "active"
    assert history(mirror, run / "train", "m") == [(1, 1.0)]


@pytest.mark.smoke
def test_another_store_gets_everything(mirror: Mirror, run: Path, empty_store: Path, tmp_path: Path) -> None:
    RunWriter(run / "train").metrics(1, {"m": 1.0})
    mirror.sync(run)
    shutil.copy(empty_store / "mlflow.db", tmp_path / "other.db")
    other = Mirror(f"sqlite:///{tmp_path / 'other.db'}")
    other.sync(run)
    assert history(other, run / "train", "m") == [(1, 1.0)]


@pytest.mark.smoke
def test_three_processes_can_make_the_store_at_the_same_time(tmp_path: Path) -> None:
    environment = {**os.environ, "TITHE_STATE": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "tasks.tracking", "initialise"]
    started = [subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said


# --- outages -------------------------------------------------------------------------------------------------------------


class MlflowServer:
    """A real MLflow server over HTTP that can be killed and started again on the same store and port."""

    def __init__(self, state: Path, port: int):
        self.state, self.port = state, port
        self.process: subprocess.Popen[bytes] | None = None
        self.uri = f"http://127.0.0.1:{port}"

    def start(self) -> None:
        from urllib.request import urlopen

        store = ["--backend-store-uri", f"sqlite:///{self.state / 'mlflow.db'}"]
        files = ["--artifacts-destination", str(self.state / "files")]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "DO_NOT_TRACK": "true"}
        deadline = time.monotonic() + 300
        while True:
            if self.process is None or self.process.poll() is not None:  # or what was killed still held the port
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "mlflow", "server", *place, *store, *files],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            try:
                with urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)

    def kill(self) -> None:
        import signal

        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowServer]:
    state = tmp_path / "server"
    state.mkdir()
    shutil.copy(empty_store / "mlflow.db", state / "mlflow.db")
    monkeypatch.setenv("TITHE_STATE", str(state))
    server = MlflowServer(state, free_port())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    yield server
    server.kill()


@pytest.mark.smoke
def test_an_outage_stops_nothing_and_loses_nothing(server: MlflowServer, run: Path) -> None:
    """Absent at first, there in the middle, killed, and back only after the shipper has given up."""
    root = run.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    follow = [sys.executable, "-m", "tasks.tracking", "follow", str(root), str(run)]
    shipper = subprocess.Popen(
        follow, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert shipper.stdin is not None
    writer = RunWriter(run / "train")
    writer.metrics(1, {"m": 1.0})
    server.start()
    deadline = time.monotonic() + 300
    while Sidecar.read(run / "train").cursor.last_step != 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    server.kill()
    writer.metrics(2, {"m": 2.0})
    finish(run / "train", "FINISHED", artifact=artifact(run))
    finish(run, "FINISHED")
    shipper.stdin.close()
    assert shipper.wait(300) == 1
    assert shipper.stderr is not None
    said = shipper.stderr.read()
    shipper.stderr.close()
    assert "The campaign goes on" in said, said
    assert is_behind(run)
    server.start()
    mirror = Mirror(server.uri)
    mirror.sync(run)
    assert not is_behind(run)
    assert history(mirror, run / "train", "m") == [(1, 1.0), (2, 2.0)]
    child = mirror._client.get_run(Sidecar.read(run / "train").run_id)
    assert child.info.status == "FINISHED"
    assert {f.path for f in mirror._client.list_artifacts(child.info.run_id, "policy")} == {
        "policy/adapter.bin",
        "policy/manifest.json",
    }


@pytest.mark.smoke
def test_an_absent_server_is_one_error_at_once(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITHE_STATE", str(tmp_path / "state"))
    mirror = Mirror("http://127.0.0.1:9")
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9"):
        mirror.sync(run)
    assert Sidecar.read(run).run_id == ""
