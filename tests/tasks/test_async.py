"""The async schedule as people run it: real processes, killed, frozen and stopped; each time the consumption log is asked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from sqlalchemy import Connection, create_engine, make_url, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from tasks.registry import get_stage
from tasks.replay import replay_run
from tasks.stage import run_stage
from tasks.workspace import REPOSITORY, Workspace
from tests.postgresql import PASSWORD
from trainer.anchors.store import build_anchors
from trainer.config import CampaignConfig, as_tree, validate
from trainer.config.load import lay_over
from trainer.errors import BusyError, CheckpointError, MismatchError, ResourceError, StalledError, StopRequested
from trainer.experience.database import Database
from trainer.experience.pool import Pool, Step
from trainer.files import sha256_file, write_json
from trainer.metrics import read_lines
from trainer.prompts import read_prompts
from trainer.schedule.terms import pool_url

pytestmark = pytest.mark.smoke

END_ALL_OTHERS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = current_user"
STEPS, GROUPS, LAG = 16, 4, 4
TREE: dict[str, Any] = {
    "campaign": {"name": "async"},
    "prepare": {
        "sources": [
            {
                "source": "reasoning_gym:basic_arithmetic",
                "num_rows": 200,
                "prompt_template": "{expression}=",
                "remove_whitespace": True,
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": ["+"]},
            }
        ],
        "heldout_fraction": 0.2,
    },
    "base": {
        "source": "scratch",
        "scratch": {"alphabet": "0123456789+-()=", "hidden_size": 32, "num_layers": 1, "steps": 40, "decay_steps": 10},
    },
    "anchors": {"num_prompts": 8, "top_k": 4, "refresh_every": 4, "audit_every": 6, "max_drift": 0.0},
    "train": {
        "method": "lora",
        "schedule": "async",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"learning_rate": 1e-3},
        "batch": {
            "prompts_per_step": GROUPS,
            "group_size": 4,
            "minibatches": 2,
            "micro_batch_tokens": 16,  # slow steps, so that a test can act between two of them
        },  # slow steps, to be caught between
        "sampling": {"max_completion_tokens": 4},
        "sampler": {"slots": 16, "groups_per_claim": 2},
        "sync": {"sync_every": 2, "max_policy_update_lag": LAG},
        "stages": [{"steps": STEPS}],
        "heldout": {"every_steps": 0},
        "checkpoints": {"every_steps": 5},
    },
    "reward": {"verifier": "regex", "pattern": "^[0-4]", "num_workers": 1},
    "preflight": {"num_prompts": 0},
    "machine": {"device": "cpu", "threads": 2},
}


ANCHORED: dict[str, Any] = {"train": {"algorithm": {"kl": {"reference": "anchors", "anchor_batch_size": 4}}}}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, base and anchors, made once."""
    root = tmp_path_factory.mktemp("inputs")
    workspace = Workspace(root, validate(TREE))
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    return root / "artifacts"


