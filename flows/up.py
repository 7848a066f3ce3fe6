"""`tithe up`: Prefect, MLflow and a worker on this machine, on the loopback interface, with their state in .tithe/.

    serve        starts the servers, prints their addresses, registers the deployments, starts the worker, and keeps all of it
                 going until Ctrl-C: one that ends by itself is started again
    initialise   makes both databases beforehand

Their addresses go to .tithe/servers.json, where `tithe run` finds Prefect. The databases are SQLite files, or PostgreSQL by
TITHE_DATABASE. On Ctrl-C the worker stops first: its campaigns write a checkpoint, and go on when `tithe up` is started again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

import httpx

from flows.flow_runs import at_work, settle
from flows.pool import DECLARED, POOL, Api, KeptSchedules, device_slots, register, requeue, set_up, skip_missed
from flows.server import Server, ServerError, addresses_file, initialised_marker, private_server, settings
from flows.workspaces import recipe_names
from tasks.locks import Owner, hold, wait_for
from tasks.tracking import artifact_root, own_store
from tasks.workspace import REPOSITORY, server_database, state_directory
from trainer.errors import BusyError, TitheError, first_line, without_password
from trainer.files import sha256_text, write_json

HOST, WORKER = "127.0.0.1", "the worker"
MAX_RESTARTS, RESTART_SECONDS = 5, 600.0  # a server that ends more often than that is broken
SETTLE_SECONDS, REGISTER_AGAIN_SECONDS = 2.0, 60.0
_CONNECT_SECONDS = 10
_WORKER_STOP_SECONDS = 60.0  # for the checkpoints of its campaigns


def check_port(port: int, option: str) -> None:
    """Raise BusyError when something listens on a port, naming the option that chooses another."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise BusyError(
                f"port {port} on {HOST} is in use ({error.strerror}); choose another: tithe up {option} <port>"
            ) from None


def prefect_server(port: int) -> Server:
    environment = {
        **settings(),
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
        # slots in use are still known when the server is started again
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    arguments = ["server", "start", "--host", HOST, "--port", str(port)]
    log = state_directory() / "prefect" / "server.log"
    return Server("Prefect", "prefect", arguments, f"http://{HOST}:{port}/api/health", log, environment)


def mlflow_server(port: int) -> Server:
    """Start MLflow's server on the default store: one worker, no job runner (they cost 45 s and 500 MB)."""
    arguments = ["server", "--host", HOST, "--port", str(port), "--workers", "1"]
    files = ["--no-serve-artifacts", "--default-artifact-root", artifact_root().as_uri()]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    environment["MLFLOW_BACKEND_STORE_URI"] = own_store()  # its password is nothing for the list of processes
    log = state_directory() / "mlflow-server.log"
    return Server("MLflow", "mlflow", [*arguments, *files], f"http://{HOST}:{port}/health", log, environment)


def worker(api: str) -> Server:
    """Start the process that starts flow runs from the pool; how many at once is the queues' business (flows/pool.py)."""
    arguments = [
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
        "--name",
        socket.gethostname(),
        "--install-policy",
        "never",
    ]
    log = state_directory() / "prefect" / "worker.log"
    environment = {**settings(), "PREFECT_API_URL": api, "PREFECT_WORKER_QUERY_SECONDS": "3"}
    return Server(WORKER, "prefect", arguments, "", log, environment)


@dataclass
class Keeper:
    """Keeps servers going: one that ends by itself is started again, until it does so too often."""

    running: dict[str, Server] = field(default_factory=dict)
    _make: dict[str, Callable[[], Server]] = field(default_factory=dict)
    _ended: list[float] = field(default_factory=list)

    def start(self, make: Callable[[], Server]) -> Server:
        server = make()
        self.running[server.name], self._make[server.name] = server, make
        return server

    def look(self) -> None:
        """Start again what has ended.

        Raises:
            ServerError: it ends again and again.
        """
        for name, server in list(self.running.items()):
            if not server.ended:
                continue
            if name != WORKER:  # whose flow runs go on by themselves
                server.stop()  # what is left of its group
            now = time.monotonic()
            self._ended = [*(moment for moment in self._ended if now - moment < RESTART_SECONDS), now]
            if len(self._ended) > MAX_RESTARTS:
                raise ServerError(f"{name} ended by itself, again; see {server.log}")
            print(f"{name} ended by itself and is started again; see {server.log}", flush=True)
            self.running[name] = self._make[name]()

    def stop(self) -> None:
        """Stop all, the last started first."""
        for server in reversed(self.running.values()):
            if server.name == WORKER:
                server.stop(_WORKER_STOP_SECONDS, busy=lambda: bool(at_work()))
            else:
                server.stop()


def serve(prefect_port: int, mlflow_port: int, slots: int | None = None) -> None:
    """Run servers and worker until Ctrl-C, SIGTERM, or the end of the terminal.

    Args:
        slots: how many campaigns run at once; None is one a GPU, or one.

    Raises:
        BusyError: a port is in use, or `tithe up` runs already. ServerError: a server did not start, or ends again and again.
    """
    with hold(state_directory() / "up.lock", "`tithe up` already runs", "its addresses are in " + str(addresses_file())):
        check_port(prefect_port, "--prefect-port")
        check_port(mlflow_port, "--mlflow-port")
        if mlflow_port == prefect_port:
            raise BusyError(f"port {mlflow_port} is Prefect's; choose another: tithe up --mlflow-port <port>")
        keeper, stop = Keeper(), StopSignal()
        try:
            with stop:
                initialise(quiet=True, stop=stop)
                _start(keeper, stop, prefect_port, mlflow_port, slots or device_slots())
                _keep(keeper, stop, f"http://{HOST}:{prefect_port}/api")
        except httpx.HTTPError as error:
            log = state_directory() / "prefect" / "server.log"
            raise ServerError(f"Prefect does not answer as it should ({first_line(error)}); see {log}") from error
        finally:
            addresses_file().unlink(missing_ok=True)
            keeper.stop()
        with suppress(OSError):  # the terminal may be gone
            print("stopped", flush=True)


class StopSignal:
    """Whether Ctrl-C, SIGTERM or the end of the terminal asked to stop; under nohup that end is none."""

    def __init__(self) -> None:
        self.asked = False

    def __bool__(self) -> bool:
        return self.asked

    def __enter__(self) -> None:
        def handle(number: int, frame: FrameType | None) -> None:
            self.asked = True

        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, handle) for number in numbers}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _start(keeper: Keeper, stop: StopSignal, prefect_port: int, mlflow_port: int, slots: int) -> None:
    """Start servers, then what needs them; say the addresses as soon as both answer."""
    if stop:
        return
    servers = [keeper.start(lambda: prefect_server(prefect_port)), keeper.start(lambda: mlflow_server(mlflow_port))]
    print("starting Prefect and MLflow ...", flush=True)
    for server in servers:
        server.wait_ready(stop=stop)
    if stop:
        return
    urls = {"prefect": f"http://{HOST}:{prefect_port}", "mlflow": f"http://{HOST}:{mlflow_port}"}
    write_json(addresses_file(), {**urls, "owner": Owner.me().to_json()})
    print(f"Prefect  {urls['prefect']}\nMLflow   {urls['mlflow']}", flush=True)
    api = Api(f"{urls['prefect']}/api")
    set_up(api, slots)
    names = register(api)
    requeue(api)
    skip_missed(api)
    if stop:
        return
    keeper.start(lambda: worker(api.url))
    print(
        f"start or schedule in Prefect: {', '.join(names)}; {slots} at once\nCtrl-C stops all; their history stays.", flush=True
    )


