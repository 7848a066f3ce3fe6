"""A model directory in, a transformers model out, or a ModelError that says what is wrong with the directory.

Nothing happens behind the user's back: a tensor that the model needs and the files lack is an error, not a random one, and so
is a tensor that the files hold and the model does not, such as an adapter's that was never merged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from trainer.errors import NOBODYS_FAULT, ModelError, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.gguf")
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.masked_bias|\battn\.bias)$")  # buffers that older files hold and models make


def pick_device(device: str) -> torch.device:
    """Return the torch device of `machine.device`; `auto` takes CUDA where there is one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("machine.device = 'cuda': torch sees no CUDA device here; set machine.device: cpu or auto")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(directory: Path, dtype: str = "float32", device: str = "cpu", **options: Any) -> PreTrainedModel:
    """Load a causal language model with all its weights.

    Args:
        directory: Hugging Face model directory (or one with a .gguf file, then `gguf_file=` is needed).
        dtype: `float32` or `bfloat16`.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ModelError: no config, no weights, or weights that do not fill the model.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such model directory")
    if "gguf_file" not in options and not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: has no config.json, so it is no Hugging Face model directory")
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise ModelError(f"{directory}: has no weights (*.safetensors); the model cannot be loaded")
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,  # else transformers asks on the terminal, and runs what the directory brings
            output_loading_info=True,
            **options,
        )
        model, info = loaded
    except NOBODYS_FAULT:
        raise
    except Exception as error:  # whatever a broken file makes of transformers' readers
        raise ModelError(f"{directory}: cannot be loaded ({first_line(error)})") from error
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ModelError(f"{directory}: its weights lack or misshape {len(missing)} tensors, first {missing[0]}")
    foreign = sorted(name for name in info["unexpected_keys"] if not _COMPUTED.search(name))
    if foreign:
        raise ModelError(
            f"{directory}: its weights hold {len(foreign)} tensors that a {type(model).__name__} has no place for, first "
            f"{foreign[0]}; its config.json is another model's. If they are to be left out, load the model and save it again"
        )
    on_device: PreTrainedModel = model.to(pick_device(device)).eval()
    return on_device


def true_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, of which a rank may hold a piece only (DeepSpeed's `ds_shape`)."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path | str) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for, or that lacks the tokens that end the model's answers.

    Args:
        source: what the two were loaded from, for the message.
    """
    embedding: Any = model.get_input_embeddings()
    rows, highest = true_shape(embedding.weight)[0], max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise ModelError(
            f"{source}: the tokenizer has ids up to {highest}, the model embeds {rows} tokens; this is another model's tokenizer"
        )
    unknown = [token for token in eos_token_ids(model, tokenizer) if token > highest]
    if unknown:
        raise ModelError(
            f"{source}: the model ends an answer with token {unknown[0]}, the tokenizer has ids up to {highest}; "
            "this is another model's tokenizer"
        )


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token that ends a completion: the tokenizer's EOS and those of the generation config."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    listed = configured if isinstance(configured, list) else [configured]
    return tuple(sorted({int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None}))


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model and tokenizer so that plain transformers loads them.

    Args:
        weights: the parameters by name, where they are not in the model.
    """
    disable_progress_bar()
    if weights is None:
        model.save_pretrained(directory)
    else:
        model.save_pretrained(directory, state_dict={**model.state_dict(), **weights})
        model.config.dtype = next(iter(weights.values())).dtype
        model.config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
