"""The gate of `tithe run`: plan first, refuse what cannot fit, and lay what was measured beside what was predicted.

before(workspace)   the plan of this campaign on this machine as it is now; ResourceError where it does not fit
after(workspace)    measured peak and step time beside the prediction, as metrics plan/... of the campaign's run
"""

from __future__ import annotations

from collections.abc import Callable

from tasks.registry import STAGES
from tasks.workspace import Workspace

Say = Callable[[str], None]


def before(workspace: Workspace, say: Say, force: bool) -> None:
    """Plan a campaign before it starts.

    Args:
        workspace: of the campaign; its run directory takes the plan.
        say: takes one-line messages for a person.
        force: start it even where it does not fit.

    Raises:
        ResourceError: it does not fit, and nobody insisted.
    """
    if workspace.stages != STAGES:  # somebody else's stages, of which no ledger knows
        return
    from tasks.plan import gate, record_prediction

    plan, said = gate(workspace, force)
    for sentence in said:
        say(sentence)
    if plan is not None:
        record_prediction(workspace, plan)


def after(workspace: Workspace, say: Say) -> None:
    """Lay what training took beside what was predicted."""
    from tasks.plan import record_measurement
    from trainer.plan.plan import size

    values = record_measurement(workspace)
    ratios = {"memory": "peak_bytes", "step time": "step_seconds"}
    parts = []
    for name, key in ratios.items():
        ratio, seen = values.get(f"plan/ratio_{key}"), values.get(f"plan/measured_{key}")
        if ratio and seen:
            shown = size(seen) if key == "peak_bytes" else f"{seen:.3g} s"
            parts.append(f"{name} {shown}, planned {ratio:.2f} times that")
    if parts:
        say(f"measured: {'; '.join(parts)}")