@dataclass
class Trial:
    """One campaign's train stage in a workspace of its own, as a process that can be killed."""

    root: Path
    config: CampaignConfig
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root, self.config)

    @property
    def run(self) -> Path:
        return self.workspace.run / "train"

    def start(self) -> subprocess.Popen[bytes]:
        write_json(self.root / "config.json", as_tree(self.config))
        arguments = ["train", "--workspace", str(self.root), "--config", str(self.root / "config.json"), "--no-tracking"]
        path = os.pathsep.join(filter(None, [self.environment.get("TEST_PYTHONPATH"), str(REPOSITORY)]))
        environment = {**os.environ, **self.environment, "PYTHONPATH": path}
        with open(self.root / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks", *arguments], cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )
        return self.process

    def log(self) -> str:
        return (self.root / "log").read_text()

    def finish(self) -> None:
        assert self.process is not None
        assert self.process.wait(600) == 0, self.log()

    def pool(self) -> Pool:
        prompts = {prompt.id: prompt for prompt in read_prompts(self.root / "artifacts" / "prompts", "train")}
        database = Database(pool_url(self.config.train, self.run), str(self.run.resolve()), 30.0)
        return Pool(database, self.workspace.identity(get_stage("train")), prompts, "test", 60.0)

    def steps(self) -> list[Step]:
        pool = self.pool()
        try:
            return pool.steps()
        finally:
            pool.close()

    @contextmanager
    def held_at_step(self, number: int) -> Iterator[Connection]:
        """Hold the pool's lock from when so many steps are in the log, so that the run cannot go on, or end, inside the block."""
        url = make_url(pool_url(self.config.train, self.run))
        sqlite = url.drivername == "sqlite"
        options: dict[str, Any] = {"connect_args": {"timeout": 0}} if sqlite else {}
        engine = create_engine(
            url if sqlite else url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT", **options
        )
        schema = "" if sqlite else f"{self.schema()}."
        lock = "SELECT 1" if sqlite else f"SELECT 1 FROM {schema}cursor FOR UPDATE"
        self.wait(lambda: not sqlite or Path(str(url.database)).exists())
        with engine.connect() as connection:

            def held() -> bool:
                try:
                    connection.execute(text("BEGIN IMMEDIATE" if sqlite else "BEGIN"))
                    connection.execute(text(lock)).all()
                    if connection.execute(text(f"SELECT count(*) FROM {schema}steps")).scalar_one() >= number:
                        return True
                except (OperationalError, ProgrammingError):
                    pass  # somebody else is at it, or there are no tables yet
                with suppress(OperationalError):
                    connection.execute(text("ROLLBACK"))
                return False

            self.wait(held, 0.01)
            yield connection
            connection.execute(text("ROLLBACK"))
        engine.dispose()

    def schema(self) -> str:
        database = Database(pool_url(self.config.train, self.run), str(self.run.resolve()), 30.0)
        database.close()
        return database.schema

    def wait(self, ready: Callable[[], object], pause_seconds: float = 0.02) -> None:
        end = time.monotonic() + 600
        while not ready():
            assert self.process is not None
            assert self.process.poll() is None, (self.root / "log").read_text()
            assert time.monotonic() < end, (self.root / "log").read_text()
            time.sleep(pause_seconds)

    def freeze(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.wait(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    def sampler_pid(self, name: str = "s0") -> int | None:
        pool = self.pool()
        try:
            return next((worker.pid for worker in pool.workers() if worker.id == name and "start" not in worker.doing), None)
        finally:
            pool.close()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run / "events.jsonl") if event["kind"] == kind]

    def check_log(self, num_steps: int = STEPS) -> None:
        """Every step used its number of groups, no group counts twice, none is lost, none was too old."""
        pool = self.pool()
        try:
            steps, counts = pool.steps(), pool.counts()
            assert [step.step for step in steps] == list(range(1, num_steps + 1))
            assert [step.version_before for step in steps] == [0, *(step.version_after for step in steps[:-1])]
            used = Counter(group_id for step in steps for group_id in step.group_ids)
            assert all(len(step.group_ids) == GROUPS for step in steps)
            assert set(used.values()) == {1}
            assert counts["consumed"] == len(used) == num_steps * GROUPS
            lags = [
                step.version_before - sample.completion.policy_version
                for step in steps
                for group in pool.groups(step.group_ids)
                for sample in group.samples
            ]
            assert min(lags) >= 0
            assert max(lags) <= LAG
        finally:
            pool.close()


@pytest.fixture
def make_trial(artifacts: Path, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(difference: dict[str, Any] | None = None) -> Trial:
        root = tmp_path / f"trial{len(made)}"
        shutil.copytree(artifacts, root / "artifacts")
        trial = Trial(root, validate(lay_over(TREE, difference or {})))
        made.append(trial)
        return trial

    yield make
    for trial in made:
        if trial.process is not None and trial.process.poll() is None:
            trial.process.kill()
            trial.process.wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_async_run_trains_and_can_be_replayed_to_the_last_bit(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial(lay_over(ANCHORED, {"train": {"heldout": {"every_steps": 6, "num_prompts": 8}}}))
    trial.start()
    trial.finish()
    trial.check_log()
    lines = {line["step"]: line["metrics"] for line in read_lines(trial.run / "metrics.jsonl")}
    assert sorted(lines) == list(range(STEPS + 1))
    for step in range(1, STEPS + 1):
        assert 0 < lines[step]["off_policy/effective_sample_fraction"] <= 1
        assert 0 < lines[step]["off_policy/kept_fraction"] <= 1
        shares = [value for name, value in lines[step].items() if name.startswith("lag/share_to_")]
        assert len(shares) == 5
        assert sum(shares) == pytest.approx(1)
        assert lines[step]["mismatch/mean_abs_logprob"] < 0.2
        assert lines[step]["mismatch/probe"] < 1e-4
    assert max(lines[step]["lag/max"] for step in range(1, STEPS + 1)) > 0
    assert "heldout/accuracy" in lines[6]
    assert [event["step"] for event in trial.events("refresh")] == list(range(4, STEPS, 4))
    assert {lines[step]["memory/reference_bytes"] for step in range(1, STEPS + 1)} == {0.0}
    facts = replay_run(trial.workspace.run)
    assert facts["identical"]
    assert facts["artifact_identical"]
    assert facts["versions_compared"] >= 3
    # a changed sample changes the bits, so the comparison can fail
    engine = create_engine(pool_url(trial.config.train, trial.run))
    with engine.begin() as connection:
        connection.execute(text("UPDATE samples SET reward = 5.0 WHERE group_id = 1 AND position = 0"))
    engine.dispose()
    assert not replay_run(trial.workspace.run)["identical"]


def test_a_refresh_does_not_stop_the_samplers(make_trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner makes anchors only after it has seen groups come in that were sampled since it began to."""
    longer = {"train": {"stages": [{"steps": 500}], "sync": {"max_policy_update_lag": 1000}}}
    trial, build, come = make_trial(lay_over(lay_over(ANCHORED, {"anchors": {"refresh_every": 1}}), longer)), build_anchors, []

    def delivered() -> int:
        pool = trial.pool()
        try:
            counts = pool.counts()
        finally:
            pool.close()
        return sum(counts.get(state, 0) for state in ("ready", "learning", "consumed"))

    def build_late(*args: Any, **options: Any) -> Any:
        before, end = delivered(), time.monotonic() + 300
        while delivered() < before + 3 * GROUPS:
            assert time.monotonic() < end, "no sampler delivers while anchors are made"
            time.sleep(0.05)
        come.append(before)
        if len(come) == 2:
            raise StopRequested("seen enough")
        return build(*args, **options)

    threads = torch.get_num_threads()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("trainer.anchors.guard.build_anchors", build_late)
            with pytest.raises(StopRequested, match="seen enough"):
                run_stage(trial.workspace, get_stage("train"))
    finally:
        torch.set_num_threads(threads)


def test_a_killed_sampler_is_replaced_and_nothing_is_lost(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    trial.start()
    with trial.held_at_step(2):
        pid = trial.sampler_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    trial.finish()
    trial.check_log()
    (event,) = trial.events("restart")
    assert event["culprit"] == "s0"
    assert event["pid"] == pid
    assert "SIGKILL" in event["reason"]


def test_a_frozen_sampler_is_ended_at_its_deadline_and_its_groups_go_to_another(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial({"train": {"watchdog": {"deadline_seconds": 20.0}}})
    trial.start()
    with trial.held_at_step(2):
        pid = trial.sampler_pid()
        assert pid is not None
        trial.freeze(pid)  # while it holds no lock
    trial.finish()
    trial.check_log()
    events = [event for event in trial.events("restart") if event["pid"] == pid]
    assert len(events) == 1
    assert "no sign of life" in events[0]["reason"]
    assert not is_alive(pid)


def test_a_killed_learner_goes_on_to_the_same_bits_and_its_samplers_end_with_it(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    process = trial.start()
    with trial.held_at_step(7):  # past the checkpoint of step 5
        pid = trial.sampler_pid()
        assert pid is not None
        process.kill()
        process.wait()
    before = trial.steps()
    assert 7 <= len(before) < STEPS
    end = time.monotonic() + 300
    while is_alive(pid):
        assert time.monotonic() < end
        time.sleep(0.05)
    trial.start()
    trial.finish()
    trial.check_log()
    assert trial.steps()[: len(before)] == before
    assert any("consumption log" in event["reason"] for event in trial.events("resume"))
    assert [line["step"] for line in read_lines(trial.run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert replay_run(trial.workspace.run)["identical"]


def test_sigterm_ends_everything_in_order_with_a_checkpoint_and_the_run_goes_on(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    process = trial.start()
    with trial.held_at_step(6):
        pid = trial.sampler_pid()
        assert pid is not None
        process.terminate()
    assert process.wait(600) == StopRequested.exit_code
    assert not is_alive(pid)
    used = trial.steps()
    checkpoints = sorted(path.name for path in (trial.run / "checkpoints").glob("step_*"))
    assert checkpoints[-1] == f"step_{len(used):06d}"
    pool = trial.pool()
    try:
        assert pool.counts().get("sampling", 0) == pool.counts().get("learning", 0) == 0
    finally:
        pool.close()
    trial.start()
    trial.finish()
    trial.check_log()


def test_a_lost_database_connection_is_taken_up_again(
    make_trial: Callable[..., Trial], guarded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the database's password stands in no file of the run."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    trial = make_trial({"train": {"pool": {"url": guarded_url}}})
    trial.start()
    for step in (2, 5, 8):
        with trial.held_at_step(step) as connection:
            assert connection.execute(text(END_ALL_OTHERS)).all()
    trial.finish()
    trial.check_log()
    assert replay_run(trial.workspace.run)["identical"]
    written = [path for path in trial.root.rglob("*") if path.is_file()]
    assert any(b"guarded@" in path.read_bytes() for path in written)
    assert not [path for path in written if PASSWORD.encode() in path.read_bytes()]


def test_a_pool_that_is_removed_under_a_run_ends_it_by_name_and_nothing_is_used_twice(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    process, file = trial.start(), trial.run / "experience.db"
    with trial.held_at_step(6):  # past the checkpoint of step 5
        for path in trial.run.glob("experience.db*"):
            path.rename(trial.root / path.name)
    assert process.wait(600) == StalledError.exit_code, trial.log()
    assert "was removed or replaced while the run used it" in trial.log()
    assert not file.exists()
    trial.start()
    assert trial.process is not None
    assert trial.process.wait(600) == CheckpointError.exit_code, trial.log()
    assert "the pool was removed or replaced, and samples would be used twice" in trial.log()
    for path in trial.run.glob("experience.db*"):
        path.unlink()
    for path in trial.root.glob("experience.db*"):
        path.rename(trial.run / path.name)
    trial.start()
    trial.finish()
    trial.check_log()


@pytest.mark.parametrize("full", ["pool", "run"])
def test_a_full_disk_ends_a_run_by_name_and_space_lets_it_go_on(
    make_trial: Callable[..., Trial], tmp_path: Path, full: str
) -> None:
    """Under the pool alone, or under everything that the run writes: checkpoints, policies, metrics."""
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs more rights than these")
    try:
        trial = make_trial({"train": {"pool": {"url": f"sqlite:///{small}/experience.db"}}} if full == "pool" else None)
        if full == "run":
            (small / "runs").mkdir()
            trial.workspace.run.parent.mkdir(parents=True, exist_ok=True)
            trial.workspace.run.symlink_to(small / "runs")
        process = trial.start()
        with trial.held_at_step(3):
            fill_up(small / "ballast")
        assert process.wait(600) == ResourceError.exit_code, trial.log()
        assert "no space left on the disk" in trial.log()
        assert "Traceback" not in trial.log()
        (small / "ballast").unlink()
        trial.start()
        trial.finish()
        trial.check_log()
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def fill_up(path: Path) -> None:
    """Write a file until the disk is full."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_second_learner_on_a_pool_is_refused_by_name(make_trial: Callable[..., Trial], tmp_path: Path) -> None:
    shared = {"train": {"pool": {"url": f"sqlite:///{tmp_path}/shared.db"}}}
    trial, other = make_trial(shared), make_trial(shared)
    first = trial.start()
    with trial.held_at_step(2):  # so it holds no lock
        trial.freeze(first.pid)
    second = other.start()
    assert second.wait(600) == BusyError.exit_code, other.log()
    assert f"has a learner already: process {first.pid} on" in other.log()
    os.kill(first.pid, signal.SIGCONT)
    trial.finish()
    trial.check_log()


def test_a_clock_that_jumps_loses_nothing(make_trial: Callable[..., Trial], tmp_path: Path) -> None:
    """Leases are by the wall clock: a day ahead ends them all, a day back keeps them for long; samples still count once."""
    trial, clock = make_trial(), tmp_path / "clock"
    trial.environment = {"TEST_CLOCK": str(clock), "TEST_PYTHONPATH": str(REPOSITORY / "tests" / "flows" / "clock")}
    trial.start()
    for step, seconds in ((3, "86400"), (6, "-86400"), (9, "0")):
        with trial.held_at_step(step):
            clock.write_text(seconds)
    trial.finish()
    trial.check_log()
    assert not trial.events("restart")


def test_a_run_that_ended_well_is_trained_anew_with_an_empty_pool(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial({"train": {"stages": [{"steps": 2}]}})
    trial.start()
    trial.finish()
    first = sha256_file(trial.root / "artifacts" / "policy" / "adapter_config.json")
    shutil.rmtree(trial.root / "artifacts" / "policy")
    trial.start()
    trial.finish()
    trial.check_log(2)
    assert sha256_file(trial.root / "artifacts" / "policy" / "adapter_config.json") == first


def test_a_sampler_with_another_base_stops_the_run_and_names_the_cause(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial()
    process = trial.start()
    weights = trial.root / "artifacts" / "base" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 0.5
    save_file(tensors, trial.root / "other", {"format": "pt"})
    with trial.held_at_step(0):  # the learner has loaded its base and can start no sampler yet
        os.replace(trial.root / "other", weights)
    assert process.wait(600) == MismatchError.exit_code
    said = (trial.root / "log").read_text()
    assert "sampler s0" in said
    assert "another base" in said
    assert trial.steps() == []


def test_a_colocated_run_goes_on_after_a_kill_and_can_be_replayed(make_trial: Callable[..., Trial]) -> None:
    trial = make_trial({"train": {"schedule": "colocated"}})
    process = trial.start()
    with trial.held_at_step(6):
        process.kill()
        process.wait()
    before = trial.steps()
    trial.start()
    trial.finish()
    trial.check_log()
    assert trial.steps()[: len(before)] == before
    lines = [line["metrics"] for line in read_lines(trial.run / "metrics.jsonl")]
    assert {line["memory/backbone_copies"] for line in lines[-2:]} == {1.0}
    assert replay_run(trial.workspace.run)["identical"]
