"""Three guards against stale anchors. A policy can drift where no anchor looks: reward climbs, the KL term sees nothing.

    after every step   drift above anchors.max_drift                                   \\
    every so often     anchors.refresh_every                                             > refresh: <run>/anchors/v000NNN
    audit              anchored KL and exact KL of the step's own samples part company  /

*Refresh*: the policy as it is completes the prompts of its RL stage; the reference (or the policy itself, `anchors.source:
policy`) scores them; the KL term goes on with these. The newest `anchors.keep` versions stay, and those that a checkpoint names;
the reason is in the new one's manifest.
*Audit*: KL(policy || reference) over the whole vocabulary at the states that the step's samples visited, beside the anchored KL
over the anchors in use, both under the policy after the step. With `source: policy` the former is the total drift, and is only
reported: the two are held against different references.

Everything follows from seed, step and weights, and the version in use belongs to the checkpoint, so a run that was killed goes on
to the same bits. Version 0 is the artifact of stage *anchors*.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.anchors.recall import Recall
from trainer.anchors.scorer import Voice
from trainer.anchors.store import (
    COMPLETIONS,
    AnchorStore,
    Origin,
    Settings,
    Version,
    build_anchors,
    choose_prompts,
    damaged_files,
    open_anchors,
    rebuild_files,
)
from trainer.config.schema import Anchors, RLStage, Train
from trainer.engine.team import ALONE, Team
from trainer.files import MANIFEST, new_directory, read_manifest, write_json, write_manifest
from trainer.learn.kl import full_kl
from trainer.learn.learner import Learner
from trainer.policy.forward import TokenPair, completion_logits, scoring, tempered_logits
from trainer.types import Prompt, Sample, Sampler

Event = Callable[..., None]
_NAME = re.compile(r"v\d+")


@dataclass(frozen=True)
class Audit:
    anchored: float  # nats a token
    exact: float

    @property
    def gap(self) -> float:
        return abs(self.anchored - self.exact)

    @property
    def relative(self) -> float:
        """The gap as a share of the exact KL."""
        return self.gap / max(self.exact, 1e-6)

    def passes(self, config: Anchors) -> bool:
        return self.gap <= config.audit_absolute or self.relative <= config.audit_relative


def exact_kls(
    policy: Any, voice: Voice, pairs: Sequence[TokenPair], temperature: float
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Yield KL(policy || reference) over the whole vocabulary, a batch at a time: indices of its pairs, and their tokens' kl_N.

    Args:
        policy: transformers model.
        voice: the reference, which may be the same object, switched.
        pairs: (prompt ids, completion ids) whose states are looked at.
        temperature: of the sampling distribution.
    """
    with scoring(policy), scoring(voice.model):
        theirs = completion_logits(voice.model, pairs, pad_token_id=0)
        for mine in completion_logits(policy, pairs, pad_token_id=0):
            with voice.switched():
                other = next(theirs)
            kl_N = full_kl(tempered_logits(mine.logits_NV, temperature), tempered_logits(other.logits_NV, temperature))
            yield mine.indices, kl_N


def exact_kl(policy: Any, voice: Voice, pairs: Sequence[TokenPair], temperature: float) -> float:
    """Return the mean of `exact_kls` per completion token."""
    total, num_tokens = 0.0, 0
    for _, kl_N in exact_kls(policy, voice, pairs, temperature):
        total += float(kl_N.sum())
        num_tokens += len(kl_N)
    return total / max(num_tokens, 1)


