"""A policy and the base it was trained from become one plain model directory, tensor by tensor.

    LoRA adapter   base weight + scaling * B @ A, summed in float32, rounded once into the output type
    full policy    the policy's own weights, in the output type

The base is only read. At no time is more than one output shard in memory, and of the arithmetic only a few rows. Rounding can
lose an update (a change of 1e-3 of a bfloat16 weight keeps a fifth of itself), so every changed tensor is reported:

    cosine       between the change that was meant and the one that the rounded weights realise
    norm_ratio   norm(realised) / norm(meant)

where realised = rounded(new) - rounded(base): against the base as it is in the output type.

Legend: O, I a weight's rows and columns.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.files import write_json
from trainer.policy.adapter import Adapter, LowRankChange, is_adapter, read_adapter
from trainer.policy.weights import PlannedTensor, WeightReader, write_shards

_CHUNK_ELEMENTS = 2**24  # rows are summed in pieces of about 64 MiB of float32
_OUTPUT_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)


@dataclass
class Change:
    """Sums over one tensor, or over all: what was meant, what the rounded weights hold."""

    meant_squared: float = 0.0
    realised_squared: float = 0.0
    product: float = 0.0
    base_squared: float = 0.0

    def add(self, other: Change) -> None:
        self.meant_squared += other.meant_squared
        self.realised_squared += other.realised_squared
        self.product += other.product
        self.base_squared += other.base_squared

    def facts(self) -> dict[str, float]:
        """Return cosine, norm ratio and relative size; no change meant and none made counts as kept."""
        meant, realised, base = (math.sqrt(x) for x in (self.meant_squared, self.realised_squared, self.base_squared))
        still = meant == 0 and realised == 0
        cosine = 1.0 if still else self.product / (meant * realised) if meant and realised else 0.0
        ratio = 1.0 if still else realised / meant if meant else 0.0
        relative = meant / base if base else 0.0
        return {key: float(f"{x:.6g}") for key, x in (("cosine", cosine), ("norm_ratio", ratio), ("relative_change", relative))}


@dataclass
class MergeReport:
    method: str  # lora | full
    dtype: str
    num_tensors: int = 0
    untied: bool = False  # embedding and head were one tensor in the base and are two now
    changed: dict[str, Change] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Return the content of merge.json: the whole model's numbers, and one entry for every changed tensor."""
        overall = Change()
        for change in self.changed.values():
            overall.add(change)
        return {
            "method": self.method,
            "dtype": self.dtype,
            "untied": self.untied,
            "num_tensors": self.num_tensors,
            "num_changed": len(self.changed),
            **overall.facts(),
            "tensors": [{"name": name, **change.facts()} for name, change in self.changed.items()],
        }


@dataclass(frozen=True)
class _Output:
    """One tensor of the merged model: where it comes from and what happens to it."""

    name: str
    source: WeightReader
    source_name: str
    base_name: str | None  # what the change is measured against; None for a tensor that only passes through
    change: LowRankChange | None = None
    replacement: Tensor | None = None


def merge(
    base: Path,
    policy: Path,
    out: Path,
    dtype: str = "base",
    max_shard_bytes: int = 5 * 1000**3,
    progress: Callable[[int, int], None] | None = None,
) -> MergeReport:
    """Write the merged model into a directory.

    Args:
        base: Hugging Face model directory with safetensors; only read.
        policy: peft adapter directory, or a complete model directory.
        out: an existing directory that gets weights, config, tokenizer.
        dtype: `base` keeps each tensor's own type; `float32` or `bfloat16` converts what is floating point.
        max_shard_bytes: size limit of one weight file, and of what is in memory.
        progress: called with (shards written, shards in all).

    Raises:
        ModelError: a directory is incomplete or damaged, or the policy was trained from another base.
    """
    weights = WeightReader(base)
    _refuse_quantised(base)
    if is_adapter(policy):
        adapter = read_adapter(policy)
        outputs, untied = _plan_adapter(adapter, weights)
        report = MergeReport("lora", dtype, len(outputs), untied)
        _copy_companions([base], out)
    else:
        outputs = _plan_full(WeightReader(policy), weights)
        report = MergeReport("full", dtype, len(outputs))
        _copy_companions([policy, base], out)
    plan = [_plan_tensor(output, weights, dtype, report) for output in outputs]
    write_shards(out, plan, max_shard_bytes, progress)
    _write_config(out, dtype, report.untied)
    return report


def _plan_tensor(output: _Output, base: WeightReader, dtype: str, report: MergeReport) -> PlannedTensor:
    own = output.source.dtype(output.source_name)
    kept = own if dtype == "base" or not own.is_floating_point else _OUTPUT_TYPES[dtype]
    size = math.prod(output.source.shape(output.source_name)) * kept.itemsize

    def make() -> Tensor:
        source = output.source.read(output.source_name)
        if output.base_name is None or not own.is_floating_point:
            return source.to(kept)
        before = source if output.source is base and output.source_name == output.base_name else base.read(output.base_name)
        new, change = combine(before, source if output.replacement is None else output.replacement, output.change, kept)
        report.changed[output.name] = change
        return new

    return PlannedTensor(output.name, size, make)


