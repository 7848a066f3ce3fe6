"""Stage *train*: the policy, trained by reinforcement learning on prompts that a program can check.

Reads prompts, base and anchors; writes a peft adapter (lora) or a whole model (full) and `curve.csv`, one row a step. The run
directory holds metrics.jsonl, events.jsonl and checkpoints: stop or kill the stage, start it again, and it goes on. Nothing in
the artifact depends on when or where it was made.
"""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from tasks.anchors import origin_of
from tasks.command import main
from tasks.ranks import RANKS, Rank, launch
from tasks.registry import StagePaths
from trainer.anchors.guard import AnchorGuard
from trainer.anchors.recall import AdapterRecall, BaseRecall, Recall
from trainer.anchors.store import open_anchors
from trainer.config import CampaignConfig
from trainer.engine.build import (
    boundary_device,
    build_stateless,
    place_reference,
    place_weights,
    recalled_base,
    recalled_int8,
)
from trainer.engine.port import Engine
from trainer.engine.team import ALONE, Team
from trainer.errors import ConfigError
from trainer.files import read_manifest
from trainer.learn.anchored import AnchorTerm
from trainer.learn.learner import Learner
from trainer.learn.plain import PlainEngine
from trainer.learn.tiered import TieredAdapterEngine
from trainer.memory.int8 import WARN_AT, Int8Reference, logprob_error, prompt_works
from trainer.metrics import METRICS, RESULT, RunWriter, read_lines
from trainer.policy.load import check_vocabulary, eos_token_ids, load_model, pick_device, true_shape
from trainer.policy.policy import Policy, build_policy
from trainer.policy.tokenizer import load_tokenizer
from trainer.processes import fit_malloc
from trainer.prompts import read_prompts
from trainer.reward import build_verifier, size_warnings
from trainer.rollout.embedded import EmbeddedSampler
from trainer.schedule.preflight import look, record
from trainer.schedule.stop import StopWish, deferred_stop
from trainer.schedule.sync import Crew, Run, SyncSchedule, begin_anew_after_success
from trainer.schedule.team import TeamSampler, TeamVerifier, TeamWish
from trainer.types import Prompt, Sampler, SamplingParams, Verifier

CURVE, OPTIMIZER_STATE = "curve.csv", "optimizer"
CURVE_COLUMNS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "zero_variance_fraction": "reward/zero_variance_fraction",
    "heldout_accuracy": "heldout/accuracy",
    "heldout_reward_mean": "heldout/reward_mean",
    "kl_mean": "kl/mean",
    "kl_coefficient": "kl/coefficient",
    "anchors_version": "anchors/version",
    "anchors_drift": "anchors/drift",
    "audit_exact": "anchors/audit_exact",
    "entropy": "entropy",
    "length_mean": "completion/length_mean",
    "truncated_fraction": "completion/truncated_fraction",
    "loss": "loss/total",
    "clip_fraction": "clip/fraction",
    "grad_norm": "grad/norm",
    "learning_rate": "lr",
    "policy_version": "policy/version",
    "skipped": "update/skipped",
}


def write_curve(run: Path, path: Path) -> dict[str, Any]:
    """Write what a step's seeds decide as CSV, one row a step, and return the last row's held-out accuracy and reward."""
    lines = read_lines(run / METRICS)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *CURVE_COLUMNS])
        for line in lines:
            writer.writerow([line["step"], *(line["metrics"].get(name, "") for name in CURVE_COLUMNS.values())])
    accuracies = [line["metrics"]["heldout/accuracy"] for line in lines if "heldout/accuracy" in line["metrics"]]
    return {
        "heldout_accuracy_before": accuracies[0] if accuracies else None,
        "heldout_accuracy": accuracies[-1] if accuracies else None,
    }


