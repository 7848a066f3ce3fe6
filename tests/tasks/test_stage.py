"""A stage runs once, alone, and leaves either a whole artifact or the old one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tasks import command
from tasks.record import read_record
from tasks.registry import StagePaths, get_stage
from tasks.stage import run_stage, stage_lock, stop_on_signals
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import CampaignConfig, load_config
from trainer.errors import BusyError, DataError, DivergedError, StopRequested, name_os_error
from trainer.files import read_json, read_manifest

PARAMS = REPOSITORY / "params.yaml"
PREPARE, BASE = get_stage("prepare"), get_stage("base")


class Toy:
    """Stands in for a stage's function: writes one file and remembers how often it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failure: BaseException | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
            self.calls.append(name)
            (paths.out / "data").write_text(f"{name} {len(self.calls)}", encoding="utf-8")
            (paths.run / "log").write_text("x", encoding="utf-8")
            if self.failure:
                raise self.failure
            return {"rows": len(self.calls)}

        module = types.ModuleType(f"tasks.{name}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"tasks.{name}", module)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy()
    toy.install(monkeypatch, "prepare")
    toy.install(monkeypatch, "base")
    return toy


@pytest.fixture
def handlers() -> Iterator[None]:
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


def place(root: Path, *overrides: str) -> Workspace:
    return Workspace(root, load_config(PARAMS, overrides))


def text(workspace: Workspace, artifact: str) -> str:
    return (workspace.artifact(artifact) / "data").read_text(encoding="utf-8")


def test_a_stage_leaves_an_artifact_a_result_and_the_resolved_configuration(tmp_path: Path, toy: Toy) -> None:
    workspace = place(tmp_path)
    prompts, base = run_stage(workspace, PREPARE), run_stage(workspace, BASE)
    assert toy.calls == ["prepare", "base"]
    assert base == read_manifest(workspace.artifact("base"))
    assert base["rows"] == 2
    assert base["inputs"] == {"prompts": prompts["content_sha256"]}
    assert base["params"]["campaign.seed"] == 0
    assert read_json(workspace.run / "base" / "result.json") == {"key": base["key"], "rows": 2}
    assert read_json(workspace.run / "config.json")["campaign"]["name"] == "quickstart"


def test_a_current_artifact_is_left_alone(tmp_path: Path, toy: Toy) -> None:
    first = run_stage(place(tmp_path), PREPARE)
    assert run_stage(place(tmp_path, "machine.threads=1"), PREPARE) == first
    assert toy.calls == ["prepare"]
    run_stage(place(tmp_path), PREPARE, force=True)
    run_stage(place(tmp_path, "prepare.max_prompt_tokens=9"), PREPARE)
    assert toy.calls == ["prepare"] * 3


@pytest.mark.parametrize(
    ("name", "said"),
    [("data", "prompts/data does not match its sha256"), ("manifest.json", "prompts has no readable manifest")],
)
def test_a_damaged_artifact_is_made_again_and_said(tmp_path: Path, toy: Toy, name: str, said: str) -> None:
    workspace = place(tmp_path)
    run_stage(workspace, PREPARE)
    assert not (workspace.run / "prepare" / "events.jsonl").exists(), "the first time nothing is mended"
    (workspace.artifact("prompts") / name).write_text("prepare 7", encoding="utf-8")
    run_stage(workspace, PREPARE)
    assert text(workspace, "prompts") == "prepare 2"
    [event] = map(json.loads, (workspace.run / "prepare" / "events.jsonl").read_text(encoding="utf-8").splitlines())
    assert event["kind"] == "rebuild"
    assert said in event["reason"]
    assert event["reason"].endswith("; the artifact was made again")


def test_a_missing_or_damaged_input_is_refused_before_the_stage_runs(tmp_path: Path, toy: Toy) -> None:
    workspace = place(tmp_path)
    with pytest.raises(DataError, match="prompts has no readable manifest"):
        run_stage(workspace, BASE)
    run_stage(workspace, PREPARE)
    (workspace.artifact("prompts") / "data").write_text("prepare 7", encoding="utf-8")
    with pytest.raises(DataError, match="does not match its sha256"):
        run_stage(workspace, BASE)
    assert toy.calls == ["prepare"]


@pytest.mark.parametrize("failure", [DivergedError("nan"), StopRequested("stop"), ZeroDivisionError()])
def test_a_stage_that_fails_leaves_the_old_artifact_and_its_run_directory(
    tmp_path: Path, toy: Toy, failure: BaseException
) -> None:
    workspace = place(tmp_path)
    run_stage(workspace, PREPARE)
    toy.failure = failure
    with pytest.raises(type(failure)):
        run_stage(workspace, PREPARE, force=True)
    assert text(workspace, "prompts") == "prepare 1"
    assert workspace.is_current(PREPARE)
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["prompts"]
    assert (workspace.run / "prepare" / "log").exists()
    run_stage(workspace, PREPARE)  # current: the old one stands, and nobody says that the second attempt ended well
    record = read_record(workspace.run / "prepare")
    assert record is not None
    assert (record.status, record.artifact) == ("KILLED" if isinstance(failure, StopRequested) else "FAILED", None)


def killed_before(call: int, act: Callable[[], object]) -> bool:
    """Act in a process that is killed before that call to change or secure a file, and return whether it came so far."""
    pid = os.fork()
    if pid == 0:
        numbers = count(1)

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def change(*arguments: Any, **options: Any) -> Any:
                if next(numbers) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return change

        try:
            for name in ("rename", "replace", "unlink", "mkdir", "rmdir", "fsync"):
                setattr(os, name, counted(getattr(os, name)))
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("again", [False, True])
def test_killed_anywhere_it_ends_as_if_nothing_had_happened(
    tmp_path: Path, toy: Toy, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr("tasks.stage.git_tags", lambda repository: {})
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    lost = 0
    for call in count(1):
        workspace = place(tmp_path / str(call))
        if again:
            run_stage(workspace, PREPARE)
        toy.calls.clear()
        was_killed = killed_before(call, lambda: run_stage(workspace, PREPARE, force=again))  # noqa: B023 (called at once)
        manifest = read_manifest(workspace.artifact("prompts"))
        if workspace.is_current(PREPARE):
            assert manifest is not None
            run_stage(workspace, PREPARE)
            assert toy.calls == [], "what is finished does not run again"
        else:
            lost += 1
            manifest = run_stage(workspace, PREPARE)
            assert toy.calls == ["prepare"]
        record = read_record(workspace.run / "prepare")
        assert record is not None
        begun_again = again and record.status != "FINISHED"  # killed on the way to the second, the first artifact stands
        if not begun_again:
            assert record.status == "FINISHED", record
            assert record.error is None
            assert record.artifact is not None
            assert record.artifact["content_sha256"] == manifest["content_sha256"]
            assert read_json(workspace.run / "prepare" / "result.json") == {"key": manifest["key"], "rows": manifest["rows"]}
        assert [path.name for path in (workspace.root / "artifacts").iterdir() if path.name[0] != "."] == ["prompts"]
        if not was_killed:
            break
    assert call > 20
    assert lost >= 1


def test_only_one_process_makes_an_artifact(tmp_path: Path, toy: Toy) -> None:
    workspace = place(tmp_path)
    script = f"""
import sys
from pathlib import Path
from tasks.registry import get_stage
from tasks.stage import stage_lock
from tasks.workspace import Workspace
from trainer.config import load_config
with stage_lock(Workspace(Path({str(tmp_path)!r}), load_config(Path({str(PARAMS)!r}))), get_stage("prepare")):
    print("held", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(BusyError, match=f"pid {holder.pid}"):
                run_stage(workspace, PREPARE)
            with stage_lock(workspace, BASE):  # another stage is free
                pass
        finally:
            holder.kill()
    run_stage(workspace, PREPARE)  # the lock died with its holder
    assert toy.calls == ["prepare"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request_to_stop(handlers: None, number: signal.Signals) -> None:
    stop_on_signals()
    with pytest.raises(StopRequested, match=f"{number.name}.*run the same command again"):
        signal.raise_signal(number)


@pytest.mark.parametrize(("failure", "code"), [(None, 0), (DivergedError("lost"), 5), (StopRequested("later"), 75)])
def test_the_exit_code_says_what_happened(
    tmp_path: Path, toy: Toy, handlers: None, capsys: pytest.CaptureFixture[str], failure: BaseException | None, code: int
) -> None:
    toy.failure = failure
    assert command.main(["prepare", "--workspace", str(tmp_path), "--config", str(PARAMS), "--no-tracking"]) == code
    said = capsys.readouterr()
    if failure is None:
        assert said.out == f"prepare: {tmp_path / 'artifacts' / 'prompts'}\n"
    else:
        assert said.err == f"{'stopped' if code == 75 else 'error'}: {failure}\n"


def test_a_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, toy: Toy, handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "file"
    place.write_text("")
    assert command.main(["prepare", "--workspace", str(place), "--config", str(PARAMS), "--no-tracking"]) == 8
    assert capsys.readouterr().err.splitlines()[0].startswith(f"error: {place}")
    with pytest.raises(ConnectionRefusedError):
        name_os_error(ConnectionRefusedError(111, "refused"))


def test_a_configuration_file_that_is_not_there_is_a_mistake(handlers: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["prepare", "--config", "absent.json"]) == 2
    assert capsys.readouterr().err.startswith("error: --config = 'absent.json'")


def test_an_unknown_stage_is_a_mistake_of_the_user(handlers: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["prepair", "--config", str(PARAMS)]) == 2
    assert "did you mean 'prepare'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    command.limit_threads(load_config(REPOSITORY / "params.yaml", ["machine.threads=3"]))
    assert (environment["OMP_NUM_THREADS"], environment.get("GOMP_SPINCOUNT")) == ("3", spins)


def test_threads_are_as_many_as_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a big machine a job has a few."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    command.limit_threads(load_config(REPOSITORY / "params.yaml"))
    assert os.environ["OMP_NUM_THREADS"] == "5"
