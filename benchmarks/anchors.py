"""Anchors against the exact reference over the quickstart run: reference forward tokens, and whether the KLs agree.

    python -m benchmarks.anchors            make bench-anchors

Trains the quickstart twice, in a workspace of its own: with anchors and their guards, and with `kl.reference: exact`. In the
first run a second look, which nothing acts on, measures the exact KL of every step's samples over the whole vocabulary beside the
anchored KL. Its tokens are not counted.

Expected: the anchors' reference forward tokens (making, refreshes and audits) at most a fifth of the exact mode's; anchored KL
within 20 % of exact KL, as the mean over steps in which the exact one is above 0.01 nats. benchmarks/results/anchors.json, .svg.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tasks.train
from tasks.charts import Series, line_chart
from tasks.command import limit_threads
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.anchors.guard import AnchorGuard
from trainer.config import CampaignConfig, load_config
from trainer.files import read_manifest, write_json, write_text
from trainer.metrics import EVENTS, METRICS, read_lines

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
SMALLEST_KL = 0.01  # nats a token; below it a share says nothing
STYLE = (
    "<style>text{font:11px sans-serif;fill:#555}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#ddd}"
    ".mark{stroke:#999;stroke-dasharray:3 3}.line{fill:none;stroke-width:2}.faint{opacity:.3}"
    ".t1{fill:#0b6bcb}.t2{fill:#c2410c}.t3{fill:#15803d}"
    ".s1{stroke:#0b6bcb;fill:none}.s2{stroke:#c2410c;fill:none}.s3{stroke:#15803d;fill:none}.s4{stroke:#7e22ce;fill:none}</style>"
)


def train(workspace: Workspace, config: CampaignConfig, name: str) -> tuple[Path, float]:
    """Run stage train by itself in a run directory of its own; return it and the seconds."""
    run = workspace.root / "runs" / name
    out = workspace.root / "policies" / name
    for directory in (run, out):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    stage, begin = get_stage("train"), time.perf_counter()
    paths = tasks.train.StagePaths({name: workspace.artifact(name) for name in stage.inputs}, out, run, "0" * 64)
    tasks.train.run(config, paths)
    return run, time.perf_counter() - begin


def watch_exactly(seen: list[tuple[int, float, float]]) -> Any:
    """Let every step be measured exactly before its guards act; return the method that was there."""
    acts = AnchorGuard.after_step

    def measured(self: AnchorGuard, step: int, stage: Any, samples: Any, metrics: Any, last: bool = False) -> dict[str, float]:
        audit = self.audit(samples)
        seen.append((step, audit.anchored, audit.exact))
        return acts(self, step, stage, samples, metrics, last)  # it counts its own tokens from 0

    AnchorGuard.after_step = measured  # type: ignore[method-assign]
    return acts


def draw(path: Path, title: str, series: Sequence[Series], marks: Sequence[tuple[float, str]] = ()) -> None:
    """Write a chart from zero, with its title and legend, as a file that stands alone."""
    chart = line_chart(title, series, (0.0, None), marks).replace(">", f' xmlns="http://www.w3.org/2000/svg">{STYLE}', 1)
    words = "".join(f'<tspan class="t{n}" dx="8">{escape(one.label)}</tspan>' for n, one in enumerate(series, start=1))
    dashed = f'<tspan dx="8">dashed: {marks[0][1]}</tspan>' if marks else ""
    write_text(path, chart.replace("</svg>", f'<text x="50" y="9">{escape(title)}{words}{dashed}</text></svg>') + "\n")


def total(run: Path, name: str) -> float:
    return sum(line["metrics"].get(name, 0.0) for line in read_lines(run / METRICS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, default=REPOSITORY / "campaigns" / "bench-anchors")
    parser.add_argument("-S", "--set", action="append", default=[], help="override a key, as in `tithe run`")
    options = parser.parse_args()
    config = load_config(REPOSITORY / "params.yaml", options.set)
    limit_threads(config)
    workspace = Workspace(options.workspace, config)
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    seen: list[tuple[int, float, float]] = []
    acts = watch_exactly(seen)
    try:
        anchored, _ = train(workspace, config, "anchored")
    finally:
        AnchorGuard.after_step = acts  # type: ignore[method-assign]
    exact_config = load_config(REPOSITORY / "params.yaml", [*options.set, "train.algorithm.kl.reference=exact"])
    exact, _ = train(workspace, exact_config, "exact")
    report(workspace, anchored, exact, seen)


def report(workspace: Workspace, anchored: Path, exact: Path, seen: list[tuple[int, float, float]]) -> None:
    made = (read_manifest(workspace.artifact("anchors")) or {})["num_fed_tokens"]
    while_training, all_samples = total(anchored, "reference/tokens"), total(exact, "reference/tokens")
    share = (made + while_training) / all_samples
    apart = [abs(one - other) / other for _, one, other in seen if other > SMALLEST_KL]
    gap = sum(apart) / len(apart) if apart else float("nan")
    refreshes = [event["step"] for event in read_lines(anchored / EVENTS) if event["kind"] == "refresh"]
    facts = {
        "tokens_making": made,
        "tokens_training": while_training,
        "tokens_exact_mode": all_samples,
        "share": share,
        "mean_relative_gap": gap,
        "max_relative_gap": max(apart, default=float("nan")),
        "refreshes": refreshes,
        "curve": [{"step": step, "anchored": one, "exact": other} for step, one, other in seen],
    }
    write_json(RESULTS / "anchors.json", facts)
    series = (
        Series("anchored KL", tuple((step, one) for step, one, _ in seen), noisy=False),
        Series("exact KL of the same policy", tuple((step, other) for step, _, other in seen), noisy=False),
    )
    draw(RESULTS / "anchors.svg", "anchored and exact KL, nats a token", series, [(step, "refresh") for step in refreshes])
    table = Table("what", "measured", "expected")
    table.add_row("reference forward tokens, making the anchors", f"{made:,}", "")
    table.add_row("reference forward tokens, refreshes and audits", f"{while_training:,.0f}", "")
    table.add_row("reference forward tokens, exact mode", f"{all_samples:,.0f}", "")
    table.add_row("share", f"{share:.1%}", "at most 20 %")
    table.add_row("anchored KL off by, mean", f"{gap:.1%}", "at most 20 %")
    table.add_row("refreshes after steps", ", ".join(map(str, refreshes)) or "none", "")
    Console().print(table)


if __name__ == "__main__":
    main()
