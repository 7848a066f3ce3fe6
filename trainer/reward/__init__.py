"""Rewards: `build_verifier(config.reward)` gives the judge of a campaign's answers. Importable without torch."""

from __future__ import annotations

import os

from trainer.config.schema import Reward
from trainer.reward.verifiers import ExactVerifier, PoolVerifier
from trainer.types import Verifier


def build_verifier(reward: Reward) -> Verifier:
    """Return the verifier that the configuration asks for; nothing is started before the first answer."""
    if reward.verifier == "exact":
        return ExactVerifier()
    return PoolVerifier(
        reward.verifier,
        f"trainer.reward.judges:make_{reward.verifier}",
        {"partial_credit": reward.partial_credit},
        reward.timeout_seconds,
        min(4, os.cpu_count() or 1),
    )


__all__ = ["build_verifier"]
