"""`tithe up` with its worker: campaigns started by Prefect's API and from its UI in a real browser; what is killed goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.pool import DECLARED, Api, deployments, register, skip_missed
from flows.server import free_port
from flows.workspaces import recipe_names, resolve_config, resolve_workspace
from tasks.locks import Owner
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import read_yaml
from trainer.files import read_json, write_json
from trainer.metrics import read_lines

pytestmark = pytest.mark.smoke
NUMBERS = count(os.getpid())
CAMPAIGN = "flows.deployments.campaign"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class Up:
    """A running `tithe up` whose campaigns have tiny stages."""

    campaigns: Path
    environment: dict[str, str]
    prefect_port: int = field(default_factory=free_port)
    mlflow_port: int = field(default_factory=free_port)
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.prefect_port}"

    @property
    def api(self) -> Api:
        return Api(f"{self.url}/api")

    def start(self, eventually: Callable[..., Any]) -> None:
        ports = ["--prefect-port", str(self.prefect_port), "--mlflow-port", str(self.mlflow_port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "up", *ports],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        eventually(lambda: self.said("Ctrl-C") or self.process.poll() is not None, 500)
        assert self.process.poll() is None, self.lines

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                self.lines.append(line.rstrip())

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(240)
            finally:
                self.process.kill()
        self._reader.join(120)

    def child(self, module: str) -> Owner:
        """Return the process of a server or of the worker, by what stands on its command line."""
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended in between
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if "flows.guard" in words and module in " ".join(words):
                    return Owner.of(int(pid))
        raise AssertionError(f"no {module}")

    def start_flow(self, flow: str, **parameters: Any) -> str:
        """Start a flow run as the UI does, and return its id."""
        deployment = self.api.ask("GET", f"deployments/name/{flow}/tithe")
        made = self.api.ask("POST", f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        """Return a flow run, or nothing while Prefect is away."""
        try:
            return dict(self.api.ask("GET", f"flow_runs/{flow_run}"))
        except httpx.HTTPError:
            return {"state": {"type": "", "name": ""}}

    def states(self, flow_run: str) -> list[str]:
        found = httpx.get(f"{self.api.url}/flow_run_states/", params={"flow_run_id": flow_run}, timeout=60).json()
        return [state["name"] for state in sorted(found, key=lambda state: state["timestamp"])]

    def wait(self, flow_run: str, eventually: Callable[..., Any]) -> dict[str, Any]:
        """Wait until a flow run has ended for good."""
        eventually(lambda: self.flow_run(flow_run)["state"]["type"] in ENDED and not self.owner(flow_run), 300)
        return self.flow_run(flow_run)

    def owner(self, flow_run: str) -> Owner | None:
        """Return the process that works on a flow run, or None when nothing is left to settle."""
        path = Path(self.environment["TITHE_STATE"]) / "flow-runs" / f"{flow_run}.json"
        try:
            return Owner.from_json(read_json(path)["owner"])
        except (FileNotFoundError, ValueError):
            return None


@dataclass
class Tiny:
    """A tiny campaign in the folder of campaigns that the worker uses."""

    up: Up
    name: str
    seed: int

    @property
    def overrides(self) -> list[str]:
        return [f"campaign.seed={self.seed}", "limits.grace_seconds=120"]

    @property
    def workspace(self) -> Workspace:
        config = resolve_config(None, [f"campaign.name={self.name}", *self.overrides])
        return resolve_workspace(config, root=self.root, stages_name="tiny_stages:STAGES")

    @property
    def root(self) -> Path:
        return self.up.campaigns / self.name

    @property
    def made(self) -> list[str]:
        file = self.root / "made.txt"
        return file.read_text().split() if file.exists() else []

    def plan(self, **wishes: Any) -> None:
        write_json(self.root / "tiny.json", wishes)

    def start(self, **wishes: Any) -> str:
        self.plan(**wishes)
        return self.up.start_flow("campaign", name=self.name, overrides=self.overrides)

    def steps(self) -> list[int]:
        return [line["step"] for line in read_lines(self.workspace.run / "train" / "metrics.jsonl")]

    def hangs(self) -> bool:
        return (self.workspace.run / "train" / "hang_at.happened").exists()

    def at_step(self, step: int) -> bool:
        return bool(self.steps()) and self.steps()[-1] >= step


@pytest.fixture(scope="module")
def up(state: Path, prefect_server: str, tmp_path_factory: pytest.TempPathFactory, eventually: Any) -> Iterator[Up]:
    campaigns = tmp_path_factory.mktemp("campaigns")
    environment = {
        **os.environ,
        "TITHE_STATE": str(state),
        "TITHE_CAMPAIGNS": str(campaigns),
        "TITHE_STAGES": "tiny_stages:STAGES",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)]),
    }
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        environment.pop(name, None)
    running = Up(campaigns, environment)
    running.start(eventually)
    yield running
    running.stop()


@pytest.fixture
def campaign(up: Up, request: pytest.FixtureRequest, eventually: Any) -> Tiny:
    """A campaign of its own for every try at a test, and `tithe up` running."""
    if up.process.poll() is not None:
        up.start(eventually)
    seed = next(NUMBERS)
    return Tiny(up, request.node.name.removeprefix("test_").replace("_", "-")[:40] + f"-{seed}", seed)


def test_a_campaign_started_by_the_api_runs_to_the_end_and_shows_what_a_person_looks_for(
    up: Up, campaign: Tiny, eventually: Any
) -> None:
    flow_run = campaign.start(seconds=1.2, steps=5, alarm_at=2)
    run = up.wait(flow_run, eventually)
    assert run["state"]["name"] == "Completed", run["state"]
    assert run["name"] == campaign.workspace.run_id
    assert campaign.made == ["prepare", "train", "evaluate", "report"]
    tasks = up.api.ask("POST", "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    assert {task["name"]: task["state"]["name"] for task in tasks} == dict.fromkeys(campaign.made, "Completed")
    found = up.api.ask("POST", "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
    artifacts = {artifact["key"].removeprefix(campaign.name + "-"): artifact["data"] for artifact in found}
    assert set(artifacts) == {"train", "stages", "evaluation", "report", "mlflow"}
    assert float(artifacts["train"]) == 100.0
    assert f"http://127.0.0.1:{up.mlflow_port}/#/experiments/" in artifacts["mlflow"]
    assert "/artifacts/report/report.html" in artifacts["report"]
    wanted = {"filter": {"event": {"name": ["tithe.alarm.kl"]}}}
    events = eventually(lambda: up.api.ask("POST", "events/filter", wanted)["events"])
    assert events[0]["payload"]["reason"] == "KL to the reference is 0.4"


def test_the_form_offers_recipes_and_stages_and_schedules_are_off(up: Up) -> None:
    declared = [entry["entrypoint"] for entry in read_yaml(REPOSITORY / "prefect.yaml")["deployments"]]
    assert len(declared) == len(set(declared)), "the second of two would undo the first"
    found = {flow: up.api.ask("GET", f"deployments/name/{flow}/tithe") for flow in ("campaign", "sweep", "evaluate", "plan")}
    campaign, sweep, evaluate, plan = found.values()
    form = campaign["parameter_openapi_schema"]["properties"]
    assert list(form) == ["recipe", "name", "overrides", "force"]
    assert form["recipe"]["enum"] == list(recipe_names())
    assert form["recipe"]["default"] == "params.yaml"
    assert "key=value" in form["overrides"]["description"]
    assert form["force"]["items"]["enum"][0] == "prepare"
    assert "recipes/plans/stateless-1t.yaml" in plan["parameter_openapi_schema"]["properties"]["target"]["enum"]
    schedules = [schedule for deployment in (campaign, sweep, evaluate) for schedule in deployment["schedules"]]
    assert [(entry["slug"], entry["active"], bool(entry["schedule"]["cron"])) for entry in schedules] == [
        ("nightly", False, True),
        ("weekly", False, True),
        ("weekly", False, True),
    ]
    assert campaign["tags"] == ["campaign"]
    assert sweep["parameter_openapi_schema"]["properties"]["search"]["enum"] == ["grid", "random", "optuna"]
    queue = up.api.ask("GET", "work_pools/tithe/queues/device")
    assert queue["concurrency_limit"] >= 1


def test_the_job_template_for_kubernetes_is_one_that_prefect_takes(up: Up) -> None:
    template = read_json(REPOSITORY / "docs" / "kubernetes-pool.json")
    variables = set(template["variables"]["properties"])
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == variables
    assert template["variables"]["properties"]["command"]["default"] == "python -m prefect.engine"
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    its_worker_wants = (1, 1, "prefect-job")
    assert (pod["parallelism"], pod["completions"], pod["containers"][0]["name"]) == its_worker_wants
    assert template["variables"]["properties"]["grace_seconds"]["default"] > resolve_config(None).limits.grace_seconds
    name = f"kubernetes-{next(NUMBERS)}"
    up.api.ask("POST", "work_pools/", {"name": name, "type": "kubernetes", "base_job_template": template})
    try:
        deployment = up.api.ask("GET", "deployments/name/campaign/tithe")
        wanted = {"work_pool_name": name, "job_variables": {"gpus": 0}}
        made = {"name": name, "flow_id": deployment["flow_id"], "entrypoint": CAMPAIGN, **wanted}
        answer = up.api.ask("POST", "deployments/", made)
        assert answer["work_pool_name"] == name
        up.api.ask("DELETE", f"deployments/{answer['id']}")
        mistaken = {**made, "name": "mistaken", "job_variables": {"gpus": "many"}}
        with pytest.raises(httpx.HTTPStatusError, match="422"):
            up.api.ask("POST", "deployments/", mistaken)
    finally:
        up.api.ask("DELETE", f"work_pools/{name}")


def schedules(up: Up, flow: str = "campaign") -> dict[str, tuple[bool, str, str]]:
    """Return the schedules of a flow: slug to switch, time and the name that they give."""
    found = deployments(up.api)[f"flows.deployments.{flow}"]["schedules"]
    return {str(s["slug"]): (s["active"], s["schedule"].get("cron"), s["parameters"].get("name")) for s in found}


def fired(up: Up, name: str) -> list[dict[str, Any]]:
    """Return the flow runs that schedules made of a campaign, the first first."""
    deployment = deployments(up.api)[CAMPAIGN]["id"]
    wanted = {"deployments": {"id": {"any_": [deployment]}}, "sort": "NEXT_SCHEDULED_START_TIME_ASC"}
    found = up.api.ask("POST", "flow_runs/filter", wanted)
    return [run for run in found if run["auto_scheduled"] and run["parameters"].get("name") == name]


def test_a_schedule_fires_and_every_one_is_as_the_last_person_left_it(
    up: Up, campaign: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setenv("TITHE_STATE", up.environment["TITHE_STATE"])
    campaign.plan()
    path = f"deployments/{deployments(up.api)[CAMPAIGN]['id']}/schedules"
    nightly = f"{path}/{deployments(up.api)[CAMPAIGN]['schedules'][0]['id']}"
    seldom = {"cron": "0 0 29 2 *", "timezone": "UTC", "day_or": True}
    up.api.ask("PATCH", nightly, {"active": True, "schedule": seldom, "parameters": {"name": "theirs"}})
    own = up.api.ask("POST", path, [{"active": True, "schedule": seldom, "parameters": {"name": "own"}}])[0]["id"]
    slug = f"own-{own[:8]}"
    file, kept = tmp_path / "prefect.yaml", {"nightly": (True, "0 0 29 2 *", "theirs"), slug: (False, "0 0 29 2 *", "own")}
    try:
        eventually(lambda: slug in schedules(up))
        up.api.ask("PATCH", f"{path}/{own}", {"active": False})  # the UI's switch, which empties the parameters
        eventually(lambda: schedules(up)[slug] == (False, "0 0 29 2 *", "own"))
        tree = read_yaml(DECLARED)
        parameters = {"name": campaign.name, "overrides": campaign.overrides}
        often = {"slug": "often", "interval": 15, "active": True, "parameters": parameters}
        next(entry for entry in tree["deployments"] if entry["entrypoint"] == CAMPAIGN)["schedules"].append(often)
        file.write_text(json.dumps(tree).replace("0 6 * * 1", "0 7 * * 1"))
        assert register(up.api, file) == ["campaign/tithe", "evaluate/tithe", "plan/tithe", "sweep/tithe"]
        assert schedules(up) == {**kept, "often": (True, None, campaign.name)}
        assert schedules(up, "evaluate") == {"weekly": (False, "0 7 * * 1", None)}
        run = eventually(lambda: [run for run in fired(up, campaign.name) if run["state"]["type"] in ENDED], 300)[0]
        assert (run["name"], run["state"]["name"]) == (campaign.workspace.run_id, "Completed"), run["state"]
        assert (run["created_by"]["type"], run["created_by"]["display_value"]) == ("SCHEDULE", "often")
        assert run["parameters"] == parameters
        assert campaign.made == ["prepare", "train", "evaluate", "report"]
    finally:
        register(up.api)
        found = schedules(up)
        up.api.ask("DELETE", f"{path}/{own}")
        up.api.ask("PATCH", nightly, {"active": False, "schedule": {**seldom, "cron": "0 1 * * *"}, "parameters": {}})
    assert found == kept
    assert schedules(up, "evaluate") == {"weekly": (False, "0 6 * * 1", None)}
    eventually(lambda: all(run["state"]["type"] in ENDED for run in fired(up, campaign.name)), 300)


def test_of_missed_times_of_a_schedule_only_the_last_is_made_up_for(up: Up, eventually: Any) -> None:
    plan, light = deployments(up.api)["flows.deployments.plan"], "work_pools/tithe/queues/light"
    found = {"deployments": {"id": {"any_": [plan["id"]]}}, "flow_runs": {"tags": {"all_": ["auto-scheduled"]}}}

    def runs(state: str) -> list[str]:
        now = datetime.now(UTC).isoformat()
        due = {**found["flow_runs"], "state": {"name": {"any_": [state]}}, "next_scheduled_start_time": {"before_": now}}
        wanted = {**found, "flow_runs": due, "sort": "NEXT_SCHEDULED_START_TIME_ASC"}
        return [run["id"] for run in up.api.ask("POST", "flow_runs/filter", wanted)]

    up.api.ask("PATCH", light, {"is_paused": True})
    often = {"active": True, "schedule": {"interval": 1, "anchor_date": "2026-01-01T00:00:00Z", "timezone": "UTC"}}
    schedule = up.api.ask("POST", f"deployments/{plan['id']}/schedules", [often])[0]["id"]
    try:
        missed = eventually(lambda: len(due := [*runs("Scheduled"), *runs("Late")]) >= 3 and due)
        number = skip_missed(up.api)
        made = [run for run in up.api.ask("POST", "flow_runs/filter", found) if run["created_by"]["id"] == schedule]
        skipped = [run["id"] for run in made if run["state"]["name"] == "Skipped"]
        assert len(skipped) == number >= 2
        assert len([run for run in missed if run not in skipped]) <= 1
    finally:
        up.api.ask("DELETE", f"deployments/{plan['id']}/schedules/{schedule}")
        up.api.ask("PATCH", light, {"is_paused": False})
    assert not runs("Scheduled")


def test_a_mistake_in_the_form_is_one_sentence(up: Up, eventually: Any) -> None:
    run = up.wait(up.start_flow("campaign", overrides=["train.batch.group_sise=4"]), eventually)
    assert run["state"]["type"] == "FAILED"
    assert run["state"]["message"] == "train.batch.group_sise = 4: unknown key; did you mean 'group_size'?"


def test_a_sweep_started_by_the_api_runs_its_trials(up: Up, campaign: Tiny, eventually: Any) -> None:
    rates, overrides = "train.optimizer.learning_rate=1e-4,2e-4", [*campaign.overrides, "train.stages=[{steps: 5}]"]
    flow_run = up.start_flow("sweep", axes=[rates], overrides=overrides, name=campaign.name)
    ended = up.wait(flow_run, eventually)
    assert (ended["name"], ended["state"]["name"]) == (campaign.name, "Completed")
    made = [(campaign.root / trial / "made.txt").read_text().split() for trial in ("000", "001")]
    assert [stages[-3:] for stages in made] == [["train", "evaluate", "report"]] * 2
    assert sum(stages.count("prepare") for stages in made) == 1
    tasks = up.api.ask("POST", "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    assert sorted(task["state"]["name"] for task in tasks) == ["Completed"] * 2


def test_a_plan_is_a_flow_run_too(up: Up, eventually: Any) -> None:
    flow_run = up.start_flow("plan", target="recipes/plans/conventional-1t.yaml")
    run = up.wait(flow_run, eventually)
    assert run["state"]["type"] == "COMPLETED", run["state"]
    assert run["name"] == "conventional-1t"
    found = up.api.ask("POST", "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [flow_run]}}})
    assert run["state"]["message"] in found[0]["data"]


def test_cancelled_in_prefect_it_ends_after_a_checkpoint_and_goes_on_when_it_is_started_again(
    up: Up, campaign: Tiny, eventually: Any
) -> None:
    flow_run = campaign.start(seconds=0.2, steps=10_000)
    eventually(lambda: campaign.at_step(2))
    up.api.ask("POST", f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    assert up.wait(flow_run, eventually)["state"]["name"] == "Cancelled"
    assert read_json(campaign.workspace.run / "train" / "checkpoint.json")["stopped"]
    reached = campaign.steps()[-1]
    again = campaign.start(seconds=0, steps=reached + 3)
    assert up.wait(again, eventually)["state"]["name"] == "Completed"
    assert campaign.steps() == list(range(1, reached + 4))
    assert campaign.made == ["prepare", "train", "train", "evaluate", "report"]


def test_a_killed_flow_is_started_again_and_goes_on(up: Up, campaign: Tiny, eventually: Any) -> None:
    flow_run = campaign.start(hang_at=4, steps=25)
    eventually(campaign.hangs)
    owner = up.owner(flow_run)
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    eventually(lambda: "AwaitingRetry" in up.states(flow_run), 300)
    assert up.wait(flow_run, eventually)["state"]["name"] == "Completed", up.states(flow_run)
    assert up.states(flow_run).count("AwaitingRetry") == 1
    assert campaign.steps() == list(range(1, 26))
    assert campaign.made == ["prepare", "train", "train", "evaluate", "report"]


def test_a_killed_worker_costs_nothing(up: Up, campaign: Tiny, eventually: Any) -> None:
    flow_run = campaign.start(seconds=0.2, steps=15)
    eventually(lambda: campaign.at_step(2))
    os.kill(up.child("worker start").pid, signal.SIGKILL)
    run = up.wait(flow_run, eventually)
    assert run["state"]["name"] == "Completed", up.states(flow_run)
    assert campaign.steps() == list(range(1, 16))
    assert campaign.made == ["prepare", "train", "evaluate", "report"]
    assert up.said("the worker ended by itself and is started again")


def test_a_killed_prefect_server_is_started_again_and_hears_how_the_campaign_ended(
    up: Up, campaign: Tiny, eventually: Any
) -> None:
    flow_run = campaign.start(seconds=0.3, steps=15)
    eventually(lambda: campaign.at_step(2))
    server = up.child("server start")
    os.killpg(server.pid, signal.SIGKILL)
    eventually(lambda: up.said("Prefect ended by itself and is started again"))
    eventually(lambda: "report" in campaign.made, 300)
    run = up.wait(flow_run, eventually)
    assert run["state"]["name"] == "Completed", run["state"]
    assert campaign.steps() == list(range(1, 16))
    assert campaign.made == ["prepare", "train", "evaluate", "report"]


def test_a_stopped_up_keeps_its_history_and_the_next_one_goes_on_with_what_it_ran(
    up: Up, campaign: Tiny, eventually: Any
) -> None:
    flow_run = campaign.start(hang_at=4, steps=25)
    eventually(campaign.hangs)
    up.stop()
    assert up.lines[-1] == "stopped"
    assert read_json(campaign.workspace.run / "train" / "checkpoint.json")["stopped"]
    up.start(eventually)
    run = up.wait(flow_run, eventually)
    assert run["state"]["name"] == "Completed", run["state"]
    assert up.states(flow_run).count("AwaitingRetry") == 1
    assert campaign.steps() == list(range(1, 26))
    assert campaign.made == ["prepare", "train", "train", "evaluate", "report"]


def test_a_campaign_is_started_from_the_form_in_a_browser(up: Up, campaign: Tiny, browser: Any, eventually: Any) -> None:
    campaign.plan()
    deployment = up.api.ask("GET", "deployments/name/campaign/tithe")["id"]
    browser.open(f"{up.url}/v2/deployments/deployment/{deployment}/run")
    browser.wait_for_text("recipe (Optional)")
    for text in (f"campaign.name={campaign.name}", *campaign.overrides):
        boxes = browser.evaluate("document.querySelectorAll('textarea').length")
        browser.click_text("Add item")
        browser.wait_for(f"document.querySelectorAll('textarea').length > {boxes}")
        browser.click("[...document.querySelectorAll('textarea')].at(-1)")
        browser.type(text)
    browser.click_text("Submit")
    browser.wait_for("!location.pathname.endsWith('/run')")
    found = {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_DESC", "limit": 1}
    eventually(lambda: campaign.made[-1:] == ["report"], 300)
    flow_run = up.api.ask("POST", "flow_runs/filter", found)[0]
    assert flow_run["parameters"]["overrides"][0] == f"campaign.name={campaign.name}"
    assert up.wait(flow_run["id"], eventually)["state"]["name"] == "Completed"
    browser.open(f"{up.url}/v2/runs/flow-run/{flow_run['id']}?tab=Artifacts")
    browser.wait_for_text("Completed")
    browser.wait_for_text(f"{campaign.name}-report")
