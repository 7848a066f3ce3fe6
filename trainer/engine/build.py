"""From the configuration to an engine, for the choices that run layer by layer."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config.schema import Memory, Train
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.stateless import StatelessEngine
from trainer.memory.build import resident
from trainer.memory.residency import Residency
from trainer.policy.policy import Policy


def place_weights(policy: Policy, memory: Memory, directory: Path) -> Residency:
    """Put a policy's weights where the configuration wants them; the policy's model goes on working as a whole."""
    adapter = frozenset(id(p) for p in policy.model.parameters() if p.requires_grad) if policy.adapter is not None else frozenset()
    trains = policy.adapter is None
    journal = directory / "journal" if memory.journal == "disk" else None
    policy.residency = resident(policy.model, trains=trains, split=memory.split, journal_directory=journal, adapter=adapter)
    return policy.residency


def build_stateless(policy: Policy, train: Train, seed: int, directory: Path) -> StatelessEngine:
    """Return the stateless engine over a policy's weights.

    Args:
        policy: its weights move to where `train.memory` says.
        train: the configuration of training.
        seed: the campaign's.
        directory: the run's; journals and cold layers lie in it.
    """
    residency = place_weights(policy, train.memory, directory)
    heartbeat = Heartbeat(train.heartbeat.factor, train.heartbeat.warmup_steps)
    boundary = torch.device("cpu") if train.memory.boundaries == "host" else None
    return StatelessEngine(residency, train.optimizer, heartbeat, train.sampling.temperature, seed, boundary)
