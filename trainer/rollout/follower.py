"""Samplers that follow the learner's versions through the `policies` directory: the embedded one, with its own copy, or any."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.policy.policy import Policy
from trainer.policy.versions import SCORES, PolicyStore
from trainer.rollout.embedded import EmbeddedSampler, Progress
from trainer.rollout.probe import Look, Probe, Scores, check, read_probe
from trainer.rollout.vllm import Score, VllmSampler
from trainer.types import Sampler


class FollowingSampler(EmbeddedSampler):
    """An `EmbeddedSampler` whose weights are loaded from policy directories.

    Args:
        policy: its own; base and adapter shape must be the learner's.
        store: where versions are.
        slots, pad_token_id: see EmbeddedSampler.
    """

    def __init__(self, policy: Policy, store: PolicyStore, slots: int, pad_token_id: int):
        super().__init__(policy.model, slots, pad_token_id, version=-1)
        self.policy, self.store = policy, store

    def load_policy(self, version: int) -> None:
        """Load the weights of a version.

        Raises:
            ModelError: it is damaged or gone.
        """
        self.store.load(self.policy, version)
        self.version = version


class Follower:
    """Keeps any sampler at the newest version, with the probe after every load, on every server where there are several.

    Args:
        sampler: whose `load_policy` reads policy directories.
        store: where versions and the probe are.
        tolerance: of the probe.
    """

    def __init__(self, sampler: Sampler, store: PolicyStore, tolerance: float):
        self.sampler, self.store, self.tolerance = sampler, store, tolerance
        self.version = -1
        self.looks: dict[str, Look] = {}  # the last one at each server
        self.mismatches: dict[str, float] = {}
        self._probe_path: Path = store.root / SCORES

    @property
    def mismatch(self) -> float:
        """Of the last probe, mean absolute log-prob a token; of several servers the worst."""
        return max(self.mismatches.values(), default=0.0)

    def on_progress(self, progress: Progress) -> None:
        """Have the sampler call back with (finished, total) completions, if it can."""
        if isinstance(self.sampler, EmbeddedSampler | VllmSampler):
            self.sampler.progress = progress

    def follow(self) -> bool:
        """Load the newest version if there is a newer one; return whether there was.

        Raises:
            MismatchError: the sampler does not give the learner's log-probs.
        """
        newest = self.store.newest()
        if newest is None or newest.version == self.version:
            return False
        self.load(newest.version)
        return True

    def load(self, version: int) -> None:
        """Load a version and inspect it. Raises as `follow`."""
        probe = read_probe(self._probe_path)
        if isinstance(self.sampler, VllmSampler):
            # Its log-probs of given tokens come at temperature 1.
            expected = self.store.scores(version, untempered=True)
            untempered = replace(probe, temperature=1.0, base=probe.untempered)
            self.sampler.inspect = partial(self._inspect, untempered, version, expected)
            self.sampler.load_policy(version)
        else:
            self.sampler.load_policy(version)
            score = partial(self.sampler.score, temperature=probe.temperature)
            self._inspect(probe, version, self.store.scores(version), "the sampler", score)
        self.version = version

    def forget(self) -> None:
        """Begin anew: what the sampler gives next is compared with nothing that it gave before."""
        self.version, self.looks, self.mismatches = -1, {}, {}

    def _inspect(self, probe: Probe, version: int, expected: Scores, who: str, score: Score) -> None:
        given = score(probe.sequences)
        self.mismatches[who] = check(given, probe, version, expected, self.looks.get(who), self.tolerance, who)
        self.looks[who] = Look(version, expected, given)
