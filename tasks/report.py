"""Report: one HTML page that tells the whole campaign, and needs nothing beside itself.

    evaluation.json, samples.jsonl  ->  before and after: numbers with intervals, answers side by side
    metrics.jsonl, events.jsonl     ->  curves, and what happened when; what `tithe run` planned beside what was measured
    config, manifests, git          ->  what was run, from what, and how to run it again

Whatever is missing is named on the page instead of breaking it. Completions are arbitrary text: everything is escaped, and
the page forbids scripts and outside resources by itself. Run alone: `python -m tasks.report`.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from tasks.charts import NUM_COLOURS, Interval, Series, interval_chart, line_chart, number
from tasks.plan import beside
from tasks.registry import StagePaths
from trainer.config import CampaignConfig, as_tree, load_config
from trainer.errors import ConfigError
from trainer.files import REPOSITORY, read_json, read_manifest, write_text
from trainer.metrics import EVENTS, METRICS, read_lines

TEMPLATE = "report.html.j2"
PAGE = "report.html"
MAX_EVENTS = 300
MAX_TEXT_CHARACTERS = 4000
PACKAGES = ("torch", "transformers", "peft", "prefect", "mlflow", "dvc")
METRICS_IN_ORDER = ("greedy_accuracy", "mean_reward", "mean_length", "truncated_fraction")
LOUD_EVENTS = ("skip", "rollback", "alarm", "resume")  # drawn into the curves


@dataclass(frozen=True)
class Chart:
    """What one chart shows: metric names in metrics.jsonl, each with its label."""

    title: str
    note: str
    metrics: Mapping[str, str]
    bounds: tuple[float | None, float | None] = (None, None)


CHARTS: tuple[Chart, ...] = (
    Chart(
        "Reward",
        "Training samples; greedy answers to held-out prompts.",
        {"reward/mean": "reward of samples", "heldout/accuracy": "held-out accuracy"},
        (0.0, 1.0),
    ),
    Chart("Divergence from the base", "Mean KL per token.", {"kl/mean": "KL"}, (0.0, None)),
    Chart("Entropy", "Mean per token; a fast fall to zero means that exploration ended.", {"entropy": "entropy"}, (0.0, None)),
    Chart("Completion length", "Tokens.", {"completion/length_mean": "mean", "completion/length_max": "longest"}, (0.0, None)),
    Chart("Gradient norm", "Before clipping.", {"grad/norm": "mean of the step"}, (0.0, None)),
    Chart("Learning rate", "", {"lr": "learning rate"}, (0.0, None)),
    Chart("Throughput", "Samples per second, sampled and learned.", {"throughput/samples_per_second": "samples/s"}, (0.0, None)),
    Chart(
        "Without signal",
        "Share of groups whose rewards all agree: they teach nothing.",
        {"reward/zero_variance_fraction": "share of groups"},
        (0.0, 1.0),
    ),
    Chart("Clipped", "Share of tokens whose ratio was clipped.", {"clip/fraction": "share of tokens"}, (0.0, None)),
    Chart(
        "Mismatch",
        "Mean distance between the sampler's log-probs and the learner's.",
        {"mismatch/mean_abs_logprob": "log-prob"},
        (0.0, None),
    ),
)


@dataclass
class Page:
    """Everything that the template shows; `missing` are sentences about what could not be shown."""

    title: str
    headline: list[dict[str, Any]] = field(default_factory=list)
    about_evaluation: str = ""
    intervals: str = ""
    verdicts: list[tuple[str, str]] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)
    planned: list[tuple[str, str, str, str]] = field(default_factory=list)
    event_counts: list[tuple[str, int]] = field(default_factory=list)
    events: list[dict[str, str]] = field(default_factory=list)
    num_events_left_out: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)
    differences: list[tuple[str, str, str]] = field(default_factory=list)
    config_json: str = ""
    provenance: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Write `report.html` and return its size and what it could not show."""
    page = gather(config, paths)
    text = render(page)
    write_text(paths.out / PAGE, text)
    return {"characters": len(text), "missing": page.missing}


