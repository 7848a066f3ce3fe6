"""Train an async run again from its pool, by its consumption log, and say whether the policy comes out bit for bit the same.

    tithe replay runs/<campaign>-<hash>        writes <run>/train/replay/: the policy, and replay.json

Reads the run's config.json, its pool, and the artifacts that it was trained on; changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.registry import get_stage
from tasks.train import build_guard, build_learner, load_policy
from tasks.workspace import Workspace, replayable
from trainer.errors import DataError
from trainer.experience.pool import Pool
from trainer.files import new_directory, sha256_file, write_json
from trainer.policy.load import eos_token_ids
from trainer.policy.tokenizer import load_tokenizer
from trainer.prompts import read_prompts
from trainer.rollout.embedded import EmbeddedSampler
from trainer.schedule.replay import replay
from trainer.schedule.terms import open_database, pool_url

WEIGHTS = ("adapter_model.safetensors", "model.safetensors")


def replay_run(run: Path, on_step: Callable[[int, int], None] = lambda step, total: None) -> dict[str, Any]:
    """Replay a run.

    Args:
        run: its run directory, `runs/<campaign>-<hash>` in a workspace.
        on_step: called with (step, number of steps) after each.

    Returns:
        What replay.json holds: steps, versions compared, and `identical`.

    Raises:
        ConfigError: no run, or not an async one. DataError: its pool or inputs are not what it was trained with.
    """
    run = run.resolve()
    config = replayable(run)
    workspace, stage = Workspace(run.parent.parent, config, run), get_stage("train")
    place, url = run / stage.name, pool_url(config.train, run / stage.name)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).exists():
        raise DataError(url.removeprefix("sqlite:///"), "the run's pool is not there, so it cannot be replayed")
    prompts = read_prompts(workspace.artifact("prompts"), "train")
    by_id = {prompt.id: prompt for prompt in prompts}
    pool = Pool(open_database(config.train, place), workspace.identity(stage), by_id, "replay", 60.0)
    try:
        with new_directory(place / "replay") as out:
            paths = replace(workspace.paths(stage, out), run=out)  # the run's own events stay as they are
            tokenizer = load_tokenizer(paths.inputs["base"])
            policy, engine = load_policy(config, paths)
            learner = build_learner(config, paths, policy, engine)
            sampler = EmbeddedSampler(policy.model, config.train.sampler.slots, tokenizer.pad_token_id or 0)
            guard = build_guard(config, paths, learner, sampler, prompts, eos_token_ids(policy.model, tokenizer))
            done = replay(learner, pool, config.train.stages, on_step, guard)
            policy.save(out, tokenizer)
            total = sum(rl_stage.steps for rl_stage in config.train.stages)
            artifact = _same_files(out, workspace.artifact("policy")) if done.num_steps == total else None
            facts = {
                "num_steps": done.num_steps,
                "policy_version": done.version,
                "versions_compared": done.compared,
                "versions_differing": list(done.differing),
                "artifact_identical": artifact,
                "identical": done.identical and artifact is not False,
            }
            write_json(out / "replay.json", facts)
    finally:
        pool.close()
    return facts


def _same_files(out: Path, artifact: Path) -> bool | None:
    """Return whether the weights of two policy directories have the same bytes; None where there is nothing to compare."""
    names = [name for name in WEIGHTS if (out / name).exists() and (artifact / name).exists()]
    return all(sha256_file(out / name) == sha256_file(artifact / name) for name in names) if names else None
