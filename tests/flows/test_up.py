"""`tithe up`, really: both servers answer, a busy port is named, Ctrl-C ends both, and the history stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from flows.pool import Api
from flows.server import ServerError, addresses, answers, find_server, free_port, settings
from flows.up import Keeper, check_port, serve
from tasks.locks import Owner
from trainer.errors import BusyError, ConfigError


def test_a_port_in_use_is_named_with_the_option_that_chooses_another() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BusyError, match=rf"port {port} .*--mlflow-port"):
            check_port(port, "--mlflow-port")


def test_prefect_that_is_busy_for_a_moment_is_asked_again() -> None:
    left = [503, 429, 200]

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            assert Api(f"http://127.0.0.1:{server.server_port}").ask("GET", "health") is None
        finally:
            server.shutdown()
            thread.join(120)
    assert not left


class Ends:
    """A server that has ended by the time that somebody looks."""

    name, log, ended = "MLflow", Path("mlflow.log"), True

    def stop(self) -> None:
        pass


def test_a_server_that_ends_is_started_again_five_times_in_ten_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    keeper, made = Keeper(), []

    def make() -> Any:
        made.append(Ends())
        return made[-1]

    keeper.start(make)
    for _ in range(5):
        keeper.look()
    assert capsys.readouterr().out.count("MLflow ended by itself and is started again; see mlflow.log") == 5
    with pytest.raises(ServerError, match=r"MLflow ended by itself, again; see mlflow\.log"):
        keeper.look()
    assert len(made) == 6
    keeper._ended = [moment - 600.0 for moment in keeper._ended]
    keeper.look()
    assert len(made) == 7, "what is long ago does not count"


def up(prefect_port: int, mlflow_port: int, **environment: str) -> subprocess.Popen[str]:
    ports = ["--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)]
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "up", *ports],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if word in line:
            return lines
    raise AssertionError("\n".join(lines))


def command_lines(parent: int) -> list[str]:
    """Return all words of the command lines of a process's children, those that end meanwhile left out."""
    words: list[str] = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words += child.cmdline()
    return words


@pytest.mark.smoke
def test_both_servers_run_until_they_are_stopped_and_a_campaign_finds_them(
    tiny: Any, state: Path, prefect_server: str, eventually: Any
) -> None:
    prefect_port, mlflow_port = free_port(), free_port()
    process = up(prefect_port, mlflow_port)
    try:
        lines = read_until(process, "Ctrl-C")
        assert any(f"http://127.0.0.1:{prefect_port}" in line for line in lines)
        assert any(f"http://127.0.0.1:{mlflow_port}" in line for line in lines)
        assert find_server() == f"http://127.0.0.1:{prefect_port}/api"
        page = httpx.get(f"http://127.0.0.1:{prefect_port}/", follow_redirects=True, timeout=60)
        assert page.status_code == 200
        assert "Prefect" in page.text
        second = subprocess.run(
            [sys.executable, "-m", "flows.cli", "up"], capture_output=True, text=True, check=False, timeout=240
        )
        assert second.returncode == 7
        assert "already runs" in second.stderr
        words = command_lines(process.pid)
        assert [word for word in words if "mlflow" in word]
        assert not [word for word in words if "mlflow.db" in word]  # an address may hold a password, and everybody sees these
        done = tiny.run()
        assert done.returncode == 0, done.stderr
        assert f"MLflow: http://127.0.0.1:{mlflow_port}/#/experiments/" in done.stdout
        prefect, mlflow = f"http://127.0.0.1:{prefect_port}/api", f"http://127.0.0.1:{mlflow_port}/api/2.0/mlflow"
        body = {"flow_runs": {"name": {"any_": [tiny.workspace.run_id]}}}
        assert len(httpx.post(f"{prefect}/flow_runs/filter", json=body, timeout=60).json()) == 1
        named = httpx.get(f"{mlflow}/experiments/get-by-name", params={"experiment_name": "tiny"}, timeout=60).json()
        wanted = {"experiment_ids": [named["experiment"]["experiment_id"]]}
        found = httpx.post(f"{mlflow}/runs/search", json=wanted, timeout=60).json()["runs"]
        names = {run["info"]["run_name"] for run in found}
        assert {tiny.workspace.run_id, "prepare", "train", "evaluate", "report"} <= names
        assert {run["info"]["status"] for run in found} == {"FINISHED"}
    finally:
        os.kill(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=240)
    assert process.returncode == 0, rest
    assert "stopped" in rest
    assert not addresses()
    check_port(prefect_port, "--prefect-port")
    check_port(mlflow_port, "--mlflow-port")


