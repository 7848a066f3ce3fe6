"""What `tithe plan` predicts beside what the real train stage takes: peak memory and step time, one process per case.

Random Llamas train for a few steps on the CPU through the same stage as any campaign (`tasks.train`). Measured: the highest
resident memory above what Python and libraries hold before any model is loaded, and the median seconds of a step. Step time is
predicted after one case has taught this machine's efficiency, as `tithe plan --calibrate` does; that one is left out.

    python -m benchmarks.plan            make bench-plan            expected: memory within 10 %, step time within 25 %
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tasks.train
from benchmarks.models import forget_peak, memory, warm_up
from tasks.plan import learn
from tasks.registry import StagePaths
from trainer.config import CampaignConfig, validate
from trainer.files import read_json, write_json, write_manifest
from trainer.metrics import METRICS, read_lines
from trainer.plan.hardware import Efficiency, Hardware, load_hardware
from trainer.plan.memory import TRAIN_STAGE
from trainer.plan.plan import Plan, make_plan
from trainer.plan.request import plan_request
from trainer.plan.skeleton import load_card
from trainer.policy.load import DTYPES, save_model
from trainer.prompts import write_prompts
from trainer.types import Prompt

RESULTS = Path(__file__).parent / "results"
STARTED = "TITHE_BENCHMARK_STARTED"
LIKE_A_STAGE = (
    "import runpy; from trainer.processes import return_blocks; return_blocks(); "
    "runpy.run_module('benchmarks.plan', run_name='__main__')"
)
VOCABULARY = 4096
MODELS = {
    "25M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8},
    "83M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 10, "num_attention_heads": 12},
}
LENGTHS = {"short": (16, 16), "long": (32, 64)}


@dataclass(frozen=True)
class Case:
    model: str
    length: str
    method: str = "full"
    recompute: bool = False
    reference: str = "none"
    dtype: str = "float32"
    micro_batch_tokens: int = 2048
    rule: str = "adamw"
    weights: str = "resident"

    @property
    def name(self) -> str:
        extra = [self.rule if self.rule != "adamw" else "", self.weights if self.weights != "resident" else ""]
        extra += [self.dtype if self.dtype != "float32" else "", "recompute" if self.recompute else ""]
        extra += [f"reference {self.reference}" if self.reference != "none" else ""]
        extra += [f"micro-batch {self.micro_batch_tokens}" if self.micro_batch_tokens != 2048 else ""]
        return ", ".join([f"{self.model} {self.length} {self.method}", *filter(None, extra)])


CASES = (
    Case("25M", "short"),
    Case("25M", "long"),
    Case("25M", "long", recompute=True),
    Case("25M", "long", micro_batch_tokens=256),
    Case("25M", "long", reference="exact"),
    Case("25M", "short", dtype="bfloat16"),
    Case("25M", "short", "lora"),
    Case("25M", "long", "lora"),
    Case("25M", "long", rule="stateless"),
    Case("25M", "long", rule="stateless", weights="tiered", dtype="bfloat16"),
    Case("83M", "short"),
    Case("83M", "long", "lora"),
    Case("83M", "short", rule="stateless"),
    Case("83M", "short", rule="stateless", weights="tiered", dtype="bfloat16"),
)
CALIBRATED_ON = CASES[1]


def config_of(case: Case, steps: int) -> CampaignConfig:
    prompt, completion = LENGTHS[case.length]
    return validate(
        {
            "campaign": {"name": "plan-benchmark"},
            "prepare": {"sources": [{"source": "jsonl:none.jsonl"}], "max_prompt_tokens": prompt},
            "base": {"source": "hf:base", "dtype": case.dtype},
            "train": {
                "method": case.method,
                "optimizer": {"kind": case.rule, "learning_rate": 1e-5},
                "memory": {"weights": case.weights},
                "lora": {"rank": 16},
                "algorithm": {"kl": {"reference": case.reference}},
                "batch": {"prompts_per_step": 1, "group_size": 8, "micro_batch_tokens": case.micro_batch_tokens},
                "sampling": {"max_completion_tokens": completion},
                "sampler": {"slots": 8},
                "activation_checkpointing": case.recompute,
                "stages": [{"steps": steps}],
                "heldout": {"every_steps": 0},
                "checkpoints": {"every_steps": steps},
            },
            "reward": {"verifier": "regex", "pattern": "[02468]$", "num_workers": 1},
        }
    )


def write_inputs(case: Case, folder: Path) -> None:
    """Write a random base with a tokenizer of its own, and random prompts, as the stages before would."""
    torch.manual_seed(0)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    shape: dict[str, Any] = MODELS[case.model]
    config = LlamaConfig(
        **shape, vocab_size=VOCABULARY, max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=1
    )
    (folder / "base").mkdir(parents=True)
    with torch.no_grad():
        save_model(LlamaForCausalLM(config).to(DTYPES[case.dtype]), tokenizer, folder / "base")
    write_manifest(folder / "base", {"tokenizer_hash": "none"})
    draw = random.Random(0)
    length = LENGTHS[case.length][0]
    prompts = []
    for index in range(32):
        ids = tuple(draw.randrange(3, VOCABULARY) for _ in range(length))
        prompts.append(Prompt(str(index), "main", "train", " ".join(f"w{i}" for i in ids), ids, "", {}))
    (folder / "prompts").mkdir()
    for split, some in (("train", prompts), ("heldout", prompts[:2]), ("test", [])):
        write_prompts(folder / "prompts", split, some)
    write_manifest(folder / "prompts", {})


def measure(case: Case, folder: Path, steps: int) -> None:
    """Run the train stage in this process and write what it took."""
    config = config_of(case, steps)
    torch.set_num_threads(1)
    write_inputs(case, folder)
    gc.collect()
    paths = StagePaths(
        inputs={name: folder / name for name in ("prompts", "base", "anchors")},
        out=folder / "out",
        run=folder / "run",
        identity="0" * 64,
    )
    paths.out.mkdir()
    paths.run.mkdir()
    warm_up()
    base = forget_peak()
    tasks.train.run(config, paths)
    every = [line["metrics"] for line in read_lines(paths.run / METRICS)]
    lines = every[1:] or every
    seconds = {key: statistics.median(line[key] for line in lines if key in line) for key in lines[0] if key.startswith("time/")}

    def highest(key: str) -> float:
        return float(max(line[key] for line in every)) - base

    write_json(
        folder / "measured.json",
        {
            "base_bytes": base,
            # the trainer begins its peak anew with every phase of a step, so the whole is the highest of what it wrote
            "peak_bytes": max(highest("memory/rss_peak_bytes"), memory("VmHWM") - base),
            "sample_bytes": highest("memory/sample_peak_bytes"),
            "learn_bytes": highest("memory/learn_peak_bytes"),
            "seconds": seconds,
            "completion_tokens": statistics.mean(line.get("completion/length_mean", 0) for line in lines),
        },
    )


def run_case(case: Case, steps: int) -> dict[str, Any]:
    """Measure one case in a process of its own, forked from this one, which has imported everything."""
    with tempfile.TemporaryDirectory(prefix="tithe-plan-") as folder:
        child = multiprocessing.get_context("fork").Process(target=measure, args=(case, Path(folder), steps))
        child.start()
        child.join()
        if child.exitcode != 0:
            raise SystemExit(f"{case.name}: ended with {child.exitcode}")
        result: dict[str, Any] = read_json(Path(folder) / "measured.json")
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    options = parser.parse_args()
    if STARTED not in os.environ:  # a stage is told about malloc before it imports torch, and so is this
        os.execve(sys.executable, [sys.executable, "-c", LIKE_A_STAGE, *sys.argv[1:]], {**os.environ, STARTED: "1"})
    report(options.steps, options.only)


def plan_of(case: Case, steps: int, hardware: Hardware, completion_tokens: float) -> Plan:
    shape = MODELS[case.model]
    tree = {"name": case.model, "model_type": "llama", **shape, "num_key_value_heads": shape["num_attention_heads"]}
    card = load_card({**tree, "vocab_size": VOCABULARY, "tie_word_embeddings": False})
    return make_plan(plan_request(config_of(case, steps), hardware, card, {"completion_tokens": completion_tokens}))


def seconds_of(plan: Plan) -> float:
    schedule = plan.schedule
    return schedule.sample_seconds + schedule.score_seconds + schedule.train_seconds + schedule.fixed_seconds


def report(steps: int, only: str) -> None:
    """Run all cases and print predicted beside measured."""
    hardware = load_hardware("local")
    cases = [case for case in CASES if only in case.name]
    taken = {}
    for case in cases:
        taken[case] = run_case(case, steps)
        print(
            f"{case.name}: {taken[case]['peak_bytes'] / 1e6:,.0f} MB, {taken[case]['seconds']['time/step_seconds']:.2f} s a step",
            flush=True,
        )
    calibrated = hardware
    if CALIBRATED_ON in taken:
        seen = {key.removeprefix("time/"): value for key, value in taken[CALIBRATED_ON]["seconds"].items()}
        plain = plan_of(CALIBRATED_ON, steps, hardware, taken[CALIBRATED_ON]["completion_tokens"])
        calibrated = hardware.model_copy(update={"efficiency": Efficiency(**learn(plain.request, seen))})
    rows = [
        compare(case, measured, plan_of(case, steps, calibrated, measured["completion_tokens"]))
        for case, measured in taken.items()
    ]
    show(rows)
    write_json(RESULTS / "plan.json", {"hardware": hardware.model_dump(mode="json"), "rows": rows})


def compare(case: Case, measured: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a case's numbers, planned and measured: bytes above an empty process, and seconds."""
    ledger, schedule, seconds = plan.memory, plan.schedule, measured["seconds"]
    peak, phase = ledger.peak("device", TRAIN_STAGE)
    empty = ledger.find("device", "worker process")
    learn_bytes = max(ledger.total("device", name) for name in ("score", "train"))
    return {
        "case": case.name,
        "phase": phase,
        "calibrated_on": case == CALIBRATED_ON,
        "peak_bytes": (peak - empty, measured["peak_bytes"]),
        "sample_bytes": (ledger.total("device", "sample") - empty, measured["sample_bytes"]),
        "learn_bytes": (learn_bytes - empty, measured["learn_bytes"]),
        "step_seconds": (seconds_of(plan), seconds["time/step_seconds"]),
        "sample_seconds": (schedule.sample_seconds, seconds["time/sample_seconds"]),
        "learn_seconds": (schedule.train_seconds + schedule.score_seconds, seconds["time/learn_seconds"]),
        "terms": {term.name: term.bytes for term in ledger.at("device", phase)},
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="tithe plan: planned beside measured")
    columns = ("case", "peak planned", "measured", "error", "phase", "sampling", "learning", "step planned", "measured", "error")
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "phase") else "right")
    for row in rows:
        sizes = [f"{value / 1e6:,.0f} MB" for value in row["peak_bytes"]]
        times = [f"{value:.2f} s" for value in row["step_seconds"]]
        said = "calibrated on" if row["calibrated_on"] else f"{error(row['step_seconds']):+.0%}"
        parts = [f"{error(row[key]):+.1%}" for key in ("peak_bytes", "sample_bytes", "learn_bytes")]
        table.add_row(row["case"], *sizes, parts[0], row["phase"], *parts[1:], *times, said)
    Console(width=160).print(table)
    worst = max(abs(error(row["peak_bytes"])) for row in rows)
    others = [abs(error(row["step_seconds"])) for row in rows if not row["calibrated_on"]] or [0.0]
    print(f"memory: within {worst:.1%} in {len(rows)} cases")
    print(f"step time, calibrated on one other run: within {max(others):.0%}, median {statistics.median(others):.0%}")


def error(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] - 1


if __name__ == "__main__":
    main()
