"""`tithe plan` as a person types it: the verdict, the way out, JSON, the comparison; and the gate of `tithe run`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows import gate
from flows.child import Launcher
from flows.cli import app
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import load_config
from trainer.errors import ConfigError, ResourceError
from trainer.metrics import RunWriter

PLANS = REPOSITORY / "recipes" / "plans"


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TITHE_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "140")


def tithe(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_verdict_comes_first_and_decides_the_exit_code(tmp_path: Path) -> None:
    said = tithe(str(PLANS / "lora-async-1.2t-as-published.yaml"), "--html", str(tmp_path / "plan.html"))
    assert said.exit_code == 1
    assert (
        said.output.index("Does not fit") < said.output.index("cheapest way") < said.output.index("memory: what each phase holds")
    )
    assert "keep the frozen backbone in INT8" in said.output
    assert (tmp_path / "plan.html").read_text().startswith("<!doctype html>")
    fits = tithe(str(PLANS / "lora-async-1.2t.yaml"))
    assert fits.exit_code == 0
    assert "Fits: each of 8 sampling devices" in fits.output


def test_json_is_all_of_it() -> None:
    said = tithe(str(PLANS / "stateless-1t.yaml"), "--json")
    tree = json.loads(said.output)
    assert tree["verdict"]["fits"]
    assert tree["model"]["parameters"] == 10**12
    assert {flow["name"] for flow in tree["bandwidth"]} >= {"weights gathered", "reference streamed"}


def test_json_of_what_does_not_fit_ends_like_the_page(tmp_path: Path) -> None:
    said = tithe(str(PLANS / "lora-async-1.2t-as-published.yaml"), "--json")
    assert not json.loads(said.output)["verdict"]["fits"]
    assert said.exit_code == 1
    (tmp_path / "small.yaml").write_text("device: t4-16gb\nmemory_bytes: 1.0e+8\n")
    none = tithe("--model", "kimi-k2", "--hardware", str(tmp_path / "small.yaml"), "--search", "--json")
    assert none.exit_code == 1
    assert not json.loads(none.output)["verdict"]["fits"]


def test_search_finds_the_fewest_devices() -> None:
    said = tithe("--model", "qwen3-32b", "--search", "--json", "-S", "train.residency=zero3", "-S", "devices=8")
    tree = json.loads(said.output)
    assert tree["verdict"]["fits"]
    assert tree["choices"]["devices"] <= 16


def test_comparison_shows_all_three() -> None:
    said = tithe("--model", "dense-10b", "--compare")
    assert said.exit_code == 0
    for words in ("conventional", "method S", "method L", "devices (training + sampling)"):
        assert words in said.output


def test_details_and_names() -> None:
    assert "P 6,738,415,616 x 2 B" in tithe(str(PLANS / "lomo-7b.yaml"), "--details").output
    assert "kimi-k2" in tithe("--list").output


def test_mistakes_reach_the_command_line() -> None:
    said = tithe("--model", "qwen3-8b", "--hardware", "h1000")
    assert isinstance(said.exception, ConfigError)
    assert "did you mean 'h100-80gb'" in str(said.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "qwen3-8b", "--compare", "--search"), "the comparison searches by itself"),
        (("--model", "qwen3-8b", "--compare", "--html", "x.html"), "leave one of them out"),
        (("--model", "qwen3-8b", "--hardware", "nowhere.yaml"), "hardware = 'nowhere.yaml': no such file"),
        (("--calibrate", "runs/nowhere"), "is no run directory"),
    ],
)
def test_more_mistakes_are_named(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.plan.hardware_of", lambda name: pytest.fail("the machine was probed first"))
    said = tithe(*arguments)
    assert words in str(said.exception)


@pytest.fixture
def launcher() -> Launcher:
    return Launcher(load_config(REPOSITORY / "params.yaml"), fork=False)


def test_the_gate_stops_what_does_not_fit_before_anything_runs(tmp_path: Path, launcher: Launcher) -> None:
    large = ["base.scratch.hidden_size=65536", "base.scratch.num_heads=64", "base.scratch.num_layers=64"]
    workspace = Workspace(tmp_path, load_config(REPOSITORY / "params.yaml", large))
    said: list[str] = []
    with pytest.raises(ResourceError, match="cannot fit: main memory is"):
        gate.before(workspace, said.append, False, launcher)
    assert not (workspace.run / "plan.json").exists()
    gate.before(workspace, said.append, True, launcher)
    assert (workspace.run / "plan.json").exists()
    assert any("cannot fit" in sentence for sentence in said)


def test_the_gate_of_plain_models_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flows import gate; from flows.child import Launcher; "
        "from tasks.workspace import Workspace; from trainer.config import load_config; "
        f"config = load_config(Path({str(REPOSITORY / 'params.yaml')!r})); "
        f"gate.before(Workspace(Path({str(tmp_path)!r}), config), print, False, Launcher(config)); "
        "sys.exit(bool({'torch', 'transformers', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "plan: fits" in done.stdout


@pytest.mark.smoke
def test_other_models_are_planned_in_a_process_of_their_own(tmp_path: Path, launcher: Launcher) -> None:
    shape = {"model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({**shape, "intermediate_size": 128}))
    base = f"base.source=hf:{tmp_path / 'small'}"
    workspace = Workspace(tmp_path, load_config(REPOSITORY / "params.yaml", [base, "train.lora.target_modules=[dense]"]))
    workspace.claim_run()
    said: list[str] = []
    gate.before(workspace, said.append, False, launcher)
    assert any("plan: fits" in sentence for sentence in said), said
    assert json.loads((workspace.run / "plan.json").read_text())["model"]["architecture"] == "GPTNeoXForCausalLM"
    (tmp_path / "small" / "config.json").write_text(json.dumps({**shape, "hidden_size": 65536, "num_hidden_layers": 80}))
    with pytest.raises(ResourceError, match="cannot fit"):
        gate.before(workspace, said.append, False, launcher)


def test_after_a_run_the_measured_is_said(tmp_path: Path, launcher: Launcher) -> None:
    workspace = Workspace(tmp_path, load_config(REPOSITORY / "params.yaml"))
    said: list[str] = []
    gate.before(workspace, said.append, False, launcher)
    writer = RunWriter(workspace.run / "train")
    for step in (1, 2):
        writer.metrics(step, {"time/step_seconds": 2.0, "time/learn_seconds": 1.0, "memory/rss_peak_bytes": 5e8})
    gate.after(workspace, said.append)
    assert "measured: memory 500 MB, planned" in said[-1]
    assert "a step 2 s" in said[-1]