@pytest.mark.smoke
def test_a_killed_up_leaves_no_server_behind(state: Path, prefect_server: str, eventually: Any) -> None:
    prefect_port, mlflow_port = free_port(), free_port()
    process = up(prefect_port, mlflow_port)
    try:
        read_until(process, "Ctrl-C")
        children = psutil.Process(process.pid).children(recursive=True)
        owners = [Owner.of(child.pid) for child in children]
        assert len(psutil.Process(process.pid).children()) == 3  # Prefect, MLflow, the worker
    finally:
        process.kill()
        process.communicate(timeout=240)
    eventually(lambda: not any(owner.is_alive for owner in owners))
    assert not answers(f"http://127.0.0.1:{mlflow_port}/health")
    assert find_server() is None


@pytest.mark.smoke
def test_the_end_of_its_terminal_stops_it_as_ctrl_c_does(state: Path, prefect_server: str, eventually: Any) -> None:
    process = up(free_port(), free_port())
    try:
        read_until(process, "Ctrl-C")
        owners = [Owner.of(child.pid) for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGHUP)
        rest, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, rest
    assert "stopped" in rest
    eventually(lambda: not any(owner.is_alive for owner in owners))
    assert not addresses()


@pytest.mark.smoke
def test_stopped_while_it_makes_its_databases_it_says_so_and_leaves_nothing_running(tmp_path: Path, eventually: Any) -> None:
    process = up(free_port(), free_port(), TITHE_STATE=str(tmp_path))
    try:
        children = eventually(lambda: psutil.Process(process.pid).children())
        owners = [Owner.of(child.pid) for child in children]
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert (process.returncode, said.splitlines()) == (0, ["stopped"])
    eventually(lambda: not any(owner.is_alive for owner in owners))
    assert not (tmp_path / "prefect" / "initialised").exists()


def test_one_port_for_both_servers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITHE_STATE", str(tmp_path))
    port = free_port()
    with pytest.raises(BusyError, match=rf"port {port} is Prefect's; .*--mlflow-port"):
        serve(port, port)
    assert not list(tmp_path.glob("*.db"))


DEAF = """
import os, signal
from flows import guard
signal.signal(signal.SIGTERM, signal.SIG_IGN)
guard.GRACE_SECONDS = 0.1
parent = os.getppid()  # before it may be killed
print(os.getpid(), flush=True)
guard.kill_after(parent, leaves_children=False)
"""


def test_a_server_that_does_not_heed_the_end_of_its_parent_is_killed(eventually: Any) -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {DEAF!r}], start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = Owner.of(int(parent.stdout.readline()))
    assert server.is_alive
    parent.kill()
    parent.communicate(timeout=120)
    eventually(lambda: not server.is_alive)


@pytest.mark.smoke
def test_history_in_postgresql(tiny: Any, tmp_path: Path, postgresql_url: str) -> None:
    environment = {"TITHE_STATE": str(tmp_path / "state"), "TITHE_DATABASE": postgresql_url}
    made = subprocess.run(
        [sys.executable, "-m", "flows.cli", "initialise"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    done = tiny.run(**environment)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith("warning")]
    with psycopg.connect(f"{postgresql_url}_prefect") as database:
        found = database.execute("SELECT name, state_name FROM flow_run").fetchall()
    assert found == [(tiny.workspace.run_id, "Completed")]
    with psycopg.connect(f"{postgresql_url}_mlflow") as database:
        runs = database.execute("SELECT name, status FROM runs").fetchall()
    assert dict(runs) == dict.fromkeys([tiny.workspace.run_id, "prepare", "train", "evaluate", "report"], "FINISHED")
    prefect_port, mlflow_port = free_port(), free_port()
    process = up(prefect_port, mlflow_port, **environment)  # what is made is not made again
    try:
        read_until(process, "Ctrl-C")
        body = {"flow_runs": {"name": {"any_": [tiny.workspace.run_id]}}}
        shown = httpx.post(f"http://127.0.0.1:{prefect_port}/api/flow_runs/filter", json=body, timeout=60).json()
        assert [run["state"]["name"] for run in shown] == ["Completed"]
        api = f"http://127.0.0.1:{mlflow_port}/api/2.0/mlflow"
        named = httpx.get(f"{api}/experiments/get-by-name", params={"experiment_name": "tiny"}, timeout=60).json()
        wanted = {"experiment_ids": [named["experiment"]["experiment_id"]]}
        found = httpx.post(f"{api}/runs/search", json=wanted, timeout=60).json()["runs"]
        assert len(found) == 5
    finally:
        os.kill(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=240)
    assert process.returncode == 0, rest
    assert not list((tmp_path / "state").rglob("*.db"))


def test_a_database_address_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITHE_DATABASE", "mysql://me:secret@somewhere/tithe")
    with pytest.raises(ConfigError, match=r"TITHE_DATABASE.*expected postgresql://") as caught:
        settings()
    assert "secret" not in str(caught.value)
