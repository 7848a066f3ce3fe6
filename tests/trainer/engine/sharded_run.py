"""Run by torchrun from test_sharded.py: a few sharded steps; rank 0 writes what came out.

sharded_run.py OUT KIND DTYPE RULE CLIPPING [START [gloo | nccl | cuda-gloo]]
"""

from __future__ import annotations

import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.trainer.memory.kit import loss_of, make_model, make_works
from trainer.config.schema import Optimizer
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term
from trainer.engine.sharded import ShardedEngine, ShardWatch
from trainer.engine.stateless import group_of
from trainer.engine.team import Team
from trainer.memory.anatomy import Unit
from trainer.memory.build import streamed
from trainer.memory.schedule import Gradients
from trainer.memory.sharded import ShardedSource

LAYERS = ("head", "layers.2", "layers.1", "layers.0", "embedding", "outer")


def skipped_by(engine: ShardedEngine, terms: list[Term], layer: str) -> list[tuple[bool, str, bool]]:
    """Put a NaN into one layer's gradient on the last rank, and return what every rank made of the step."""
    before, real = pieces(engine), ShardWatch.reduced

    def poisoned(self: ShardWatch, unit: Unit, gradients: Gradients) -> Any:
        if group_of(unit) == layer and dist.get_rank() == dist.get_world_size() - 1:
            next(iter(gradients.values())).view(-1)[-1] = math.nan
        return real(self, unit, gradients)

    ShardWatch.reduced = poisoned  # type: ignore[method-assign]
    outcome = engine.step(terms, 1e-3, 3)
    ShardWatch.reduced = real  # type: ignore[method-assign]
    after = pieces(engine)
    mine = (outcome.applied, outcome.culprit, all(torch.equal(after[name], before[name]) for name in before))
    return Team(dist.group.WORLD).gather(mine)


def pieces(engine: ShardedEngine) -> dict[str, torch.Tensor]:
    return {name: engine.source.piece(name)[1].clone() for name in engine.residency.anatomy.units}


def main(out: Path, kind: str, dtype: str, rule: Any, clipping: Any, start: str = "", how: str = "gloo") -> None:
    torch.set_num_threads(1)
    device = "cpu" if how == "gloo" else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.init()
    dist.init_process_group({"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "cuda-gloo": "cpu:gloo,cuda:gloo"}[how])
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    residency = streamed(
        make_model(kind, getattr(torch, dtype)).to(device),
        lambda anatomy, units: ShardedSource(((name, flat.to(device)) for name, flat in units), mesh, None),
        block_elements=10**9,
    )
    config = Optimizer(kind="stateless", rule=rule, learning_rate=1e-3, clipping=clipping, max_grad_norm=0.05)
    engine = ShardedEngine(residency, config, Heartbeat(0.0, 1), 1.0, seed=7)
    if start:
        saved = torch.load(start, weights_only=False)
        engine.load(saved["weights"], {}, saved["facts"])
    terms = [Term(work, partial(loss_of, index)) for index, work in enumerate(make_works(3, device=device))]
    outcomes = [engine.step(terms, 1e-3, number) for number in range(3)]
    skipped = {layer: skipped_by(engine, terms, layer) for layer in LAYERS if layer != "head" or not residency.anatomy.tied}
    model = residency.anatomy.model
    with torch.no_grad():
        logits = model(input_ids=make_works(device=device)[0].input_ids_BS, use_cache=False).logits.cpu()
    facts = {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.norm for outcome in outcomes],
        "metrics": outcomes[-1].metrics,
        "weights": engine.weights(),
        "facts": engine.facts(),
        "logits": logits,
        "skipped": skipped,
    }
    if dist.get_rank() == 0:
        torch.save(facts, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
