"""What a person wants to know at the end: before and after, where the report lies, what to do next. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flows.server import addresses
from tasks.tracking import Sidecar, tracking_uri
from tasks.workspace import Workspace
from trainer.files import read_json

_SHARES = ("pass@", "greedy_accuracy", "truncated_fraction")


def comparison(workspace: Workspace) -> list[dict[str, str]]:
    """Return the rows of base beside trained, as text; empty where there is no evaluation."""
    path = workspace.artifact("evaluation") / "evaluation.json"
    if not path.exists():
        return []
    tree = read_json(path)
    sides = [tree.get(side) or {} for side in ("base", "trained", "difference")]
    rows = []
    for name in sides[1]:
        share = name.startswith(_SHARES)
        before, after, gain = (_shown(side.get(name), share) for side in sides)
        if before or after:
            rows.append({"metric": name.replace("_", " "), "base": before, "trained": after, "change": gain})
    return rows


def _shown(value: Any, share: bool) -> str:
    if isinstance(value, Mapping):
        middle = _shown(value.get("value"), share)
        low, high = (_shown(value.get(end), share) for end in ("low", "high"))
        return f"{middle} ({low} to {high})" if middle and low and high and low != high else middle
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{100 * value:.1f} %" if share else f"{value:.3g}"


def report_page(workspace: Workspace) -> Path | None:
    """Return the campaign's HTML page, or None where it is not made yet."""
    pages = sorted(workspace.artifact("report").glob("*.html"))
    return pages[0] if pages else None


def mlflow_link(workspace: Workspace) -> str | None:
    """Return where a browser shows the campaign's MLflow run, or None while no server shows it."""
    sidecar = Sidecar.read(workspace.run)
    uri = tracking_uri()
    server = uri if uri.startswith("http") else addresses().get("mlflow")
    if not server or not sidecar.run_id:
        return None
    parts = urlsplit(str(server).rstrip("/"))
    public = parts._replace(netloc=parts.netloc.rpartition("@")[2])  # Prefect shows it to everybody; the browser asks for a name
    return f"{public.geturl()}/#/experiments/{sidecar.experiment_id}/runs/{sidecar.run_id}"
