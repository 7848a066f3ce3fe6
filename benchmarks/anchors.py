"""Anchors against the exact reference over the quickstart run: reference forward tokens, and whether the KLs agree.

    python -m benchmarks.anchors            make bench-anchors

Trains the quickstart twice, in a workspace of its own: with anchors and their guards, and with `kl.reference: exact`. In the
first run a second look, which nothing acts on, measures two exact KLs after every step, over the whole vocabulary, beside the
anchored KL: of the step's own samples, as an audit does and as the exact mode trains on, and of completions that the policy
draws anew for as many prompts as there are anchors, which it has just not been trained on. Their tokens are not counted. All
three are means over sampled completions, and come with their standard error.

Then anchors are built over a random model with a larger vocabulary, beside plain scoring of the same completions (log-probs of
the drawn tokens alone, as sampler and learner score) and beside the sampler by itself.

Expected: the anchors' reference forward tokens (making, refreshes and audits) at most a fifth of the exact mode's; anchored KL
within 20 % of exact KL, as the mean over steps in which the exact one is above 0.01 nats, and as the mean KL of the run; scoring
and writing anchors at least 0.8 of plain scoring, and building them at least 0.8 of sampling and plain scoring without storing.
Writes benchmarks/results/anchors.json and .svg, and with `--docs` the plot of docs/anchors.md. About three minutes on two free
cores.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaForCausalLM

import tasks.train
from benchmarks.models import Shape
from tasks.charts import Series, line_chart
from tasks.command import limit_threads
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.anchors.guard import AnchorGuard, exact_kls, spread
from trainer.anchors.scorer import Voice
from trainer.anchors.store import Origin, Settings, build_anchors, choose_prompts, open_anchors
from trainer.config import CampaignConfig, load_config
from trainer.files import read_manifest, write_json, write_manifest, write_text
from trainer.learn.batch import split_micro_batches
from trainer.metrics import EVENTS, METRICS, read_lines
from trainer.policy.forward import TokenPair, completion_logprobs
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Completion, Prompt, Request, Sample, SamplingParams, derive_seed

REPOSITORY = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
DOCS = REPOSITORY / "docs"
SMALLEST_KL = 0.01  # nats a token; below it a share says nothing
AT_MOST, AT_LEAST = 0.2, 0.8
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


@dataclass(frozen=True)
class Estimate:
    """A mean KL in nats a token, over sampled completions, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, sums: Tensor, lengths: Tensor) -> Estimate:
        """Take each completion's KL and tokens; the error is that of a ratio of two sums, from one completion to the next."""
        mean = sums.sum() / lengths.sum()
        spread = (sums - mean * lengths).square().sum() * len(sums) / (len(sums) - 1)
        return cls(float(mean), float(spread.sqrt() / lengths.sum()))

    def apart(self, true: Estimate) -> float:
        """Return how far this one is off as a share of the true one."""
        return abs(self.mean - true.mean) / true.mean

    def errors_apart(self, true: Estimate) -> float:
        """Return how far both are apart in standard errors of the difference."""
        return abs(self.mean - true.mean) / math.hypot(self.error, true.error)


@dataclass(frozen=True)
class Look:
    """The KL after one step, three times."""

    step: int
    anchored: Estimate
    exact: Estimate  # of the step's samples
    fresh: Estimate  # exact, of completions drawn anew


def exact_estimate(guard: AnchorGuard, voice: Voice, pairs: Sequence[TokenPair]) -> Estimate:
    """Return the KL over the whole vocabulary at the states of some completions."""
    sums, lengths = torch.zeros(len(pairs), dtype=torch.float64), torch.tensor([float(len(c)) for _, c in pairs])
    for indices, kl_N in exact_kls(guard.learner.policy.model, voice, pairs, guard.train.sampling.temperature):
        which = torch.tensor([index for index in indices for _ in pairs[index][1]])
        sums.index_add_(0, which, kl_N.double())
    return Estimate.of(sums, lengths.double())


def anchored_estimate(guard: AnchorGuard) -> Estimate:
    """Return the KL over all anchors in use, as the KL term sees it."""
    term, engine, device = guard.term, guard.learner.engine, guard.learner.policy.device
    anchors, chosen_M = term._load(list(range(len(guard.store))), device)
    lengths = anchors.sequences.completion_length_N
    which_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums = torch.zeros(len(lengths), dtype=torch.float64)
    for micro in split_micro_batches(anchors.sequences, chosen_M, term.micro_batch_tokens):
        (scores,) = engine.score([anchors.work(micro)])
        sums.index_add_(0, which_T[micro.token_T], anchors.kl(micro, scores.logprobs_TK).double())
    return Estimate.of(sums, lengths.double())


