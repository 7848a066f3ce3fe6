"""Plain forward passes of a policy for everyone who only wants log-probs: sampler scores, anchors, evaluation.

Sequences are (prompt ids, completion ids). They are sorted by length, padded on the right (a causal model never sees the
padding) and run under a token budget. The head is applied to the positions that predict a completion token and to no
other, so the logits of prompts and padding never exist. No gradient, no dropout; the model's modes come back as they were.

Legend: N completion tokens of one batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import ModelError

TokenPair = tuple[Sequence[int], Sequence[int]]
MAX_LOGITS = 2**27  # elements of one batch of logits: 512 MiB in float32


@contextmanager
def scoring(model: Any) -> Iterator[None]:
    """Turn gradients and dropout off, and give every module its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def head_at(model: Any, rows: Tensor, columns: Tensor) -> Iterator[None]:
    """Apply the output head only to the hidden states at (rows[i], columns[i]): logits come out as [1, N, V].

    Raises:
        ModelError: the model does not call its output embedding as a module, so its logits cannot be narrowed.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embedding, so it is no causal language model")
    called = []

    def pick(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        called.append(True)
        return (arguments[0][rows, columns].unsqueeze(0), *arguments[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
    if not called:
        raise ModelError(f"{type(model).__name__} does not call its output embedding; it cannot be scored")


@dataclass(frozen=True)
class LogitsBatch:
    """The logits that predict the completion tokens of some sequences, packed."""

    indices: list[int]  # which sequences, in the order of their tokens below
    lengths: list[int]  # completion length of each; sum is N
    logits_NV: Tensor  # in the model's dtype
    tokens_N: Tensor  # the completion tokens, int64


def completion_logits(
    model: Any, sequences: Sequence[TokenPair], pad_token_id: int, max_batch_tokens: int = 16384
) -> Iterator[LogitsBatch]:
    """Yield packed logits for all sequences, longest first. Use inside `scoring(model)`.

    Args:
        sequences: (prompt ids, completion ids); prompts hold at least one id. Empty completions are left out.
        pad_token_id: any valid id; what stands in the padding is never attended to.
        max_batch_tokens: padded tokens of one forward pass (one sequence always fits).
    """
    sizes = [len(prompt) + len(completion) for prompt, completion in sequences]
    order = sorted((index for index, (_, completion) in enumerate(sequences) if len(completion)), key=lambda i: -sizes[i])
    vocabulary = model.config.get_text_config().vocab_size
    max_completion_tokens = max(1, MAX_LOGITS // vocabulary)
    start = 0
    while start < len(order):
        width = sizes[order[start]]
        stop, num_logits = start, 0
        while stop < len(order):
            num_logits += len(sequences[order[stop]][1])
            if stop > start and ((stop + 1 - start) * width > max_batch_tokens or num_logits > max_completion_tokens):
                break
            stop += 1
        yield _forward(model, sequences, order[start:stop], pad_token_id, width)
        start = stop


def _forward(model: Any, sequences: Sequence[TokenPair], indices: list[int], pad_token_id: int, width: int) -> LogitsBatch:
    """Run one right-padded batch; the last token of each sequence predicts nothing and is not fed."""
    device = next(model.parameters()).device
    fed: list[list[int]] = []
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for row, index in enumerate(indices):
        prompt, completion = sequences[index]
        assert prompt, "a prompt needs at least one token"
        ids = [*prompt, *completion][:-1]
        fed.append(ids + [pad_token_id] * (width - 1 - len(ids)))
        rows += [row] * len(completion)
        columns += range(len(prompt) - 1, len(ids))
        targets += completion
    positions = torch.arange(width - 1, device=device).unsqueeze(0)
    with head_at(model, torch.tensor(rows, device=device), torch.tensor(columns, device=device)):
        output = model(input_ids=torch.tensor(fed, device=device), position_ids=positions, use_cache=False)
    lengths = [len(sequences[index][1]) for index in indices]
    return LogitsBatch(indices, lengths, output.logits[0], torch.tensor(targets, device=device))


def tempered_logits(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in float32: softmax of it is the sampling distribution, in sampler and learner alike.

    Temperature 0 (greedy) has no density; its log-probs are those of the model itself, at temperature 1.
    """
    logits = logits.float()
    return logits if temperature in (0, 1) else logits / temperature


def completion_logprobs(
    model: Any, sequences: Sequence[TokenPair], temperature: float, pad_token_id: int, max_batch_tokens: int = 16384
) -> list[list[float]]:
    """Return, for each (prompt ids, completion ids), the natural log-prob of every completion token."""
    result: list[list[float]] = [[] for _ in sequences]
    with scoring(model):
        for batch in completion_logits(model, sequences, pad_token_id, max_batch_tokens):
            logits_NV = tempered_logits(batch.logits_NV, temperature)
            logprobs = (logits_NV.gather(1, batch.tokens_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)).tolist()
            done = 0
            for index, length in zip(batch.indices, batch.lengths, strict=True):
                result[index] = logprobs[done : done + length]
                done += length
    return result
