"""From a finished campaign to a model that others use: the gate, the registry's entry, files for an engine.

    gate(run)            whether the trained model beats the base: the paired bootstrap interval of one metric lies above 0
    promote(run)         the merged model, and the adapter where there is one, as a version in MLflow's registry, with its
                         evaluation and its lineage; the alias `champion` moves to it
    export(run, target)  a directory that plain transformers and vLLM load, with where it comes from beside it

The bytes stay where DVC has them; MLflow's registry points there. Nothing is promoted or exported whose artifact has been
replaced by another run's since.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tasks.lineage import lineage
from tasks.record import PRUNED, read_record
from tasks.runs import standing, workspace_of
from tasks.workspace import Workspace
from trainer.errors import BusyError, ConfigError, DataError, ModelError, TitheError, nearest
from trainer.files import damage, new_directory, read_json, read_manifest, write_json, write_manifest, write_text

Engine = Literal["transformers", "vllm"]
ORIGIN = "origin.json"  # in an export: where it comes from
_MORE_IS_BETTER = ("pass@", "greedy_accuracy", "mean_reward")  # beginnings of metrics that a gate may ask for
_OURS = ("manifest.json", "merge.json", "curve.csv")  # files of an artifact that no engine reads


class NotBetter(TitheError):
    """The trained model does not beat the base."""


@dataclass(frozen=True)
class Verdict:
    """The gate's answer: the metric, its gain over the base with the interval's ends, and whether that is enough."""

    metric: str
    value: float
    low: float
    high: float
    margin: float
    confidence: float

    @property
    def passes(self) -> bool:
        return self.low > self.margin

    @property
    def sentence(self) -> str:
        share = self.metric.startswith("pass@") or self.metric == "greedy_accuracy"
        scale, unit = (100.0, " points") if share else (1.0, "")
        low, middle, high = (f"{scale * value:+.3g}" for value in (self.low, self.value, self.high))
        numbers = f"{middle}{unit} ({low} to {high}, {self.confidence:.0%} bootstrap)"
        least = f"{scale * self.margin:g}{unit}" if self.margin else "0"
        return f"{self.metric} {numbers}: its lower end is {'above' if self.passes else 'not above'} {least}"


def artifact_of(workspace: Workspace, run: Path, name: str) -> Path:
    """Return an artifact of a run.

    Raises:
        DataError: it is not made yet, or another run's lies there now. ModelError: it is damaged.
    """
    stage = next((stage for stage in workspace.stages if stage.artifact == name), None)
    place = workspace.artifact(name)
    manifest = read_manifest(place)
    record = read_record(run / stage.name) if stage is not None else None
    if stage is None or manifest is None or record is None or record.artifact is None:
        if stage is not None and workspace.is_current(
            stage
        ):  # pulled, or made under another --run-dir, or before a stopped attempt
            return place
        how, maker = standing(run), stage.name if stage is not None else name
        hopeless = how.startswith(PRUNED)
        more = "compare its sweep's other trials" if hopeless else f"`tithe resume` finishes it (stage {maker})"
        raise DataError(str(place), f"run {run.name} has no {name} yet ({how}); {more}")
    if manifest["content_sha256"] != record.artifact["content_sha256"]:
        raise DataError(str(place), f"is another run's by now; run {run.name} again to have its {name} back")
    wrong = damage(place)
    if wrong:
        raise ModelError(f"{wrong}; run the stage {stage.name} again")
    return place


def gate(run: Path, metric: str = "pass@1", margin: float = 0.0) -> Verdict:
    """Return whether a run's trained model beats the base on the evaluation's prompts.

    Args:
        metric: of evaluation.json, one of which more is better.
        margin: least gain, in the metric's own unit (0.02 is two points of pass@1).

    Raises:
        DataError: there is no evaluation. ConfigError: it has no such metric.
    """
    workspace = workspace_of(run)
    place = artifact_of(workspace, run, "evaluation")
    differences = read_json(place / "evaluation.json").get("difference", {})
    gates = [name for name in differences if name.startswith(_MORE_IS_BETTER)]
    if metric not in gates:
        problem = "more of it is not better" if metric in differences else "the evaluation has no such metric"
        raise ConfigError("--metric", metric, f"{problem}; {nearest(metric, gates)}")
    three = differences[metric]
    return Verdict(metric, three["value"], three["low"], three["high"], margin, workspace.config.evaluate.confidence)


@dataclass(frozen=True)
class Version:
    """A version in the registry."""

    name: str
    number: int
    was_there: bool


def promote(
    run: Path, metric: str = "pass@1", margin: float = 0.0, name: str = "", anyway: bool = False
) -> tuple[Verdict, list[Version]]:
    """Register a run's merged model, and its adapter, and make it the champion.

    Args:
        name: of the registered model; empty takes the campaign's. The adapter's has `-adapter` behind it.
        anyway: register it although the gate refuses it; the champion stays who it is.

    Raises:
        NotBetter: the gate refuses it. DataError, ModelError: an artifact is missing or damaged. TrackingError: MLflow is away.
    """
    from tasks.tracking import Mirror, tracking_uri

    verdict = gate(run, metric, margin)
    if not verdict.passes and not anyway:
        raise NotBetter(f"{run.name} is not promoted: {verdict.sentence}. Train longer, evaluate more prompts, or say --anyway")
    workspace = workspace_of(run)
    base_name = name or workspace.config.campaign.name
    places = {base_name: artifact_of(workspace, run, "merged")}
    if workspace.config.train.method == "lora":
        places[f"{base_name}-adapter"] = artifact_of(workspace, run, "policy")
    tree = lineage(run)
    mirror = Mirror(tracking_uri())
    mirror.sync(run)
    versions = []
    for registered, place in places.items():
        tags = describe(workspace, run, place, verdict)
        number, was_there = mirror.register(
            run, registered, place, tags, "\n".join(tree.lines()), scores(workspace), verdict.passes
        )
        versions.append(Version(registered, number, was_there))
    return verdict, versions


def describe(workspace: Workspace, run: Path, place: Path, verdict: Verdict) -> dict[str, str]:
    """Return the registry's tags of an artifact."""
    manifest = read_manifest(place) or {}
    record = read_record(run)
    tags = {
        "run": run.name,
        "workspace": str(workspace.root),
        "path": str(place),
        "artifact": place.name,
        "content_sha256": str(manifest.get("content_sha256", "")),
        "gate": "passed" if verdict.passes else "refused",
        "gate.says": verdict.sentence,
        **{f"made_from.{name}": str(sha256) for name, sha256 in manifest.get("inputs", {}).items()},
    }
    if record is not None:
        tags |= {
            key: record.tags[key] for key in ("git.commit", "git.dirty", f"dvc.{place.name}", "config") if key in record.tags
        }
    return tags


