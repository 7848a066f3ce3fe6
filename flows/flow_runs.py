"""Which flow runs this machine's processes answer for, in files, so that Prefect hears the truth of a process that was killed.

    note     a process says that it works on a flow run: flow-runs/<id>.json in the state directory, with pid and run directory
    settle   flow runs whose process is gone get the state that their run directory proves: ended well, failed, cancelled; one
             that a deployment had started and that was cut off is scheduled again, so that a worker goes on with it

Prefect by itself would show such runs as Running for ever (a killed process says nothing), or as Crashed although the work went
on and ended well (a server that was away). Imports no prefect: plain HTTP.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tasks.locks import Owner
from tasks.record import truth
from tasks.workspace import state_directory
from trainer.files import read_json, write_json

PATIENCE_SECONDS = 5.0  # for a worker to say first that the process it had started crashed
BUSY_SECONDS = 30.0  # for Prefect to be less busy
START_SECONDS = 300.0  # from being scheduled again to the new process's first word
MAX_RESUMES = 3  # of one flow run; a process that is killed again and again is a person's business
GONE = "its process is gone"  # what a record says that was corrected (tasks/record.py)


def request(method: str, url: str, body: Any = None) -> httpx.Response:
    """Ask Prefect; again for a while when it says that it is too busy, as it does while its SQLite has another writer.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        answer = httpx.request(method, url, json=body, timeout=60)
        if answer.status_code not in (429, 503) or time.monotonic() > deadline:
            return answer
        time.sleep(0.5)


def directory() -> Path:
    return state_directory() / "flow-runs"


def _read(path: Path) -> dict[str, Any] | None:
    """Return a note, or None for one that its process has removed in between."""
    try:
        return dict(read_json(path))
    except FileNotFoundError:
        return None


def note(flow_run: str, run: Path, deployed: bool) -> None:
    """Write down that this process works on a flow run.

    Args:
        run: run directory of the campaign.
        deployed: whether a worker started it, and can start it again.
    """
    path = directory() / f"{flow_run}.json"
    resumes = (_read(path) or {}).get("resumes", 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"owner": Owner.me().to_json(), "run": str(run), "deployed": deployed, "since": time.time(), "resumes": resumes}
    write_json(path, entry)


def at_work() -> list[str]:
    """Return the flow runs of workers that a process of this machine is working on."""
    entries = {path.stem: entry for path in directory().glob("*.json") if (entry := _read(path)) is not None}
    return [name for name, entry in entries.items() if entry["deployed"] and Owner.from_json(entry["owner"]).is_alive]


def settle(api: str, over: bool = False) -> dict[str, str]:
    """Tell Prefect how flow runs ended whose process is gone.

    Args:
        api: address of Prefect's API.
        over: whether the flow runs of this very process are over too.

    Returns:
        Flow run to the state that it was given.

    Raises:
        httpx.HTTPError: Prefect does not answer; call again later.
    """
    given: dict[str, str] = {}
    me = Owner.me()
    for path in sorted(directory().glob("*.json")):
        entry = _read(path)
        if entry is None:
            continue
        owner = Owner.from_json(entry["owner"])
        mine = over and owner == me
        if not owner.is_here or not (mine or (not owner.is_alive and _long_gone(path, entry))):
            continue
        answer = request("GET", f"{api}/flow_runs/{path.stem}")
        if answer.status_code != 404:
            answer.raise_for_status()
            kind = answer.json()["state"]["type"]
            starting = kind == "RUNNING" and time.time() - entry.get("scheduled", 0) < START_SECONDS
            if kind in ("SCHEDULED", "PENDING") or starting:
                continue  # a worker will go on with it, or its new process has not said yet that it does
            if kind in ("RUNNING", "CRASHED", "CANCELLING", "PAUSED"):
                state = verdict(entry, kind)
                if state["type"] == "SCHEDULED":
                    write_json(path, {**entry, "resumes": entry["resumes"] + 1})
                    schedule_again(api, path.stem, state["message"])
                else:
                    set_state(api, path.stem, state)
                given[path.stem] = state["name"]
                if state["type"] == "SCHEDULED":
                    continue
        path.unlink(missing_ok=True)
    return given


def _long_gone(path: Path, entry: dict[str, Any]) -> bool:
    """Whether a process was found gone some time ago; the first time is written down."""
    now = time.time()
    if "gone" not in entry:
        write_json(path, {**entry, "gone": now})
    return bool(abs(now - entry.get("gone", now)) >= PATIENCE_SECONDS)


def set_state(api: str, flow_run: str, state: dict[str, Any]) -> None:
    """Give a flow run a state, whatever it had.

    Raises:
        httpx.HTTPError.
    """
    request("POST", f"{api}/flow_runs/{flow_run}/set_state", {"state": state, "force": True}).raise_for_status()


def schedule_again(api: str, flow_run: str, message: str) -> None:
    """Have a worker start a flow run again, now; until its new process says that it does, nobody else judges it.

    Raises:
        httpx.HTTPError.
    """
    path = directory() / f"{flow_run}.json"
    entry = _read(path)
    if entry is not None:
        write_json(path, {**entry, "scheduled": time.time()})
    set_state(api, flow_run, again(message))


def again(message: str) -> dict[str, Any]:
    """Return the state of a flow run that a worker is to start again, now."""
    details = {"scheduled_time": datetime.now(UTC).isoformat()}
    return {"type": "SCHEDULED", "name": "AwaitingRetry", "message": message, "state_details": details}


def verdict(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the state that a flow run without a process deserves, by the record in its run directory."""
    if kind == "CANCELLING":
        return {"type": "CANCELLED", "name": "Cancelled", "message": "its process has ended"}
    record = truth(Path(entry["run"]))
    if record is not None and record.ended is not None and record.ended >= entry["since"]:
        if record.status == "FINISHED":
            return {"type": "COMPLETED", "name": "Completed", "message": "ended well while Prefect was away"}
        if record.status == "FAILED":
            return {"type": "FAILED", "name": "Failed", "message": record.error or "failed while Prefect was away"}
        if record.error != GONE and not entry["deployed"]:
            return {"type": "CANCELLED", "name": "Cancelled", "message": record.error}
    if entry["deployed"] and entry["resumes"] < MAX_RESUMES:
        return again("its process ended before the campaign did; a worker goes on where it stopped")
    return {"type": "CRASHED", "name": "Crashed", "message": "its process ended before the campaign did"}