def check_lengths(config: CampaignConfig, prompts: list[Prompt], model: PreTrainedModel) -> None:
    """Refuse completions that would run past the positions the model knows."""
    positions = getattr(model.config, "max_position_embeddings", None)
    caps = [stage.max_completion_tokens or config.train.sampling.max_completion_tokens for stage in config.train.stages]
    longest, cap = max(len(prompt.token_ids) for prompt in prompts), max(caps)
    if positions is not None and longest + cap > positions:
        raise ConfigError(
            "train.sampling.max_completion_tokens",
            cap,
            f"with the longest prompt ({longest} tokens) it passes the model's {positions} positions; "
            f"set at most {positions - longest}, or lower prepare.max_prompt_tokens",
        )


def load_policy(config: CampaignConfig, paths: StagePaths, rank: Rank | None = None) -> tuple[Policy, Engine]:
    """Return the base as a policy, its weights in their place, and the engine over them."""
    train, base = config.train, paths.inputs["base"]
    if train.memory.weights == "zero3":
        assert rank is not None
        return load_in_pieces(config, base, rank)
    if not train.layer_major:
        policy = build_policy(load_model(base, config.base.dtype, config.machine.device), train, config.campaign.seed)
        return policy, PlainEngine(policy, train, paths.run / OPTIMIZER_STATE)
    mesh = rank.mesh if rank else None
    model, residency = place_weights(base, config.base.dtype, config.machine.device, train, paths.run, mesh)
    policy = replace(build_policy(model, train, config.campaign.seed), residency=residency)
    if train.method == "full":
        return policy, build_stateless(residency, train, config.campaign.seed)
    return policy, TieredAdapterEngine(policy, train, residency, boundary_device(train.memory))


def load_in_pieces(config: CampaignConfig, base: Path, rank: Rank) -> tuple[Policy, Engine]:
    """Return the base as a policy that DeepSpeed ZeRO-3 has cut over ranks, and the engine over it."""
    from trainer.engine import zero3

    train, device = config.train, pick_device(config.machine.device)
    zero3.begin(device, rank.first_run / RANKS)
    zero3.self_test(train, device)
    with zero3.loading(train, config.base.dtype, base):
        model = load_model(base, config.base.dtype, config.machine.device)
    policy = build_policy(model, train, config.campaign.seed)
    return policy, zero3.Zero3Engine(policy, train)


def build_learner(config: CampaignConfig, paths: StagePaths, policy: Policy, engine: Engine, rank: Rank | None = None) -> Learner:
    train, seed, anchors = config.train, config.campaign.seed, None
    if train.algorithm.kl.reference == "anchors":
        made_by = origin_of(read_manifest(paths.inputs["base"]) or {})
        store = open_anchors(paths.inputs["anchors"], made_by, train.sampling.temperature)
        kl = train.algorithm.kl
        anchors = AnchorTerm(store, kl.anchor_batch_size, train.batch.micro_batch_tokens, seed, kl.direction)
    return Learner(policy, train, seed, anchors, RunWriter(paths.run).event, engine, build_reference(config, paths, rank))


