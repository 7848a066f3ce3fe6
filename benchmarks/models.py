"""Random Llamas for benchmarks of memory and time, and one training step of each method over them.

Weights are random and losses mean nothing: no claim about quality is made with them. A `Reader` makes weights tensor by tensor,
so that a model larger than memory can be laid on a disk without ever being whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config.schema import Optimizer
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term, TokenScores, Work
from trainer.engine.stateless import StatelessEngine
from trainer.learn.optimizer import PolicyOptimizer
from trainer.memory.anatomy import Anatomy
from trainer.memory.build import resident, streamed
from trainer.memory.device import CudaLane, DeviceSource, pinned_copy
from trainer.memory.disk import DiskSource
from trainer.memory.source import LayerSource, MemorySource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# One malloc arena, and large blocks go back to the system at once: peak memory is then that of the live tensors.
STEADY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 16384
    heads: int = 16

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )

    @property
    def num_parameters(self) -> int:
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


def whole_model(shape: Shape, dtype: torch.dtype, device: str = "cpu") -> LlamaForCausalLM:
    """Return a model with random weights, made in its own type, where it will compute."""
    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(shape.config)
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(random_weight(name, tuple(parameter.shape), dtype, device)))
    return model.to(device).eval()


def random_weight(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(sum(name.encode()) % 2**31)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)


class RandomReader:
    """Makes each weight when it is asked for."""

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype, device: str = "cpu"):
        self.dtype, self.device = dtype, torch.device(device)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def read(self, name: str) -> Tensor:
        return random_weight(name, self._shapes[name], self.dtype, str(self.device))


def works(shape: Shape, num_micro_batches: int, rows: int, columns: int, device: str = "cpu") -> list[Work]:
    """Return forward passes that score every position."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(num_micro_batches):
        ids = torch.randint(0, shape.vocabulary, (rows, columns + 1), generator=generator)
        where = torch.arange(rows * columns)
        work = (ids[:, :-1].contiguous(), where, ids[:, 1:].reshape(-1, 1))
        made.append(Work(*(tensor.to(device) for tensor in work)))
    return made


def terms(given: list[Work]) -> list[Term]:
    total = sum(len(work.where_T) for work in given)

    def loss(scores: TokenScores) -> Tensor:
        return -scores.logprobs_TK.sum() / total

    return [Term(work, loss) for work in given]


def stateless_step(
    shape: Shape,
    dtype: str,
    given: list[Work],
    directory: Path | None,
    prefetch: int = 2,
    drop_cache: bool = False,
    split: bool = False,
    device: str = "cpu",
) -> tuple[Callable[[], Any], StatelessEngine]:
    """Return a function that takes one step of method S, and its engine; with a directory the weights are tiered.

    On a CPU cold layers lie in the directory; on a device in pinned host memory.
    """
    if directory is None:
        residency = resident(whole_model(shape, DTYPES[dtype], device), split=split, journal_directory=Path("/tmp"))
    else:
        with init_empty_weights(include_buffers=False):
            skeleton = LlamaForCausalLM(shape.config)

        def make(anatomy: Anatomy, units: Iterator[tuple[str, Tensor]]) -> LayerSource:
            if device == "cpu":
                return DiskSource(directory, units, prefetch=prefetch, drop_cache=drop_cache, split=split)
            host = MemorySource({name: pinned_copy(flat) for name, flat in units}, Path("/tmp"))
            largest = max(unit.numel for unit in anatomy.units.values()) * DTYPES[dtype].itemsize
            return DeviceSource(host, CudaLane(torch.device(device)), largest, prefetch)

        residency = streamed(skeleton.eval(), make, reader=RandomReader(skeleton, DTYPES[dtype], device), split=split)
    config = Optimizer(kind="stateless", rule="rms", learning_rate=1e-6)
    engine = StatelessEngine(residency, config, Heartbeat(0.0, 1), 1.0, 0, chunk_elements=2**20 if device == "cpu" else None)
    count = iter(range(10**9))

    def step() -> None:
        assert engine.step(terms(given), 1e-6, next(count)).applied

    return step, engine


def plain_step(shape: Shape, method: str, given: list[Work], dtype: str = "float32", device: str = "cpu") -> Callable[[], Any]:
    """Return a function that takes one step of AdamW, SGD or LOMO, with activation checkpointing.

    `adamw-master` steps bfloat16 weights through float32 ones, as adamw does in a campaign.
    """
    model: Any = whole_model(shape, DTYPES[dtype], device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def head(hidden: Tensor, ids: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()
        return (logits.gather(-1, ids) - torch.logsumexp(logits, -1, keepdim=True)).sum()

    def loss_of(work: Work) -> Tensor:
        hidden = model.model(input_ids=work.input_ids_BS, use_cache=False).last_hidden_state.flatten(0, 1)
        rows = 64 if device == "cpu" else 1024
        parts = zip(hidden.split(rows), work.ids_TK.split(rows), strict=True)
        sums = [checkpoint(head, *part, use_reentrant=False) for part in parts]
        return -torch.stack(sums).sum() / sum(len(w.where_T) for w in given)

    if method == "lomo":
        lomo: Any = __import__("lomo_optim").Lomo
        optimizer = lomo(model, lr=1e-6)

        def fused() -> None:  # LOMO knows no accumulation: every micro-batch is a step of its own
            for work in given:
                optimizer.fused_backward(loss_of(work), 1e-6)

        return fused
    if method == "adamw-master":
        masters = PolicyOptimizer(dict(model.named_parameters()), Optimizer(kind="adamw", learning_rate=1e-6))

        def through_masters() -> None:
            for work in given:
                loss_of(work).backward()
            masters.step(1e-6, masters.grad_norm())

        return through_masters
    made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[method](model.parameters(), lr=1e-6)

    def step() -> None:
        for work in given:
            loss_of(work).backward()
        made.step()
        made.zero_grad()

    return step


def warm_up() -> None:
    """Let the libraries load what they load at first use, with a model of no size: that is no method's memory."""
    tiny = Shape(64, 128, 1, 64, 4)
    given = works(tiny, 1, 1, 8)
    plain_step(tiny, "sgd", given)()
    stateless_step(tiny, "bfloat16", given, None)[0]()


# -- measuring ----------------------------------------------------------------------------------------------------------


def memory(field: str) -> int:
    """Return a size of this process in bytes: VmRSS, its peak VmHWM, or VmData."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def forget_peak() -> int:
    """Let the peak begin anew, and return the memory in use now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def environment() -> dict[str, str]:
    """Return the environment of a child that measures itself."""
    return {**os.environ, **STEADY}
