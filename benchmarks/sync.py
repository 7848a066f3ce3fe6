"""Merge against hot adapter on the real vLLM engine: seconds of a sync and tokens per second of each, and which one pays when.

    python -m benchmarks.sync [--hidden 256] [--layers 4] [--rounds 5] [--requests 64] [--tokens 32]

Starts a server from `.venv-vllm` (make vllm-env) on a random Llama of that size, or takes one that runs (--url, --model). Every
round hands over a new adapter, brings it to the engine in both ways, each with the probe, and samples; medians are shown.
`sync.mode: auto` does the same once and takes the shorter period. Writes benchmarks/results/sync.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config import validate
from trainer.policy.forward import completion_logprobs
from trainer.policy.load import save_model
from trainer.policy.policy import build_policy
from trainer.policy.tokenizer import character_tokenizer
from trainer.policy.versions import PolicyStore
from trainer.rollout.follower import Follower
from trainer.rollout.probe import Probe
from trainer.rollout.sync_choice import Trial, measure, measure_both, table
from trainer.rollout.vllm import Mode, VllmSampler
from trainer.rollout.vllm_server import VllmServer
from trainer.types import Request, SamplingParams

RESULTS = Path(__file__).parent / "results"
EOS, VOCABULARY, DEADLINE = 1, 512, 600.0
MODES: tuple[Mode, ...] = ("adapter", "merge")
SEQUENCES = tuple(((2 + i, 5, 9), (3, 4 + i, 7, 11)) for i in range(8))


def model(hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": hidden // 64, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=EOS, pad_token_id=EOS, bos_token_id=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("layers", 4), ("rounds", 5), ("requests", 64), ("tokens", 32), ("rank", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--url", help="of a server that runs; it must serve the same base")
    parser.add_argument("--model", default="", help="its name of the backbone")
    options = parser.parse_args()
    config = validate(
        {
            "campaign": {"name": "bench"},
            "prepare": {"sources": [{"source": "jsonl:nowhere"}]},
            "base": {"source": "scratch"},
            "train": {
                "method": "lora",
                "schedule": "async",
                "lora": {"rank": options.rank, "alpha": 2.0 * options.rank},
                "optimizer": {"learning_rate": 1e-3},
                "sampler": {"kind": "vllm", "slots": options.requests, "vllm": {"environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}},
                "sync": {"mode": "auto"},
                "stages": [{"steps": 1}],
            },
        }
    )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        save_model(model(options.hidden, options.layers), character_tokenizer("0123456789"), root / "base")
        server = None if options.url else VllmServer(config, root / "base", root, options.tokens + 16)
        try:
            if server is not None:
                server.wait()
            url, name = (server.url, server.name) if server is not None else (options.url, options.model)
            rounds = run(config, root, url, name, options)
        finally:
            if server is not None:
                server.close()
    trials = [middle(rounds, mode) for mode in MODES]
    num_tokens = float(options.requests * options.tokens)
    print(table(trials, num_tokens))
    for problem in (trial.problem for trial in rounds if trial.problem):
        print(f"failed: {problem}")
    sizes = {key: getattr(options, key) for key in ("hidden", "layers", "rounds", "requests", "tokens", "rank")}
    RESULTS.mkdir(exist_ok=True)
    result = {"sizes": sizes, "trials": [asdict(trial) for trial in trials], "rounds": [asdict(trial) for trial in rounds]}
    (RESULTS / "sync.json").write_text(json.dumps(result, indent=2) + "\n")


def run(config: Any, root: Path, url: str, name: str, options: argparse.Namespace) -> list[Trial]:
    """Return one trial a way and round."""
    learner = build_policy(model(options.hidden, options.layers), config.train, seed=3)
    store = PolicyStore(root / "policies", keep=2)

    def says() -> list[list[float]]:
        return completion_logprobs(learner.model, SEQUENCES, 1.0, EOS)

    rows = tuple(tuple(row) for row in says())
    Probe(SEQUENCES, 1.0, rows, rows).write(root / "policies" / "probe.json")
    sampler = VllmSampler([url], store, root / "base", name, "adapter", options.requests, DEADLINE, root / "merged")
    follower = Follower(sampler, store, 1e-3)
    params = SamplingParams(1.0, options.tokens, (EOS,))
    trials: list[Trial] = []
    try:
        for number in range(options.rounds):
            version = 8 * (number + 1)
            with torch.no_grad():
                for parameter in learner.trainable.values():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
            scores = says()
            store.publish(learner, version, version, scores, scores)
            requests = [Request(f"p{i}", (2 + i % 500, 5, 9), 1000 * number + i) for i in range(options.requests)]
            if number == 0:
                measure_both(follower, version, requests, params)  # the engine's first requests are slow
            trials += [measure(follower, version, mode, requests, params) for mode in MODES]
    finally:
        sampler.close()
    return trials


def middle(trials: list[Trial], mode: Mode) -> Trial:
    """Return the medians of a way."""
    mine = [trial for trial in trials if trial.mode == mode]
    good = [trial for trial in mine if not trial.problem]
    if not good:
        return mine[0]
    numbers = (median(getattr(t, key) for t in good) for key in ("sync_seconds", "tokens_per_second", "mismatch"))
    return Trial(mode, *numbers)


if __name__ == "__main__":
    main()
