"""Plans from recipes, files and flags; the gate; the page; what a finished run teaches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.plan import (
    RATES,
    Asked,
    calibrate,
    calibrated,
    check,
    gate,
    gather,
    key_of,
    learn,
    learn_memory,
    measured,
    page,
    record_measurement,
)
from tasks.workspace import REPOSITORY, Workspace
from tests.recipes import RECIPES
from trainer.config import load_config
from trainer.errors import ConfigError, DataError, ModelError, ResourceError
from trainer.files import read_json, write_json
from trainer.metrics import METRICS, RunWriter, read_lines
from trainer.plan.hardware import load_hardware
from trainer.plan.memory import CONTEXT, TRAIN_STAGE
from trainer.plan.plan import floor, make_plan
from trainer.plan.probe import quick_local

PLANS = REPOSITORY / "recipes" / "plans"
TOO_LARGE = {
    "base.scratch.hidden_size": 65536,
    "base.scratch.num_heads": 64,
    "base.scratch.num_layers": 64,
    "base.scratch.intermediate_size": 65536,
}


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep calibrations and probes of this machine out of the tests, and the tests' out of this machine."""
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("TITHE_STATE", str(state))
    return state


def config(**changes: object):
    return load_config(REPOSITORY / "params.yaml", [f"{key}={value}" for key, value in changes.items()])


# -- what is asked -----------------------------------------------------------------------------------------------------------


def test_a_plan_file_with_flags_over_it() -> None:
    asked = Asked(
        PLANS / "lomo-7b.yaml", hardware="h100-80gb", devices=4, price_per_hour=1.5, overrides=("train.recompute=false",)
    )
    request = gather(asked)
    assert request.name == "lomo-7b"
    assert request.hardware.device.name == "h100-80gb"
    assert request.hardware.device.price_per_hour == 1.5
    assert request.choices.devices == 4
    assert not request.choices.train.recompute


def test_devices_on_the_command_line_are_those_that_settings_are_checked_against() -> None:
    assert gather(Asked(model="qwen3-8b", devices=8, overrides=("train.residency=zero3",))).choices.devices == 8


def test_a_model_alone_is_a_plan_with_defaults() -> None:
    request = gather(Asked(model="qwen3-8b", overrides=("hardware=a100-80gb", "train.method=lora")))
    assert request.adapter_parameters == request.card.lora_parameters(32, request.choices.train.lora.target_modules)
    assert request.hardware.device.name == "a100-80gb"


def test_a_recipe_plans_its_base(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {method: lora, batch: {prompts_per_step: 8}}\n")
    request = gather(Asked(recipe, hardware="h100-80gb"))
    assert request.choices.train.method == "lora"
    assert request.choices.batch.prompts_per_step == 8
    assert request.card.name == "scratch"


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (Asked(model="qwen3-8b", hardware="h100"), "did you mean 'h100-80gb'"),
        (Asked(model="qwen-8b"), "did you mean 'qwen3-8b'"),
        (Asked(model="qwen3-8b", overrides=("train.metod=lora",)), "did you mean 'method'"),
        (Asked(model="qwen3-8b", overrides=("train.residency=sharded",)), "nobody to share with"),
        (Asked(model="qwen3-8b", overrides=("train.dtype=int4",)), "frozen backbone"),
        (Asked(PLANS / "lomo-65b.yaml", devices=1), "nobody to share with"),
        (Asked(PLANS / "stateless-1t.yaml", overrides=("reference.kind=adapter_off",)), "nothing can be switched off"),
        (Asked(Path("no-such-plan.yaml")), "no such file"),
        (Asked(model="qwen3-8b", devices=0), "devices = 0"),
        (Asked(model="qwen3-8b", sampling_devices=-1), "sample.devices = -1"),
        (Asked(model="qwen3-8b", price_per_hour=-1.0), "hardware.device.price_per_hour = -1.0"),
    ],
)
def test_what_is_wrong_is_named(asked: Asked, problem: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.escape(problem)):
        gather(asked)


def test_a_hub_name_that_is_not_here_is_said() -> None:
    with pytest.raises(ConfigError, match=r"config\.json is not on this machine"):
        gather(Asked(overrides=("base.source=hf:nobody/nothing-7b",), hardware="h100-80gb"))


