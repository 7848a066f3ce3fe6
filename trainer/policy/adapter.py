"""A peft LoRA adapter directory, read as what it does to a model: low-rank changes, and tensors that it replaces.

The change of a matrix W is scaling * B @ A, in float32; scaling is alpha / r, or alpha / sqrt(r) for rsLoRA, per layer where the
adapter says so. Left out, and refused by name: DoRA, LoRA biases, adapters on bare parameters, other peft methods.

Legend: R rank, I inputs, O outputs of the adapted layer; an embedding has I = vocabulary and O = hidden size.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.policy.weights import open_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"^(?P<module>.+)\.(?:lora_(?P<side>[AB])\.weight|lora_embedding_(?P<embedded>[AB]))$")
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "LoRA biases",
    "target_parameters": "adapters on bare parameters",
    "ensure_weight_tying": "one adapter shared by tied layers",
    "trainable_token_indices": "trainable tokens",
}


@dataclass(frozen=True)
class LowRankChange:
    """What an adapter adds to one weight."""

    a_RI: Tensor  # float32
    b_OR: Tensor  # float32
    scaling: float
    transposed: bool  # the weight is stored as [I, O]: embeddings, and Conv1D layers (fan_in_fan_out)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.b_OR.shape[0], self.a_RI.shape[1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    def rows(self, start: int, end: int) -> Tensor:
        """Return rows start to end of scaling * B @ A, laid out as the weight is."""
        if self.transposed:
            return (self.b_OR @ self.a_RI[:, start:end]).T * self.scaling
        return (self.b_OR[start:end] @ self.a_RI) * self.scaling


@dataclass(frozen=True)
class Adapter:
    directory: Path
    changes: dict[str, LowRankChange]  # module name -> what is added to its weight
    replacements: dict[str, Tensor] = field(default_factory=dict)  # tensor name -> its trained value (modules_to_save, biases)
    base_copies: dict[str, Tensor] = field(default_factory=dict)  # tensor name -> the base's value that the adapter was made with


def is_adapter(directory: Path) -> bool:
    return (directory / CONFIG).is_file()


def read_adapter(directory: Path) -> Adapter:
    """Read an adapter directory as peft writes it.

    Raises:
        ModelError: a file is missing or damaged, a factor lacks its other half, a value is not finite, or the adapter is of
            a kind that cannot be merged.
    """
    config = _read_config(directory)
    handle = open_safetensors(directory / WEIGHTS)
    factors: dict[str, dict[str, Tensor]] = {}
    embeddings: set[str] = set()
    others: dict[str, Tensor] = {}
    for key in sorted(handle.keys()):
        tensor = handle.get_tensor(key)
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{directory / WEIGHTS}: {key} holds values that are not finite; take an earlier policy")
        name = key.removeprefix(_PREFIX)
        match = _FACTOR.match(name)
        if match is None:
            others[name] = tensor
            continue
        module, side = match["module"], match["side"] or match["embedded"]
        factors.setdefault(module, {})[side] = tensor.float()
        if match["embedded"]:
            embeddings.add(module)
    changes = {module: _change(directory, config, module, pair, module in embeddings) for module, pair in sorted(factors.items())}
    # A wrapped layer's weight is frozen and only kept along; its bias, where it is saved, was trained.
    copies = {name for name in others if name.endswith(".base_layer.weight")}
    replacements = {name.replace(".base_layer.", "."): tensor for name, tensor in others.items() if name not in copies}
    return Adapter(directory, changes, replacements, {name.replace(".base_layer.", "."): others[name] for name in copies})


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; {directory} is no adapter directory") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: is no JSON ({error}); copy the adapter again") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be merged")
    for key, words in _REFUSED.items():
        if config.get(key):
            raise ModelError(f"{path}: {key} is set; {words} cannot be merged here, use peft's merge_and_unload")
    return config


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as peft does."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _change(directory: Path, config: dict[str, Any], module: str, pair: dict[str, Tensor], embedding: bool) -> LowRankChange:
    where = f"{directory / WEIGHTS}: {module}"
    if set(pair) != {"A", "B"}:
        raise ModelError(f"{where} has only one of its two factors ({', '.join(pair)}); copy the adapter again")
    a_RI, b_OR = pair["A"], pair["B"]
    if a_RI.ndim != 2 or b_OR.ndim != 2 or a_RI.shape[0] != b_OR.shape[1]:
        raise ModelError(f"{where} has factors of shapes {tuple(a_RI.shape)} and {tuple(b_OR.shape)}, which do not multiply")
    rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
    if rank != a_RI.shape[0]:
        raise ModelError(f"{where} has rank {a_RI.shape[0]}, {CONFIG} says {rank}; the two files are of different adapters")
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRankChange(a_RI, b_OR, scaling, transposed=embedding or bool(config.get("fan_in_fan_out")))
