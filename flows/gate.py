"""The gate of `tithe run`: plan first, refuse what cannot fit, and lay what was measured beside what was predicted.

before(...)         the plan of this campaign on this machine; ResourceError where it cannot fit
after(workspace)    measured peak and step time beside the prediction, as metrics plan/... of the campaign's run

The plan of a plain decoder is arithmetic, done here in milliseconds. Any other model's needs torch, which the flow never imports:
that one is made in a process of its own, forked from the one that holds torch anyway.
"""

from __future__ import annotations

from collections.abc import Callable

from flows.child import Launcher, end
from tasks.registry import STAGES
from tasks.workspace import Workspace
from trainer.errors import ConfigError, ModelError, ResourceError

Say = Callable[[str], None]
LOG = "plan.log"
DEADLINE_SECONDS = 120.0


def before(workspace: Workspace, say: Say, force: bool, launcher: Launcher) -> None:
    """Plan a campaign before it starts.

    Args:
        workspace: of the campaign; its run directory takes the plan.
        say: takes one-line messages for a person.
        force: start it even where it does not fit.
        launcher: starts the process of a plan that needs torch.

    Raises:
        ResourceError: it cannot fit, and nobody insisted.
    """
    if workspace.stages != STAGES:  # somebody else's stages, of which no ledger knows
        return
    from tasks.plan import gate
    from trainer.plan.request import needs_torch

    try:
        apart = needs_torch(workspace.config)
    except (ConfigError, ModelError):  # said by the gate itself
        apart = False
    for sentence in _apart(workspace, force, launcher) if apart else gate(workspace, force):
        say(sentence)


def _apart(workspace: Workspace, force: bool, launcher: Launcher) -> list[str]:
    """Plan in a process of its own; one that breaks stops no campaign."""
    log = workspace.run / LOG
    log.unlink(missing_ok=True)
    place = ["--workspace", str(workspace.root), "--config", str(workspace.run / "config.json"), "--run-dir", str(workspace.run)]
    child = launcher.start(["plan", *place, *(["--force"] if force else [])], log, {})
    code = child.wait(DEADLINE_SECONDS)
    end(child, 0.0)
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line] if log.exists() else []
    if code == ResourceError.exit_code:
        raise ResourceError("\n".join(line.removeprefix("error: ") for line in lines if line.startswith("error: ")))
    if code != 0:
        return [f"not planned: {lines[-1] if lines else f'the planner ended with {code}'}"]
    return lines


def after(workspace: Workspace, say: Say) -> None:
    """Lay what training took beside what was predicted."""
    from tasks.plan import record_measurement
    from trainer.plan.plan import size

    values = record_measurement(workspace)
    parts = []
    for name, key in {"memory": "peak_bytes", "a step": "step_seconds"}.items():
        planned, seen = values.get(f"plan/predicted_{key}"), values.get(f"plan/measured_{key}")
        if planned and seen:
            shown = [size(value) if key == "peak_bytes" else f"{value:.3g} s" for value in (seen, planned)]
            parts.append(f"{name} {shown[0]}, planned {shown[1]}")
    if parts:
        say(f"measured: {'; '.join(parts)}")
