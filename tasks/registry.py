"""The one list of stages: what each reads, writes and depends on. The flow walks it, dvc.yaml is generated from it.

    prepare -> base -> anchors -> train -> merge -> evaluate -> report

Every stage writes one directory, `artifacts/<artifact>/`, with a manifest. Imports nothing heavy: a stage's function is
named by its module, `tasks.<name>`, which holds `run(config, paths) -> dict of small facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from tasks.sources import base_files, pair_files, prepare_files, reward_files
from trainer.config import CampaignConfig
from trainer.errors import ConfigError, nearest


@dataclass(frozen=True)
class StagePaths:
    """Where a stage reads and writes.

    `out` is a new empty directory that becomes the artifact when the stage ends well. `run` is the stage's run directory:
    it outlives failures, and holds checkpoints, metrics.jsonl, events.jsonl, heartbeat and result.json. `identity` is the
    sha256 of the stage's parameters and inputs: a checkpoint of another identity is not this run's.
    """

    inputs: Mapping[str, Path]  # artifact name -> its directory
    out: Path
    run: Path
    identity: str
    runs: Mapping[str, Path] = field(default_factory=dict)  # stage name -> run directory of the stages before it


StageFunction = Callable[[CampaignConfig, StagePaths], dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    name: str
    artifact: str  # written to artifacts/<artifact>
    inputs: tuple[str, ...]  # artifacts it reads
    params: tuple[str, ...]  # dotted configuration keys that its result depends on
    code: tuple[str, ...]  # files and folders of this repository that its result depends on
    metrics: tuple[str, ...] = ()  # files inside the artifact that `dvc metrics` shows
    plots: tuple[tuple[str, tuple[str, ...]], ...] = ()  # CSV files inside it and their columns that `dvc plots` shows
    external: Callable[[CampaignConfig], list[Path]] | None = None  # files of the user's own that it reads
    upload: Literal["", "stage", "campaign"] = ""  # MLflow run that gets the artifact's small files; big ones are references
    module: str = ""  # module that holds `run`; empty is tasks.<name>

    @property
    def function(self) -> StageFunction:
        """The stage's plain function; importing it may import torch."""
        function: StageFunction = import_module(self.module or f"tasks.{self.name}").run
        return function


STAGES: tuple[Stage, ...] = (
    Stage(
        "prepare",
        "prompts",
        (),
        ("prepare", "base.source", "base.revision", "base.scratch.alphabet", "campaign.seed"),
        ("tasks/prepare.py", "tasks/sources.py", "trainer/prompts.py", "trainer/policy/tokenizer.py"),
        external=prepare_files,
    ),
    Stage(
        "base",
        "base",
        ("prompts",),
        ("base", "campaign.seed"),
        ("tasks/base.py", "trainer/policy"),
        external=base_files,
    ),
    Stage(
        "anchors",
        "anchors",
        ("prompts", "base"),
        (
            "anchors.num_prompts",
            "anchors.completions_per_prompt",
            "anchors.top_k",
            "anchors.max_completion_tokens",
            "anchors.reference",
            "train.sampling",
            "campaign.seed",
        ),
        ("tasks/anchors.py", "trainer/anchors", "trainer/memory", "trainer/policy", "trainer/rollout"),
    ),
    Stage(
        "train",
        "policy",
        ("prompts", "base", "anchors"),
        ("train", "anchors", "reward", "campaign.seed"),
        ("tasks/train.py", "trainer"),
        plots=(("curve.csv", ("reward_mean", "heldout_accuracy", "kl_mean")),),
        upload="stage",
        external=reward_files,
    ),
    Stage(
        "merge",
        "merged",
        ("base", "policy"),
        ("merge",),
        ("tasks/merge.py", "trainer/policy"),
        metrics=("merge.json",),
    ),
    Stage(
        "evaluate",
        "evaluation",
        ("prompts", "base", "merged"),
        ("evaluate", "reward", "train.sampling.max_completion_tokens", "train.stages", "campaign.seed"),
        (
            "tasks/evaluate.py",
            "trainer/evaluation.py",
            "trainer/statistics.py",
            "trainer/prompts.py",
            "trainer/schedule/judge.py",
            "trainer/policy",
            "trainer/rollout",
            "trainer/reward",
        ),
        metrics=("evaluation.json",),
        upload="stage",
        external=reward_files,
    ),
    Stage(
        "report",
        "report",
        ("prompts", "policy", "evaluation"),
        ("report", "campaign.name"),
        ("tasks/report.py", "tasks/report.html.j2", "tasks/charts.py", "tasks/plan.py"),
        upload="campaign",
    ),
)

# Stages outside the one DAG, run by name where the configuration has their section. What they write is read as a file of the
# user's own (`external`), so a campaign without them is not another campaign.
OPTIONAL_STAGES: tuple[Stage, ...] = (
    Stage(
        "reward_model",
        "reward_model",
        (),
        ("reward_training", "campaign.seed"),
        ("tasks/reward_model.py", "trainer/reward/preference.py", "trainer/reward/reward_model.py"),
        metrics=("accuracy.json",),
        external=pair_files,
    ),
)


def optional_stages(config: CampaignConfig) -> tuple[Stage, ...]:
    """Return the optional stages that a configuration asks for; they come before all others, which may read what they write."""
    asked = {"reward_model": config.reward_training is not None}
    return tuple(stage for stage in OPTIONAL_STAGES if asked[stage.name])


def get_stage(name: str, stages: Sequence[Stage] = STAGES) -> Stage:
    """Return a stage by name; an unknown name is a ConfigError with the nearest valid one."""
    by_name = {stage.name: stage for stage in (*stages, *OPTIONAL_STAGES)}
    if name not in by_name:
        raise ConfigError("stage", name, "no such stage; " + nearest(name, by_name))
    return by_name[name]