def build_guard(
    config: CampaignConfig,
    paths: StagePaths,
    learner: Learner,
    sampler: Sampler,
    prompts: list[Prompt],
    eos: tuple[int, ...],
    rank: Rank | None = None,
) -> AnchorGuard | None:
    """Return who watches the learner's anchors, where it has any."""
    if learner.anchors is None:
        return None
    policy, writer, base = learner.policy, RunWriter(paths.run), paths.inputs["base"]

    def load(recalled: Callable[..., AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        mesh = rank.mesh if rank else None
        return lambda: recalled(base, config.base.dtype, config.machine.device, config.train, paths.run, mesh)

    def beat(done: int, total: int) -> None:
        writer.heartbeat("making anchors anew", done, total)

    recall = BaseRecall(load(recalled_base)) if policy.adapter is None else AdapterRecall(policy.model)
    by: dict[str, Recall] = {"resident": BaseRecall(load(recalled_base)), "int8_streamed": BaseRecall(load(recalled_int8))}
    made_by = origin_of(read_manifest(base) or {})
    place = ((rank.first_run if rank else paths.run) / "anchors", writer.event, beat)
    return AnchorGuard(
        config.anchors,
        config.train,
        config.campaign.seed,
        learner,
        sampler,
        prompts,
        eos,
        made_by,
        recall,
        *place,
        scored_by=by.get(config.anchors.reference),
        team=rank.team if rank else ALONE,
    )


def build_reference(config: CampaignConfig, paths: StagePaths, rank: Rank | None = None) -> Int8Reference | None:
    """Return the base with 8-bit weights, where the configuration asks for it as reference."""
    if config.train.algorithm.kl.reference != "int8_streamed":
        return None
    mesh = rank.mesh if rank else None
    return place_reference(paths.inputs["base"], config.base.dtype, config.machine.device, config.train, paths.run, mesh)


def tell_error(learner: Learner, prompts: Sequence[Prompt], event: Callable[..., None]) -> None:
    """Measure an 8-bit reference against the policy before its first step, which is the base, and write down the error."""
    if not isinstance(learner.reference, Int8Reference):
        return
    works = prompt_works([prompt.token_ids for prompt in prompts], learner.policy.device)
    if works:
        error = logprob_error(learner.engine.score(works), learner.reference.score(works))
        said = f"the 8-bit reference is off by {error:.4f} nats a token on held-out prompts"
        advice = f", more than {WARN_AT}: anchors are exact" if error > WARN_AT else ""
        event("warning" if error > WARN_AT else "reference", said + advice, error=error, bytes=learner.reference.num_bytes)


def clear_tiers(policy: Policy, learner: Learner) -> None:
    """Remove the working copies of weights on the disk; the policy is written and they are not needed any more."""
    if policy.residency is not None:
        policy.residency.source.shutdown()
    if isinstance(learner.reference, Int8Reference):
        learner.reference.residency.source.shutdown()


def first_look(config: CampaignConfig, crew: Crew, policy: Policy) -> Callable[[RunWriter], None]:
    """Return what is done before the first step: the pre-flight, and a warning when a learned reward is small for the policy."""
    train = config.train
    count = min(config.preflight.num_prompts, train.batch.prompts_per_step)
    sources = train.stages[0].sources
    prompts = [prompt for prompt in crew.prompts if sources is None or prompt.source in sources][:count]
    num_parameters = sum(true_shape(parameter).numel() for parameter in policy.model.parameters())
    cap = train.stages[0].max_completion_tokens or train.sampling.max_completion_tokens
    params = SamplingParams(train.sampling.temperature, cap, crew.eos_token_ids)
    size, per_step, seed = train.batch.group_size, train.batch.samples_per_step, config.campaign.seed

    def look_and_record(writer: RunWriter) -> None:
        if policy.residency and (odd := train.memory.too_many_stay(len(policy.residency.anatomy.layers))):
            writer.event("warning", odd)
        tell_error(crew.learner, crew.heldout, writer.event)
        verifier = crew.verifier.verifier if isinstance(crew.verifier, TeamVerifier) else crew.verifier
        for sentence in size_warnings(verifier, num_parameters) if verifier else ():
            writer.event("warning", sentence)
        if prompts:
            writer.heartbeat("looking at the reward")
            report = look(prompts, crew.sampler, crew.tokenizer, crew.verifier, params, size, per_step, seed)
            record(report, writer, config.preflight.stop)

    return look_and_record


def save_policy(policy: Policy, engine: Engine, paths: StagePaths, tokenizer: Any, team: Team) -> None:
    """Write the policy, by the first rank; the others give it their pieces."""
    with engine.whole():
        if team.is_first:
            policy.save(paths.out, tokenizer)
        elif policy.residency is not None:
            assert not list(policy.residency.source.peek())


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Train, from the newest checkpoint where there is one, and write the policy; over ranks, where they share the weights.

    Raises:
        StopRequested: asked to stop; a checkpoint was written. Any other TitheError that names what is wrong.
    """
    if config.train.memory.weights == "zero3":
        from trainer.engine.zero3 import check_installed

        check_installed()
    return launch(config, paths) if config.train.memory.over_ranks else train(config, paths)


def train(config: CampaignConfig, paths: StagePaths, rank: Rank | None = None) -> dict[str, Any]:
    """Do it in this process.

    Args:
        rank: of the team that this process is one of; its run directory is then `paths.run`.
    """
    fit_malloc(paths.inputs["base"])
    team = rank.team if rank else ALONE
    place = Run(paths.run, paths.identity, team, rank.first_run if rank else None)
    if config.train.schedule != "sync" and (paths.run / RESULT).exists():
        from trainer.schedule.asynchronous import forget_experience

        forget_experience(config, place)
    begin_anew_after_success(place)
    judge = build_verifier(config.reward) if team.is_first else None  # first: its workers start while the model loads
    verifier = TeamVerifier(team, judge) if judge is None or rank else judge
    try:
        return train_with(verifier, config, paths, place, rank)
    finally:
        verifier.close()


def train_with(
    verifier: Verifier, config: CampaignConfig, paths: StagePaths, place: Run, rank: Rank | None = None
) -> dict[str, Any]:
    """Train with a verifier that somebody else closes; see `train`."""
    train, team = config.train, place.team
    prompts = read_prompts(paths.inputs["prompts"], "train")
    heldout = read_prompts(paths.inputs["prompts"], "heldout")[: train.heldout.num_prompts]
    tokenizer = load_tokenizer(paths.inputs["base"])
    policy, engine = load_policy(config, paths, rank)
    check_vocabulary(policy.model, tokenizer, paths.inputs["base"])
    check_lengths(config, prompts + heldout, policy.model)
    learner = build_learner(config, paths, policy, engine, rank)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sampler: Sampler = EmbeddedSampler(policy.model, train.sampler.slots, pad)
    if rank is not None:
        sampler = TeamSampler(rank.team, sampler, engine.together)
    try:
        eos = eos_token_ids(policy.model, tokenizer)
        guard = build_guard(config, paths, learner, sampler, prompts, eos, rank)
        crew = Crew(learner, sampler, verifier, tokenizer, prompts, heldout, eos, guard)
        with deferred_stop() as own_wish:
            wish = TeamWish(rank.team, own_wish) if rank else own_wish
            choose_schedule(config, crew, paths, place, wish, first_look(config, crew, policy)).run()
    finally:
        sampler.close()
    save_policy(policy, engine, paths, tokenizer, team)
    clear_tiers(policy, learner)
    shutil.rmtree(paths.run / OPTIMIZER_STATE, ignore_errors=True)
    curve = write_curve(paths.run, paths.out / CURVE) if team.is_first else {}
    return {"method": train.method, "policy_version": learner.version, "num_trainable_parameters": policy.num_trainable, **curve}


class Runs(Protocol):
    """A schedule, ready to run."""

    def run(self) -> None: ...


def choose_schedule(
    config: CampaignConfig, crew: Crew, paths: StagePaths, place: Run, wish: StopWish, look_first: Callable[[RunWriter], None]
) -> Runs:
    """Return the schedule that the configuration asks for; those with a pool import SQLAlchemy, so they are imported here."""
    train = config.train
    if train.schedule == "async":
        from trainer.schedule.asynchronous import AsyncSchedule, Places

        places = Places(str(paths.inputs["base"].resolve()), str(paths.inputs["prompts"].resolve()))
        return AsyncSchedule(config, crew, place, wish, places, look_first)
    if train.schedule == "colocated":
        from trainer.schedule.colocated import ColocatedSchedule

        return ColocatedSchedule(config, crew, place, wish, look_first)
    return SyncSchedule(train, config.campaign.seed, crew, place, wish, look_first)


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