def draw_fresh(guard: AnchorGuard, step: int, samples: Sequence[Sample]) -> list[TokenPair]:
    """Return completions that the policy as it is draws for prompts that are neither anchored nor learnt from in this step."""
    learnt, count = {sample.prompt.id for sample in samples} | set(guard.store.manifest["prompt_ids"]), len(guard.store)
    others = choose_prompts([prompt for prompt in guard.prompts if prompt.id not in learnt], count, guard.seed + step)
    params = SamplingParams(guard.train.sampling.temperature, guard.train.sampling.max_completion_tokens, guard.eos_token_ids)
    requests = [Request(p.id, p.token_ids, derive_seed(guard.seed, "fresh", step, p.id), 0) for p in others]
    drawn = guard.sampler.generate(requests, params)
    return [(prompt.token_ids, completion.token_ids) for prompt, completion in zip(others, drawn, strict=True)]


def watch_exactly(seen: list[Look]) -> Any:
    """Let every step be measured exactly before its guards act; return the method that was there."""
    acts = AnchorGuard.after_step

    def measured(self: AnchorGuard, step: int, stage: Any, samples: Any, metrics: Any, last: bool = False) -> dict[str, float]:
        own, fresh = spread(samples, len(samples)), draw_fresh(self, step, samples)
        with self.recall.called() as voice:
            seen.append(Look(step, anchored_estimate(self), *(exact_estimate(self, voice, pairs) for pairs in (own, fresh))))
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
    """Return tokens per second of sampling, plain scoring, scoring and writing, and building, and the shares of them."""
    shape = Shape(hidden=256, intermediate=512, layers=4, vocabulary=16384, heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape.config).eval()
    prompts = [Prompt(str(i), "main", "train", "", tuple(range(7 + i, 31 + i)), "") for i in range(48)]
    settings = Settings(completions_per_prompt=1, top_k=64, temperature=1.0, max_completion_tokens=40, seed=0)
    seconds: dict[str, list[float]] = {"sampling": [], "plain_scoring": [], "scoring_and_writing": [], "building": []}
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
        scored = time.perf_counter() - begin
        for name, took in zip(seconds, (sampler.seconds, scored, building - sampler.seconds, building), strict=True):
            seconds[name].append(took)
    of_scoring = [plain / mine for plain, mine in zip(seconds["plain_scoring"], seconds["scoring_and_writing"], strict=True)]
    both = zip(seconds["sampling"], seconds["plain_scoring"], seconds["building"], strict=True)
    of_building = [(sampling + plain) / building for sampling, plain, building in both]
    rates = {f"{name}_tokens_per_second": facts["num_tokens"] / statistics.median(took) for name, took in seconds.items()}
    return {**rates, "of_scoring": statistics.median(of_scoring), "of_building": statistics.median(of_building)}


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
    seen: list[Look] = []
    acts = watch_exactly(seen)
    try:
        anchored, _ = train(workspace, config, "anchored")
    finally:
        AnchorGuard.after_step = acts  # type: ignore[method-assign]
    exact_config = load_config(REPOSITORY / "params.yaml", [*options.set, "train.algorithm.kl.reference=exact"])
    exact, _ = train(workspace, exact_config, "exact")
    report(workspace, anchored, exact, seen, [RESULTS, DOCS] if options.docs else [RESULTS])


def compare(seen: Sequence[Look]) -> dict[str, Any]:
    """Return how far the anchored KL is off, step by step and over the run, and what of it is the luck of sampling."""
    worth = [look for look in seen if look.exact.mean > SMALLEST_KL]
    worst = max(worth, key=lambda look: look.anchored.apart(look.exact))
    worst_fresh = max(worth, key=lambda look: look.anchored.apart(look.fresh))
    means = {name: statistics.mean(getattr(look, name).mean for look in seen) for name in ("anchored", "exact", "fresh")}
    return {
        "steps": len(worth),
        "mean_apart": statistics.mean(look.anchored.apart(look.exact) for look in worth),
        "mean_apart_fresh": statistics.mean(look.anchored.apart(look.fresh) for look in worth),
        "run_apart": abs(means["anchored"] - means["exact"]) / means["exact"],
        "run_apart_fresh": abs(means["anchored"] - means["fresh"]) / means["fresh"],
        "steps_apart": [look.step for look in worth if look.anchored.apart(look.exact) > AT_MOST],
        "worst": asdict(worst),
        "worst_apart": worst.anchored.apart(worst.exact),
        "worst_errors": worst.anchored.errors_apart(worst.exact),
        "worst_apart_fresh": worst.anchored.apart(worst.fresh),
        "worst_errors_fresh": worst.anchored.errors_apart(worst.fresh),
        "most_apart_fresh": worst_fresh.anchored.apart(worst_fresh.fresh),
        "most_apart_fresh_step": worst_fresh.step,
        "error_anchored": statistics.median(look.anchored.error / look.anchored.mean for look in worth),
        "error_exact": statistics.median(look.exact.error / look.exact.mean for look in worth),
    }


