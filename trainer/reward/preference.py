"""Train a small reward model from preference pairs: the chosen answer must score above the rejected one.

    pairs -> texts -> logit of each -> -log sigmoid(chosen - rejected) -> AdamW

The Bradley-Terry loss of InstructGPT (arXiv 2203.02155, eq. 1). Which pairs are held out follows from the prompt's text, so
no prompt is on both sides.

Shapes: B pairs of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from trainer.config.schema import RewardTraining
from trainer.reward.reward_model import logits, prepare_padding
from trainer.types import derive_seed


@dataclass(frozen=True)
class Pair:
    prompt: str
    chosen: str
    rejected: str


def preference_loss(chosen_B: torch.Tensor, rejected_B: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log sigmoid(chosen - rejected), a scalar."""
    return -nn.functional.logsigmoid(chosen_B - rejected_B).mean()


def is_heldout(pair: Pair, fraction: float) -> bool:
    """Whether a pair is held out, by the hash of its prompt."""
    point = int.from_bytes(hashlib.sha256(pair.prompt.encode()).digest()[:8], "big") / 2**64
    return point < fraction


def scratch_model(pairs: Sequence[Pair], options: RewardTraining) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a tiny untrained Llama with a head, over the characters that the pairs hold."""
    from trainer.policy.tokenizer import character_tokenizer

    alphabet = "".join(sorted({c for pair in pairs for c in pair.prompt + pair.chosen + pair.rejected + options.separator}))
    tokenizer = character_tokenizer(alphabet)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=4 * options.hidden_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_heads,
        max_position_embeddings=options.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    config.num_labels = 1
    return LlamaForSequenceClassification(config), tokenizer


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], options: RewardTraining
) -> dict[str, float]:
    """Return how often, and by how much, the chosen answer scores above the rejected one."""
    texts = [pair.prompt + options.separator + answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    found = torch.tensor(logits(model, tokenizer, texts, options.batch_size, options.max_tokens)).view(-1, 2)
    margin = found[:, 0] - found[:, 1]
    return {"accuracy": float((margin > 0).float().mean()), "margin": float(margin.mean())}


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    options: RewardTraining,
    seed: int,
    progress: Callable[[int, int, dict[str, float]], None],
) -> None:
    """Train a model in place on all pairs given.

    Args:
        progress: called with step, number of steps and metrics after every step.
    """
    prepare_padding(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    generator = torch.Generator().manual_seed(derive_seed(seed, "reward_model"))
    per_epoch = -(-len(pairs) // options.batch_size)
    total, step = per_epoch * options.epochs, 0
    model.train()
    for _ in range(options.epochs):
        order = torch.randperm(len(pairs), generator=generator).tolist()
        for start in range(0, len(order), options.batch_size):
            step += 1
            rate = options.learning_rate * min(1.0, 10 * step / total) * (1 - (step - 1) / total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            chosen = [pairs[i] for i in order[start : start + options.batch_size]]
            loss, accuracy = _step(model, tokenizer, chosen, options, optimizer)
            progress(step, total, {"loss": loss, "accuracy": accuracy, "lr": rate})
    model.eval()


def _step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    options: RewardTraining,
    optimizer: torch.optim.Optimizer,
) -> tuple[float, float]:
    texts = [pair.prompt + options.separator + pair.chosen for pair in pairs]
    texts += [pair.prompt + options.separator + pair.rejected for pair in pairs]
    batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=options.max_tokens).to(model.device)
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].float()
    chosen_B, rejected_B = scores[: len(pairs)], scores[len(pairs) :]
    loss = preference_loss(chosen_B, rejected_B)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), options.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach()), float((chosen_B > rejected_B).float().mean())
