"""A model larger than memory: its skeleton with all buffers, and a reader that maps one tensor of its directory at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from trainer.errors import ModelError
from trainer.policy.weights import WeightReader


class DirectoryReader:
    """The weights of a model directory, for `trainer.memory.build.streamed`.

    Args:
        directory: a Hugging Face model directory with safetensors.
        dtype: in which weights are to be stored.
        device: on which the model computes.
        model: its skeleton; persistent buffers are filled from the directory, and all buffers move to the device.

    Raises:
        ModelError: the directory's tensors are not named as the model's parameters are.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, model: PreTrainedModel):
        self.dtype, self.device = dtype, device
        self._reader = WeightReader(directory)
        there = set(self._reader.names)
        missing = [name for name, _ in model.named_parameters() if name not in there]
        if missing:
            raise ModelError(
                f"{directory}: has no tensor {missing[0]} ({len(missing)} in all are named otherwise), so it cannot be read "
                "layer by layer; load it once with transformers and save it again, or set train.memory.weights: resident"
            )
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in there:
                    buffer.copy_(self._reader.read(name))
        for module in model.modules():
            for name, held in module._buffers.items():
                module._buffers[name] = None if held is None else held.to(device)

    def read(self, name: str) -> Tensor:
        return self._reader.read(name)


def skeleton(directory: Path) -> PreTrainedModel:
    """Return a model without weights: parameters on the meta device, buffers computed.

    Raises:
        ModelError: the directory has no configuration of a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}: cannot be loaded ({str(error).splitlines()[0]})") from error
    model.tie_weights()
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    whole: PreTrainedModel = model.eval()
    return whole
