"""Anchors against the exact reference over the quickstart run: reference forward tokens, and whether the KLs agree.

    python -m benchmarks.anchors            make bench-anchors

Trains the quickstart twice, in a workspace of its own: with anchors and their guards, and with `kl.reference: exact`. In the
first run a second look, which nothing acts on, measures the exact KL of every step's samples over the whole vocabulary beside the
anchored KL. Its tokens are not counted.

Then anchors are built over a random model with a larger vocabulary, beside plain scoring of the same completions: log-probs of
the drawn tokens alone, as sampler and learner score.

Expected: the anchors' reference forward tokens (making, refreshes and audits) at most a fifth of the exact mode's; anchored KL
within 20 % of exact KL, as the mean over steps in which the exact one is above 0.01 nats; scoring and writing anchors at least
0.8 of plain scoring. Writes benchmarks/results/anchors.json and .svg, and with `--docs` the plot of docs/anchors.md. About three
minutes on two free cores.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM

import tasks.train
from benchmarks.models import Shape
from tasks.charts import Series, line_chart
from tasks.command import limit_threads
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.anchors.guard import AnchorGuard
from trainer.anchors.scorer import Voice
from trainer.anchors.store import Origin, Settings, build_anchors, open_anchors
from trainer.config import CampaignConfig, load_config
from trainer.files import read_manifest, write_json, write_manifest, write_text
from trainer.metrics import EVENTS, METRICS, read_lines
from trainer.policy.forward import completion_logprobs
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Completion, Prompt, Request, SamplingParams

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
DOCS = REPOSITORY / "docs"
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


@dataclass
class Timed:
    """A sampler that counts its seconds."""

    sampler: EmbeddedSampler
    seconds: float = 0.0

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        begin = time.perf_counter()
        try:
            return self.sampler.generate(requests, params)
        finally:
            self.seconds += time.perf_counter() - begin


def throughput(rounds: int = 3) -> dict[str, float]:
    """Return the throughput of scoring and writing anchors as a share of plain scoring's, and sampling's share of the time."""
    shape = Shape(hidden=256, intermediate=512, layers=4, vocabulary=16384, heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape.config).eval()
    prompts = [Prompt(str(i), "main", "train", "", tuple(range(7 + i, 31 + i)), "") for i in range(48)]
    settings = Settings(completions_per_prompt=1, top_k=64, temperature=1.0, max_completion_tokens=40, seed=0)
    of_scoring, of_sampling = [], []
    for _ in range(rounds):
        sampler = Timed(EmbeddedSampler(model, 48, 0))
        with tempfile.TemporaryDirectory() as root:
            begin = time.perf_counter()
            facts = build_anchors(Path(root), Voice(model), sampler, prompts, settings, Origin("", ""), (1,))  # type: ignore[arg-type]
            write_manifest(Path(root), facts)
            building = time.perf_counter() - begin
            batch = open_anchors(Path(root), Origin("", "")).take(range(len(prompts)))
        begin = time.perf_counter()
        completion_logprobs(model, list(zip(batch.prompts, batch.completions, strict=True)), 1.0, 0)
        of_scoring.append((time.perf_counter() - begin) / (building - sampler.seconds))
        of_sampling.append(sampler.seconds / building)
    return {"of_scoring": statistics.median(of_scoring), "of_sampling": statistics.median(of_sampling)}


def total(run: Path, name: str) -> float:
    return sum(line["metrics"].get(name, 0.0) for line in read_lines(run / METRICS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, default=REPOSITORY / "campaigns" / "bench-anchors")
    parser.add_argument("--docs", action="store_true", help="write the plot of docs/anchors.md")
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
    report(workspace, anchored, exact, seen, [RESULTS, DOCS] if options.docs else [RESULTS])


def report(
    workspace: Workspace, anchored: Path, exact: Path, seen: list[tuple[int, float, float]], places: Sequence[Path]
) -> None:
    made = (read_manifest(workspace.artifact("anchors")) or {})["num_fed_tokens"]
    while_training, all_samples = total(anchored, "reference/tokens"), total(exact, "reference/tokens")
    share = (made + while_training) / all_samples
    apart = [abs(one - other) / other for _, one, other in seen if other > SMALLEST_KL]
    gap = sum(apart) / len(apart) if apart else float("nan")
    refreshes = [event["step"] for event in read_lines(anchored / EVENTS) if event["kind"] == "refresh"]
    speed = throughput()
    facts = {
        "throughput": speed,
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
        Series("anchored", tuple((step, one) for step, one, _ in seen), noisy=False),
        Series("exact, of the same policy", tuple((step, other) for step, _, other in seen), noisy=False),
    )
    for place in places:
        draw(place / "anchors.svg", "KL, nats a token:", series, [(step, "refresh") for step in refreshes])
    table = Table("what", "measured", "expected")
    table.add_row("reference forward tokens, making the anchors", f"{made:,}", "")
    table.add_row("reference forward tokens, refreshes and audits", f"{while_training:,.0f}", "")
    table.add_row("reference forward tokens, exact mode", f"{all_samples:,.0f}", "")
    table.add_row("share", f"{share:.1%}", "at most 20 %")
    table.add_row("anchored KL off by, mean", f"{gap:.1%}", "at most 20 %")
    table.add_row("throughput of scoring and writing, of plain scoring's", f"{speed['of_scoring']:.2f}", "at least 0.8")
    table.add_row("sampling's share of the time of building", f"{speed['of_sampling']:.2f}", "")
    table.add_row("refreshes after steps", ", ".join(map(str, refreshes)) or "none", "")
    Console().print(table)


if __name__ == "__main__":
    main()
