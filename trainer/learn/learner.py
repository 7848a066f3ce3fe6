"""The learner: judged groups in, better weights out. The same for every schedule.

    step(groups)   pack -> advantages -> score what must be scored once -> passes x minibatches optimizer steps

An optimizer step sums its micro-batches with weights that are known before the first backward, so the split changes
nothing. The engine runs it, whole or not at all: a loss that is not finite, or a layer whose gradient norm is not what it should
be, skips it and leaves every weight as it was. The policy version is the number of optimizer steps that changed the weights.

Samples whose every term is exactly zero (an advantage of 0, no KL on samples, no entropy bonus) are not run through the model at
all; they still count in the denominator.

Legend: N samples of a step, M samples of an optimizer step, T completion tokens, K cached anchor tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainer.config.schema import RLStage, Train
from trainer.engine.port import Engine, Outcome, Term, TokenScores, Work
from trainer.errors import DivergedError
from trainer.learn.advantage import advantages, zero_variance_groups
from trainer.learn.anchored import AnchorTerm
from trainer.learn.batch import Batch, MicroBatch, make_batch, split_micro_batches, split_minibatches
from trainer.learn.kl import KlController, kl_term, kl_value
from trainer.learn.loss import (
    decoupled_weight,
    denominator,
    effective_sample_fraction,
    ppo_loss,
    token_weights,
)
from trainer.learn.optimizer import learning_rate
from trainer.learn.plain import PlainEngine
from trainer.learn.reference import Reference, exact_reference
from trainer.learn.tally import Tally
from trainer.policy.policy import Policy
from trainer.types import Group, derive_seed

Event = Callable[..., None]
_FIRST_RATIO, _FIRST_SQUARE = "off_policy/ratio_mean", "off_policy/ratio_square"
LOUD_FRACTION, LOUD_AFTER = 0.05, 20  # share of skipped optimizer steps that raises an alarm, once so many were tried


@dataclass(frozen=True)
class StepStats:
    metrics: dict[str, float]
    version: int  # policy version after the step
    num_skipped: int  # optimizer steps that were skipped


@dataclass(frozen=True)
class Prepared:
    """A batch with everything that is fixed before the first optimizer step of a step."""

    batch: Batch
    advantage_N: torch.Tensor  # float32, on the device
    trains_N: torch.Tensor  # bool, host: counts in the denominator
    active_N: torch.Tensor  # bool, host: has a term that is not zero by construction
    old_T: torch.Tensor  # log-probs that the ratio is taken against
    weight_T: torch.Tensor | None  # the decoupled weight
    reference_T: torch.Tensor | None


class Learner:
    """Owns the optimizer, the KL coefficient and the policy version.

    Args:
        policy: its trainable weights are stepped in place.
        train: the configuration of training.
        seed: the campaign's.
        anchors: the anchored KL term, where `kl.reference` is `anchors`.
        event: takes (kind, reason, **facts); told of every skipped optimizer step.
        engine: runs optimizer steps over the policy's weights; None takes the plain one.
        reference: scores samples where `kl.reference` is `int8_streamed`; that of `exact` is made here.
    """

    def __init__(
        self,
        policy: Policy,
        train: Train,
        seed: int,
        anchors: AnchorTerm | None,
        event: Event,
        engine: Engine | None = None,
        reference: Reference | None = None,
    ):
        kl = train.algorithm.kl
        assert (anchors is not None) == (kl.reference == "anchors")
        self.policy, self.train, self.algorithm, self.seed, self.event = policy, train, train.algorithm, seed, event
        self.engine: Engine = engine or PlainEngine(policy, train)
        self.reference = reference
        if kl.reference == "exact":
            self.reference = exact_reference(policy, self.engine, train.sampling.temperature)
        assert (self.reference is not None) == (kl.reference in ("exact", "int8_streamed"))
        self.anchors = anchors
        self.kl = KlController(kl)
        self.version = 0
        self.skipped_in_a_row = 0
        self.skipped = 0  # over the whole run
        self.tried = 0  # optimizer steps of this RL stage, skipped ones included
        self.tried_before = 0  # of the RL stages before it
        self.begin_stage(train.stages[0])

    def begin_stage(self, stage: RLStage) -> None:
        """Begin an RL stage: the policy goes on, optimizer and learning-rate schedule begin anew."""
        self.engine.restart()
        self.tried_before += self.tried
        self.tried = 0
        self.total = stage.steps * self.train.batch.optimizer_steps_per_step
        self.peak = stage.learning_rate or self.train.optimizer.learning_rate
        self.length_cap = stage.max_completion_tokens or self.train.sampling.max_completion_tokens

    def step(self, groups: Sequence[Group], step: int) -> StepStats:
        """Train on one step's groups.

        Args:
            groups: judged samples by prompt.
            step: number of the step, >= 1; decides the shuffles and the dropout.

        Raises:
            DivergedError: too many optimizer steps in a row were skipped.
        """
        tally = Tally()
        prepared = self.prepare(make_batch(groups), tally)
        version_before, tried_before = self.version, self.tried
        torch.manual_seed(derive_seed(self.seed, "update", step))
        with self.policy.updating():
            for number in range(self.train.batch.passes):
                parts = (self.seed, "minibatches", step, number)
                for samples_M in split_minibatches(prepared.batch.num_samples, self.train.batch.minibatches, *parts):
                    self._update(prepared, samples_M, tally, step, first=self.tried == tried_before)
        metrics = _with_effective_samples(tally.means())
        if self.anchors is not None or self.reference is not None:
            metrics["kl/coefficient"] = self.kl.coefficient
            metrics["kl/controller_factor"] = self.kl.update(metrics.get("kl/mean", math.nan))
        skipped = (self.tried - tried_before) - (self.version - version_before)
        tried = self.tried_before + self.tried
        metrics |= {"policy/version": self.version, "update/skipped": skipped}
        metrics["update/skipped_fraction"] = self.skipped / tried if tried else 0.0
        return StepStats(metrics, self.version, skipped)

    # -- once a step ------------------------------------------------------------------------------------------------

    def prepare(self, batch: Batch, tally: Tally) -> Prepared:
        """Make advantages, and score old policy and reference where the algorithm asks for them."""
        advantage_N = advantages(batch.rewards_N, batch.group_N, self.algorithm.advantage)
        trains_N = ~batch.truncated_N if self.algorithm.truncated == "mask" else torch.ones_like(batch.truncated_N)
        always = self.reference is not None or self.algorithm.entropy_coefficient > 0
        active_N = trains_N & (torch.ones_like(trains_N) if always else advantage_N != 0)
        zero_G = zero_variance_groups(batch.rewards_N, batch.group_N)
        tally.set("reward/mean", batch.rewards_N.mean())
        tally.set("reward/std", batch.rewards_N.std())
        tally.set("reward/zero_variance_fraction", zero_G.double().mean())
        tally.set("completion/length_mean", batch.length_N.double().mean())
        tally.set("completion/length_max", batch.length_N.max())
        tally.set("completion/truncated_fraction", batch.truncated_N.double().mean())
        tally.set("entropy", -batch.rollout_T.double().mean())
        tally.set("lag/mean", self.version - batch.version_N.double().mean())

        batch = batch.to(self.policy.device)
        active = active_N.nonzero().squeeze(1)
        old_T, weight_T = batch.rollout_T, None
        if self.algorithm.off_policy.mode == "decoupled":
            old_T = self._score(batch, active, self.engine)
            weight_T = decoupled_weight(old_T, batch.rollout_T, self.algorithm.off_policy.truncation)
            self._tally_weights(weight_T[active_N.repeat_interleave(batch.length_N).to(weight_T.device)], tally)
        reference_T = None
        if self.reference is not None:
            reference_T = self._score(batch, active, self.reference)
            lengths_N = batch.sequences.prompt_length_N + batch.sequences.completion_length_N - 1
            tally.set("reference/tokens", lengths_N.cpu()[active].sum())
        return Prepared(batch, advantage_N.float().to(self.policy.device), trains_N, active_N, old_T, weight_T, reference_T)

    def _tally_weights(self, weight_T: torch.Tensor, tally: Tally) -> None:
        """Count how far the decoupled weights are from 1 over the tokens that train."""
        if len(weight_T):
            tally.set("off_policy/weight_mean", weight_T.mean())
            tally.set("off_policy/effective_sample_fraction", effective_sample_fraction(weight_T))
            tally.set("off_policy/kept_fraction", (weight_T < self.algorithm.off_policy.truncation).double().mean())

    @torch.no_grad()
    def _score(self, batch: Batch, samples_M: torch.Tensor, scorer: Engine | Reference) -> torch.Tensor:
        """Return log-probs of some samples' tokens, dropout off; the sampler's own stand for the other samples [T]."""
        scored_T = batch.rollout_T.clone()
        micros = list(self._micro_batches(batch, samples_M))
        works = [Work(micro.input_ids_BS, micro.where_T, micro.target_T.unsqueeze(1)) for micro in micros]
        for micro, scores in zip(micros, scorer.score(works) if works else [], strict=True):
            scored_T[micro.token_T] = scores.logprobs_TK.squeeze(1)
        return scored_T

    def _micro_batches(self, batch: Batch, samples_M: torch.Tensor) -> Any:
        return split_micro_batches(batch.sequences, samples_M, self.train.batch.micro_batch_tokens)

    # -- once an optimizer step -------------------------------------------------------------------------------------

    def _update(self, prepared: Prepared, samples_M: torch.Tensor, tally: Tally, step: int, first: bool) -> None:
        """Apply the gradient of some samples, unless the engine stops it."""
        part_tally = Tally()
        terms = self.terms(prepared, samples_M, part_tally, first)
        rate = learning_rate(self.tried, self.total, self.train.optimizer, self.peak)
        outcome = self.engine.step(terms, rate, self.tried_before + self.tried)
        self.tried += 1
        if not outcome.applied:
            self._skip(outcome, step)
            return
        self.version += 1
        self.skipped_in_a_row = 0
        tally.take(part_tally)
        metrics = {"loss/total": outcome.loss, "grad/norm": outcome.norm, **outcome.metrics}
        for name, value in metrics.items():
            tally.add(name, torch.tensor(value, dtype=torch.float64))
        tally.peak("grad/norm_max", torch.tensor([outcome.norm], dtype=torch.float64))
        tally.set("lr", torch.tensor(rate, dtype=torch.float64))

    def terms(self, prepared: Prepared, samples_M: torch.Tensor, tally: Tally, first: bool = False) -> list[Term]:
        """Return the forward passes of one optimizer step and what each adds to its loss.

        Args:
            prepared: from `prepare`.
            samples_M: the samples of the optimizer step [M].
            tally: takes the metrics.
            first: whether no optimizer step of this step came before, so that learner and sampler should agree.
        """
        batch, kind = prepared.batch, self.algorithm.aggregation
        trains_M = samples_M[prepared.trains_N[samples_M]]
        num_tokens = int(batch.length_N[trains_M].sum())
        divisor = denominator(kind, num_tokens, len(trains_M), self.length_cap)
        entropy = self.algorithm.entropy_coefficient > 0
        terms = []
        for micro in self._micro_batches(batch, samples_M[prepared.active_N[samples_M]]):
            work = Work(micro.input_ids_BS, micro.where_T, micro.target_T.unsqueeze(1), entropy)
            terms.append(Term(work, partial(self._loss, prepared, micro, divisor, tally, first)))
        if self.anchors is not None:
            number = self.tried_before + self.tried
            terms += self.anchors.terms(number, self.kl.coefficient, tally, self.policy.device)
        return terms

    def _loss(
        self, prepared: Prepared, micro: MicroBatch, divisor: int, tally: Tally, first: bool, scores: TokenScores
    ) -> torch.Tensor:
        """Return a micro-batch's share of the loss of its optimizer step."""
        algorithm, kl = self.algorithm, self.algorithm.kl
        batch, token_T = prepared.batch, micro.token_T
        logprobs_T = scores.logprobs_TK.squeeze(1)
        old_T = prepared.old_T[token_T]
        length_T = batch.sequences.completion_length_N[micro.sample_T]
        weight_T = token_weights(algorithm.aggregation, length_T, divisor)
        ppo = ppo_loss(
            logprobs_T, old_T, prepared.advantage_N[micro.sample_T], algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
        )
        policy_T = ppo.loss_T if prepared.weight_T is None else ppo.loss_T * prepared.weight_T[token_T]
        loss = (policy_T * weight_T).sum()
        tally.total("loss/policy", loss)
        if prepared.reference_T is not None:
            reference_T = prepared.reference_T[token_T]
            term = (kl_term(logprobs_T, old_T, reference_T, kl.estimator) * weight_T).sum()
            loss = loss + self.kl.coefficient * term
            tally.total("loss/kl", self.kl.coefficient * term)
            tally.add("kl/mean", kl_value(logprobs_T.detach(), reference_T))
        if scores.entropy_T is not None:
            bonus = algorithm.entropy_coefficient * (scores.entropy_T * weight_T).sum()
            loss = loss - bonus
            tally.total("loss/entropy", -bonus)
        tally.add("ratio/mean", ppo.ratio_T)
        tally.peak("ratio/max", ppo.ratio_T)
        tally.add("clip/fraction", ppo.clipped_T)
        if first:
            apart_T = (logprobs_T.detach() - batch.rollout_T[token_T]).abs()
            tally.add("mismatch/mean_abs_logprob", apart_T)
            tally.peak("mismatch/max_abs_logprob", apart_T)
            if prepared.weight_T is None:
                tally.add(_FIRST_RATIO, ppo.ratio_T)
                tally.add(_FIRST_SQUARE, ppo.ratio_T**2)
                tally.add("off_policy/kept_fraction", ~ppo.clipped_T)
        return loss

    def _skip(self, outcome: Outcome, step: int) -> None:
        """Count a skipped optimizer step, say why, give up after too many in a row."""
        self.skipped += 1
        self.skipped_in_a_row += 1
        facts = {"version": self.version, "layer": outcome.culprit, "value": outcome.value, "limit": outcome.limit}
        printable = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in facts.items()}
        where = "" if outcome.culprit in outcome.reason else f" in {outcome.culprit}"
        self.event("skip", f"{outcome.reason}{where}; no weight was changed", step=step, **printable)
        tried = self.tried_before + self.tried
        if self.skipped > LOUD_FRACTION * tried and tried >= LOUD_AFTER:
            self.event("alarm", f"{self.skipped} of {tried} optimizer steps were skipped", step=step, skipped=self.skipped)
        if self.skipped_in_a_row >= self.train.max_skipped_in_a_row:
            raise DivergedError(
                f"step {step}: {self.skipped_in_a_row} optimizer steps in a row were skipped ({outcome.reason}{where}); "
                "they changed no weight. Lower train.optimizer.learning_rate or raise train.algorithm.kl.coefficient"
            )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """Return what a checkpoint needs to go on exactly: tensors by part and name, and small facts."""
        generator = {"cpu": torch.get_rng_state()}
        if self.policy.device.type == "cuda":
            generator["cuda"] = torch.cuda.get_rng_state(self.policy.device)
        parts = {"weights": self.engine.weights(), "optimizer": self.engine.state(), "generator": generator}
        facts = {
            "version": self.version,
            "tried": self.tried,
            "tried_before": self.tried_before,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "engine": self.engine.facts(),
            "kl_coefficient": self.kl.coefficient,
        }
        return parts, facts

    def load_state(self, parts: dict[str, dict[str, torch.Tensor]], facts: dict[str, Any]) -> None:
        """Take the state of a checkpoint of the same RL stage; `begin_stage` comes first."""
        self.engine.load(parts["weights"], parts["optimizer"], facts["engine"])
        torch.set_rng_state(parts["generator"]["cpu"])
        if "cuda" in parts["generator"]:
            torch.cuda.set_rng_state(parts["generator"]["cuda"], self.policy.device)
        self.version, self.tried, self.tried_before = facts["version"], facts["tried"], facts["tried_before"]
        self.skipped, self.skipped_in_a_row, self.kl.coefficient = (
            facts["skipped"],
            facts["skipped_in_a_row"],
            facts["kl_coefficient"],
        )


def _with_effective_samples(metrics: dict[str, float]) -> dict[str, float]:
    """Return a direct step's metrics with the effective sample size of its first ratios, as a fraction of their number."""
    square = metrics.pop(_FIRST_SQUARE, None)
    if square:
        metrics["off_policy/effective_sample_fraction"] = min(metrics[_FIRST_RATIO] ** 2 / square, 1.0)  # rounding
    return metrics
