"""How a command ends its process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Leave:
    """`at_once`: without waiting for threads of Prefect that still try to reach a server that is gone."""

    at_once: bool = False
