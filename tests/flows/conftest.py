"""A campaign of tiny stages in a temporary workspace, and one real Prefect server for all tests that ask for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.server import PrivateServer
from flows.workspaces import resolve_config, resolve_workspace
from tasks.workspace import REPOSITORY, Workspace
from trainer.files import read_json, sha256_text, write_json

HERE = Path(__file__).parent
STAGES_NAME = "tiny_stages:STAGES"


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state directory for the whole session, so that databases are made once."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def place(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of this machine's state goes to the temporary place, and nothing of the outside is used."""
    monkeypatch.setenv("TITHE_STATE", str(state))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(HERE)]))
    monkeypatch.syspath_prepend(str(HERE))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Campaign:
    """A tiny campaign: its workspace, its planned misfortunes, and ways to run it."""

    root: Path
    overrides: list[str]

    def plan(self, **wishes: Any) -> None:
        """Write the wishes down at once: a stage that runs reads them all the time."""
        write_json(self.root / "tiny.json", wishes)

    @property
    def workspace(self) -> Workspace:
        return resolve_workspace(resolve_config(None, self.overrides), root=self.root, stages_name=STAGES_NAME)

    @property
    def made(self) -> list[str]:
        """The stages that really ran, in order."""
        file = self.root / "made.txt"
        return file.read_text().split() if file.exists() else []

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", "run", *self.place(), "--no-fork", *options]

    def place(self) -> list[str]:
        """What names this campaign to any command."""
        chosen = [word for override in self.overrides for word in ("-S", override)]
        return [*chosen, "--workspace", str(self.root), "--stages", STAGES_NAME]

    def run(self, *options: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*options),
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*options),
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_it_hangs(self) -> int:
        """Wait until the train stage is where the wish `hang_at` left it, and return the pid of its process."""
        _eventually((self.workspace.run / "train" / "hang_at.happened").exists)
        return int(read_json(self.workspace.run / "train" / "heartbeat")["pid"])

    def wait_for_step(self, step: int, timeout: float = 240) -> int:
        """Wait until the train stage, which must not end meanwhile, has a checkpoint of that step; return its pid."""
        checkpoint = self.workspace.run / "train" / "checkpoint.json"
        _eventually(lambda: checkpoint.exists() and json.loads(checkpoint.read_text())["step"] >= step, timeout)
        return int(json.loads((self.workspace.run / "train" / "heartbeat").read_text())["pid"])


def _eventually(true: Callable[[], Any], timeout: float = 240) -> Any:
    """Return the first truthy value of a question that is asked again and again."""
    deadline = time.monotonic() + timeout
    while True:
        value = true()
        if value:
            return value
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    return _eventually


def common(tmp_path: Path) -> list[str]:
    """Overrides of all campaigns of a test: a seed of its own, so that no test takes another's results from the cache."""
    return [f"campaign.seed={int(sha256_text(str(tmp_path))[:6], 16)}", "limits.grace_seconds=120"]


@pytest.fixture
def tiny(tmp_path: Path) -> Campaign:
    (tmp_path / "campaign").mkdir()
    return Campaign(tmp_path / "campaign", ["campaign.name=tiny", *common(tmp_path)])


@pytest.fixture
def second(tmp_path: Path) -> Campaign:
    """Another campaign, in another workspace."""
    (tmp_path / "second").mkdir()
    return Campaign(tmp_path / "second", ["campaign.name=second", *common(tmp_path)])


@pytest.fixture(scope="session")
def prefect_server(state: Path) -> Iterator[str]:
    """The API address of a real Prefect server, started when first asked for."""
    before = os.environ.get("TITHE_STATE")
    os.environ["TITHE_STATE"] = str(state)
    server = PrivateServer()
    try:
        server.wait_ready()
        (state / "prefect" / "initialised").touch()
        yield server.api_url
    finally:
        server.stop()
        if before is None:
            del os.environ["TITHE_STATE"]
        else:
            os.environ["TITHE_STATE"] = before


@pytest.fixture(scope="session")
def mlflow_store(state: Path) -> None:
    """Make the MLflow store of the session."""
    command = [sys.executable, "-m", "tasks.tracking", "initialise"]
    environment = {**os.environ, "TITHE_STATE": str(state), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)


@pytest.fixture
def api(prefect_server: str) -> Callable[..., Any]:
    """Ask the Prefect server something: api("flow_runs/filter", {...})."""
    import httpx

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        answer = httpx.post(f"{prefect_server}/{path}", json=body or {}, timeout=120)
        answer.raise_for_status()
        return answer.json()

    return ask
