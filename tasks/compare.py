"""Runs side by side: the keys in which they differ, what each reached, and their curves on one page.

from_files(runs)      what run directories hold
from_mlflow(uri, ..)  the same out of an MLflow store, which shows it on its comparison page: one must agree with the other
table, page           rows for a terminal; one HTML file that needs nothing beside itself
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.charts import Series, line_chart, number
from tasks.record import flatten
from tasks.runs import RunFacts
from tasks.sweep import short_keys
from trainer.config import as_tree

TEMPLATE = "compare.html.j2"
NUM_LINES = 10  # of one chart; more are no picture
OBJECTIVE = "heldout/reward_mean"
_UNIMPORTANT = ("machine.", "limits.", "campaign.name")
CHARTS: Mapping[str, str] = {
    "heldout/reward_mean": "Held-out reward",
    "heldout/accuracy": "Held-out accuracy",
    "reward/mean": "Reward of samples",
    "kl/mean": "KL to the reference",
    "entropy": "Entropy",
    "completion/length_mean": "Completion length",
    "grad/norm": "Gradient norm",
    "throughput/samples_per_second": "Samples per second",
}
_FINALS = {"evaluate/trained/pass@1/value": "pass@1", "evaluate/trained/greedy_accuracy/value": "greedy accuracy"}


@dataclass(frozen=True)
class Row:
    """One run: its name, how it ended, its flat parameters, curves by metric, numbers that sum it up."""

    name: str
    status: str
    params: Mapping[str, str]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    final: Mapping[str, float]
    seconds: float | None = None

    def last(self, metric: str) -> float | None:
        points = self.curves.get(metric)
        return points[-1][1] if points else None

    def best(self, metric: str) -> tuple[float, float] | None:
        """The step and the value of the highest point."""
        points = self.curves.get(metric)
        return max(points, key=lambda point: point[1]) if points else None


def from_files(runs: Sequence[RunFacts]) -> list[Row]:
    """Return the rows of some runs, in the order given."""
    rows = []
    for facts in runs:
        params = {key: as_text(value) for key, value in flatten(as_tree(facts.config)).items()}
        curves = {name: facts.series[name] for name in CHARTS if name in facts.series}
        rows.append(Row(facts.name, facts.status, params, curves, facts.final, facts.train_seconds))
    return rows


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def differing(rows: Sequence[Row]) -> list[str]:
    """Return the keys in which rows differ, in the order of the configuration."""
    keys = dict.fromkeys(key for row in rows for key in row.params)
    return [key for key in keys if not key.startswith(_UNIMPORTANT) and len({row.params.get(key, "-") for row in rows}) > 1]


def ranked(rows: Sequence[Row], objective: str) -> list[Row]:
    """Return the rows by the objective's last value, the best first; those without it last."""
    return sorted(rows, key=lambda row: -(value if (value := row.last(objective)) is not None else float("inf") * -1))


def table(rows: Sequence[Row], objective: str) -> list[dict[str, str]]:
    """Return one line a run, the best first: what differs, then what came out."""
    keys = differing(rows)
    shorts = short_keys(keys)
    lines = []
    for row in ranked(rows, objective):
        line = {"run": row.name, **{short: row.params.get(key, "-") for short, key in zip(shorts, keys, strict=True)}}
        best, last = row.best(objective), row.last(objective)
        line[objective] = "-" if last is None else number(last)
        line["best"] = "-" if best is None else f"{number(best[1])} at {best[0]:g}"
        line["KL"] = "-" if (kl := row.last("kl/mean")) is None else number(kl)
        for key, short in _FINALS.items():
            if any(key in other.final for other in rows):
                line[short] = f"{100 * row.final[key]:.1f} %" if key in row.final else "-"
        line["seconds"] = "-" if row.seconds is None else f"{row.seconds:.0f}"
        line["status"] = row.status
        lines.append(line)
    return lines


def page(title: str, rows: Sequence[Row], objective: str) -> str:
    """Return the comparison as HTML: the table, and one chart a metric with a line per run."""
    import jinja2

    shown = [row for row in ranked(rows, objective) if row.curves][:NUM_LINES]  # one that failed before its first step has none
    names = dict.fromkeys([objective, *CHARTS])
    charts = []
    for name in names:
        lines = [Series(row.name, tuple(row.curves[name])) for row in shown if row.curves.get(name)]
        if len(lines) == len(shown):
            charts.append({"title": CHARTS.get(name, name), "svg": line_chart(name, lines, num_colours=NUM_LINES)})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["markup"] = jinja2.utils.markupsafe.Markup
    return environment.get_template(TEMPLATE).render(
        title=title,
        objective=objective,
        lines=table(rows, objective),
        charts=charts,
        legend=[row.name for row in shown],
        num_left_out=len(rows) - len(shown),
        num_lines=len(shown),
    )
