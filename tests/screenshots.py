"""`python -m tests.screenshots` (`make screenshots`): the pictures in docs/pictures, taken of a real sweep and a real campaign.

A sweep of three learning rates, `tithe up`, a small campaign started as the form in Prefect's UI does it; then a headless
Chromium looks at the pages. About three minutes on 2 cores.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from flows.pool import Api
from flows.server import free_port
from tasks.tracking import Sidecar
from tasks.workspace import REPOSITORY
from tests.browser import Browser, program

PICTURES = REPOSITORY / "docs" / "pictures"
RATES = "1e-4,3e-4,1e-3"
SHORT = ("train.stages.0.steps=24", "train.heldout.every_steps=3", "evaluate.num_prompts=64")
SMALL = ("campaign.name=adder", "train.stages.0.steps=6", "evaluate.num_prompts=32")
OBJECTIVE = "heldout/reward_mean"
WIDTH, HEIGHT, COLOURS = 1200, 1000, 96
LIMIT_SECONDS, SETTLE_SECONDS = 900, 5.0


def tithe(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "flows.cli", *words], cwd=REPOSITORY, check=True, timeout=LIMIT_SECONDS)


@contextmanager
def up(prefect_port: int, mlflow_port: int) -> Iterator[None]:
    """Run `tithe up` for the length of a block."""
    ports = ["--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)]
    command = [sys.executable, "-m", "flows.cli", "up", *ports]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_SECONDS)


def start_campaign(prefect: str) -> str:
    """Start a campaign as the form does, wait for its end and return its flow run."""
    api = Api(f"{prefect}/api")
    deployment = api.ask("GET", "deployments/name/campaign/tithe")["id"]
    parameters = {"recipe": "params.yaml", "overrides": list(SMALL)}
    flow_run = str(api.ask("POST", f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])
    deadline = time.monotonic() + LIMIT_SECONDS
    while (state := api.ask("GET", f"flow_runs/{flow_run}")["state"])["type"] != "COMPLETED":
        assert state["type"] in ("SCHEDULED", "PENDING", "RUNNING"), state
        assert time.monotonic() < deadline, state
        time.sleep(1.0)
    return flow_run


def keep(browser: Browser, name: str, height: int = HEIGHT) -> None:
    """Take a picture of the window's upper part, with few colours: text needs no more, and a picture in docs should be small."""
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=2, y=2)
    time.sleep(SETTLE_SECONDS)
    raw, kept = PICTURES / f".{name}.png", PICTURES / f"{name}.png"
    browser.screenshot(raw)
    with Image.open(io.BytesIO(raw.read_bytes())) as picture:
        part = picture.convert("RGB").crop((0, 0, WIDTH, height))
        part.quantize(COLOURS, dither=Image.Dither.NONE).save(kept, optimize=True)
    raw.unlink()
    print(f"{kept}: {kept.stat().st_size / 1e3:.0f} kB", flush=True)


def show_mlflow(browser: Browser, mlflow: str, sweep: Path) -> None:
    """MLflow's comparison of the trials: the parameters that differ and what each reached; and the curve that ranks them."""
    trials = [Sidecar.read(record.parent) for record in sorted(sweep.glob("[0-9]*/runs/*/record.json"))]
    runs, experiments = (quote(json.dumps(ids)) for ids in ([t.run_id for t in trials], [trials[0].experiment_id]))
    browser.open(f"{mlflow}/#/compare-runs?runs={runs}&experiments={experiments}")
    for name in ("Close", "Toggle sidebar", "Parameters - Show diff only", "Metrics - Show diff only"):
        browser.click(f"document.querySelector('button[aria-label=\"{name}\"]')")
    browser.click_text("Visualizations", "h1,h2,h3,h4,h5,span,div,[role=button]")
    browser.evaluate("[...document.querySelectorAll('*')].filter(e => e.scrollTop > 0).forEach(e => e.scrollTop = 0)")
    keep(browser, "mlflow-compare")
    metric, keys = quote(json.dumps(OBJECTIVE)), quote(json.dumps([OBJECTIVE]))
    browser.open(f"{mlflow}/#/metric?runs={runs}&metric={metric}&experiments={experiments}&plot_metric_keys={keys}&x_axis=step")
    browser.wait_for_text("Latest")
    keep(browser, "mlflow-curves", 740)


def show_prefect(browser: Browser, prefect: str, flow_run: str) -> None:
    """The form that starts a campaign, and the flow run of one."""
    deployment = Api(f"{prefect}/api").ask("GET", "deployments/name/campaign/tithe")["id"]
    browser.open(f"{prefect}/v2/deployments/deployment/{deployment}/run")
    browser.wait_for_text("overrides (Optional)")
    keep(browser, "prefect-form", 720)
    browser.open(f"{prefect}/v2/runs/flow-run/{flow_run}")
    browser.wait_for_text("Completed")
    keep(browser, "prefect-run")


def main() -> None:
    executable = program()
    if executable is None:
        sys.exit("error: Chromium is not installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(prefix="tithe-screenshots-") as folder:
        place = Path(folder)
        os.environ |= {"TITHE_STATE": str(place / "state"), "TITHE_CAMPAIGNS": str(place / "campaigns")}
        short = [word for override in SHORT for word in ("-S", override)]
        tithe("sweep", "--plain", "--name", "rates", f"train.optimizer.learning_rate={RATES}", *short)
        sweep = place / "campaigns" / "rates"
        tithe("compare", str(sweep))
        ports = free_port(), free_port()
        prefect, mlflow = (f"http://127.0.0.1:{port}" for port in ports)
        with up(*ports):
            flow_run = start_campaign(prefect)
            with Browser(executable, WIDTH, HEIGHT) as browser:
                show_mlflow(browser, mlflow, sweep)
                show_prefect(browser, prefect, flow_run)
                browser.open(f"{sweep.as_uri()}/compare.html")
                keep(browser, "compare", 860)


if __name__ == "__main__":
    main()
