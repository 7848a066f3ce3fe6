"""The command line: what it says, how it fails, and that it is quick because it imports nothing heavy."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flows.console import Console
from flows.start import next_commands, tell_from_where
from flows.summary import mlflow_link
from flows.workspaces import resolve_config, resolve_workspace
from tasks.record import begin, finish
from tasks.tracking import Sidecar
from tasks.workspace import REPOSITORY
from trainer.errors import ConfigError

HEAVY = ("torch", "prefect", "mlflow", "transformers", "dvc", "sqlalchemy", "pandas")
PROBE = """
import sys
from flows.cli import main
sys.argv = ["tithe", *sys.argv[1:]]
try:
    main()
finally:
    print("HEAVY", [name for name in {heavy!r} if name in sys.modules])
"""


def tithe(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = PROBE.format(heavy=HEAVY)
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=240, check=False)


def test_help_has_examples_and_imports_nothing_heavy() -> None:
    done = tithe("--help")
    assert done.returncode == 0
    for word in ("run", "resume", "up", "evaluate", "recipes/smollm2.yaml"):
        assert word in done.stdout
    assert "HEAVY []" in done.stdout


@pytest.mark.parametrize(
    "command", ["run", "resume", "sweep", "up", "status", "initialise", "evaluate", "compare", "doctor", "export"]
)
def test_every_command_has_help(command: str) -> None:
    done = tithe(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "-S", "train.batch.group_sise=4"], 2, "train.batch.group_sise = 4: unknown key; did you mean 'group_size'?"),
        (["run", "-S", "train.batch.group_size=1"], 2, "train.batch.group_size = 1: a group of one has no baseline"),
        (["run", "-S", "train.batch.group_size=many"], 2, "train.batch.group_size = 'many'"),
        (["run", "-S", "novalue"], 2, "expected key=value"),
        (["run", "recipes/absent.yaml"], 2, "recipes/absent.yaml"),
        (["train", "-S", "train.sampling.top_p=0.9"], 2, "train.sampling.top_p = 0.9"),
        (["sweep"], 2, "names no key"),
        (["sweep", "train.batch.group_sise=2,4", "campaign.seed=0,1"], 2, "did you mean 'group_size'?"),
        (["sweep", "--random", "3", "campaign.seed=0..9", "--name", "../etc"], 2, "is no name"),
        (["doctor", "nowhere-1a2b3c4d"], 3, "nowhere-1a2b3c4d: no such run"),
        (["lineage", "tests"], 3, "tests: is no run directory: it has no config.json"),
        (["compare", "nowhere", "either"], 3, "nowhere: no such run"),
        (["promote", "nowhere"], 3, "nowhere: no such run"),
        (["export", "nowhere", "out"], 3, "nowhere: no such run"),
        (["resume", "-S", "campaign.name=never-begun"], 2, "no such run was begun"),
        (["sync", "-S", "campaign.name=never-begun"], 2, "no such run was begun"),
        (["replay", "runs/never-begun"], 2, "RUN = 'runs/never-begun': is no run directory; name one"),
        (["replay", "README.md"], 2, "RUN = 'README.md': is no run directory; name one"),
    ],
)
def test_a_mistake_is_one_line_before_anything_heavy_is_imported(arguments: list[str], code: int, said: str) -> None:
    done = tithe(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "HEAVY []" in done.stdout


def test_an_unknown_option_is_a_usage_error() -> None:
    done = tithe("run", "--nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_the_default_campaign_lives_in_the_repository_and_any_other_beside_it(tmp_path: Path) -> None:
    assert resolve_workspace(resolve_config(None)).root == REPOSITORY
    assert resolve_workspace(resolve_config(None, ["machine.threads=1", "limits.retries=0"])).root == REPOSITORY
    changed = resolve_config(None, ["train.optimizer.learning_rate=3e-4"])
    assert resolve_workspace(changed).root == REPOSITORY / "campaigns" / "quickstart"
    recipe = tmp_path / "My Recipe.yaml"
    recipe.write_text("train: {optimizer: {learning_rate: 3.0e-4}}\n")
    assert resolve_config(recipe).campaign.name == "my-recipe"
    assert resolve_config(recipe, ["campaign.name=other"]).campaign.name == "other"
    recipe.write_text("campaign: {name: named}\n")
    assert resolve_workspace(resolve_config(recipe)).root == REPOSITORY / "campaigns" / "named"
    assert resolve_workspace(resolve_config(recipe), root=tmp_path).root == tmp_path


def test_resume_names_the_runs_that_there_are(tiny: Any) -> None:
    from flows.workspaces import Workspace

    assert isinstance(tiny.workspace, Workspace)
    with pytest.raises(ConfigError, match="no such file"):
        resolve_config(tiny.root / "absent.yaml")


@pytest.mark.smoke
def test_status_resume_and_busy(tiny: Any, eventually: Any) -> None:
    tiny.plan(seconds=0.3, steps=10_000)
    process = tiny.start("--plain", "--no-tracking")
    tiny.wait_for_step(2)
    command = [word for word in tiny.command() if word != "--no-fork"]
    command[3] = "status"
    status = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    rows = {line.split("│")[1].strip(): line for line in status.splitlines() if line.startswith("│")}
    assert "current" in rows["prepare"]
    assert "missing" in rows["train"]
    assert "learning, step" in rows["train"]
    refused = tiny.run("--plain", "--no-tracking")
    assert refused.returncode == 7
    assert f"pid {process.pid}" in refused.stderr
    assert "campaign.name" in refused.stderr
    os.kill(process.pid, 15)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 75, said
    tiny.plan(seconds=0, steps=30)
    command = tiny.command("--plain", "--no-tracking")
    command[3] = "resume"
    resumed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    assert "resuming attempt 1, which ended KILLED: prepare current" in resumed


def test_a_run_that_goes_on_says_from_which_checkpoint(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace = tiny.workspace

    def told() -> str:
        tell_from_where(workspace, Console())
        return capsys.readouterr().out.strip()

    assert told() == ""
    begin(workspace.run, "campaign", workspace.run_id, workspace.config, "x", {}, {})
    finish(workspace.run, "FAILED", error="planned")
    assert told() == "resuming attempt 1, which ended FAILED: nothing current"
    for step in (2, 10):
        (workspace.run / "train" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert told() == "resuming attempt 1, which ended FAILED: nothing current; train goes on from step_000010"
    finish(workspace.run, "FINISHED")
    assert told() == ""


def test_the_link_to_mlflow_holds_no_password(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:s3cret@mlflow.example/below/")
    assert mlflow_link(tiny.workspace) is None
    Sidecar("record", "https://me:***@mlflow.example/below/", "7", "abc").write(tiny.workspace.run)
    assert mlflow_link(tiny.workspace) == "https://mlflow.example/below/#/experiments/7/runs/abc"


@pytest.mark.smoke
def test_a_forked_campaign_is_the_same(tiny: Any) -> None:
    command = ["--fork" if word == "--no-fork" else word for word in tiny.command("--plain", "--no-tracking")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert tiny.made == ["prepare", "train", "evaluate", "report"]
    assert done.stderr == ""


def test_the_next_commands_work_in_a_shell_without_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    workspace = resolve_workspace(resolve_config(None), root=tmp_path / "elsewhere")
    lines = next_commands(workspace)
    assert len(lines) == 3
    assert "--cd elsewhere repro" in lines[2]
    for line in lines:
        program = shlex.split(line.removeprefix("next:"), comments=True)[0]
        assert shutil.which(program) is not None, line
    words = shlex.split(lines[1], comments=True)
    overrides = [word for option, word in pairwise(words) if option == "-S"]
    other = resolve_workspace(resolve_config(None, [*overrides, f"campaign.name={workspace.config.campaign.name}"]))
    assert other.run_id != workspace.run_id  # it trains something else, and not the same under another name


def test_after_another_campaign_the_next_commands_are_its_own(tmp_path: Path) -> None:
    workspace = resolve_workspace(resolve_config(None, ["campaign.name=mine"]), root=tmp_path / "mine")
    lines = next_commands(workspace)
    assert len(lines) == 3
    assert f"doctor {workspace.run}" in lines[1]
    assert not any("learning_rate" in line for line in lines)


def test_the_next_commands_do_not_need_a_right_params_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign that has ended well is not failed by what somebody writes into params.yaml meanwhile."""
    workspace = resolve_workspace(resolve_config(None), root=tmp_path / "place")
    edited = tmp_path / "params.yaml"
    edited.write_text("campaign: [\n")
    monkeypatch.setattr("flows.start.resolve_config", lambda recipe: resolve_config(recipe, params=edited))
    assert len(next_commands(workspace)) == 3


def test_a_port_that_is_none_is_a_usage_error() -> None:
    done = tithe("up", "--prefect-port", "99999")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