def spread(samples: Sequence[Sample], most: int) -> list[TokenPair]:
    """Return the sequences of up to `most` samples, evenly over all of them."""
    count = min(most, len(samples))
    chosen = (samples[index * len(samples) // count] for index in range(count))
    return [(sample.prompt.token_ids, sample.completion.token_ids) for sample in chosen]


class AnchorGuard:
    """Watches the anchors of a learner and makes new ones.

    Args:
        config: when, and by whom they are scored.
        train: the configuration of training.
        seed: the campaign's.
        learner: its anchored KL term gets the new anchors.
        sampler: draws completions from the learner's policy.
        prompts: all training prompts.
        eos_token_ids: end a completion.
        origin: of the reference.
        recall: calls the reference, for audits.
        scored_by: calls the reference for anchors; None: the same.
        directory: `<run>/anchors`.
        event: takes (kind, reason, step, **facts).
        beat: takes (finished, total) completions while anchors are made.
        team: of ranks that do all of this alike; the first one writes.
    """

    def __init__(
        self,
        config: Anchors,
        train: Train,
        seed: int,
        learner: Learner,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        eos_token_ids: tuple[int, ...],
        origin: Origin,
        recall: Recall,
        directory: Path,
        event: Event,
        beat: Callable[[int, int], None] | None = None,
        scored_by: Recall | None = None,
        team: Team = ALONE,
    ):
        assert learner.anchors is not None
        first = learner.anchors.source
        assert isinstance(first, AnchorStore)
        self.config, self.train, self.seed, self.learner, self.sampler = config, train, seed, learner, sampler
        self.prompts, self.eos_token_ids, self.origin, self.recall = prompts, eos_token_ids, origin, recall
        self.scored_by = scored_by or recall
        self.directory, self.event, self.beat, self.term, self.team = directory, event, beat, learner.anchors, team
        self.first = self.store = first
        self.version, self.made_at = 0, 0  # of the anchors in use: number, and step after which they were made
        self.tokens = 0  # that the reference was fed since the last step

    # -- after every step -------------------------------------------------------------------------------------------------

    def after_step(
        self, step: int, stage: RLStage, samples: Sequence[Sample], metrics: Mapping[str, float], last: bool = False
    ) -> dict[str, float]:
        """Audit and refresh where it is time, and return the step's metrics of it.

        Args:
            step: number of the step that was learnt.
            stage: its RL stage.
            samples: that it learnt from.
            metrics: the learner's, with `anchors/drift` where anything trained.
            last: whether no step comes after it, so that new anchors would have no use.
        """
        self.tokens, begin, config = 0, time.perf_counter(), self.config
        drift = metrics.get("anchors/drift", 0.0)
        found: dict[str, float] = {"anchors/age_steps": step - self.made_at}
        audit = None
        if config.audit_every and step % config.audit_every == 0:
            audit = self.audit(samples)
            found |= self._audit_metrics(audit)
        reason = self._reason(step, drift, audit)
        if reason and not last:
            found["anchors/refresh_tokens"] = self.refresh(step, stage, reason, drift)
        found |= {"anchors/version": self.version, "anchors/guard_seconds": time.perf_counter() - begin}
        resident = sum(recall.resident_bytes for recall in {self.recall, self.scored_by})
        assert resident == 0, f"{resident} bytes of the reference stay in memory between refreshes"
        return {**found, "memory/reference_bytes": resident, "reference/tokens": self.tokens}

    def _audit_metrics(self, audit: Audit) -> dict[str, float]:
        seen = {"anchors/audit_anchored": audit.anchored, "anchors/audit_exact": audit.exact}
        if self.config.source == "policy":
            return {**seen, "anchors/total_drift": audit.exact}
        return {**seen, "anchors/audit_gap": audit.gap, "anchors/audit_relative_gap": audit.relative}

    def _reason(self, step: int, drift: float, audit: Audit | None) -> str:
        """Return why anchors should be made anew, or nothing."""
        config = self.config
        if config.max_drift and drift > config.max_drift:
            return f"drift {drift:.3g} is above anchors.max_drift {config.max_drift:g}"
        if audit is not None and config.source == "reference" and not audit.passes(config):
            return (
                f"audit: anchored KL {audit.anchored:.3g} and exact KL {audit.exact:.3g} part by {audit.gap:.3g}, more than "
                f"{config.audit_relative:.0%} and {config.audit_absolute:g} nats"
            )
        if config.refresh_every and step - self.made_at >= config.refresh_every:
            return f"{step - self.made_at} steps old (anchors.refresh_every {config.refresh_every})"
        return ""

    def audit(self, samples: Sequence[Sample]) -> Audit:
        """Measure the KL over the anchors in use, and the exact one over samples, under the policy as it is."""
        policy, most = self.learner.policy, self.config.audit_samples
        pairs = spread(samples, most)
        anchored, _ = self.term.measure(self.learner.engine, policy.device, most)
        with self.recall.called() as voice:
            exact = exact_kl(policy.model, voice, pairs, self.train.sampling.temperature)
        self.tokens += sum(len(prompt) + len(completion) - 1 for prompt, completion in pairs)
        return Audit(anchored, exact)

    # -- making anchors anew ------------------------------------------------------------------------------------------------

    def refresh(self, step: int, stage: RLStage, reason: str, drift: float) -> int:
        """Make the next version of the anchors with the policy as it is, go on with it, and return its tokens."""
        policy, engine, most = self.learner.policy, self.learner.engine, self.config.audit_samples
        before, _ = self.term.measure(engine, policy.device, most)
        version = Version(self.version + 1, self.learner.version, self.config.source)
        target = self.directory_of(version.version)
        with self._written(target) as out:
            facts = self._build(out, version, stage)
            write_manifest(out, {**facts, "reference": self.config.reference, "step": step, "reason": reason})
        self._use(open_anchors(target, self.origin), version.version, step)
        after, _ = self.term.measure(engine, policy.device, most)
        self.event(
            "refresh",
            f"anchors v{version.version:06d} on completions of policy version {version.policy_version}: {reason}",
            step=step,
            version=version.version,
            drift=drift,
            kl_before=before,
            kl_after=after,
            num_tokens=facts["num_tokens"],
        )
        num_tokens: int = facts["num_tokens"]
        return num_tokens

    def _build(self, out: Path, version: Version, stage: RLStage) -> dict[str, Any]:
        cap = stage.max_completion_tokens or self.train.sampling.max_completion_tokens
        settings = Settings(
            completions_per_prompt=self.config.completions_per_prompt,
            top_k=self.config.top_k,
            temperature=self.train.sampling.temperature,
            max_completion_tokens=self.config.max_completion_tokens or cap,
            seed=self.seed,
        )
        of_stage = [prompt for prompt in self.prompts if stage.sources is None or prompt.source in stage.sources]
        prompts = choose_prompts(of_stage, self.config.num_prompts, self.seed)

        def build(voice: Voice) -> dict[str, Any]:
            return build_anchors(
                out,
                voice,
                self.sampler,
                prompts,
                settings,
                self.origin,
                self.eos_token_ids,
                progress=self.beat,
                version=version,
            )

        if self.config.source == "policy":
            return build(Voice(self.learner.policy.model))
        with self.scored_by.called() as voice:
            facts = build(voice)
        self.tokens += facts["num_fed_tokens"]
        return facts

    @contextmanager
    def _written(self, target: Path) -> Iterator[Path]:
        """Build a directory on the first rank, and on the others for nothing: they are needed to compute what is in it."""
        if self.team.is_first:
            with new_directory(target) as out:
                yield out
        else:
            with tempfile.TemporaryDirectory() as scratch:
                yield Path(scratch)
        self.team.wait()

    def directory_of(self, version: int) -> Path:
        return self.directory / f"v{version:06d}"

    def _use(self, store: AnchorStore, version: int, step: int) -> None:
        self.store, self.version, self.made_at = store, version, step
        self.term.replace(store)

    def prune(self, named: Collection[int]) -> None:
        """Remove versions that are neither among the newest nor named.

        Args:
            named: versions that checkpoints need.
        """
        for path in self.directory.glob("v*"):
            version = int(path.name[1:]) if _NAME.fullmatch(path.name) else self.version
            if version <= self.version - self.config.keep and version not in named:
                (path / MANIFEST).unlink(missing_ok=True)  # first, so that a half-removed one is never taken for whole
                shutil.rmtree(path, ignore_errors=True)

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a run anew: with the stage's anchors."""
        if self.team.is_first:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._use(self.first, 0, 0)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the anchors in use."""
        state = {"version": self.version, "made_at": self.made_at, "content_sha256": self.store.manifest["content_sha256"]}
        return {**state, "manifest": self.store.manifest} if self.version else state  # small, and all that cannot be computed

    def load_state(self, state: Mapping[str, Any], step: int, stage: RLStage) -> None:
        """Go on with the anchors of a checkpoint; what is damaged of them is made again, and said.

        Args:
            state: from `state`.
            step: of the checkpoint.
            stage: the RL stage of that step.
        """
        version, made_at = state["version"], state["made_at"]
        if version == 0:
            self._use(self.first, 0, 0)
            return
        target = self.directory_of(version)
        self.team.share(lambda: self._put_manifest_back(target, state.get("manifest"), step))
        damaged = self.team.share(lambda: damaged_files(target))
        if damaged and self._rebuilt(target, damaged, step):
            damaged = []
        if not damaged and (read_manifest(target) or {}).get("content_sha256") != state["content_sha256"]:
            damaged = ["not what the checkpoint was trained with"]
        if damaged:
            self.version = version - 1  # the one that is made now takes the lost one's place
            lost = f"v{version:06d} is damaged ({', '.join(damaged)}) and cannot be scored again; the run goes on, to other bits"
            self.refresh(step, stage, lost, 0.0)
            return
        self._use(open_anchors(target, self.origin), version, made_at)

    def _put_manifest_back(self, target: Path, manifest: dict[str, Any] | None, step: int) -> None:
        """Write the manifest that a checkpoint remembers where another one is, or none: it says what the files must be."""
        if manifest is not None and read_manifest(target) != manifest:
            what = "is not the checkpoint's" if (target / MANIFEST).exists() else "is lost"
            write_json(target / MANIFEST, manifest)
            self.event("rebuild", f"{target.name}: {MANIFEST} {what}; put back from the checkpoint", step=step)

    def _rebuilt(self, target: Path, damaged: list[str], step: int) -> bool:
        """Make damaged files again, scoring where it needs it; return whether the version is whole again."""
        rescored = damaged != [COMPLETIONS]
        if rescored and (self.config.source == "policy" or COMPLETIONS in damaged):
            return False
        scorer = self.scored_by.called() if rescored else nullcontext()
        with scorer as voice, tempfile.TemporaryDirectory() as scratch:
            mine = target if self.team.is_first else Path(shutil.copytree(target, Path(scratch) / target.name))
            self.team.wait()
            whole = rebuild_files(mine, damaged, voice)
            self.team.wait()
        if whole:
            names, how = ", ".join(damaged), "scored again" if rescored else "read from the shards"
            self.event("rebuild", f"{target.name}: {names} did not match its sha256; {how} to the same bytes", step=step)
        return whole