def test_a_hub_name_of_the_library_is_planned() -> None:
    request = gather(Asked(overrides=("base.source=hf:Qwen/Qwen3-8B",), hardware="h100-80gb"))
    assert request.card.parameters == 8_190_735_360


def test_methods_of_the_trainer_are_mapped() -> None:
    tiered = check(config(**{"train.optimizer.kind": "stateless", "train.memory.weights": "tiered"}), load_hardware("h100-80gb"))
    train = tiered.request.choices.train
    assert (train.rule, train.residency, train.layer_major, train.cold, train.slots) == ("stateless", "tiered", True, "disk", 4)
    beside = check(
        load_config(REPOSITORY / "recipes/lora-async.yaml", (), REPOSITORY / "params.yaml"), load_hardware("h100-80gb")
    )
    assert beside.request.choices.schedule.kind == "async"
    assert beside.memory.find("device", "samplers' weights") == beside.memory.find("device", "weights")


def test_an_offloaded_optimizer_is_mapped() -> None:
    moved = check(config(**{"train.optimizer.offload": "cpu"}), load_hardware("h100-80gb"))
    assert moved.request.choices.train.optimizer_offload == "host"
    assert moved.memory.find("host", "first moments") > 0 == moved.memory.find("device", "first moments")


def test_servers_of_the_recipe_are_mapped() -> None:
    asked = Asked(REPOSITORY / "recipes/lora-async-1t.yaml", hardware="h100-80gb")
    sample = gather(asked).choices.sample
    assert (sample.engine, sample.devices, sample.sequences, sample.kv_bits, sample.page_tokens) == ("vllm", 2, 256, 8, 16)
    assert gather(replace(asked, sampling_devices=32)).choices.sample.devices == 32
    here = gather(replace(asked, overrides=("train.sampler.vllm.urls=[]", "train.sampler.vllm.tensor_parallel_size=1")))
    assert (here.choices.sample.devices, here.choices.sample.tensor_parallel) == (0, 1)


# -- the gate -----------------------------------------------------------------------------------------------------------------


HUGE = {"stateless-1t", "lora-async-1t"}


def test_what_fits_passes_the_gate_and_leaves_its_prediction(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, config())
    workspace.claim_run()
    (said,) = gate(workspace)
    assert "plan: fits" in said
    gate(workspace)  # begun again: one line, not two
    (line,) = read_lines(workspace.run / METRICS)
    tree = read_json(workspace.run / "plan.json")
    assert tree["verdict"]["fits"]
    assert line["metrics"]["plan/predicted_peak_bytes"] == pytest.approx(
        max(r["peak_bytes"] for r in tree["verdict"]["rooms"][:1])
    )


