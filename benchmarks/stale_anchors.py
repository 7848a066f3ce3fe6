"""The failure that stale anchors lead to, and the cure: one task, a reward with a loophole, three runs.

    python -m benchmarks.stale_anchors            make bench-stale_anchors

A tiny base repeats a number: "37=" gives "37", but "73" in two of five answers. It closes three of ten answers with `=`; a second
one follows seldom, a third hardly ever. The reward is 1 for an answer that begins right, plus 0.2 for every token beyond three: a
loophole, "37=============" earns most. Wanted is the number, closed once at most; that share is only looked at. What holds the
policy is the KL to the base.

    stale    anchors made once by the base, no guard. At the states that they cover the policy stays near the base. Behind `==`
             there are none: the KL term sees nothing, the policy drifts there for reward, exact KL grows
    guarded  the same, with refresh, drift limit and audit
    exact    every sample scored by the base: what guarded should look like

Exact KL is measured by audits in all runs; in *stale* their bounds are so wide that nothing follows from them. Numbers go to
benchmarks/results/stale_anchors.json; with `--docs` the plots of docs/anchors.md are written too. About a minute.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.anchors import DOCS, RESULTS, draw, train
from tasks.charts import Series
from tasks.command import limit_threads
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, validate
from trainer.config.load import lay_over
from trainer.config.schema import ScratchModel
from trainer.files import write_json, write_text
from trainer.metrics import METRICS, read_lines
from trainer.policy.load import save_model
from trainer.policy.scratch import train_scratch
from trainer.policy.tokenizer import character_tokenizer, encode
from trainer.types import Prompt

ALPHABET = "0123456789="
MORE = (0.3, 0.15, 0.05, 0.01)  # shares of the base's answers that go on after so many `=`
SWAPPED = 0.4
NEVER = {"refresh_every": 0, "max_drift": 0.0, "audit_relative": 1e9, "audit_absolute": 1e9}
GUARDS = {"refresh_every": 10, "max_drift": 0.3}
MODES: dict[str, dict[str, Any]] = {
    "stale": {"anchors": NEVER},
    "guarded": {"anchors": GUARDS},
    "exact": {"train": {"algorithm": {"kl": {"reference": "exact"}}}},
}
RIGHT = r"^(\d\d)"
CAMPAIGN: dict[str, Any] = {
    "campaign": {"name": "stale-anchors"},
    "prepare": {"sources": [{"source": "jsonl:numbers.jsonl"}], "heldout_fraction": 0.3},
    "anchors": {"num_prompts": 64, "completions_per_prompt": 2, "top_k": 8, "audit_every": 5, "audit_samples": 128},
    "train": {
        "method": "full",
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant"},
        "algorithm": {"advantage": "dr_grpo", "kl": {"reference": "anchors", "coefficient": 0.3, "anchor_batch_size": 64}},
        "batch": {"prompts_per_step": 32, "group_size": 8, "passes": 2, "minibatches": 2},
        "sampling": {"max_completion_tokens": 16},
        "stages": [{"steps": 60}],
        "heldout": {"every_steps": 5, "num_prompts": 32},
        "checkpoints": {"every_steps": 1000},
    },
    "reward": {
        "verifier": "mix",
        "num_workers": 1,
        "parts": [
            {"name": "begins_right", "verifier": "regex", "pattern": RIGHT},
            {"name": "longer", "verifier": "length", "weight": -2.6, "length": {"max_length": 16, "buffer": 13}},
            {"name": "wanted", "verifier": "regex", "pattern": RIGHT + "=?$", "weight": 0.0},
        ],
    },
    "preflight": {"num_prompts": 0},
}


def answer(number: str, chance: random.Random) -> str:
    """Return a number as the base repeats it."""
    text, closed = number[::-1] if chance.random() < SWAPPED else number, 0
    while closed < 6 and chance.random() < MORE[min(closed, len(MORE) - 1)]:
        text, closed = text + "=", closed + 1
    return text


def make_base(directory: Path, steps: int, seed: int = 0) -> None:
    """Train the base and write it as a model directory."""
    tokenizer, chance = character_tokenizer(ALPHABET), random.Random(seed)
    examples = []
    for _ in range(5000):
        number = f"{chance.randrange(100):02d}"
        examples.append(Prompt("", "main", "train", f"{number}=", encode(tokenizer, f"{number}="), answer(number, chance)))
    size = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
    scratch = ScratchModel(alphabet=ALPHABET, steps=steps, learning_rate=5e-3, decay_steps=steps // 3, **size)
    save_model(train_scratch(scratch, tokenizer, examples, seed, lambda step, metrics: None), tokenizer, directory)


def run_all(root: Path, modes: Sequence[str] = tuple(MODES), difference: dict[str, Any] | None = None) -> dict[str, Path]:
    """Train runs below a directory and return their run directories by mode."""
    make_base(root / "made-base", steps=300)
    numbers = [f"{number:02d}" for number in range(100)]
    rows = [json.dumps({"question": f"{number}=", "answer": number}) for number in numbers]
    write_text(root / "numbers.jsonl", "\n".join(rows) + "\n")

    def configure(mode: str) -> CampaignConfig:
        tree = lay_over(CAMPAIGN, {"base": {"source": f"hf:{root / 'made-base'}"}})
        tree["prepare"]["sources"][0]["source"] = f"jsonl:{root / 'numbers.jsonl'}"
        return validate(lay_over(lay_over(tree, MODES[mode]), difference or {}))

    workspace = Workspace(root, configure("stale"))
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    return {mode: train(workspace, configure(mode), mode)[0] for mode in modes}


COLUMNS = {
    "reward": "reward/mean",
    "wanted": "heldout/part_wanted_ok_fraction",
    "trained_kl": "kl/mean",
    "exact_kl": "anchors/audit_exact",
    "length": "completion/length_mean",
}


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what is compared, by name, as (step, value)."""
    lines = read_lines(run / METRICS)
    found = {
        name: [(line["step"], line["metrics"][key]) for line in lines if key in line["metrics"]] for name, key in COLUMNS.items()
    }
    if not found["exact_kl"]:  # scored sample by sample
        found["exact_kl"] = found["trained_kl"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the plots of docs/anchors.md")
    options = parser.parse_args()
    limit_threads(validate(lay_over(CAMPAIGN, {"base": {"source": "scratch"}})))
    with tempfile.TemporaryDirectory() as root:
        found = {mode: curves(run) for mode, run in run_all(Path(root)).items()}
    write_json(RESULTS / "stale_anchors.json", found)
    table = Table("", *found)
    for name, title in (
        ("reward", "training reward"),
        ("wanted", "held-out: share that is wanted"),
        ("trained_kl", "KL that the term sees, nats a token"),
        ("exact_kl", "exact KL"),
        ("length", "answer's tokens"),
    ):
        table.add_row(title, *(f"{each[name][0][1]:.2f} -> {each[name][-1][1]:.2f}" for each in found.values()))
    Console().print(table)
    places = [RESULTS, DOCS] if options.docs else [RESULTS]
    for place in places:
        for name, title in (
            ("reward", "training reward"),
            ("wanted", "held-out: share that is wanted"),
            ("exact_kl", "exact KL"),
        ):
            series = [Series(mode, tuple(each[name]), noisy=False) for mode, each in found.items()]
            draw(place / f"stale-anchors-{name}.svg", title, series)


if __name__ == "__main__":
    main()
