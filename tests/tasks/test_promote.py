"""From a finished run to a model that others use: the gate, MLflow's registry, exports that plain transformers loads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.promote import ORIGIN, NotBetter, export, gate, promote
from tasks.record import PRUNED, begin, config_hash, finish
from tasks.registry import STAGES
from tasks.tracking import tracking_uri
from tasks.workspace import REPOSITORY, Workspace
from trainer.config import as_tree, load_config
from trainer.errors import BusyError, ConfigError, DataError, ModelError
from trainer.files import damage, read_json, write_json

Finish = Callable[..., Workspace]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny base, an adapter of it and the two merged, as their stages leave them."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainer.policy.tokenizer import character_tokenizer

    place = tmp_path_factory.mktemp("models")
    tokenizer = character_tokenizer("0123456789+=")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes))
    base.save_pretrained(place / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(place / "policy")
    adapted.merge_and_unload().save_pretrained(place / "merged")
    for name in ("base", "policy", "merged"):
        tokenizer.save_pretrained(place / name)
    write_json(place / "merged" / "merge.json", {"cosine": 1.0})
    return {name: place / name for name in ("base", "policy", "merged")}


@pytest.fixture
def finished(tmp_path: Path, models: dict[str, Path], put_artifact: Any) -> Finish:
    def build(gain: tuple[float, float, float] = (0.1, 0.05, 0.15), method: str = "lora", stages: int = len(STAGES)) -> Workspace:
        config = load_config(REPOSITORY / "params.yaml", [f"train.method={method}", "campaign.name=adder"])
        workspace = Workspace(tmp_path / "workspace", config)
        write_json(workspace.run / "config.json", as_tree(config))
        tags = {"workspace": str(workspace.root), "git.commit": "abc", "dvc.merged": "123.dir"}
        begin(workspace.run, "campaign", workspace.run_id, config, config_hash(config), {}, tags)
        evaluation = tmp_path / "evaluation"
        three = dict(zip(("value", "low", "high"), gain, strict=True))
        side = {"pass@1": {"value": 0.6, "low": 0.5, "high": 0.7}, "statuses": {"ok": 3}}
        gains = {"pass@1": three, "truncated_fraction": three}
        write_json(evaluation / "evaluation.json", {"base": side, "trained": side, "difference": gains})
        for stage in STAGES[:stages]:
            put_artifact(workspace, stage, {**models, "evaluation": evaluation}.get(stage.artifact, "x"))
        finish(workspace.run, "FINISHED")
        return workspace

    return build


def test_the_gate_wants_the_whole_interval_above_the_margin(finished: Finish) -> None:
    run = finished().run
    assert gate(run).passes
    assert "+10 points (+5 to +15, 95% bootstrap)" in gate(run).sentence
    assert not gate(run, margin=0.06).passes
    with pytest.raises(ConfigError, match=r"no such metric; .*'pass@1'"):
        gate(run, "pass@l")
    with pytest.raises(ConfigError, match="more of it is not better; valid here: pass@1"):
        gate(run, "truncated_fraction")


def test_no_gain_beyond_chance_is_not_promoted(finished: Finish) -> None:
    workspace = finished(gain=(0.02, -0.01, 0.05))
    with pytest.raises(NotBetter, match=r"\+2 points \(-1 to \+5.*not above 0"):
        promote(workspace.run)


def test_what_is_not_there_or_not_this_runs_is_refused(finished: Finish, put_artifact: Any, tmp_path: Path) -> None:
    half = finished(stages=4)
    with pytest.raises(DataError, match=r"has no evaluation yet \(finished\); `tithe resume` finishes it"):
        gate(half.run)
    finish(half.run, "KILLED", error=f"{PRUNED}5 of 12: hopeless")
    with pytest.raises(DataError, match=r"has no merged yet \(pruned at step 5 of 12: hopeless\); compare its sweep's other"):
        export(half.run, tmp_path / "out", "vllm")
    whole = finished()
    weights = whole.artifact("merged") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ModelError, match="does not match its sha256"):
        export(whole.run, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()
    other = Workspace(whole.root, load_config(REPOSITORY / "params.yaml", ["campaign.name=other"]))
    merge = next(stage for stage in STAGES if stage.name == "merge")
    put_artifact(other, merge, "other")
    with pytest.raises(DataError, match="is another run's by now"):
        export(whole.run, tmp_path / "out", "vllm")


def test_what_was_pulled_and_not_made_here_can_be_exported(finished: Finish, tmp_path: Path) -> None:
    """After `dvc pull`, or under another --run-dir, every stage is current and none has a record."""
    workspace = finished()
    for stage in STAGES:
        shutil.rmtree(workspace.run / stage.name)
    assert gate(workspace.run).passes
    export(workspace.run, tmp_path / "out", "vllm")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    merge = next(stage for stage in STAGES if stage.name == "merge")  # made anew by force, and stopped: the old one stands
    begin(workspace.run / "merge", "stage", "merge", workspace.config, "i", {}, {})
    finish(workspace.run / "merge", "KILLED")
    assert workspace.is_current(merge)
    export(workspace.run, tmp_path / "out", "vllm")
    shutil.rmtree(workspace.artifact("merged"))
    with pytest.raises(DataError, match="has no merged yet"):
        export(workspace.run, tmp_path / "out", "vllm")


def test_an_export_loads_in_plain_transformers_and_is_the_merged_model(
    finished: Finish, models: dict[str, Path], tmp_path: Path
) -> None:
    workspace = finished()
    lines = export(workspace.run, tmp_path / "out", "transformers")
    assert damage(tmp_path / "out") is None
    assert not (tmp_path / "out" / "merge.json").exists()
    names = [child["name"] for child in read_json(tmp_path / "out" / ORIGIN)["from"]]
    assert names[:3] == ["configuration", "code", "environment"]
    program = "\n".join([*lines, "import torch", 'ids = tokenizer("12+34=", return_tensors="pt").input_ids'])
    program += "\nimport sys\nours = sorted({'trainer', 'tasks'} & set(sys.modules))\nprint(model(ids).logits.sum().item(), ours)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    total, ours = done.stdout.strip().split(" ", 1)
    assert ours == "[]"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged = AutoModelForCausalLM.from_pretrained(models["merged"])
    ids = AutoTokenizer.from_pretrained(models["merged"])("12+34=", return_tensors="pt").input_ids
    assert float(total) == pytest.approx(merged(ids).logits.sum().item(), rel=1e-5)


def test_an_exported_adapter_names_its_base_and_gives_the_merged_models_answers(
    finished: Finish, models: dict[str, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    workspace = finished()
    (line,) = export(workspace.run, tmp_path / "adapter", "vllm", adapter=True)
    assert line.startswith(f"vllm serve {workspace.artifact('base')} --enable-lora --max-lora-rank")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(workspace.artifact("base"))
    base = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"])
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(models["merged"])
    ids = torch.tensor([[2, 3, 4]])
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-5)


def test_an_export_replaces_an_earlier_one_and_nothing_else(finished: Finish, tmp_path: Path) -> None:
    workspace = finished(method="full")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(BusyError, match="holds something that is no export"):
        export(workspace.run, tmp_path / "mine", "vllm")
    (tmp_path / "file").touch()
    with pytest.raises(BusyError, match="is a file"):
        export(workspace.run, tmp_path / "file", "vllm")
    with pytest.raises(ConfigError, match="there is no adapter"):
        export(workspace.run, tmp_path / "out", "vllm", adapter=True)
    assert export(workspace.run, tmp_path / "out", "vllm") == export(workspace.run, tmp_path / "out", "vllm")


@pytest.mark.smoke
def test_a_promoted_model_is_a_version_with_evaluation_lineage_and_alias(
    finished: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("TITHE_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    workspace = finished()
    verdict, versions = promote(workspace.run)
    assert verdict.passes
    assert [(v.name, v.number, v.was_there) for v in versions] == [("adder", 1, False), ("adder-adapter", 1, False)]
    client = MlflowClient(tracking_uri=tracking_uri())
    version = client.get_model_version_by_alias("adder", "champion")
    assert version.version == 1
    assert version.tags["path"] == str(workspace.artifact("merged"))
    assert (version.tags["gate"], version.tags["git.commit"], version.tags["dvc.merged"]) == ("passed", "abc", "123.dir")
    assert "reasoning_gym:basic_arithmetic" in version.description
    model = client.get_logged_model(version.source.rpartition("/")[2])
    assert {metric.key: metric.value for metric in model.metrics}["trained/pass_at_1"] == 0.6
    assert [v.was_there for v in promote(workspace.run)[1]] == [True, True]  # the same content is no second version
    shutil.rmtree(workspace.root)
    unsure = finished(gain=(0.0, -0.1, 0.1))
    promote(unsure.run, anyway=True, name="unsure")
    assert client.search_model_versions("name = 'unsure'")[0].tags["gate"] == "refused"
    shutil.rmtree(unsure.root)
    promote(finished().run, name="unsure")  # the same weights, evaluated on more prompts
    assert client.get_model_version_by_alias("unsure", "champion").tags["gate"] == "passed"
    shutil.rmtree(unsure.root)
    worse = finished(gain=(0.0, -0.1, 0.1), method="full")
    _, (second,) = promote(worse.run, anyway=True, name="adder")
    assert client.get_model_version_by_alias("adder", "champion").version == 1
    assert second.was_there  # the same merged weights as before
