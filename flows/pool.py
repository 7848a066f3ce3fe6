"""Makes a Prefect server ready for campaigns: the work pool with its queues, and the deployments of prefect.yaml.

    pool `tithe`      type process: flow runs start as `python -m prefect.engine` in the repository
    queue `device`    as many slots as devices: campaigns, sweeps and evaluations take turns
    queue `light`     what needs no device

Making it again changes nothing but what differs. A schedule is as the last person wanted it who changed it, in prefect.yaml or in
Prefect: `prefect deploy` alone would undo what was changed in the UI, and delete schedules made there. Imports no prefect: plain
HTTP, and `prefect deploy` in a process of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.flow_runs import request, schedule_again, set_state
from flows.server import ServerError, initialised_marker, settings
from tasks.workspace import REPOSITORY, state_directory
from trainer.config import read_yaml
from trainer.errors import ConfigError
from trainer.files import read_json, write_json, write_text

DECLARED = REPOSITORY / "prefect.yaml"
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


def deployments(api: Api) -> dict[str, dict[str, Any]]:
    """Return the deployments there are in the pool, by entry point."""
    found = api.ask("POST", "deployments/filter", {"work_pools": {"name": {"any_": [POOL]}}})
    return {entry["entrypoint"]: entry for entry in found}


def register(api: Api, file: Path = DECLARED) -> list[str]:
    """Register the deployments of prefect.yaml, and return their names.

    Of their schedules only those are touched that the file says differently than at the last time.

    Raises:
        ConfigError: the file is wrong. ServerError: Prefect refuses it; its log says why.
    """
    KeptSchedules().look(api)
    tree, there = read_yaml(file, "prefect.yaml"), deployments(api)
    state = state_directory() / "prefect"
    memory = state / f"{initialised_marker().name.replace('initialised', 'schedules')}.json"
    before = read_json(memory) if memory.exists() else {}
    now: dict[str, dict[str, str]] = {}
    for entry in tree.get("deployments") or []:
        name, schedules = str(entry.get("entrypoint")), entry.pop("schedules", None) or []
        now[name] = {slug_of(schedule): as_json(schedule) for schedule in schedules}
        if name in there:
            known = before.get(name, {})
            schedules = [schedule for schedule in schedules if known.get(slug_of(schedule)) != as_json(schedule)]
            delete_schedules(api, there[name], known.keys() - now[name].keys())
        if schedules:
            entry["schedules"] = schedules
    written = state / "deployments.yaml"
    write_text(written, as_json(tree))
    log = state / "deploy.log"
    environment = {**os.environ, **settings(), "PREFECT_API_URL": api.url}
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(written)]
    with open(log, "wb") as output:
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise ServerError(f"the deployments of prefect.yaml could not be registered; see {log}")
    write_json(memory, now)
    flows = {entry["id"]: entry["name"] for entry in api.ask("POST", "flows/filter", {})}
    return sorted(f"{flows[entry['flow_id']]}/{entry['name']}" for entry in deployments(api).values())


def as_json(value: Any) -> str:
    """Return what a YAML file holds as JSON, which every reader of YAML understands alike."""
    return json.dumps(value, default=str, sort_keys=True)


def slug_of(schedule: dict[str, Any]) -> str:
    """Return the name of a schedule of prefect.yaml.

    Raises:
        ConfigError: it has none, and could not be told from another the next time.
    """
    if not schedule.get("slug"):
        raise ConfigError(
            "deployments[].schedules[].slug", schedule, "prefect.yaml: give this schedule a slug, as in slug: nightly"
        )
    return str(schedule["slug"])


def delete_schedules(api: Api, deployment: dict[str, Any], slugs: Collection[str]) -> None:
    for schedule in deployment["schedules"]:
        if schedule["slug"] in slugs:
            api.ask("DELETE", f"deployments/{deployment['id']}/schedules/{schedule['id']}")


class KeptSchedules:
    """Keeps what a person wanted of schedules from being lost on the way through Prefect 3.9, whose faults these are.

    A schedule without a slug, as the UI makes it, is deleted when its deployment is registered again: it gets one. The UI's
    switch and `prefect deployment schedule resume` empty a schedule's parameters: it gets them back.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Any]] = {}

    def look(self, api: Api) -> None:
        for deployment in deployments(api).values():
            for schedule in deployment["schedules"]:
                slug, parameters = schedule["slug"] or f"own-{schedule['id'][:8]}", schedule["parameters"]
                before = self._seen.get(schedule["id"])
                if before and not parameters and before["schedule"] == schedule["schedule"]:  # who changes its time means both
                    parameters = before["parameters"]
                self._seen[schedule["id"]] = {**schedule, "parameters": parameters}
                if (slug, parameters) != (schedule["slug"], schedule["parameters"]):
                    path = f"deployments/{deployment['id']}/schedules/{schedule['id']}"
                    api.ask("PATCH", path, {"slug": slug, "parameters": parameters})


def requeue(api: Api) -> int:
    """Schedule again what a dead worker had taken but not started, and return how many; only while no worker is at work."""
    body = {"work_pools": {"name": {"any_": [POOL]}}, "flow_runs": {"state": {"type": {"any_": ["PENDING"]}}}}
    found = api.ask("POST", "flow_runs/filter", body)
    for run in found:
        schedule_again(api.url, run["id"], "the worker that had taken it is gone")
    return len(found)


def skip_missed(api: Api) -> int:
    """Skip what schedules missed while no worker was there, but for the newest run of each; return how many were skipped."""
    wanted = {
        "work_pools": {"name": {"any_": [POOL]}},
        "flow_runs": {
            "state": {"name": {"any_": ["Scheduled", "Late"]}},
            "next_scheduled_start_time": {"before_": datetime.now(UTC).isoformat()},
        },
        "sort": "NEXT_SCHEDULED_START_TIME_ASC",
    }
    found = [run for run in api.ask("POST", "flow_runs/filter", wanted) if run["auto_scheduled"] and run["created_by"]]
    newest = {run["created_by"]["id"]: run["id"] for run in found}
    missed = [run["id"] for run in found if run["id"] not in newest.values()]
    for flow_run in missed:
        message = "its time passed while `tithe up` did not run; a later run of the same schedule stands for it"
        set_state(api.url, flow_run, {"type": "CANCELLED", "name": "Skipped", "message": message})
    return len(missed)
