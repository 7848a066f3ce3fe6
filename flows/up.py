"""`tithe up`: Prefect and MLflow as servers on this machine, on the loopback interface, with their state in .tithe/.

Their addresses go to .tithe/servers.json, where `tithe run` finds Prefect. `initialise` makes both databases beforehand.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from types import FrameType

from flows.server import Server, ServerError, addresses_file, private_server, settings
from tasks.locks import Owner, hold, wait_for
from tasks.tracking import artifact_root
from tasks.workspace import REPOSITORY, state_directory
from trainer.errors import BusyError, TitheError
from trainer.files import write_json

HOST = "127.0.0.1"


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
    environment = {**settings(), "PREFECT_API_URL": f"http://{HOST}:{port}/api"}
    arguments = ["server", "start", "--host", HOST, "--port", str(port)]
    log = state_directory() / "prefect" / "server.log"
    return Server("Prefect", "prefect", arguments, f"http://{HOST}:{port}/api/health", log, environment)


def mlflow_server(port: int) -> Server:
    """Start MLflow's server on the default store: one worker, no job runner (they cost 45 s and 500 MB)."""
    arguments = ["server", "--host", HOST, "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{state_directory() / 'mlflow.db'}"]
    files = ["--no-serve-artifacts", "--default-artifact-root", artifact_root().as_uri()]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    log = state_directory() / "mlflow-server.log"
    return Server("MLflow", "mlflow", [*arguments, *store, *files], f"http://{HOST}:{port}/health", log, environment)


def serve(prefect_port: int, mlflow_port: int) -> None:
    """Run both servers until Ctrl-C or SIGTERM.

    Raises:
        BusyError: a port is in use, or `tithe up` runs already. ServerError: a server did not start, or ended.
    """
    with hold(state_directory() / "up.lock", "`tithe up` already runs", "its addresses are in " + str(addresses_file())):
        check_port(prefect_port, "--prefect-port")
        check_port(mlflow_port, "--mlflow-port")
        initialise(quiet=True)
        servers: list[Server] = []
        try:
            servers += [prefect_server(prefect_port), mlflow_server(mlflow_port)]
            print("starting Prefect and MLflow ...", flush=True)
            for server in servers:
                server.wait_ready()
            urls = {"prefect": f"http://{HOST}:{prefect_port}", "mlflow": f"http://{HOST}:{mlflow_port}"}
            write_json(addresses_file(), {**urls, "owner": Owner.me().to_json()})
            print(f"Prefect  {urls['prefect']}\nMLflow   {urls['mlflow']}\nCtrl-C stops both; their history stays.", flush=True)
            wait_for_end(servers)
        finally:
            addresses_file().unlink(missing_ok=True)
            for server in servers:
                server.stop()
        print("stopped", flush=True)


def wait_for_end(servers: list[Server]) -> None:
    """Wait for Ctrl-C or SIGTERM."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while not asked:
            for server in servers:
                if server.ended:
                    raise ServerError(f"{server.name} ended by itself; see {server.log}")
            time.sleep(0.2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def initialise(quiet: bool = False) -> None:
    """Make the databases of Prefect and MLflow where they are not made yet."""
    state = state_directory()
    with wait_for(state / "initialise.lock"):
        if not (state / "prefect" / "initialised").exists():
            if not quiet:
                print("making Prefect's database ...", flush=True)
            with private_server():
                pass
        if not (state / "mlflow.db").exists():
            if not quiet:
                print("making MLflow's database ...", flush=True)
            done = subprocess.run([sys.executable, "-m", "tasks.tracking", "initialise"], cwd=REPOSITORY, check=False)
            if done.returncode != 0:
                raise TitheError("MLflow's database could not be made; see above")
