"""A tiny Llama trained from nothing on the training prompts and their answers: a base that needs no download.

A share of the examples can show a systematic mistake instead of the answer, so that the base holds two procedures and a
verifier can tell them apart. Loss on the answer and EOS only; AdamW; the rate warms up, stays, and falls linearly to zero.

Legend: B examples of a batch, T tokens (prompt, answer and EOS, padded on the right).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from trainer.config.schema import ScratchModel
from trainer.errors import DataError
from trainer.policy.tokenizer import encode
from trainer.types import Prompt, derive_seed

Progress = Callable[[int, dict[str, float]], None]
_IGNORED = -100
_SUM = re.compile(r"(\d+)\+(\d+)")


def forget_carry(prompt: str) -> str:
    """Return the first sum `a+b` of a prompt, added digit by digit with every carry dropped: 57+68 gives 15, 55+55 gives 00."""
    match = _SUM.search(prompt.replace(" ", ""))
    if match is None:
        raise DataError(repr(prompt), "holds no sum a+b, so base.scratch.mistake = forget_carry means nothing here; set none")
    left, right = match.groups()
    width = max(len(left), len(right))
    pairs = zip(left.zfill(width), right.zfill(width), strict=True)
    return "".join(str((int(a) + int(b)) % 10) for a, b in pairs)


def build_model(scratch: ScratchModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int, seed: int) -> LlamaForCausalLM:
    """Return a randomly initialised Llama for this tokenizer."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=max(tokenizer.get_vocab().values()) + 1,
            hidden_size=scratch.hidden_size,
            intermediate_size=scratch.intermediate_size,
            num_hidden_layers=scratch.num_layers,
            num_attention_heads=scratch.num_heads,
            max_position_embeddings=max_tokens,
            initializer_range=scratch.hidden_size**-0.5,  # the usual 0.02 learns late at this width, or never
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def _pad(prompts: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids_BT, labels_BT); labels cover the answers only."""
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), length), pad)
    labels = torch.full((len(prompts), length), _IGNORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def train_scratch(
    scratch: ScratchModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], seed: int, progress: Progress
) -> LlamaForCausalLM:
    """Train a tiny base on prompts and answers.

    Args:
        scratch: sizes, steps and the mistake that is taught.
        prompts: the training split; held-out prompts must not be among them.
        seed: decides the initial weights and the order of examples.
        progress: called with (step, metrics) after every step.
    """
    end = (tokenizer.eos_token_id,)
    right = [encode(tokenizer, prompt.answer) + end for prompt in prompts]
    wrong = right if scratch.mistake == "none" else [encode(tokenizer, forget_carry(p.text)) + end for p in prompts]
    longest = max(len(p.token_ids) + len(a) for p, a in zip(prompts, right, strict=True))
    model = build_model(scratch, tokenizer, max(64, 2 * longest), derive_seed(seed, "scratch", "weights")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=scratch.learning_rate, betas=(0.9, 0.98))
    draw = random.Random(derive_seed(seed, "scratch", "examples"))
    for step in range(1, scratch.steps + 1):
        left = scratch.steps - step + 1
        slope = min(1.0, step / max(1, scratch.warmup_steps), left / max(1, scratch.decay_steps))
        for group in optimizer.param_groups:
            group["lr"] = scratch.learning_rate * slope
        rows = [draw.randrange(len(prompts)) for _ in range(scratch.batch_size)]
        answers = [wrong[i] if draw.random() < scratch.mistake_fraction else right[i] for i in rows]
        ids, labels = _pad([prompts[i].token_ids for i in rows], answers, tokenizer.pad_token_id)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, {"base/loss": loss.item(), "base/learning_rate": optimizer.param_groups[0]["lr"]})
    return model.eval()
