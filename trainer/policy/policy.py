"""The policy: a causal language model and which of its weights train (all of them, or a LoRA adapter).

Learner and embedded sampler share the model object. It is in evaluation mode, but for the span of an update, and the base's
own dropout is off for good: log-probs of one policy must not differ between two looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.schema import Train
from trainer.memory.residency import Residency
from trainer.policy.load import save_model, true_shape
from trainer.policy.lora import add_lora, save_adapter

_DROPOUT_ATTRIBUTES = ("attention_dropout", "dropout", "dropout_p", "activation_dropout", "resid_dropout", "hidden_dropout")


@dataclass
class Policy:
    model: PreTrainedModel  # with LoRA layers inside it where `adapter` is set
    adapter: PeftModel | None
    residency: Residency | None = None  # where the weights are, when they are not just the model's own

    @property
    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """The weights that train, by stable name; tied weights appear once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @property
    def num_trainable(self) -> int:
        """Number of weights that train."""
        if self.adapter is None and self.residency is not None:
            return self.residency.anatomy.num_parameters
        return sum(true_shape(parameter).numel() for parameter in self.trainable.values())

    @property
    def device(self) -> torch.device:
        return self.model.device

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Training mode (the adapter's dropout, activation checkpointing) for the span of an update."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a peft adapter directory, or a whole model with its tokenizer."""
        if self.adapter is not None:
            save_adapter(self.adapter, directory)
        elif self.residency is not None and not self.residency.direct:
            save_model(self.model, tokenizer, directory, self.residency.state_dict())
        else:
            save_model(self.model, tokenizer, directory)


def silence_dropout(model: torch.nn.Module) -> None:
    """Set every dropout of a model to 0, as modules and as the plain numbers that attention layers keep."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in _DROPOUT_ATTRIBUTES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def build_policy(base: PreTrainedModel, train: Train, seed: int) -> Policy:
    """Make a base trainable as the configuration says.

    Args:
        base: changed in place.
        train: method, LoRA settings, activation checkpointing.
        seed: the campaign's.
    """
    silence_dropout(base)
    if train.activation_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    base.requires_grad_(train.method == "full")
    adapter = add_lora(base, train.lora, seed) if train.method == "lora" else None
    base.eval()
    return Policy(base, adapter)
