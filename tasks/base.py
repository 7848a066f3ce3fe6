"""Stage *base*: the model that training starts at, as one Hugging Face directory with its tokenizer.

From a local directory or hub name (`hf:`), a GGUF file (`gguf:`), or trained from nothing on the training prompts
(`scratch`). Whatever the source, the artifact is complete safetensors in base.dtype, and its tokenizer is the one that the
prompts were encoded with.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tasks.command import main
from tasks.registry import StagePaths
from trainer.config import CampaignConfig
from trainer.errors import ModelError
from trainer.files import read_manifest
from trainer.metrics import RunWriter
from trainer.policy.load import DTYPES, check_vocabulary, load_model, save_model
from trainer.policy.scratch import train_scratch
from trainer.policy.tokenizer import build_tokenizer, find_gguf, resolve_directory, tokenizer_hash
from trainer.prompts import read_prompts


def from_scratch(config: CampaignConfig, tokenizer: PreTrainedTokenizerBase, paths: StagePaths) -> Any:
    """Train the tiny base, reporting progress to the run directory."""
    scratch, writer = config.base.scratch, RunWriter(paths.run, resume_step=0)
    every = max(1, scratch.steps // 50)

    def progress(step: int, metrics: dict[str, float]) -> None:
        if step % every == 0 or step == scratch.steps:
            writer.metrics(step, metrics)
            writer.heartbeat("training the base", step, scratch.steps)

    prompts = read_prompts(paths.inputs["prompts"], "train")
    model: torch.nn.Module = train_scratch(scratch, tokenizer, prompts, config.campaign.seed, progress)
    return model.to(DTYPES[config.base.dtype])


def from_gguf(config: CampaignConfig) -> PreTrainedModel:
    """Load a GGUF file and rebuild the model without its quantisation settings, so that it can be saved."""
    directory = resolve_directory(config.base)
    loaded = load_model(directory, config.base.dtype, gguf_file=find_gguf(directory).name)
    plain = loaded.config
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    model: PreTrainedModel = AutoModelForCausalLM.from_config(plain, dtype=DTYPES[config.base.dtype])
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Write the base model and its tokenizer.

    Raises:
        ModelError: the source lacks weights or files, or its tokenizer is not the one of the prompts.
    """
    tokenizer = build_tokenizer(config.base)
    digest = tokenizer_hash(tokenizer)
    encoded_with = (read_manifest(paths.inputs["prompts"]) or {}).get("tokenizer_hash")
    if encoded_with != digest:
        raise ModelError(
            f"base.source = {config.base.source!r}: its tokenizer ({digest[:12]}) is not the one that the prompts were encoded "
            f"with ({str(encoded_with)[:12]}); run prepare again"
        )
    if config.base.kind == "scratch":
        model = from_scratch(config, tokenizer, paths)
    elif config.base.kind == "gguf":
        model = from_gguf(config)
    else:
        model = load_model(resolve_directory(config.base), config.base.dtype)
    check_vocabulary(model, tokenizer, f"base.source = {config.base.source!r}")
    with torch.no_grad():
        save_model(model, tokenizer, paths.out)
    parameters = sum(p.numel() for p in model.parameters())
    return {"source": config.base.source, "num_parameters": parameters, "tokenizer_hash": digest}


if __name__ == "__main__":
    sys.exit(main(["base", *sys.argv[1:]]))
