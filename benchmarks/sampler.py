"""The embedded sampler beside transformers `generate`: useful tokens per second on mixed lengths.

Same model object, same prompts, same temperature, same EOS, same concurrency, alternating in one process; median of several
rounds after a warm-up. `generate` is measured twice, with all requests in one batch and in batches of as many as the sampler
has slots, and the faster one counts. A useful token is a sampled one up to and including EOS. The sampler also returns
log-probs, `generate` is not asked for them.

    python -m benchmarks.sampler            make bench-sampler            expected: 1.3x or better in every row

Completion lengths are geometric: the model's next-token distribution is nearly flat, and a few of its ids count as EOS.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from trainer.files import write_json
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Request, SamplingParams, derive_seed

PAD = 0
FIRST_EOS = 1
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Workload:
    """A mix of requests. Completion lengths are geometric with this mean, cut at the cap."""

    name: str
    num_prompts: int
    group_size: int
    max_prompt_tokens: int
    mean_completion_tokens: int
    max_completion_tokens: int
    slots: int


WORKLOADS = (
    Workload("groups of 8", 32, 8, 96, 32, 128, 64),
    Workload("no groups", 256, 1, 96, 32, 128, 64),
    Workload("short, all at once", 64, 8, 8, 4, 12, 512),
)


@dataclass(frozen=True)
class Row:
    workload: str
    group_size: int
    requests: int
    sampler_tokens_per_second: float
    generate_tokens_per_second: float
    generate_batching: str
    ratio: float


def build_model(vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, device: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=1024,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=FIRST_EOS,
    )
    return LlamaForCausalLM(config).to(device).eval()


def build_requests(workload: Workload, vocab_size: int) -> list[Request]:
    draw = random.Random(0)
    requests = []
    for prompt in range(workload.num_prompts):
        length = draw.randint(max(1, workload.max_prompt_tokens // 12), workload.max_prompt_tokens)
        ids = tuple(draw.randrange(vocab_size // 2, vocab_size) for _ in range(length))
        requests += [Request(str(prompt), ids, derive_seed(0, prompt, sample), sample) for sample in range(workload.group_size)]
    return requests


def run_generate(model: Any, requests: list[Request], params: SamplingParams, batch_size: int) -> int:
    """Sample with transformers and return the number of useful tokens."""
    device, useful = model.device, 0
    settings = GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=params.max_completion_tokens,
        eos_token_id=list(params.eos_token_ids),
        pad_token_id=PAD,
    )
    for start in range(0, len(requests), batch_size):
        batch = requests[start : start + batch_size]
        width = max(len(r.token_ids) for r in batch)
        ids = torch.tensor([[PAD] * (width - len(r.token_ids)) + list(r.token_ids) for r in batch], device=device)
        mask = torch.tensor([[0] * (width - len(r.token_ids)) + [1] * len(r.token_ids) for r in batch], device=device)
        with torch.no_grad():
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, width:]
        ends = torch.isin(output, torch.tensor(params.eos_token_ids, device=device))
        after = (ends.cumsum(1) - ends.long()) > 0
        useful += int((~after).sum())
    return useful


def rate(work: Callable[[], int], device: str) -> float:
    """Return useful tokens per second of one round."""
    start = time.perf_counter()
    tokens = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return tokens / (time.perf_counter() - start)


def measure(model: Any, workload: Workload, vocab_size: int, rounds: int, device: str) -> Row:
    requests = build_requests(workload, vocab_size)
    num_eos = max(1, round(vocab_size / workload.mean_completion_tokens))
    params = SamplingParams(1.0, workload.max_completion_tokens, tuple(range(FIRST_EOS, FIRST_EOS + num_eos)))
    sampler = EmbeddedSampler(model, workload.slots, PAD)
    contenders: dict[str, Callable[[], int]] = {
        "sampler": lambda: sum(len(c.token_ids) for c in sampler.generate(requests, params)),
        "one batch": lambda: run_generate(model, requests, params, len(requests)),
    }
    if workload.slots < len(requests):
        contenders["batches of slots"] = lambda: run_generate(model, requests, params, workload.slots)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds + 1):
        for name, work in contenders.items():
            measured = rate(work, device)
            if index:  # the first round warms up
                rates[name].append(measured)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ours = medians.pop("sampler")
    peer = max(medians, key=lambda name: medians[name])
    return Row(workload.name, workload.group_size, len(requests), ours, medians[peer], peer, ours / medians[peer])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab-size", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model = build_model(options.vocab_size, options.hidden_size, options.layers, options.heads, options.device)
    table = Table("workload", "group", "requests", "sampler tok/s", "generate tok/s", "generate batching", "ratio")
    rows = []
    for workload in WORKLOADS:
        row = measure(model, workload, options.vocab_size, options.rounds, options.device)
        rows.append(row)
        table.add_row(
            row.workload,
            str(row.group_size),
            str(row.requests),
            f"{row.sampler_tokens_per_second:,.0f}",
            f"{row.generate_tokens_per_second:,.0f}",
            row.generate_batching,
            f"{row.ratio:.2f}x",
        )
    Console().print(table)
    path = RESULTS / "sampler.json"
    write_json(path, {"settings": vars(options), "threads": torch.get_num_threads(), "rows": [asdict(row) for row in rows]})
    print(path)


if __name__ == "__main__":
    main()
