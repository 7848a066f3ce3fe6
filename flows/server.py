"""Where Prefect is: its settings, a server that somebody runs, or a private one for the length of a campaign.

    settings        environment variables that must be set before `import prefect`; history lies in .tithe/prefect
    find_server     PREFECT_API_URL, else the server that `tithe up` wrote down and that still answers
    PrivateServer   a server without UI on the same database; starts while the first stage works already

Imports no prefect: all this happens before that.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.locks import hold
from tasks.workspace import server_database, state_directory
from trainer.errors import BusyError, TitheError
from trainer.files import read_json, sha256_text
from trainer.processes import free_port

READY_SECONDS = 300.0  # 5 s; a first start makes the database, 8 to 25 s; far more on a machine that is busy
_STOP_SECONDS = 10.0


class ServerError(TitheError):
    """A server did not start or does not answer."""


def settings() -> dict[str, str]:
    """Return the environment in which everything of Prefect runs; what the user set wins."""
    home = state_directory() / "prefect"
    ours = {
        "PREFECT_HOME": str(home),
        "DO_NOT_TRACK": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(READY_SECONDS)),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # `tithe` speaks for itself; the logs are in the server
        "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",  # a server that goes away is one line of ours, not a dozen of its threads
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
    }
    database = server_database("prefect", "asyncpg")
    if database is not None:
        ours["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
    return {key: os.environ.get(key, value) for key, value in ours.items()}


def initialised_marker() -> Path:
    """Return the file that says that Prefect's database is made."""
    database = server_database("prefect", "asyncpg")
    return state_directory() / "prefect" / (f"initialised-{sha256_text(database)[:8]}" if database else "initialised")


def addresses_file() -> Path:
    """Return where `tithe up` writes the addresses of its servers."""
    return state_directory() / "servers.json"


def addresses() -> Mapping[str, Any]:
    """Return what `tithe up` wrote: {"prefect": url, "mlflow": url, "owner": ...}, or nothing."""
    try:
        found: Mapping[str, Any] = read_json(addresses_file())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def find_server() -> str | None:
    """Return the API address of a running Prefect server, or None when there is none to use.

    Raises:
        ServerError: PREFECT_API_URL names one that does not answer.
    """
    named = os.environ.get("PREFECT_API_URL")
    if named:
        if not answers(f"{named.rstrip('/')}/health", timeout_seconds=5):
            raise ServerError(f"Prefect at {named} (PREFECT_API_URL) does not answer")
        return named
    url = addresses().get("prefect")
    return f"{url}/api" if url and answers(f"{url}/api/health") else None


def answers(url: str, timeout_seconds: float = 2.0) -> bool:
    """Whether a GET of a URL is answered with 200."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_seconds)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Server:
    """A server as a child process, in its own session, with a log file.

    Args:
        name: for messages.
        module: run as `python -m <module> <arguments>`.
        health: URL that answers 200 when it is ready; empty for one that nobody asks.
        yields: whether the work of a campaign beside it comes first.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        health: str,
        log: Path,
        environment: Mapping[str, str],
        yields: bool = False,
    ):
        self.name, self.health, self.log = name, health, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.guard", *(["--yield"] * yields), str(os.getpid()), module, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait_ready(
        self, timeout_seconds: float = READY_SECONDS, stop: object = None, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until it answers, or until `stop` has become true; `meanwhile` is called at every look.

        Raises:
            ServerError: it ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not stop and not answers(self.health):
            if self.ended:
                raise ServerError(f"{self.name} ended with exit code {self._process.returncode} while starting; see {self.log}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} did not answer within {timeout_seconds:.0f} s; see {self.log}")
            meanwhile()
            time.sleep(0.1)

    def stop(self, timeout_seconds: float = _STOP_SECONDS, busy: Callable[[], bool] = lambda: False) -> None:
        """Ask it to stop, then kill what is left of its group.

        Args:
            timeout_seconds: how long it may take.
            busy: whether something that it had started is still at work and may take as long.
        """
        deadline = time.monotonic() + timeout_seconds
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait(timeout_seconds)
        while busy() and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class PrivateServer(Server):
    """A Prefect server for this process alone: no UI, a free port, the history that `tithe up` shows later.

    It is what Prefect itself starts where no server is given, but begun early, with its own log and a clean end.
    """

    def __init__(self) -> None:
        port = free_port()
        self.api_url = f"http://127.0.0.1:{port}/api"
        arguments = ["--factory", "prefect.server.api.server:create_app", "--host", "127.0.0.1", "--port", str(port)]
        environment = {**settings(), "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        if initialised_marker().exists():  # the database knows the types of blocks already
            environment["PREFECT_SERVER_REGISTER_BLOCKS_ON_START"] = "false"
        log = state_directory() / "prefect" / "private-server.log"
        super().__init__(
            "Prefect's private server",
            "uvicorn",
            [*arguments, "--log-level", "error", "--lifespan", "on"],
            f"{self.api_url}/health",
            log,
            environment,
            yields=True,
        )


@contextmanager
def private_server(stop: object = None, meanwhile: Callable[[], None] = lambda: None) -> Iterator[PrivateServer]:
    """Run a private server; the first ever makes the database while others wait their turn.

    Args:
        stop, meanwhile: see `Server.wait_ready`; a database that takes a minute to make holds nobody up.

    Raises:
        ServerError: it did not start.
    """
    made = initialised_marker()
    with ExitStack() as running:
        with ExitStack() as turn:
            while not stop and not made.exists():
                try:
                    turn.enter_context(hold(state_directory() / "prefect.lock", "Prefect's database is being made"))
                    break
                except BusyError:
                    meanwhile()
                    time.sleep(0.1)
            server = PrivateServer()
            running.callback(server.stop)
            if not made.exists():
                server.wait_ready(stop=stop, meanwhile=meanwhile)
                if not stop:
                    made.touch()
        yield server
