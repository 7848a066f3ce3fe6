"""Makes a Prefect server ready for campaigns: the work pool with its queues, and the deployments of prefect.yaml.

    pool `tithe`      type process: flow runs start as `python -m prefect.engine` in the repository
    queue `device`    as many slots as devices: campaigns, sweeps and evaluations take turns
    queue `light`     what needs no device

Making it again changes nothing but what differs; a schedule stays on or off as a person left it. Imports no prefect: plain HTTP,
and `prefect deploy` in a process of its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from flows.flow_runs import request, schedule_again
from flows.server import ServerError, settings
from tasks.workspace import REPOSITORY, state_directory

POOL, DEVICE_QUEUE, LIGHT_QUEUE, LIGHT_SLOTS = "tithe", "device", "light", 4


class Api:
    """Prefect's REST API.

    Raises:
        httpx.HTTPError: from every method, when it does not answer or refuses.
    """

    def __init__(self, url: str):
        self.url = url

    def ask(self, method: str, path: str, body: Any = None, absent_is_none: bool = False) -> Any:
        answer = request(method, f"{self.url}/{path}", body)
        if absent_is_none and answer.status_code == 404:
            return None
        answer.raise_for_status()
        return answer.json() if answer.content else None


def device_slots() -> int:
    """Return how many campaigns this machine can run at once: one a GPU, or one."""
    return max(1, len(list(Path("/dev").glob("nvidia[0-9]*"))))


def set_up(api: Api, slots: int) -> None:
    """Make the work pool and its queues, or bring them up to date."""
    job = deepcopy(api.ask("GET", "collections/views/aggregate-worker-metadata")["prefect"]["process"])
    template = job["default_base_job_configuration"]
    properties = template["variables"]["properties"]
    properties["command"]["default"] = f"{shlex.quote(sys.executable)} -m prefect.engine"
    properties["working_dir"]["default"] = str(REPOSITORY)
    properties["stream_output"]["default"] = False
    about = {"description": "Campaigns on this machine", "base_job_template": template}
    if api.ask("GET", f"work_pools/{POOL}", absent_is_none=True) is None:
        api.ask("POST", "work_pools/", {"name": POOL, "type": "process", **about})
    else:
        api.ask("PATCH", f"work_pools/{POOL}", about)
    for priority, (queue, limit) in enumerate({DEVICE_QUEUE: slots, LIGHT_QUEUE: LIGHT_SLOTS}.items(), start=1):
        wanted = {"concurrency_limit": limit, "priority": priority}
        if api.ask("GET", f"work_pools/{POOL}/queues/{queue}", absent_is_none=True) is None:
            api.ask("POST", f"work_pools/{POOL}/queues", {"name": queue, **wanted})
        else:
            api.ask("PATCH", f"work_pools/{POOL}/queues/{queue}", wanted)


def switches(api: Api) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schedules there are: (deployment id, slug) to the schedule."""
    found = api.ask("POST", "deployments/filter", {"work_pools": {"name": {"any_": [POOL]}}})
    return {(entry["id"], schedule["slug"]): schedule for entry in found for schedule in entry["schedules"] if schedule["slug"]}


def register(api: Api) -> list[str]:
    """Register the deployments of prefect.yaml, and return their names.

    Raises:
        ServerError: Prefect refuses them; its log says why.
    """
    before = switches(api)
    log = state_directory() / "prefect" / "deploy.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **settings(), "PREFECT_API_URL": api.url}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    with open(log, "wb") as output:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise ServerError(f"the deployments of prefect.yaml could not be registered; see {log}")
    for (deployment, slug), schedule in switches(api).items():
        old = before.get((deployment, slug))
        if old is not None and old["active"] != schedule["active"]:
            api.ask("PATCH", f"deployments/{deployment}/schedules/{schedule['id']}", {"active": old["active"]})
    found = api.ask("POST", "deployments/filter", {"work_pools": {"name": {"any_": [POOL]}}})
    flows = {entry["id"]: entry["name"] for entry in api.ask("POST", "flows/filter", {})}
    return sorted(f"{flows[entry['flow_id']]}/{entry['name']}" for entry in found)


def requeue(api: Api) -> int:
    """Schedule again what a dead worker had taken but not started, and return how many; only while no worker is at work."""
    body = {"work_pools": {"name": {"any_": [POOL]}}, "flow_runs": {"state": {"type": {"any_": ["PENDING"]}}}}
    found = api.ask("POST", "flow_runs/filter", body)
    for run in found:
        schedule_again(api.url, run["id"], "the worker that had taken it is gone")
    return len(found)