def combine(base: Tensor, start: Tensor, change: LowRankChange | None, dtype: torch.dtype) -> tuple[Tensor, Change]:
    """Return a new weight, rounded once, and what became of its change.

    Args:
        base: the weight before training, any floating type.
        start: what the low-rank change is added to: the base itself, or a trained replacement of it.
        change: what the adapter adds; None adds nothing.
        dtype: type of the result.
    """
    new = torch.empty(start.shape, dtype=dtype)
    sums = Change()
    columns = max(1, start[0].numel()) if start.ndim else 1
    step = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, start.shape[0], step):
        rows = slice(begin, min(begin + step, start.shape[0]))
        base_rows, start_rows = base[rows].float(), start[rows].float()
        meant = start_rows - base_rows
        if change is None:
            new[rows] = start_rows.to(dtype)
        else:
            delta = change.rows(rows.start, rows.stop)
            new[rows] = (start_rows + delta).to(dtype)
            meant = meant + delta
        realised = new[rows].float() - base_rows.to(dtype).float()
        sums.add(Change(_dot(meant, meant), _dot(realised, realised), _dot(meant, realised), _dot(base_rows, base_rows)))
    return new, sums


def _dot(left: Tensor, right: Tensor) -> float:
    return float(torch.sum(left * right, dtype=torch.float64))


def _refuse_quantised(base: Path) -> None:
    if "quantization_config" in _read_config(base):
        raise ModelError(f"{base}: its weights are quantised; merge into the unquantised base")


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ModelError(f"{directory / 'config.json'}: cannot be read ({error}); give a complete model directory") from error
    return config


def _plan_full(policy: WeightReader, base: WeightReader) -> list[_Output]:
    """Plan a full policy's tensors; it must have the base's tensors and shapes."""
    for name in policy.names:
        if name not in base:
            raise ModelError(f"{policy.directory}: has {name}, which {base.directory} lacks; it was trained from another base")
        if policy.shape(name) != base.shape(name):
            raise _shape_error(policy.directory, name, policy.shape(name), base, name)
    lacking = sorted(set(base.names) - set(policy.names))
    if lacking:
        raise ModelError(f"{policy.directory}: lacks {len(lacking)} tensors of {base.directory}, first {lacking[0]}")
    return [_Output(name, policy, name, name) for name in base.names]


def _plan_adapter(adapter: Adapter, base: WeightReader) -> tuple[list[_Output], bool]:
    """Plan base tensors and what the adapter does to them; returns also whether tied weights part."""
    tied = _tied_names(base)
    changes = {_weight_name(adapter, module, base, tied): change for module, change in adapter.changes.items()}
    replacements = {_base_name(adapter, name, base, tied): tensor for name, tensor in adapter.replacements.items()}
    copies = {_base_name(adapter, name, base, tied): tensor for name, tensor in adapter.base_copies.items()}
    source_of = {name: name for name in base.names}
    untied = tied is not None and any(name in changes or name in replacements for name in tied)
    if tied is not None and untied:
        stored = next(name for name in tied if name in base)
        source_of |= dict.fromkeys(tied, stored)
    for name, shape in [*((n, c.shape) for n, c in changes.items()), *((n, tuple(t.shape)) for n, t in replacements.items())]:
        if shape != base.shape(source_of[name]):
            raise _shape_error(adapter.directory, name, shape, base, source_of[name])
    for name, copy in copies.items():
        original = base.read(source_of.get(name, name))
        if copy.shape != original.shape or not torch.equal(copy.to(original.dtype), original):
            raise ModelError(
                f"{adapter.directory}: carries another {name} than {base.directory}; it was trained from another base"
            )
    outputs = [
        _Output(
            name,
            base,
            source,
            source if name in changes or name in replacements else None,
            changes.get(name),
            replacements.get(name),
        )
        for name, source in source_of.items()
    ]
    return outputs, untied


def _shape_error(directory: Path, name: str, shape: tuple[int, ...], base: WeightReader, base_name: str) -> ModelError:
    return ModelError(
        f"{directory}: changes {name} with shape {list(shape)}, in {base.directory} it has {list(base.shape(base_name))}; "
        "it was trained from another base"
    )


def _base_name(adapter: Adapter, name: str, base: WeightReader, tied: tuple[str, str] | None) -> str:
    """Return what the base calls a tensor; a checkpoint of a bare backbone leaves out the first part of the name."""
    for candidate in (name, name.partition(".")[2]):
        if candidate in base or (tied is not None and candidate in tied):
            return candidate
    raise ModelError(f"{adapter.directory}: changes {name}, which {base.directory} lacks; it was trained from another base")


def _weight_name(adapter: Adapter, module: str, base: WeightReader, tied: tuple[str, str] | None) -> str:
    return _base_name(adapter, f"{module}.weight", base, tied)


def _tied_names(base: WeightReader) -> tuple[str, str] | None:
    """Return the names of embedding and head where the base holds both as one tensor, else None."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base.directory, local_files_only=True)
    if not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    pair = (names[id(ends[0])], names[id(ends[1])])
    return pair if sum(name in base for name in pair) == 1 else None


def _copy_companions(directories: list[Path], out: Path) -> None:
    """Copy config and tokenizer from the first directory that has them."""
    for directory in reversed(directories):
        for pattern in _COMPANIONS:
            for path in sorted(directory.glob(pattern)):
                shutil.copyfile(path, out / path.name)


def _write_config(out: Path, dtype: str, untied: bool) -> None:
    config = _read_config(out)
    if dtype != "base":
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
    if untied:
        config["tie_word_embeddings"] = False
    write_json(out / "config.json", config)