def _keep(keeper: Keeper, stop: StopSignal, api: str) -> None:
    """Wait for the wish to stop; meanwhile restart what ends, settle flow runs, offer new recipes and schedules."""
    offers, settled = Offers(Api(api)), 0.0
    while not stop:
        keeper.look()
        if time.monotonic() - settled >= SETTLE_SECONDS:
            settled = time.monotonic()
            try:
                for flow_run, state in settle(api).items():
                    print(f"flow run {flow_run}: {state}", flush=True)
                offers.look()
            except httpx.HTTPError:
                settled += 10.0  # Prefect is just being started again
        time.sleep(0.2)


class Offers:
    """What a person can start in Prefect: registered again when recipes or prefect.yaml change."""

    def __init__(self, api: Api) -> None:
        self._api, self._registered, self._not_before = api, declared(), 0.0
        self._schedules = KeptSchedules()

    def look(self) -> None:
        self._schedules.look(self._api)
        found = declared()
        if found == self._registered or time.monotonic() < self._not_before:
            return
        try:
            register(self._api)
        except TitheError as error:
            print(f"warning: {error}", flush=True)
            self._not_before = time.monotonic() + REGISTER_AGAIN_SECONDS
        else:
            self._registered, self._schedules = found, KeptSchedules()


def declared() -> tuple[tuple[str, ...], str]:
    """Return what the deployments are made of: the recipes there are, and prefect.yaml."""
    text = DECLARED.read_text(errors="replace") if DECLARED.exists() else ""
    return recipe_names("recipes", "recipes/plans"), sha256_text(text)


def initialise(quiet: bool = False, stop: object = None) -> None:
    """Make the databases of Prefect and MLflow where they are not made yet, or until `stop` has become true."""
    state = state_directory()
    with wait_for(state / "initialise.lock"):
        make_databases()
        mlflow: subprocess.Popen[bytes] | None = None  # beside Prefect's, which takes longer
        if own_store().startswith("postgresql") or not (state / "mlflow.db").exists():
            if not quiet:
                print("making MLflow's database ...", flush=True)
            command = [sys.executable, "-m", "tasks.tracking", "initialise"]
            mlflow = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)  # Ctrl-C would leave half a database
        try:
            if not initialised_marker().exists():
                if not quiet:
                    print("making Prefect's database ...", flush=True)
                with private_server(stop=stop):
                    pass
        finally:
            ended = mlflow.wait() if mlflow is not None else 0
        if ended != 0:
            raise TitheError("MLflow's database could not be made; see above")


def make_databases() -> None:
    """Make the PostgreSQL databases that TITHE_DATABASE asks for where they are not there.

    Raises:
        ServerError: the server cannot be reached or refuses.
    """
    if server_database("prefect", "psycopg") is None:
        return
    import psycopg
    from psycopg.sql import SQL, Identifier

    try:
        with psycopg.connect(os.environ["TITHE_DATABASE"], autocommit=True, connect_timeout=_CONNECT_SECONDS) as connection:
            there = {row[0] for row in connection.execute("SELECT datname FROM pg_database")}
            for part in ("prefect", "mlflow"):
                name = f"{connection.info.dbname}_{part}"
                if name not in there:
                    connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
    except psycopg.Error as error:
        raise ServerError(f"TITHE_DATABASE: {without_password(' '.join(str(error).split()))}") from None
