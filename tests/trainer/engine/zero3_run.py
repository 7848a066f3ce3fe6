"""Run by torchrun from test_zero3.py: DeepSpeed ZeRO-3 beside the plain engine on the same tiny models.

zero3_run.py FOLDER; every rank writes what it found to FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainer.learn.logprobs
from tests.trainer.memory.kit import loss_of, make_model, make_works
from trainer.config.schema import Train
from trainer.engine import zero3
from trainer.engine.port import Term
from trainer.learn.plain import PlainEngine
from trainer.learn.reference import AdapterOff
from trainer.policy.load import load_model
from trainer.policy.policy import Policy, build_policy

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"activation_checkpointing": True},
    "gemma2": {"optimizer": {"offload": "cpu", "offload_small": True}},
    "qwen3": {"chunk": 53 * 4},
    "qwen3_moe": {"dtype": "bfloat16"},
}


def settings(optimizer: dict[str, Any] | None = None, activation_checkpointing: bool = False) -> Train:
    tree = {
        "method": "lora",
        "lora": {"rank": 3, "target_modules": ("q_proj", "o_proj")},
        "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 0.5, **(optimizer or {})},
        "memory": {"weights": "zero3"},
        "heartbeat": {"factor": 0.0},
        "activation_checkpointing": activation_checkpointing,
        "stages": ({"steps": 1},),
    }
    return Train(**tree)


def run(policy: Policy, engine: PlainEngine, poisoned: bool, num_works: int = 5) -> dict[str, Any]:
    """Run three steps; in the second, one weight's gradient is not a number where this rank is the one to poison it."""
    terms = [Term(work, partial(loss_of, index)) for index, work in enumerate(make_works(num_works, entropy=True))]
    weight, outcomes, works = list(policy.trainable.values())[1], [], [term.work for term in terms]
    policy.model.train()
    for number in range(3):
        handle = weight.register_hook(lambda gradient: gradient * math.nan) if poisoned and number == 1 else None
        outcomes.append(engine.step(terms, 1e-2, number))
        if handle is not None:
            handle.remove()
    policy.model.eval()
    found = [*engine.score(works), *AdapterOff(policy, engine).score(works)]
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.norm for outcome in outcomes],
        "applied": [outcome.applied for outcome in outcomes],
        "culprit": outcomes[1].culprit,
        "scores": torch.cat([each.logprobs_TK.flatten() for each in found]).tolist(),
        "weights": torch.cat([weight.flatten() for weight in engine.weights().values()]).tolist(),
        "state": {name: value.sum().item() for name, value in engine.state().items()},
    }


def compare(folder: Path, kind: str, dtype: str = "float32", chunk: int = 2**25, **options: Any) -> dict[str, Any]:
    """Return what the plain engine makes of a model, and what ZeRO-3 does."""
    trainer.learn.logprobs.CHUNK_ELEMENTS = chunk
    config, base = settings(**options), folder / kind
    if dist.get_rank() == 0:
        make_model(kind, getattr(torch, dtype)).save_pretrained(base)
    dist.barrier()
    whole = build_policy(load_model(base, dtype, attn_implementation="eager"), config, 0)
    plain = run(whole, PlainEngine(whole, config), poisoned=True)
    with zero3.loading(config, dtype, base):
        model = load_model(base, dtype, attn_implementation="eager")
    cut = build_policy(model, config, 0)
    engine = zero3.Zero3Engine(cut, config, whole_below=0)
    last = dist.get_rank() == dist.get_world_size() - 1
    held = sum(parameter.numel() for parameter in model.parameters())
    return {
        "plain": plain,
        "zero3": run(cut, engine, poisoned=last),
        "num_trainable": [whole.num_trainable, cut.num_trainable],
        "held_whole": held,
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    zero3.begin(torch.device("cpu"), folder)
    zero3.self_test(settings(), torch.device("cpu"))
    found = {}
    for kind, options in CASES.items():
        found[kind] = compare(folder, kind, **options)
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
