"""The train stage over real inputs, sampler and verifier: stopped, killed and damaged, it ends at the same bits."""

from __future__ import annotations

import csv
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import tasks.train
from tasks.anchors import describe
from tasks.registry import StagePaths, get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.anchors import guard
from trainer.config import CampaignConfig, as_tree, validate
from trainer.config.load import lay_over
from trainer.errors import CheckpointError, ConfigError, DataError, DivergedError, ResourceError, StopRequested
from trainer.files import read_manifest, sha256_file, write_json
from trainer.metrics import read_lines
from trainer.rollout.embedded import EmbeddedSampler
from trainer.schedule.sync import SyncSchedule

REPOSITORY = Path(__file__).parents[2]
pytestmark = pytest.mark.smoke  # a real stage in every test
CAMPAIGN: dict[str, Any] = {
    "campaign": {"name": "small"},
    "prepare": {
        "sources": [
            {
                "name": name,
                "source": "reasoning_gym:basic_arithmetic",
                "num_rows": 60,
                "prompt_template": "{expression}=",
                "remove_whitespace": True,
                "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "operators": [operator]},
            }
            for name, operator in (("plus", "+"), ("minus", "-"))
        ],
        "heldout_fraction": 0.2,
    },
    "base": {
        "source": "scratch",
        "scratch": {
            "alphabet": "0123456789+-()=",
            "hidden_size": 32,
            "num_heads": 2,
            "steps": 160,
            "decay_steps": 0,
            "batch_size": 32,
            "learning_rate": 5e-3,
        },
    },
    "anchors": {"num_prompts": 8, "top_k": 4},
    "train": {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 3},
        "algorithm": {"kl": {"reference": "anchors", "controller": "adaptive", "coefficient": 0.05, "anchor_batch_size": 4}},
        "batch": {"prompts_per_step": 4, "group_size": 4, "passes": 2, "minibatches": 2},
        "sampling": {"max_completion_tokens": 4},
        "heldout": {"every_steps": 4, "num_prompts": 8},
        "checkpoints": {"every_steps": 3},
        "stages": [
            {"name": "first", "steps": 5, "sources": ["plus"]},
            {"name": "second", "steps": 5, "sources": ["minus"], "learning_rate": 1e-3, "max_completion_tokens": 3},
        ],
    },
    "reward": {"verifier": "exact"},
    "preflight": {"num_prompts": 0},
}
FULL = {"train": {"method": "full", "algorithm": {"kl": {"reference": "exact"}}}}
Train = Callable[..., Path]


def campaign(difference: dict[str, Any] | None = None) -> CampaignConfig:
    return validate(lay_over(CAMPAIGN, difference or {}))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prompts, base and anchors, made once by their own stages."""
    workspace = Workspace(tmp_path_factory.mktemp("inputs"), campaign())
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    return {name: workspace.artifact(name) for name in ("prompts", "base", "anchors")}


def run_train(inputs: dict[str, Path], root: Path, config: CampaignConfig, identity: str = "0" * 64) -> Path:
    """Run the stage's function in the run directory `root`; return the artifact."""
    out = root.with_name(f"{root.name}-policy")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    root.mkdir(exist_ok=True)
    tasks.train.run(config, StagePaths(inputs, out, root, identity))
    return out


@pytest.fixture
def train(inputs: dict[str, Path], tmp_path: Path) -> Train:
    def run(difference: dict[str, Any] | None = None, run: str = "run", identity: str = "0" * 64) -> Path:
        return run_train(inputs, tmp_path / run, campaign(difference), identity)

    return run


@pytest.fixture(scope="module")
def whole(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of an uninterrupted run's artifact."""
    return digests(run_train(inputs, tmp_path_factory.mktemp("whole") / "run", campaign()))


def stop_in_generation(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Send this process a SIGTERM inside the sampler's call of this number."""
    generate, calls = EmbeddedSampler.generate, []

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(self, *arguments)

    monkeypatch.setattr(EmbeddedSampler, "generate", counted)


def digests(artifact: Path) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in sorted(artifact.iterdir()) if path.name != "manifest.json"}


def steps(run: Path) -> list[int]:
    return [line["step"] for line in read_lines(run / "metrics.jsonl")]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(run / "events.jsonl") if line["kind"] == kind]


