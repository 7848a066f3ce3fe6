"""A learned judge: a sequence-classification model whose first logit is the score. The only part of rewards with torch.

    (prompt, answer) -> prompt + separator + answer -> token ids, cut on the left -> batches of like length -> logit -> score

It judges in process: it is code and weights of the user's choosing, and a forward pass ends. Left out: ensembles, and
per-token (process) rewards.

Shapes: B texts of a batch, S tokens with padding.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from trainer.config.schema import Judge, LearnedReward
from trainer.errors import NOBODYS_FAULT, ConfigError, ModelError, first_line
from trainer.files import place_of
from trainer.policy.load import pick_device
from trainer.types import Prompt, Verdict

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FACTS = "tithe_reward.json"  # what the stage reward_model says of a model that it trained: {"separator": ...}
SMALLEST_SHARE_OF_POLICY = 1 / 3


class Int8Linear(nn.Module):
    """A linear layer that keeps its weight as INT8 with one scale per row, and multiplies in the input's type."""

    weight_int8: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("weight_int8", torch.round(weight / scale).to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight_int8.to(inputs.dtype) * self.scale.to(inputs.dtype), self.bias)


def quantise(model: nn.Module) -> None:
    """Replace every linear layer but the head, in place."""
    for name, child in model.named_children():
        if isinstance(child, nn.Linear) and name not in ("score", "classifier"):
            setattr(model, name, Int8Linear(child))
        else:
            quantise(child)


def count_parameters(model: nn.Module) -> int:
    """Return the number of weights, INT8 ones included."""
    plain = sum(parameter.numel() for parameter in model.parameters())
    return plain + sum(module.weight_int8.numel() for module in model.modules() if isinstance(module, Int8Linear))


def find_model(model: str, revision: str | None, key: str) -> Path:
    """Return the local directory of a reward model; a hub name is fetched, or found in the hub's local cache."""
    path = place_of(model)
    if path.is_dir():
        return path
    if model.startswith("/") or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"{key}.model", model, f"no such directory as {path}; give one, or a hub name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision))
    except NOBODYS_FAULT:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}.model",
            model,
            f"neither a local directory nor to be had from the hub ({type(error).__name__}); give a directory",
        ) from error


def load(directory: Path, dtype: str, device: torch.device | str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reward model with all its weights, and its tokenizer.

    Raises:
        ModelError: files are missing, or the model has no classification head.
    """
    disable_progress_bar()
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    except NOBODYS_FAULT:
        raise
    except Exception as error:  # whatever a broken file makes of transformers' readers
        raise ModelError(f"{directory}: no reward model can be loaded ({first_line(error)})") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{directory}: has no weights for {missing[0]}, so it is no trained reward model; the stage reward_model trains one"
        )
    prepare_padding(model, tokenizer)
    return model.to(device).eval(), tokenizer


def prepare_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Agree on a padding token: the model finds a text's end by it."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ModelError("the reward model's tokenizer has neither a padding nor an EOS token; set pad_token in it")
    model.config.pad_token_id = tokenizer.pad_token_id
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"


@torch.no_grad()
def logits(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch_size: int, max_tokens: int
) -> list[float]:
    """Return the first logit of every text, in order. Texts of like length share a batch.

    Args:
        max_tokens: longer texts lose their beginning.
    """
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found = [0.0] * len(texts)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch_BS = tokenizer(
            [texts[i] for i in chosen], return_tensors="pt", padding=True, truncation=True, max_length=max_tokens
        ).to(model.device)
        output_B = model(input_ids=batch_BS["input_ids"], attention_mask=batch_BS["attention_mask"]).logits[:, 0].float().cpu()
        for index, value in zip(chosen, output_B.tolist(), strict=True):
            found[index] = value
    return found


class RewardModelVerifier:
    """Scores answers with a learned model, loaded at the first answer."""

    def __init__(self, judge: Judge, name: str, key: str):
        self.judge, self.name, self.options = judge, name, judge.reward_model
        self.directory = find_model(self.options.model, self.options.revision, key)
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self._loaded is None:
            model, tokenizer = load(self.directory, self.options.dtype, pick_device(self.options.device))
            if self.options.int8:
                quantise(model)
            self._loaded = model, tokenizer
        return self._loaded

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        """Return one verdict per answer, in order: `ok` with its score, or `error` where the logit is not finite."""
        begin = time.perf_counter()
        model, tokenizer = self._load()
        separator = self.options.separator if self.options.separator is not None else stored_separator(self.directory)
        texts = [prompt.text + separator + str(answer) for prompt, answer in answers]
        found = logits(model, tokenizer, texts, self.options.batch_size, self.options.max_tokens)
        seconds = (time.perf_counter() - begin) / max(1, len(answers))
        return [to_verdict(value, self.name, self.options, seconds) for value in found]

    def size_warning(self, num_policy_parameters: int) -> str | None:
        """Return a sentence when the model is small beside the policy that it judges."""
        return size_warning(count_parameters(self._load()[0]), num_policy_parameters)

    def close(self) -> None:
        self._loaded = None


def stored_separator(directory: Path) -> str:
    path = directory / FACTS
    return str(json.loads(path.read_text(encoding="utf-8"))["separator"]) if path.is_file() else ""


def to_verdict(logit: float, name: str, options: LearnedReward, seconds: float) -> Verdict:
    if not math.isfinite(logit):
        return Verdict("error", 0.0, {name: 0.0}, seconds, f"the reward model's logit is {logit}")
    score = logit if options.squash == "none" else 1 / (1 + math.exp(-max(-60.0, min(60.0, logit))))
    return Verdict("ok", score, {name: score}, seconds)


def size_warning(num_parameters: int, num_policy_parameters: int) -> str | None:
    """Return a sentence when a reward model is below a third of the policy's size, where published runs saw it gamed."""
    share = num_parameters / num_policy_parameters
    if share >= SMALLEST_SHARE_OF_POLICY:
        return None
    return (
        f"the reward model has {num_parameters:,} parameters, {share:.0%} of the policy's {num_policy_parameters:,}: below a "
        "third a policy tends to outwit its judge; use a larger one, or watch the held-out reward closely"
    )