def test_layers_that_the_model_does_not_have_are_said_at_the_gate(tmp_path: Path) -> None:
    tiered = {"train.method": "full", "train.optimizer.kind": "stateless", "train.memory.weights": "tiered"}
    for kept, count in ((2, 1), (3, 2)):
        place = tmp_path / str(kept)
        said = gate(Workspace(place, config(**tiered, **{"base.scratch.num_layers": 2, "train.memory.resident_layers": kept})))
        assert len(said) == count, said
    assert said[1].startswith("warning: train.memory.resident_layers = 3: the model has 2, and where all of them stay")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_meets_the_gate(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of 24 GB: the published campaigns of 10^12 parameters are refused, all others start."""
    monkeypatch.setattr("tasks.plan.memory_limit_bytes", lambda: 24e9)
    workspace = Workspace(tmp_path, load_config(recipe, [], REPOSITORY / "params.yaml"))
    if recipe.stem not in HUGE:
        assert not any("cannot fit" in sentence for sentence in gate(workspace))
        return
    with pytest.raises(
        ResourceError,
        match=r"main memory( for each of 100 ranks is 6| is 24) GB, and what the run holds .* is .* [GT]B: weights 2",
    ) as told:
        gate(workspace)
    assert "What helps most: " in str(told.value)
    assert "are missing" in str(told.value)
    assert "cannot fit" in gate(workspace, force=True)[0]


def test_the_cheapest_change_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"base.scratch.hidden_size": 4096, "base.scratch.num_layers": 16, "base.scratch.intermediate_size": 8192}
    workspace = Workspace(tmp_path, config(**{**large, "train.method": "full"}))
    monkeypatch.setattr("tasks.plan.memory_limit_bytes", lambda: 24e9)
    monkeypatch.setattr("trainer.plan.probe.free_memory_bytes", lambda: 24e9)
    with pytest.raises(ResourceError, match=r"first moments .* Cheapest way to fit: .*stateless"):
        gate(workspace)


def test_an_estimate_alone_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.plan.probe.free_memory_bytes", lambda: 100e6)
    (said,) = gate(Workspace(tmp_path, config()))
    assert said.startswith("warning: does not fit: main memory would need")


def test_what_has_trained_here_is_not_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, config(**TOO_LARGE))
    with pytest.raises(ResourceError, match="--force"):
        gate(workspace)
    write_run(workspace, steps(0.5, 0.25, 6e8))
    assert "warning" in gate(workspace)[0]


def test_a_calibration_moves_no_floor() -> None:
    request = gather(Asked(PLANS / "lomo-7b.yaml"))
    efficiency = request.hardware.efficiency.model_copy(update={"memory": 3.0})
    tuned = replace(request, hardware=request.hardware.model_copy(update={"efficiency": efficiency}))
    assert floor(tuned, "device") == floor(request, "device")
    assert floor(request, "device")[0] == request.card.parameters * 2


def test_an_unknown_base_is_not_planned_but_said(tmp_path: Path) -> None:
    (said,) = gate(Workspace(tmp_path, config(**{"base.source": "hf:nobody/nothing-7b"})))
    assert "not planned" in said


def test_a_broken_base_is_not_planned_but_said(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    (said,) = gate(Workspace(tmp_path, config(**{"base.source": f"hf:{tmp_path / 'model'}"})))
    assert "not planned" in said
    assert "is no JSON" in said


def steps(learn_seconds: float, sample_seconds: float, peak: float) -> list[dict[str, float]]:
    step = {
        "time/step_seconds": learn_seconds + sample_seconds + 0.25,
        "time/learn_seconds": learn_seconds,
        "time/sample_seconds": sample_seconds,
        "memory/rss_peak_bytes": peak,
        "memory/sample_peak_bytes": peak / 2,
        "memory/learn_peak_bytes": peak,
        "throughput/tokens_per_second": 40.0,
        "completion/length_mean": 4.0,
    }
    first = {**step, "time/step_seconds": 100.0, "time/learn_seconds": 90.0}
    return [first, step, step]


def write_run(workspace: Workspace, lines: list[dict[str, float]]) -> None:
    workspace.claim_run()
    writer = RunWriter(workspace.run / "train")
    for number, line in enumerate(lines, 1):
        writer.metrics(number, line)


def test_measured_stands_beside_predicted(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, config())
    write_run(workspace, [])
    gate(workspace)
    write_run(workspace, steps(0.5, 0.25, 6e8))
    values = record_measurement(workspace)
    assert values["plan/measured_step_seconds"] == 1.0  # the first step warms up
    assert values["plan/measured_peak_bytes"] == 6e8
    assert values["plan/ratio_peak_bytes"] == pytest.approx(values["plan/predicted_peak_bytes"] / 6e8)
    assert values["plan/measured_sample_bytes"] == 3e8
    assert values["plan/ratio_sample_bytes"] == pytest.approx(values["plan/predicted_sample_bytes"] / 3e8)
    assert values["plan/measured_tokens_per_second"] == 40.0
    record_measurement(workspace)
    assert len(read_lines(workspace.run / METRICS)) == 2


def test_nothing_measured_nothing_said(tmp_path: Path) -> None:
    assert record_measurement(Workspace(tmp_path, config())) == {}


# -- calibration --------------------------------------------------------------------------------------------------------------


def test_a_finished_run_teaches_later_plans(tmp_path: Path, own_state: Path) -> None:
    workspace, hardware = Workspace(tmp_path, config()), quick_local(own_state)
    write_run(workspace, steps(0.5, 0.25, 6e8))
    learned = calibrate(workspace.run, hardware)
    again = calibrated(hardware)
    assert again.efficiency.train == pytest.approx(learned["train"])
    plan = make_plan(gather_like(workspace, again))
    assert plan.schedule.train_seconds + plan.schedule.score_seconds == pytest.approx(0.5)
    assert plan.schedule.sample_seconds == pytest.approx(0.25)
    assert plan.schedule.step_seconds == pytest.approx(1.0)
    assert plan.memory.peak("device", TRAIN_STAGE)[0] == pytest.approx(6e8, rel=1e-3)
    faster = hardware.device.model_copy(update={"training_flops": 7 * hardware.device.training_flops})
    probed_again = calibrated(hardware.model_copy(update={"device": faster}))
    assert make_plan(gather_like(workspace, probed_again)).schedule.step_seconds == pytest.approx(1.0)


def gather_like(workspace: Workspace, hardware: Any):
    return check(workspace.config, hardware, {"completion_tokens": 4.0}).request


def test_another_machine_keeps_its_own_calibration(own_state: Path) -> None:
    gpu = load_hardware("h100-80gb")
    rates = {key: getattr(gpu.device, key) for key in RATES}
    write_json(own_state / "calibration.json", {key_of(gpu): {"run": "r", "efficiency": {"train": 0.5}, "rates": rates}})
    assert calibrated(gpu).efficiency.train == 0.5
    assert calibrated(load_hardware("a100-80gb")).efficiency.train == 1.0


def test_what_is_no_finished_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run directory"):
        calibrate(tmp_path, load_hardware("h100-80gb"))
    workspace = Workspace(tmp_path, config())
    write_run(workspace, steps(0.5, 0.25, 6e8)[:1])
    with pytest.raises(DataError, match="has 1 steps with times; at least 2"):
        calibrate(workspace.run, load_hardware("h100-80gb"))


def test_a_tiny_run_teaches_nothing_wrong_of_a_large_model(tmp_path: Path, own_state: Path) -> None:
    """An empty process that is 200 MB larger than thought is no ledger that is five times too small."""
    workspace, hardware = Workspace(tmp_path, config()), quick_local(own_state)
    assert hardware is not None
    plan = make_plan(gather_like(workspace, hardware))
    peak = plan.memory.peak("device", TRAIN_STAGE)[0] + 200e6
    found = learn_memory(plan, peak)
    assert found["memory"] == pytest.approx(1.0, abs=0.15)
    assert found["process_bytes"] == pytest.approx(hardware.process_bytes + 200e6, rel=0.02)
    large = make_plan(gather(Asked(PLANS / "lomo-7b.yaml", hardware="h100-80gb")))
    mine = large.memory.peak("device", TRAIN_STAGE)[0] - large.memory.find("device", CONTEXT)
    assert learn_memory(large, 1.2 * mine) == {"memory": pytest.approx(1.2)}


def test_learning_from_a_run_without_memory() -> None:
    request = gather(Asked(model="qwen3-0.6b"))
    learned = learn(request, measured([{"time/step_seconds": 2.0, "time/learn_seconds": 1.0}]))
    assert set(learned) == {"train", "score", "fixed_seconds"}


# -- the page and the tree ------------------------------------------------------------------------------------------------------


def test_the_page_shows_bars_for_every_phase() -> None:
    plan = make_plan(gather(Asked(PLANS / "lora-async-1.2t-as-published.yaml")))
    html = page(plan)
    assert html.count("<svg") == 4
    assert "Does not fit" in html
    assert "train.dtype: int8" in html
    assert "do not fit as written" in html
    assert "<script" not in html
    for term in plan.memory.terms:
        assert term.name.replace("'", "&#39;") in html or term.name.replace("'", "&#x27;") in html


def test_names_are_escaped() -> None:
    request = replace(gather(Asked(PLANS / "lomo-7b.yaml")), name="<b>bold</b>", note="<i>")
    assert "<b>bold" not in page(make_plan(request))


def test_the_tree_is_json() -> None:
    tree = make_plan(gather(Asked(PLANS / "stateless-10b.yaml"))).as_tree()
    again = json.loads(json.dumps(tree))
    assert again["verdict"]["rooms"][0]["place"] == "device"
    assert sum(
        term["bytes"] for term in again["memory"] if term["place"] == "device" and "train" in term["phases"]
    ) == pytest.approx(again["verdict"]["rooms"][0]["peak_bytes"])