def test_lora_writes_an_adapter_that_plain_peft_loads(train: Train, inputs: dict[str, Path], tmp_path: Path) -> None:
    out = train()
    assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "curve.csv"]
    base = AutoModelForCausalLM.from_pretrained(inputs["base"])
    ids = torch.tensor([[4, 5, 6]])
    before = base(ids).logits.detach()
    assert not torch.allclose(PeftModel.from_pretrained(base, out)(ids).logits, before, atol=1e-3)
    assert steps(tmp_path / "run") == list(range(11))


def test_full_writes_a_model_that_plain_transformers_loads(train: Train, inputs: dict[str, Path]) -> None:
    out = train(FULL)
    trained, base = (AutoModelForCausalLM.from_pretrained(directory) for directory in (out, inputs["base"]))
    text = "1+2="
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == AutoTokenizer.from_pretrained(inputs["base"])(text).input_ids
    moved = [not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True)]
    assert all(moved)


def test_the_curve_has_one_row_a_step_and_nothing_that_time_decides(train: Train, whole: dict[str, str]) -> None:
    out = train()
    assert digests(out) == whole, "another time, another directory, the same bytes"
    rows = list(csv.DictReader((out / "curve.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == [str(step) for step in range(11)]
    assert [row["step"] for row in rows if row["heldout_accuracy"]] == ["0", "4", "8", "10"]
    assert not [column for column in rows[0] if "second" in column or "byte" in column]
    assert all(row["kl_mean"] and row["entropy"] and row["learning_rate"] for row in rows[1:])


def test_metrics_tell_cost_and_progress(train: Train, tmp_path: Path) -> None:
    train()
    lines = [line["metrics"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    last = lines[-1]
    expected = {"time/sample_seconds", "time/reward_seconds", "time/learn_seconds", "throughput/samples_per_second"}
    assert expected | {"throughput/tokens_per_second", "memory/rss_bytes", "lr"} <= last.keys()
    assert max(line.get("mismatch/max_abs_logprob", -1.0) for line in lines) >= 0, "compared wherever the first minibatch trains"
    assert last["policy/version"] == 10 * 2 * 2
    assert last["completion/length_max"] <= 3


def test_stages_take_their_own_prompts_caps_and_rates(
    train: Train, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, seen = EmbeddedSampler.generate, []

    def spy(self: Any, requests: Any, params: Any) -> Any:
        if params.temperature > 0:
            seen.append(({request.prompt_id for request in requests}, params.max_completion_tokens))
        return generate(self, requests, params)

    monkeypatch.setattr(EmbeddedSampler, "generate", spy)
    train()
    prompts = tasks.train.read_prompts(inputs["prompts"], "train")
    source = {prompt.id: prompt.source for prompt in prompts}
    assert [{source[i] for i in ids} for ids, _ in seen] == [{"plus"}] * 5 + [{"minus"}] * 5
    assert [cap for _, cap in seen] == [4] * 5 + [3] * 5
    rates = [line["metrics"]["lr"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert max(rates[:5]) > 2e-3
    assert max(rates[5:]) <= 1e-3


@pytest.mark.parametrize("call", [1, 4, 9, 13])
def test_a_stopped_run_goes_on_to_the_same_bits(
    train: Train, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Stopped before the first step, in the first RL stage, at its end, in the second."""
    with monkeypatch.context() as patch:
        stop_in_generation(patch, call)
        with pytest.raises(StopRequested, match="SIGTERM after a checkpoint") as error:
            train()
    assert error.value.exit_code == 75
    assert digests(train()) == whole
    assert steps(tmp_path / "run") == list(range(11))
    assert len(events(tmp_path / "run", "resume")) == (0 if call == 1 else 1)


def test_a_stopped_full_run_goes_on_to_the_same_bits(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen reference is the base again, not the checkpoint."""
    expected = digests(train(FULL, run="whole"))
    with monkeypatch.context() as patch:
        stop_in_generation(patch, 8)
        with pytest.raises(StopRequested):
            train(FULL)
    assert digests(train(FULL)) == expected


STATELESS = {"method": "full", "optimizer": {"kind": "stateless", "rule": "rms", "learning_rate": 1e-3}}
TIERED = {"memory": {"weights": "tiered", "split": True, "resident_layers": 1}}
TIERED |= {"algorithm": {"kl": {"reference": "int8_streamed"}}}  # type: ignore[dict-item]


@pytest.mark.parametrize("difference", [STATELESS, {**STATELESS, **TIERED}], ids=["resident", "tiered"])
def test_a_stopped_stateless_run_goes_on_to_the_same_bits(
    difference: dict[str, Any], inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = campaign({"train": difference, "base": {"dtype": "bfloat16"}})
    one = digests(run_train(inputs, tmp_path / "whole", config))
    with monkeypatch.context() as patch:
        stop_in_generation(patch, 8)
        with pytest.raises(StopRequested):
            run_train(inputs, tmp_path / "run", config)
    assert digests(run_train(inputs, tmp_path / "run", config)) == one
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run-policy")
    assert trained.dtype == torch.bfloat16
    assert not (tmp_path / "run" / "tiers").exists(), "working copies go when the policy is written"
    told = [e for kind in ("reference", "warning") for e in events(tmp_path / "whole", kind) if "8-bit" in e["reason"]]
    assert len(told) == (difference is not STATELESS), "the reference's error is measured and told"
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["metrics"]
    assert last["update/realised_fraction"] == pytest.approx(1.0, abs=0.2)


def test_layers_that_the_model_does_not_have_are_said(inputs: dict[str, Path], tmp_path: Path) -> None:
    odd = {**STATELESS, "memory": {"weights": "tiered", "resident_layers": 9}, "stages": [{"name": "one", "steps": 1}]}
    run_train(inputs, tmp_path / "run", campaign({"train": odd}))
    [told] = [event["reason"] for event in events(tmp_path / "run", "warning")]
    assert told.startswith("train.memory.resident_layers = 9: the model has 2, and where all of them stay nothing is saved")


def test_a_damaged_checkpoint_is_passed_over_to_the_same_bits(
    train: Train, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_in_generation(patch, 11)
        with pytest.raises(StopRequested):
            train()
    newest, before = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))[::-1]
    os.truncate(newest / "weights.safetensors", 100)
    assert digests(train()) == whole
    assert steps(tmp_path / "run") == list(range(11))
    [passed_over], [resumed] = events(tmp_path / "run", "rollback"), events(tmp_path / "run", "resume")
    assert newest.name in passed_over["reason"]
    assert f"step_{resumed['step']:06d}" == before.name


def test_another_runs_checkpoints_are_refused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_in_generation(patch, 5)
        with pytest.raises(StopRequested):
            train()
    with pytest.raises(CheckpointError, match="belongs to another run"):
        train(identity="1" * 64)


def test_a_run_that_ended_well_begins_anew(train: Train, whole: dict[str, str], tmp_path: Path) -> None:
    train()
    write_json(tmp_path / "run" / "result.json", {})
    assert digests(train()) == whole
    assert steps(tmp_path / "run") == list(range(11))
    assert events(tmp_path / "run", "resume") == []


def test_killed_between_the_last_checkpoint_and_the_artifact_it_only_writes_the_artifact(
    train: Train, whole: dict[str, str], tmp_path: Path
) -> None:
    train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert digests(train()) == whole
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines


def test_completions_past_the_models_positions_are_refused(train: Train) -> None:
    with pytest.raises(ConfigError, match=r"train.sampling.max_completion_tokens = 4000: .* set at most \d+"):
        train({"train": {"sampling": {"max_completion_tokens": 4000}}})


def distort(monkeypatch: pytest.MonkeyPatch, by: float) -> None:
    """Make the sampler report log-probs that are not those of its policy."""
    generate = EmbeddedSampler.generate

    def lying(self: Any, *arguments: Any) -> Any:
        return [replace(c, logprobs=tuple(v - by for v in c.logprobs)) for c in generate(self, *arguments)]

    monkeypatch.setattr(EmbeddedSampler, "generate", lying)


def test_row_10_samples_that_are_not_the_policys_end_the_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    distort(monkeypatch, by=1.0)
    with pytest.raises(DivergedError, match=r"step \d: learner and sampler are (0.9|1)\S* nats apart"):
        train()


def test_row_10_a_smaller_mismatch_is_an_alarm(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distort(monkeypatch, by=0.1)
    train({"train": {"lora": {"dropout": 0.0}}})
    alarms = [event for event in events(tmp_path / "run", "alarm") if event.get("signal") == "mismatch"]
    assert alarms
    assert "0.1 nats apart" in alarms[0]["reason"]


# -- guards of the anchors --------------------------------------------------------------------------------------------

AGEING = {"anchors": {"refresh_every": 3, "max_drift": 0.0, "audit_every": 2, "audit_absolute": 9.0, "audit_samples": 8}}


def column(run: Path, name: str) -> dict[int, float]:
    """A metric by step, where it was written."""
    return {line["step"]: line["metrics"][name] for line in read_lines(run / "metrics.jsonl") if name in line["metrics"]}


@pytest.mark.parametrize("method", ["lora", "full"])
def test_anchors_are_made_anew_and_a_stopped_run_goes_on_to_the_same_bits(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    difference = lay_over(AGEING, {"train": {"method": method}})
    expected = digests(train(difference, run="whole"))
    run = tmp_path / "whole"
    assert [event["reason"].partition(": ")[2][:11] for event in events(run, "refresh")] == ["3 steps old"] * 3
    versions = sorted(path.name for path in (run / "anchors").iterdir())
    assert versions == ["v000001", "v000002", "v000003"], "and none after the last step, for nobody"
    manifest = read_manifest(run / "anchors" / "v000002")
    assert manifest is not None
    assert (manifest["version"], manifest["step"], manifest["policy_version"]) == (2, 6, 24)
    assert column(run, "anchors/version") == {step: min(step // 3, 3) for step in range(1, 11)}
    assert sorted(column(run, "anchors/audit_exact")) == [2, 4, 6, 8, 10]
    assert column(run, "memory/reference_bytes") == dict.fromkeys(range(1, 11), 0.0)
    fed = column(run, "reference/tokens")
    assert [step for step, tokens in fed.items() if tokens] == [2, 3, 4, 6, 8, 9, 10]
    drift = column(run, "anchors/drift")
    assert drift[4] < drift[3], "new anchors are fresh"
    with monkeypatch.context() as patch:
        stop_in_generation(patch, 11)
        with pytest.raises(StopRequested):
            train(difference)
    assert digests(train(difference)) == expected
    assert [event["step"] for event in events(tmp_path / "run", "refresh")] == [3, 6, 9]


def test_what_the_controller_does_is_a_metric_and_the_hard_bound_an_alarm(train: Train, tmp_path: Path) -> None:
    train({"train": {"alarms": {"kl": 1e-6}, "stages": [{"steps": 4, "sources": ["plus"]}]}})
    factor, coefficient = (column(tmp_path / "run", f"kl/{name}") for name in ("controller_factor", "coefficient"))
    assert coefficient[1] == 0.05
    for step in (1, 2, 3):
        assert 0.998 <= factor[step] <= 1.002, "within 0.2 / horizon 100"
        assert factor[step] != 1
        assert coefficient[step + 1] == pytest.approx(coefficient[step] * factor[step])
    (alarm,) = (event for event in events(tmp_path / "run", "alarm") if event.get("signal") == "kl")
    assert "past its bound train.alarms.kl 1e-06" in alarm["reason"]


def test_old_versions_go_but_those_that_a_checkpoint_names(train: Train, tmp_path: Path) -> None:
    ageing = lay_over(
        AGEING, {"anchors": {"refresh_every": 1, "audit_every": 0, "keep": 2}, "train": {"checkpoints": {"keep": 3}}}
    )
    expected = digests(train(ageing))
    kept = sorted(path.name for path in (tmp_path / "run" / "anchors").iterdir())
    assert kept == ["v000006", "v000008", "v000009"], "checkpoints of steps 6, 9 and 10, the two newest versions"
    assert digests(train(lay_over(ageing, {"anchors": {"keep": 99}}), run="all")) == expected
    assert len(list((tmp_path / "all" / "anchors").iterdir())) == 9


def test_a_full_disk_at_a_refresh_loses_nothing(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digests(train(AGEING, run="whole"))
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if ".v000002.partial" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ResourceError, match="no space left on the disk"):
            train(AGEING)
    assert sorted(path.name for path in (tmp_path / "run" / "anchors").iterdir()) == ["v000001"]
    assert digests(train(AGEING)) == expected


@pytest.mark.parametrize(
    ("anchors", "reason"),
    [
        ({"max_drift": 1e-9, "audit_every": 0}, "drift"),
        ({"max_drift": 0.0, "audit_every": 1, "audit_relative": 1e-6, "audit_absolute": 1e-9}, "audit"),
    ],
)
def test_drift_and_audit_force_a_refresh_and_say_so(train: Train, tmp_path: Path, anchors: dict[str, Any], reason: str) -> None:
    train({"anchors": anchors, "train": {"stages": [{"steps": 3, "sources": ["plus"]}]}})
    told = events(tmp_path / "run", "refresh")
    assert told
    assert all(f": {reason}" in event["reason"] for event in told)
    assert all(event["kl_after"] >= 0 for event in told)


def test_the_policy_as_its_own_anchor_still_shows_its_total_drift(train: Train, tmp_path: Path) -> None:
    train(lay_over(AGEING, {"anchors": {"source": "policy"}}))
    run = tmp_path / "run"
    told = events(run, "refresh")
    assert all(event["kl_after"] < 1e-5 for event in told)
    assert column(run, "anchors/total_drift")[6] > told[1]["kl_after"]
    assert (read_manifest(run / "anchors" / "v000001") or {})["source"] == "policy"


@pytest.fixture(scope="module")
def aged(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Path]:
    """Digests of a whole run with refreshes, and the run directory of one that was stopped after its second refresh."""
    root = tmp_path_factory.mktemp("aged")
    expected = digests(run_train(inputs, root / "whole", campaign(AGEING)))
    with pytest.MonkeyPatch.context() as patch:
        stop_in_generation(patch, 11)
        with pytest.raises(StopRequested):
            run_train(inputs, root / "run", campaign(AGEING))
    assert sorted(path.name for path in (root / "run" / "anchors").iterdir()) == ["v000001", "v000002"]
    return expected, root / "run"


SHARD, COMPLETIONS, MANIFEST = "shard-00000.safetensors", "completions.safetensors", "manifest.json"


def harm(version: Path, name: str, how: str) -> None:
    path = version / name
    if how == "gone":
        path.unlink()
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "another":
        shutil.copyfile(version.with_name("v000001") / name, path)
    else:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("harms", "said"),
    [
        ({SHARD: "flipped"}, [f"{SHARD} did not match its sha256; scored again"]),
        ({SHARD: "another"}, [f"{SHARD} did not match its sha256; scored again"]),
        ({COMPLETIONS: "truncated"}, [f"{COMPLETIONS} did not match its sha256; read from the shards"]),
        ({MANIFEST: "gone"}, [f"{MANIFEST} is lost; put back"]),
        ({MANIFEST: "truncated"}, [f"{MANIFEST} is not the checkpoint's; put back"]),
        ({MANIFEST: "another", SHARD: "gone"}, [f"{MANIFEST} is not the checkpoint's", f"{SHARD} did not match"]),
    ],
)
def test_a_damaged_version_is_made_whole_and_said(
    train: Train, tmp_path: Path, aged: tuple[dict[str, str], Path], harms: dict[str, str], said: list[str]
) -> None:
    """To the same bits: the checkpoint remembers the manifest, and shards and completions make each other again."""
    expected, stopped = aged
    shutil.copytree(stopped, tmp_path / "run")
    version = tmp_path / "run" / "anchors" / "v000002"
    for name, how in harms.items():
        harm(version, name, how)
    with pytest.raises(DataError):
        describe(version)
    assert digests(train(AGEING)) == expected
    rebuilt = [event["reason"] for event in events(tmp_path / "run", "rebuild")]
    assert [words in reason for words, reason in zip(said, rebuilt, strict=True)] == [True] * len(said)
    assert [event["step"] for event in events(tmp_path / "run", "refresh")] == [3, 6, 9]
    assert describe(version)[0].startswith("anchors v000002 on completions of policy version ")


@pytest.mark.parametrize("harms", [{SHARD: "flipped", COMPLETIONS: "gone"}, {}, {SHARD: "another", COMPLETIONS: "another"}])
def test_a_lost_version_is_made_anew_and_said(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aged: tuple[dict[str, str], Path], harms: dict[str, str]
) -> None:
    """With the policy of the checkpoint, so to other bits; also when that run is stopped before its next checkpoint."""
    shutil.copytree(aged[1], tmp_path / "run")
    version = tmp_path / "run" / "anchors" / "v000002"
    for name, how in harms.items():
        harm(version, name, how)
    if not harms:
        shutil.rmtree(version)
    with monkeypatch.context() as patch:
        stop_in_generation(patch, 2)  # the first call draws the completions of the anchors
        patch.setattr(SyncSchedule, "_checkpoint", lambda *_: None)  # killed, not stopped
        with pytest.raises(StopRequested):
            train(AGEING)
    made = (read_manifest(version) or {})["content_sha256"]
    train(AGEING)
    assert (read_manifest(version) or {})["content_sha256"] == made, "the same ones again"
    told = [event["reason"] for event in events(tmp_path / "run", "refresh")]
    assert any("v000002 is damaged" in reason and "the run goes on, to other bits" in reason for reason in told)


def test_a_reference_that_stays_in_memory_ends_the_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked, exact_kl = [], guard.exact_kl

    def leak(policy: Any, voice: Any, *rest: Any) -> float:
        leaked.append(voice.model)
        return exact_kl(policy, voice, *rest)

    monkeypatch.setattr(guard, "exact_kl", leak)
    with pytest.raises(AssertionError, match=r"\d+ bytes of the reference stay in memory between refreshes"):
        train(lay_over(AGEING, {"train": {"method": "full"}}))


# -- killed for real -----------------------------------------------------------------------------------------------------


def make_workspace(root: Path, inputs: dict[str, Path], config: CampaignConfig) -> Path:
    for name, directory in inputs.items():
        shutil.copytree(directory, root / "artifacts" / name)
    write_json(root / "config.json", as_tree(config))
    return root


PATIENCE_SECONDS = 400  # only a hang reaches it


@contextmanager
def stage_process(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the stage as a person would; whatever happens, the process is gone afterwards."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "tasks.train", "--config", "config.json", "--run-dir", "run", "--no-tracking"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_step(process: subprocess.Popen[str], root: Path, step: int) -> None:
    """Return once the line of a step is written, or the process has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and max(steps(root / "run" / "train"), default=-1) < step:
        assert time.monotonic() < deadline, f"no line of step {step}"
        time.sleep(0.005)


@pytest.mark.smoke
def test_killed_at_three_random_points_it_ends_at_the_same_bits(train: Train, inputs: dict[str, Path], tmp_path: Path) -> None:
    """Against the same campaign in this process, so that equal bits do not hang on one process either."""
    longer = {"train": {"stages": [{"name": "first", "steps": 12}, {"name": "second", "steps": 12}]}}
    expected = digests(train(longer, run="whole"))
    killed = make_workspace(tmp_path / "killed", inputs, campaign(longer))
    for point in sorted(random.Random(20).sample(range(1, 20), 3)):
        with stage_process(killed) as process:
            wait_for_step(process, killed, point)
            process.kill()
            process.wait(PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    with stage_process(killed) as process:
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert digests(killed / "artifacts" / "policy") == expected
    assert steps(killed / "run" / "train") == list(range(25))


@pytest.mark.smoke
def test_killed_inside_and_around_refreshes_it_ends_at_the_same_bits(
    train: Train, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """A refresh after every second step: killed while anchors are written, and at a random point around a later one."""
    often = {
        "anchors": {"refresh_every": 2, "max_drift": 0.0, "audit_every": 3, "num_prompts": 48, "completions_per_prompt": 4},
        "train": {"stages": [{"name": "first", "steps": 7}, {"name": "second", "steps": 7}]},
    }
    expected = digests(train(often, run="whole"))
    killed = make_workspace(tmp_path / "killed", inputs, campaign(often))
    anchors = killed / "run" / "train" / "anchors"
    chance = random.Random(5)
    with stage_process(killed) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and not any(anchors.glob(".v*.partial")):
            assert time.monotonic() < deadline, "no refresh began"
            time.sleep(0.0005)
        process.kill()
        process.wait(PATIENCE_SECONDS)
    with stage_process(killed) as process:
        wait_for_step(process, killed, chance.randrange(5, 11))
        time.sleep(chance.random() * 0.2)  # somewhere in the next step, its refresh or its checkpoint
        process.kill()
        process.wait(PATIENCE_SECONDS)
    with stage_process(killed) as process:
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert digests(killed / "artifacts" / "policy") == expected
    assert not list(anchors.glob(".*"))
    assert set(column(killed / "run" / "train", "memory/reference_bytes").values()) == {0.0}


@pytest.mark.smoke
def test_a_terminated_process_says_so_and_exits_with_75(inputs: dict[str, Path], tmp_path: Path) -> None:
    long = {"train": {"stages": [{"name": "first", "steps": 500}]}}
    root = make_workspace(tmp_path / "stopped", inputs, campaign(long))
    with stage_process(root) as process:
        wait_for_step(process, root, 0)
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, errors
    assert errors.strip() == "stopped: stopped by SIGTERM after a checkpoint; run the same command again to go on"
    done = steps(root / "run" / "train")[-1]
    assert (root / "run" / "train" / "checkpoints" / f"step_{done:06d}").is_dir() or done == 0
    assert not (root / "artifacts" / "policy").exists()
