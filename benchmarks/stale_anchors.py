"""The failure that stale anchors lead to, and the cure: one task, a reward with a loophole, three runs.

    python -m benchmarks.stale_anchors            make bench-stale_anchors

A tiny base adds two numbers and closes one answer in five with `=`; after one, another follows in a fiftieth of the cases. The
reward wants the right sum at the beginning of the answer, and pays for every further token: a loophole, "46=============" earns
most. What is wanted is the sum, closed or not; that share is only looked at. The KL to the base is what holds the policy.

    stale    anchors made once by the base, no guard. At the states they cover the policy stays near the base. Behind the first
             `=` there are none: the KL term sees nothing, the policy drifts there for reward, exact KL grows
    guarded  the same, with refresh, drift limit and audit
    exact    every sample scored by the base: what guarded should look like

Exact KL is measured by audits in all runs; in *stale* their bounds are so wide that nothing follows from them. Numbers go to
benchmarks/results/stale_anchors.json; with `--docs` the plots of docs/anchors.md are written too. About 90 seconds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.anchors import RESULTS, draw, train
from tasks.charts import Series
from tasks.command import limit_threads
from tasks.registry import get_stage
from tasks.stage import run_stage
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, validate
from trainer.config.load import lay_over
from trainer.config.schema import ScratchModel
from trainer.files import write_json
from trainer.metrics import METRICS, read_lines
from trainer.policy.load import save_model
from trainer.policy.scratch import train_scratch
from trainer.policy.tokenizer import character_tokenizer, encode
from trainer.types import Prompt

DOCS = Path(__file__).parents[1] / "docs"
ALPHABET = "0123456789+="
CLOSED, AGAIN = 0.2, 0.02  # shares of the base's answers that go on with one `=`, and with another after it
NEVER = {"refresh_every": 0, "max_drift": 0.0, "audit_relative": 1e9, "audit_absolute": 1e9}
GUARDS = {"refresh_every": 20, "max_drift": 0.3}
MODES: dict[str, dict[str, Any]] = {
    "stale": {"anchors": NEVER},
    "guarded": {"anchors": GUARDS},
    "exact": {"train": {"algorithm": {"kl": {"reference": "exact"}}}},
}
SUM = r"^(\d+)"
CAMPAIGN: dict[str, Any] = {
    "campaign": {"name": "stale-anchors"},
    "prepare": {
        "sources": [
            {
                "source": "reasoning_gym:basic_arithmetic",
                "num_rows": 1500,
                "prompt_template": "{expression}=",
                "remove_whitespace": True,
                "options": {
                    "min_terms": 2,
                    "max_terms": 2,
                    "min_digits": 1,
                    "max_digits": 2,
                    "operators": ["+"],
                    "allow_parentheses": False,
                    "allow_negation": False,
                },
            }
        ],
    },
    "anchors": {"num_prompts": 128, "top_k": 8, "audit_every": 5, "audit_samples": 64},
    "train": {
        "method": "full",
        "optimizer": {"learning_rate": 5e-4, "schedule": "constant"},
        "algorithm": {"advantage": "dr_grpo", "kl": {"reference": "anchors", "coefficient": 0.1, "anchor_batch_size": 64}},
        "batch": {"prompts_per_step": 16, "group_size": 8, "passes": 2, "minibatches": 2},
        "sampling": {"max_completion_tokens": 16},
        "stages": [{"steps": 80}],
        "heldout": {"every_steps": 5, "num_prompts": 64},
        "checkpoints": {"every_steps": 1000},
    },
    "reward": {
        "verifier": "mix",
        "num_workers": 1,
        "parts": [
            {"name": "begins_right", "verifier": "regex", "pattern": SUM},
            {"name": "longer", "verifier": "length", "weight": -0.65, "length": {"max_length": 16, "buffer": 13}},
            {"name": "wanted", "verifier": "regex", "pattern": SUM + "=?$", "weight": 0.0},
        ],
    },
    "preflight": {"num_prompts": 0},
}


def answer(total: int, draw_: random.Random) -> str:
    """Return a sum as the base writes it."""
    text, more = str(total), CLOSED
    while draw_.random() < more:
        text, more = text + "=", AGAIN
    return text


def make_base(directory: Path, steps: int, seed: int = 0) -> None:
    """Train the base on sums of its own and write it as a model directory."""
    tokenizer, chance = character_tokenizer(ALPHABET), random.Random(seed)
    examples = []
    for number in range(8000):
        one, other = (chance.randrange(10 ** chance.randint(1, 2)) for _ in range(2))
        text = f"{one}+{other}="
        examples.append(Prompt(str(number), "main", "train", text, encode(tokenizer, text), answer(one + other, chance)))
    size = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128}
    scratch = ScratchModel(alphabet=ALPHABET, steps=steps, learning_rate=4e-3, decay_steps=steps // 3, **size)
    save_model(train_scratch(scratch, tokenizer, examples, seed, lambda step, metrics: None), tokenizer, directory)


def run_all(root: Path, base_steps: int, difference: dict[str, Any] | None = None) -> dict[str, Path]:
    """Train the three runs below a directory and return their run directories by mode."""
    make_base(root / "made-base", base_steps)

    def configure(mode: str) -> CampaignConfig:
        tree = lay_over(CAMPAIGN, {"base": {"source": f"hf:{root / 'made-base'}"}})
        return validate(lay_over(lay_over(tree, MODES[mode]), difference or {}))

    workspace = Workspace(root, configure("stale"))
    for name in ("prepare", "base", "anchors"):
        run_stage(workspace, get_stage(name))
    return {mode: train(workspace, configure(mode), mode)[0] for mode in MODES}


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
        found = {mode: curves(run) for mode, run in run_all(Path(root), base_steps=400).items()}
    write_json(RESULTS / "stale_anchors.json", found)
    table = Table("", *found)
    for name, title in (
        ("reward", "training reward"),
        ("wanted", "held-out: right and not longer than wanted"),
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
