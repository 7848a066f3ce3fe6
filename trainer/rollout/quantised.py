"""A copy of the backbone with 8- or 4-bit matrices in its files, in the format that vLLM reads (compressed-tensors).

    int8   W [O, I] -> int8 values and a scale for every output row; the engine quantises activations token by token
    int4   W [O, I] -> 4-bit values, eight to an int32, and a scale for every `group` inputs of a row

The matrices of the decoder layers are quantised; embedding, head, norms and routers keep their type. The learner keeps the
unquantised backbone, so the sampler is another policy by as much as rounding changes it: the probe measures that and decides
whether the copy may be used, and the off-policy correction takes account of the rest.

*Without a GPU* vLLM (0.32) puts no adapters on such matrices. There the copy is `rounded`: the same values in the base's own
type, which saves nothing, and shows what the rounding does to the log-probs and to training.

Legend: O, I a weight's rows and columns; G groups of a row.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.files import damage, new_directory, read_manifest, write_json, write_manifest
from trainer.policy.weights import INDEX, SINGLE, PlannedTensor, WeightReader, write_shards

Kind = Literal["int8", "int4"]
_GROUPS = (128, 64, 32)  # sizes that the engines have kernels for, the best compressing first
_ROUTERS = ("gate", "router", "shared_expert_gate")


def quantise_rows(weight_OI: Tensor, largest: int, group: int) -> tuple[Tensor, Tensor]:
    """Return (int8 values [O, I], float32 scales [O, G]), symmetric.

    Args:
        largest: value, for example 127.
        group: columns that share a scale.
    """
    rows, columns = weight_OI.shape
    grouped_OGg = weight_OI.float().view(rows, columns // group, group)
    scale_OG1 = grouped_OGg.abs().amax(-1, keepdim=True) / largest
    values = torch.where(scale_OG1 > 0, grouped_OGg / scale_OG1, 0.0).round().clamp(-largest, largest)
    return values.to(torch.int8).view(rows, columns), scale_OG1.squeeze(-1)


def rounded(weight_OI: Tensor, kind: Kind, group: int) -> Tensor:
    """Return a matrix as it is after quantisation, in its own type; `group` is that of int4."""
    group = weight_OI.shape[1] if kind == "int8" else group
    values, scale_OG = quantise_rows(weight_OI, 127 if kind == "int8" else 7, group)
    grouped = values.float().view(len(values), -1, group) * scale_OG.unsqueeze(-1)
    return grouped.view(weight_OI.shape).to(weight_OI.dtype)


def pack_int4(values_OI: Tensor) -> Tensor:
    """Return int32 [O, I/8]: eight values in [-8, 7] each, shifted by 8, the first in the lowest bits."""
    shifted = (values_OI.to(torch.int64) + 8).view(values_OI.shape[0], -1, 8)
    packed = (shifted << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of the base is a matrix of a decoder layer that is quantised."""
    module = name.removesuffix(".weight")
    inside = ".layers." in name or ".h." in name
    return name.endswith(".weight") and inside and len(shape) == 2 and module.rpartition(".")[2] not in _ROUTERS


def group_of(columns: int) -> int | None:
    return next((group for group in _GROUPS if columns % group == 0), None)


def write_quantised(base: Path, target: Path, kind: Kind, round_only: bool, max_shard_bytes: int = 5 * 1000**3) -> Path:
    """Write the quantised copy, unless it is there already, and return its directory.

    Args:
        base: model directory with safetensors; only read.
        target: becomes a model directory.
        round_only: keep the base's type, for engines that have no kernels; see above.

    Raises:
        ModelError: the base is quantised already, or has matrices that the format cannot hold.
    """
    made_from = (read_manifest(base) or {}).get("content_sha256", "")
    before = read_manifest(target) or {}
    facts = {"made_from": made_from, "kind": kind, "round_only": round_only}
    if made_from and all(before.get(key) == value for key, value in facts.items()) and damage(target) is None:
        return target
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ModelError(f"{base}: its weights are quantised already; set train.sampler.quantization: none")
    weights = WeightReader(base)
    matrices = [name for name in weights.names if is_quantised(name, weights.shape(name))]
    if not matrices:
        raise ModelError(f"{base}: has no matrices in decoder layers to quantise; set train.sampler.quantization: none")
    groups = {group_of(weights.shape(name)[1]) for name in matrices}
    if kind == "int4" and None in groups:
        raise ModelError(f"{base}: int4 wants rows of a multiple of {_GROUPS[-1]}; set train.sampler.quantization: int8")
    group = min((size for size in groups if size is not None), default=_GROUPS[0])
    plan: list[PlannedTensor] = []
    chosen = set(matrices)
    for name in weights.names:
        if name not in chosen:
            plan.append(_kept(weights, name, lambda tensor: tensor))
        elif round_only:
            plan.append(_kept(weights, name, lambda tensor: rounded(tensor, kind, group)))
        else:
            plan += _plan(weights, name, kind, group)
    with new_directory(target) as directory:
        for path in sorted(base.iterdir()):
            if path.is_file() and path.name not in (INDEX, SINGLE, "manifest.json") and path.suffix != ".safetensors":
                shutil.copyfile(path, directory / path.name)
        write_shards(directory, plan, max_shard_bytes)
        if not round_only:
            write_json(directory / "config.json", {**config, "quantization_config": describe(kind, group)})
        write_manifest(directory, facts)
    return target


def describe(kind: Kind, group: int) -> dict[str, Any]:
    """Return the `quantization_config` of the copy."""
    common: dict[str, Any] = {"type": "int", "symmetric": True}
    if kind == "int8":
        scheme: dict[str, Any] = {
            "weights": {**common, "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "num_bits": 8, "strategy": "token", "dynamic": True},
        }
    else:
        scheme = {"weights": {**common, "num_bits": 4, "strategy": "group", "group_size": group, "dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
        "ignore": ["lm_head", *(rf"re:.*\.{router}$" for router in _ROUTERS)],
    }


def _kept(weights: WeightReader, name: str, change: Callable[[Tensor], Tensor]) -> PlannedTensor:
    return PlannedTensor(name, weights.read(name).nbytes, lambda: change(weights.read(name)))


def _plan(weights: WeightReader, name: str, kind: Kind, group: int) -> list[PlannedTensor]:
    rows, columns = weights.shape(name)
    if kind == "int8":
        made = _Made(weights, name, 127, columns)
        scale = PlannedTensor(f"{name}_scale", 4 * rows, lambda: made()[1])
        return [PlannedTensor(name, rows * columns, lambda: made()[0]), scale]
    made = _Made(weights, name, 7, group)
    shape = torch.tensor([rows, columns])
    return [
        PlannedTensor(f"{name}_packed", rows * columns // 2, lambda: pack_int4(made()[0])),
        PlannedTensor(f"{name}_scale", 4 * rows * columns // group, lambda: made()[1]),
        PlannedTensor(f"{name}_shape", 16, lambda: shape),
    ]


class _Made:
    """A matrix quantised when it is asked for, and not kept."""

    def __init__(self, weights: WeightReader, name: str, largest: int, group: int):
        self.weights, self.name, self.largest, self.group = weights, name, largest, group

    def __call__(self) -> tuple[Tensor, Tensor]:
        return quantise_rows(self.weights.read(self.name), self.largest, self.group)