def scores(workspace: Workspace) -> dict[str, float]:
    """Return the evaluation's numbers of the trained model and of its gain, under names that MLflow takes."""
    tree = read_json(workspace.artifact("evaluation") / "evaluation.json")
    return {
        f"{side}/{metric.replace('@', '_at_')}": float(three["value"])
        for side in ("trained", "difference")
        for metric, three in tree.get(side, {}).items()
        if isinstance(three, dict) and "value" in three
    }


def export(run: Path, target: Path, engine: Engine, adapter: bool = False) -> list[str]:
    """Write a run's model where an engine loads it, and return what to type then.

    Args:
        target: a directory that is new, empty, or an earlier export.
        adapter: the adapter alone, beside its base, instead of the merged model.

    Raises:
        DataError, ModelError: the artifact is missing or damaged. BusyError: the target holds something else.
    """
    workspace = workspace_of(run)
    if adapter and workspace.config.train.method != "lora":
        raise ConfigError("--adapter", "full", "this run trained every weight, so there is no adapter; leave it out")
    source = artifact_of(workspace, run, "policy" if adapter else "merged")
    if target.exists() and not target.is_dir():
        raise BusyError(f"{target} is a file; name a directory")
    if target.is_dir() and any(target.iterdir()) and not (target / ORIGIN).exists():
        raise BusyError(f"{target} holds something that is no export; name an empty directory")
    origin = lineage(run)
    with new_directory(target.resolve()) as out:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name not in _OURS:
                shutil.copyfile(path, out / path.name)
        if adapter:
            _name_base(out, workspace.artifact("base"))
        write_json(out / ORIGIN, origin.as_tree())
        lines = commands(workspace, target, engine, adapter)
        write_text(out / "README.md", _readme(run, lines, origin.lines()))
        write_manifest(out, {"exported": run.name, "engine": engine})
    return lines


def _name_base(out: Path, base: Path) -> None:
    """Let an adapter's configuration name the base that it belongs to."""
    path = out / "adapter_config.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**tree, "base_model_name_or_path": str(base)})


def commands(workspace: Workspace, target: Path, engine: Engine, adapter: bool) -> list[str]:
    """Return how an engine loads an export."""
    base, name = workspace.artifact("base"), workspace.config.campaign.name
    if engine == "vllm":
        if adapter:
            rank = workspace.config.train.lora.rank
            return [f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={target}"]
        return [f"vllm serve {target} --served-model-name {name}"]
    if adapter:
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{target}")',
        ]
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'model, tokenizer = (kind.from_pretrained("{target}") for kind in (AutoModelForCausalLM, AutoTokenizer))',
    ]


def _readme(run: Path, lines: list[str], tree: list[str]) -> str:
    use, origin = "\n".join(lines), "\n".join(tree)
    return f"# {run.name}\n\n```\n{use}\n```\n\nWhere it comes from ({ORIGIN} has whole hashes):\n\n```\n{origin}\n```\n"