def render(page: Page) -> str:
    """Return the page as HTML, everything in it escaped but the charts that this package drew."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(page=page, num_colours=NUM_COLOURS)


def gather(config: CampaignConfig, paths: StagePaths) -> Page:
    """Collect what there is to tell."""
    page = Page(title=config.campaign.name)
    add_evaluation(page, paths.inputs.get("evaluation"), config)
    add_samples(page, paths.inputs.get("evaluation"), config)
    add_training(page, paths.runs.get("train"), paths.inputs.get("policy"))
    page.planned = beside(paths.run.parent)
    add_configuration(page, config)
    add_provenance(page, paths)
    return page


# --- before and after -------------------------------------------------------------------------------------------------


def add_evaluation(page: Page, artifact: Path | None, config: CampaignConfig) -> None:
    tree = _json_or_none(page, artifact, "evaluation.json", "no evaluation: there is no before and after")
    if tree is None:
        return
    base, trained, gain = (tree.get(name, {}) for name in ("base", "trained", "difference"))
    rows = []
    for name in sorted({*base, *trained}, key=_place):
        before, after = as_interval(base.get(name)), as_interval(trained.get(name))
        if before is None and after is None:
            continue
        share = name.startswith("pass@") or name in ("greedy_accuracy", "truncated_fraction")
        page.headline.append(
            {
                "name": name.replace("_", " "),
                "before": _shown(before, share),
                "after": _shown(after, share),
                "gain": _gain(as_interval(gain.get(name)), before, after, share),
            }
        )
        if name.startswith("pass@") or name == "greedy_accuracy":
            rows.append(Interval(name.replace("_", " "), before, after))
    if rows:
        page.intervals = interval_chart("Before and after with their intervals", rows)
    facts = [f"{tree['num_prompts']:,} prompts of split {tree['split']}"] if {"num_prompts", "split"} <= tree.keys() else []
    facts.append(f"{config.evaluate.samples_per_prompt} samples each at temperature {config.evaluate.temperature:g}")
    page.verdicts = [
        (name, _verdicts(side["statuses"])) for name, side in (("base", base), ("trained", trained)) if side.get("statuses")
    ]
    page.about_evaluation = f"{', '.join(facts)}; {config.evaluate.confidence:.0%} intervals from resampling the prompts."


def _place(metric: str) -> tuple[int, int, str]:
    """Return the place of a metric in the table: pass@k by k, then the known ones, then the rest."""
    if metric.startswith("pass@"):
        return 0, int(metric.removeprefix("pass@")), metric
    return 1, METRICS_IN_ORDER.index(metric) if metric in METRICS_IN_ORDER else len(METRICS_IN_ORDER), metric


def _verdicts(statuses: Mapping[str, int]) -> str:
    total = sum(statuses.values()) or 1
    return ", ".join(
        f"{name} {count / total:.1%}" for name, count in sorted(statuses.items(), key=lambda item: -item[1]) if count
    )


def as_interval(value: Any) -> tuple[float, float, float] | None:
    """Return (value, low, high) of an entry of evaluation.json; a bare number has no width."""
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        three = (float(value["value"]), float(value["low"]), float(value["high"]))
        return three if all(math.isfinite(x) for x in three) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value), float(value), float(value)
    return None


def _shown(three: tuple[float, float, float] | None, share: bool) -> dict[str, str]:
    if three is None:
        return {"value": "-", "interval": ""}
    value, low, high = (f"{x:.1%}" if share else number(x) for x in three)
    return {"value": value, "interval": f"{low} to {high}" if three[1] != three[2] else ""}


def _gain(
    given: tuple[float, float, float] | None,
    before: tuple[float, float, float] | None,
    after: tuple[float, float, float] | None,
    share: bool,
) -> dict[str, str]:
    if given is None and before is not None and after is not None:
        given = (after[0] - before[0], 0.0, 0.0)
    if given is None:
        return {"value": "-", "interval": ""}
    value, low, high = (f"{100 * x:+.1f}" if share else ("+" if x > 0 else "") + number(x) for x in given)
    interval = f"{low} to {high}" if given[1] != given[2] else ""
    return {"value": value, "interval": f"{interval} points".strip() if share else interval}


def add_samples(page: Page, artifact: Path | None, config: CampaignConfig) -> None:
    if config.report.num_examples == 0:
        return
    lines = read_lines(artifact / "samples.jsonl") if artifact is not None else []
    if not lines:
        page.missing.append("no samples.jsonl: no answers can be shown")
    changed_first = sorted(lines, key=lambda line: _score(line, "trained") == _score(line, "base"))
    for line in changed_first[: config.report.num_examples]:
        page.samples.append(
            {
                "prompt": _cut(str(line.get("prompt", ""))),
                "answer": _cut(str(line.get("answer", ""))),
                "sides": [
                    {
                        "name": title,
                        "text": _cut(str(line.get(side, {}).get("text", ""))),
                        "score": _score(line, side),
                        "right": (_score(line, side) or 0.0) >= config.evaluate.correct_at,
                    }
                    for side, title in (("base", "before"), ("trained", "after"))
                ],
            }
        )


def _score(line: Mapping[str, Any], side: str) -> float | None:
    score = line.get(side, {}).get("score")
    return float(score) if isinstance(score, int | float) else None


def _cut(text: str) -> str:
    left = len(text) - MAX_TEXT_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_TEXT_CHARACTERS]} … ({left:,} more characters)"


# --- training ---------------------------------------------------------------------------------------------------------


def add_training(page: Page, run: Path | None, policy: Path | None) -> None:
    metrics = read_metrics(run, policy)
    events = read_lines(run / EVENTS) if run is not None else []
    if not metrics:
        page.missing.append("no metrics.jsonl in the run directory and no curve.csv in the policy: there are no curves")
    marks = [(float(e["step"]), str(e["kind"])) for e in events if e.get("kind") in LOUD_EVENTS and e.get("step") is not None]
    marks += [(after[0], "next RL stage") for before, after in pairwise(metrics.get("stage/index", [])) if before[1] != after[1]]
    for chart in CHARTS:
        series = [
            Series(label, tuple(metrics[name]), noisy=not name.startswith("heldout/"))
            for name, label in chart.metrics.items()
            if metrics.get(name)
        ]
        if series:
            legend = [(one.label, number(one.points[-1][1])) for one in series]
            svg = line_chart(chart.title, series, chart.bounds, marks[:50])
            page.charts.append({"title": chart.title, "note": chart.note, "legend": legend, "svg": svg})
        elif metrics:
            page.not_measured.append(chart.title.lower())
    page.event_counts = sorted(Counter(str(e.get("kind")) for e in events).items())
    loud = [e for e in events if e.get("kind") not in ("sync", "checkpoint")] or events
    page.num_events_left_out = len(events) - len(loud[:MAX_EVENTS])
    start = float(events[0].get("time", 0.0)) if events else 0.0
    page.events = [_event(event, start) for event in loud[:MAX_EVENTS]]


def read_metrics(run: Path | None, policy: Path | None) -> dict[str, list[tuple[float, float]]]:
    """Return (step, value) series by metric name, from metrics.jsonl or, where it is gone, from curve.csv."""
    series: dict[str, list[tuple[float, float]]] = {}
    for line in read_lines(run / METRICS) if run is not None else []:
        for name, value in line.get("metrics", {}).items():
            _append(series, name, line["step"], value)
    if not series and policy is not None and (policy / "curve.csv").exists():
        from tasks.train import CURVE_COLUMNS

        with open(policy / "curve.csv", newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                for column, name in CURVE_COLUMNS.items():
                    _append(series, name, row["step"], row.get(column))
    return series


def _append(series: dict[str, list[tuple[float, float]]], name: str, step: Any, value: Any) -> None:
    """Add a point; a value that is no finite number (not measured at this step, or nan) leaves a gap."""
    try:
        point = (float(step), float(value))
    except (TypeError, ValueError):
        return
    if all(math.isfinite(x) for x in point):
        series.setdefault(name, []).append(point)


def _event(event: Mapping[str, Any], start: float) -> dict[str, str]:
    said = ("time", "kind", "step", "reason")
    scalars = {key: value for key, value in event.items() if key not in said and isinstance(value, str | int | float)}
    facts = ", ".join(f"{key}: {number(value) if isinstance(value, float) else value}" for key, value in scalars.items())
    return {
        "after": _duration(float(event.get("time", start)) - start),
        "step": "" if event.get("step") is None else str(event["step"]),
        "kind": str(event.get("kind", "")),
        "reason": _cut(" ".join(part for part in (str(event.get("reason", "")), f"({facts})" if facts else "") if part)),
    }


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


# --- what was run -----------------------------------------------------------------------------------------------------


def add_configuration(page: Page, config: CampaignConfig) -> None:
    page.config_json = json.dumps(as_tree(config), indent=2, ensure_ascii=False)
    try:
        default = flatten(as_tree(load_config(REPOSITORY / "params.yaml")))
    except ConfigError as error:
        page.missing.append(f"the default campaign cannot be read, so there is nothing to compare with: {error}")
        return
    own = flatten(as_tree(config))
    for key in [*own, *(key for key in default if key not in own)]:
        if own.get(key) != default.get(key):
            page.differences.append((key, _json(default.get(key)), _json(own.get(key))))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a tree's leaves by dotted key; a list is a leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def add_provenance(page: Page, paths: StagePaths) -> None:
    hashes: dict[str, str] = {}
    for name, directory in paths.inputs.items():
        manifest = read_manifest(directory)
        if manifest is None:
            page.missing.append(f"artifact {name} has no manifest: its hash is unknown")
            continue
        hashes.update(manifest.get("inputs", {}))
        hashes[name] = manifest["content_sha256"]
    order = ["prompts", "base", "anchors", "policy", "merged", "evaluation"]
    commit = git_commit(REPOSITORY)
    if commit is None:
        page.missing.append("not in a git checkout: the commit is unknown")
    page.provenance = [("run", paths.run.parent.name), ("code", commit or "unknown")]
    page.provenance += [(name, hashes[name]) for name in sorted(hashes, key=lambda n: order.index(n) if n in order else 99)]
    page.provenance += [("python", sys.version.split()[0]), *_versions(PACKAGES)]
    overrides = [f"-S {shlex.quote(f'{key}={value}')}" for key, _, value in page.differences]
    checkout = [f"git checkout {commit.split(' ')[0]}"] if commit else []
    page.commands = [*checkout, "make setup", " ".join([".venv/bin/tithe run", *overrides])]


def git_commit(repository: Path) -> str | None:
    """Return the commit of the code, and whether files differ from it; None outside a checkout."""
    try:
        commit = _git(repository, "rev-parse", "HEAD")
        return commit + (" with changes that are not committed" if _git(repository, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def _versions(packages: Sequence[str]) -> Iterable[tuple[str, str]]:
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _json_or_none(page: Page, directory: Path | None, name: str, otherwise: str) -> dict[str, Any] | None:
    """Return a JSON object of an artifact, or None with a sentence about what that means."""
    if directory is None or not (directory / name).exists():
        page.missing.append(otherwise)
        return None
    tree = read_json(directory / name)
    return tree if isinstance(tree, dict) else None


if __name__ == "__main__":
    from tasks.command import main

    sys.exit(main(["report", *sys.argv[1:]]))