def report(workspace: Workspace, anchored: Path, exact: Path, seen: list[Look], places: Sequence[Path]) -> None:
    made = (read_manifest(workspace.artifact("anchors")) or {})["num_fed_tokens"]
    while_training, all_samples = total(anchored, "reference/tokens"), total(exact, "reference/tokens")
    share, kl, speed = (made + while_training) / all_samples, compare(seen), throughput()
    refreshes = [event["step"] for event in read_lines(anchored / EVENTS) if event["kind"] == "refresh"]
    tokens = {"making": made, "training": while_training, "exact_mode": all_samples, "share": share}
    curve = [asdict(look) for look in seen]
    write_json(
        RESULTS / "anchors.json", {"throughput": speed, "tokens": tokens, "kl": kl, "refreshes": refreshes, "curve": curve}
    )
    series = (
        Series("anchored", tuple((look.step, look.anchored.mean) for look in seen), noisy=False),
        Series("exact", tuple((look.step, look.exact.mean) for look in seen), noisy=False),
        Series("exact, fresh", tuple((look.step, look.fresh.mean) for look in seen), noisy=False),
    )
    for place in places:
        draw(place / "anchors.svg", "KL, nats a token:", series, [(step, "refresh") for step in refreshes])
    table = Table("what", "measured", "wanted", "")

    def bounded(what: str, value: float, bound: float, at_least: bool = False) -> None:
        shown = (f"{value:.2f}", f"at least {bound:g}") if at_least else (f"{value:.1%}", f"at most {bound:.0%}")
        table.add_row(what, *shown, "pass" if (value >= bound if at_least else value <= bound) else "FAIL")

    table.add_row("reference forward tokens, making the anchors", f"{made:,}", "")
    table.add_row("reference forward tokens, refreshes and audits", f"{while_training:,.0f}", "")
    table.add_row("reference forward tokens, exact mode", f"{all_samples:,.0f}", "")
    bounded("share", share, AT_MOST)
    bounded(f"anchored KL off the exact one, mean of {kl['steps']} steps above {SMALLEST_KL} nats", kl["mean_apart"], AT_MOST)
    bounded("the same of the mean KL of the run", kl["run_apart"], AT_MOST)
    bounded("off the exact one of fresh completions, mean of steps", kl["mean_apart_fresh"], AT_MOST)
    bounded("the same of the mean KL of the run, fresh", kl["run_apart_fresh"], AT_MOST)
    bounded(f"the worst step of these, {kl['most_apart_fresh_step']}", kl["most_apart_fresh"], AT_MOST)
    worst, off = kl["worst"], f"{kl['worst_apart']:.0%}, {kl['worst_errors']:.1f} standard errors"
    sizes = " / ".join(f"{worst[name]['mean']:.3f}" for name in ("anchored", "exact", "fresh"))
    table.add_row("steps more than 20 % off", ", ".join(map(str, kl["steps_apart"])) or "none", "")
    table.add_row(f"the worst, step {worst['step']}: anchored / exact / fresh", sizes, "")
    table.add_row("  off the exact one", off, "")
    table.add_row("  off the fresh one", f"{kl['worst_apart_fresh']:.0%}, {kl['worst_errors_fresh']:.1f} standard errors", "")
    table.add_row("standard error of a step, anchored / exact", f"{kl['error_anchored']:.0%} / {kl['error_exact']:.0%}", "")
    bounded("scoring and writing, of plain scoring's throughput", speed["of_scoring"], AT_LEAST, at_least=True)
    bounded("building, of sampling and plain scoring", speed["of_building"], AT_LEAST, at_least=True)
    for name in ("sampling", "plain_scoring", "scoring_and_writing", "building"):
        table.add_row(f"tokens per second, {name.replace('_', ' ')}", f"{speed[f'{name}_tokens_per_second']:,.0f}", "")
    table.add_row("refreshes after steps", ", ".join(map(str, refreshes)) or "none", "")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
