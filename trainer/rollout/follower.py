"""An embedded sampler with its own copy of the policy, which follows the learner's versions through the `policies` directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainer.policy.policy import Policy
from trainer.policy.versions import SCORES, PolicyStore
from trainer.rollout.embedded import EmbeddedSampler, Progress
from trainer.rollout.probe import Scores, check, read_probe
from trainer.rollout.vllm import VllmSampler
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
    """Keeps any sampler at the newest version, with the probe after every load.

    Args:
        sampler: whose `load_policy` reads policy directories.
        store: where versions and the probe are.
        tolerance: of the probe.
    """

    def __init__(self, sampler: Sampler, store: PolicyStore, tolerance: float):
        self.sampler, self.store, self.tolerance = sampler, store, tolerance
        self.version = -1
        self.mismatch = 0.0  # of the last probe, mean absolute log-prob a token
        self._scores: Scores = []
        self._probe_path: Path = store.root / SCORES
        self._untempered = isinstance(sampler, VllmSampler)  # its log-probs of given tokens come at temperature 1

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
        expected = self.store.scores(newest.version, untempered=self._untempered)
        self.sampler.load_policy(newest.version)
        previous = (self.version, self._scores) if self.version >= 0 else None
        probe = read_probe(self._probe_path)
        if self._untempered:
            probe = replace(probe, temperature=1.0, base=probe.untempered)
        self.mismatch = check(self.sampler, probe, newest.version, expected, previous, self.tolerance)
        self.version, self._scores = newest.version, expected
        return True
