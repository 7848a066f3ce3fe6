"""LoRA adapters by peft: put in, switched off for the reference, written so that plain peft loads them.

peft injects its layers into the model itself, so the model object that the sampler and the learner share stays the same.
Equal adapters give equal bytes: no paths, no times, no order that changes from process to process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from trainer.config.schema import Lora
from trainer.errors import ConfigError, nearest
from trainer.files import read_json, write_json
from trainer.types import derive_seed

ADAPTER_CONFIG = "adapter_config.json"


def linear_names(model: PreTrainedModel) -> set[str]:
    """Return the last part of the name of every linear layer but the output head."""
    head = model.get_output_embeddings()
    named = model.named_modules()
    return {name.rpartition(".")[2] for name, module in named if isinstance(module, torch.nn.Linear) and module is not head}


def add_lora(model: PreTrainedModel, lora: Lora, seed: int) -> PeftModel:
    """Freeze a model and put an adapter on its target layers; the adapter's first output is zero.

    Args:
        model: the base; changed in place.
        lora: rank, alpha, dropout and the layers' names.
        seed: decides the adapter's random half, whatever the global generator's state.

    Raises:
        ConfigError: a target layer that the model does not have.
    """
    there = linear_names(model)
    for name in lora.target_modules:
        if name not in there:
            hint = f"{nearest(name, there)} (linear layers here: {', '.join(sorted(there))})"
            raise ConfigError("train.lora.target_modules", name, f"{type(model).__name__} has no such linear layer; {hint}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft scales by alpha / r, a fraction is fine
        lora_dropout=lora.dropout,
        target_modules=sorted(lora.target_modules),
        bias="none",
        task_type="CAUSAL_LM",
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a property by its old name
        torch.manual_seed(derive_seed(seed, "lora"))
        adapted = get_peft_model(model, config)
    assert isinstance(adapted, PeftModel)
    return adapted


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Run the block on the bare base."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    was_on = [not layer.disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, on in zip(layers, was_on, strict=True):
            layer.enable_adapters(on)


def save_adapter(adapted: PeftModel, directory: Path) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`."""
    adapted.save_pretrained(str(directory))
    (directory / "README.md").unlink(missing_ok=True)
    config: dict[str, Any] = read_json(directory / ADAPTER_CONFIG)
    config["base_model_name_or_path"] = None  # a path of this machine; the base is named by the stage's inputs
    config["inference_mode"] = True
    write_json(directory / ADAPTER_CONFIG, {key: sorted(v) if key == "target_modules" else v for key, v in config.items()})
