"""Method S on one GPU: memory, and the price of weights that lie in host memory; `tithe plan`'s numbers beside.

    link     bytes a second between pinned host memory and the device: in, out, and in while something goes out
    memory   peak of the device's allocated bytes by parameter over two steps: stateless (resident, split, tiered), SGD, AdamW
    time     seconds of a step by tokens a step: resident, tiered with prefetch, tiered without; the threshold from which
             transfers hide, predicted from the link and the resident step: T = w F / (2 B) for the forward pass

Random Llamas in bfloat16 whose cold layers lie in pinned host memory; one process a case, forked from one that never touches
the device. No claim of quality. Prints Markdown, and writes it beside its JSON.

    python -m benchmarks.cuda [link memory time]          make bench-cuda          two minutes; --models 6.7B takes many more
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.models import Shape, plain_step, stateless_step, works
from trainer.config import validate
from trainer.errors import first_line
from trainer.files import write_json
from trainer.plan.hardware import load_hardware
from trainer.plan.memory import CONTEXT
from trainer.plan.plan import Plan, make_plan
from trainer.plan.request import plan_request
from trainer.plan.skeleton import load_card

RESULTS = Path(__file__).parent / "results"
PARTS = ("link", "memory", "time")
SHAPES = {
    "tiny": Shape(64, 128, 2, 512, 4),
    "1.3B": Shape(2048, 5632, 22, 32000, 32),
    "6.7B": Shape(4096, 11008, 32, 32000, 32),
}
CASES = ("stateless", "stateless-split", "tiered", "sgd", "adamw", "adamw-master")
SAID = {
    "stateless": "stateless, resident",
    "stateless-split": "stateless, split",
    "tiered": "stateless, tiered (host)",
    "sgd": "SGD, gradients in bfloat16",
    "adamw": "AdamW, all in bfloat16",
    "adamw-master": "AdamW, float32 master and moments",
}
MICRO_BATCH = 4096  # tokens
WIDTH = 2  # bytes of a stored weight
DEADLINE_SECONDS = 240


def in_a_process(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Measure in a process of its own; one that fails says how."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)

    def child() -> None:
        try:
            found = measure(*arguments)
        except torch.OutOfMemoryError as error:
            found = {"failed": f"out of memory ({first_line(error)[:90]})"}
        its.send(found)

    process = context.Process(target=child)
    process.start()
    its.close()
    try:
        return dict(mine.recv()) if mine.poll(DEADLINE_SECONDS) else {"failed": f"no answer in {DEADLINE_SECONDS} s"}
    except EOFError:
        return {"failed": "killed"}
    finally:
        process.kill()
        process.join()


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# -- what is measured -----------------------------------------------------------------------------------------------------


def link(device: str) -> dict[str, Any]:
    """Return bytes a second of copies of half a gigabyte; on a CPU, of copies within memory."""
    size, rounds = 2**29, 8
    on = torch.device(device)
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu") for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=on) for _ in range(2)]
    streams = [torch.cuda.Stream() if device != "cpu" else None for _ in range(2)]

    def move(way: int) -> None:
        target, source = (there[0], host[0]) if way == 0 else (host[1], there[1])
        with torch.cuda.stream(streams[way]):
            target.copy_(source, non_blocking=True)

    def rate(ways: tuple[int, ...]) -> float:
        for number in range(rounds + 1):
            if number == 1:
                wait(device)
                begin = time.perf_counter()
            for way in ways:
                move(way)
        wait(device)
        return rounds * size / (time.perf_counter() - begin)

    return {"in": rate((0,)), "out": rate((1,)), "each_of_both": rate((0, 1))}


def held(case: str, shape: Shape, device: str) -> dict[str, Any]:
    """Return the peak of allocated bytes over two steps of one case, above an empty process."""
    given = works(shape, 2, 1, MICRO_BATCH if shape.vocabulary > 1000 else 128, device)
    method, _, how = case.partition("-")
    with tempfile.TemporaryDirectory(prefix="tithe-bench-") as folder:
        if method in ("stateless", "tiered"):
            tiers = Path(folder) if method == "tiered" else None
            step, _ = stateless_step(shape, "bfloat16", given, tiers, split=how == "split", device=device)
        else:
            step = plain_step(shape, case, given, "bfloat16", device)
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            step()
            wait(device)
            seconds.append(time.perf_counter() - begin)
    facts = {"step_seconds": seconds[-1]}
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
        }
    return facts


def paced(weights: str, shape: Shape, tokens: tuple[int, ...], device: str) -> dict[str, Any]:
    """Return seconds of a step by tokens, of weights in one place; tiered ones with and without prefetch."""
    small = works(shape, 1, 1, min(512, tokens[0]), device)
    given = list(small)
    with tempfile.TemporaryDirectory(prefix="tithe-bench-") as folder:
        step, engine = stateless_step(
            shape, "bfloat16", given, None if weights == "resident" else Path(folder), prefetch=2, device=device
        )
        source: Any = engine.residency.source
        found: dict[str, Any] = {}
        for name in ["resident"] if weights == "resident" else ["tiered", "no-prefetch"]:
            if name == "no-prefetch":
                source.prefetch = 0
            for count in tokens:
                columns = min(count, MICRO_BATCH)
                given[:] = works(shape, count // columns, 1, columns, device)
                seconds = []
                for number in range(2 if count > 32000 else 4):
                    begin = time.perf_counter()
                    step()
                    wait(device)
                    if number:  # the first warms up
                        seconds.append(time.perf_counter() - begin)
                found[f"{name}/{count}"] = statistics.median(seconds)
    return found


# -- beside it: the plan ----------------------------------------------------------------------------------------------------


def planned(shape: Shape, case: str, tokens: int, hardware: str) -> Plan:
    """Return the plan of a campaign whose optimizer steps are those that are measured here."""
    columns, prompt = min(tokens // 2, MICRO_BATCH), 32
    method, _, how = case.partition("-")
    config = validate(
        {
            "campaign": {"name": "bench"},
            "prepare": {"sources": [{"source": "jsonl:none.jsonl"}], "max_prompt_tokens": prompt},
            "base": {"source": "hf:base", "dtype": "bfloat16"},
            "train": {
                "method": "full",
                "optimizer": {"kind": "adamw" if method == "adamw" else "stateless", "learning_rate": 1e-6},
                "memory": {
                    "weights": "tiered" if method == "tiered" else "resident",
                    "source": "host" if method == "tiered" else "disk",
                    "split": how == "split",
                },
                "activation_checkpointing": method == "adamw",
                "batch": {"prompts_per_step": 1, "group_size": tokens // columns, "micro_batch_tokens": min(tokens, MICRO_BATCH)},
                "sampling": {"max_completion_tokens": columns - prompt},
                "stages": [{"steps": 1}],
            },
            "reward": {"verifier": "exact"},
        }
    )
    card = load_card(
        {
            "name": "bench",
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.heads,
            "vocab_size": shape.vocabulary,
            "tie_word_embeddings": False,
        }
    )
    return make_plan(plan_request(config, load_hardware(hardware), card))


def planned_bytes(plan: Plan) -> float:
    return plan.memory.total("device", "train") - plan.memory.find("device", CONTEXT)


# -- the tables ---------------------------------------------------------------------------------------------------------------


def memory_table(found: dict[str, Any], hardware: str) -> list[str]:
    lines = ["| model | case | device bytes a parameter | peak allocated | reserved | planned | off by | s a step |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, cases in found.items():
        shape = SHAPES[name]
        for case, facts in cases.items():
            if "peak_bytes" not in facts:
                lines.append(f"| {name} | {SAID[case]} | {facts.get('failed', '-')} | | | | | |")
                continue
            peak, said = facts["peak_bytes"], "| |"
            if case in ("stateless", "stateless-split", "tiered", "adamw-master"):
                plan = planned(shape, case, 2 * MICRO_BATCH, hardware)
                facts["planned_bytes"] = planned_bytes(plan)
                facts["planned_terms"] = {term.name: term.bytes for term in plan.memory.at("device", "train")}
                said = f"{facts['planned_bytes'] / 1e9:.2f} GB | {facts['planned_bytes'] / peak - 1:+.1%} |"
            each = f"{peak / shape.num_parameters:.2f} | {peak / 1e9:.2f} GB | {facts['reserved_bytes'] / 1e9:.2f} GB"
            lines.append(f"| {name} | {SAID[case]} | {each} | {said} {facts['step_seconds']:.2f} |")
    return lines


def time_table(found: dict[str, Any], link_found: dict[str, Any], hardware: str, tokens: tuple[int, ...]) -> list[str]:
    lines = [
        "| model | tokens a step | resident | tiered | ratio | foretold | without prefetch | ratio | planned resident, tiered |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, times in found.items():
        if "failed" in times:
            lines.append(f"| {name} | {times['failed']} | | | | | | | |")
            continue
        shape = SHAPES[name]
        size = WIDTH * shape.num_parameters
        flops = 8 * shape.num_parameters * tokens[-1] / times[f"resident/{tokens[-1]}"]
        threshold = WIDTH * flops / (2 * link_found["in"])
        times |= {"flops": flops, "threshold_tokens": threshold}
        for count in tokens:
            alone, tiered, bare = (times[f"{case}/{count}"] for case in ("resident", "tiered", "no-prefetch"))
            forward = 2 * shape.num_parameters * count / flops
            loads = (size / link_found["in"], size / link_found["each_of_both"])
            foretold = max(forward, loads[0]) + max(alone - forward, loads[1])
            plans = [planned(shape, case, count, hardware).schedule.train_seconds for case in ("stateless", "tiered")]
            times[f"planned/{count}"] = plans
            lines.append(
                f"| {name} | {count:,} | {alone:.2f} s | {tiered:.2f} s | {tiered / alone:.2f} | {foretold / alone:.2f} "
                f"| {bare:.2f} s | {bare / alone:.2f} | {plans[0]:.2f} s, {plans[1]:.2f} s |"
            )
        lines.append(f"\n{name}: {flops / 1e12:.0f} TFLOP/s in the largest step; threshold foretold: {threshold:,.0f} tokens\n")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--models", nargs="*", default=("1.3B",), choices=SHAPES)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--tokens", type=int, nargs="*", default=(1024, 4096, 16384))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--hardware", default="h200-141gb", help="as `tithe plan` knows it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__}
    begin, text, tokens = time.perf_counter(), list[str](), tuple(given.tokens)

    def keep(lines: list[str]) -> None:
        text.extend([*lines, ""])
        print("\n".join(lines), f"\n({time.perf_counter() - begin:.0f} s so far)\n", flush=True)
        (given.out / "cuda.md").write_text("\n".join(text))
        write_json(given.out / "cuda.json", results)

    if "link" in given.parts or "time" in given.parts:
        results["link"] = in_a_process(link, given.device)
        keep([f"{way}: {value / 1e9:.1f} GB/s" for way, value in results["link"].items()])
    if "time" in given.parts:
        results["time"] = {}
        for name in given.models:
            places = ("resident", "tiered")
            times: dict[str, Any] = {}
            for place in places:
                times |= in_a_process(paced, place, SHAPES[name], tokens, given.device)
                results["time"][name] = times
                write_json(given.out / "cuda.json", results)
            keep(time_table({name: times}, results["link"], given.hardware, tokens))
    if "memory" in given.parts:
        results["memory"] = {}
        for name in given.models:
            cases = results["memory"][name] = {}
            for case in given.cases:
                cases[case] = in_a_process(held, case, SHAPES[name], given.device)
                write_json(given.out / "cuda.json", results)
            keep(memory_table({name: cases}, given.hardware))


if __name__ == "__main__":
    main()
