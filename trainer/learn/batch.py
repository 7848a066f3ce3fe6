"""Judged groups in, tensors out: one Batch a step, split into minibatches (optimizer steps) and micro-batches (forward passes).

Per-token values of a batch (log-probs of the sampler, of the reference, ...) are flat [T] in the order of the samples, so
padding never reaches a loss. A micro-batch is a padded rectangle of input ids and the indices that lead from it back into
the flat arrays. Masks and positions come from lengths; no token id is ever compared with a padding id.

Legend: N samples, T completion tokens of all samples, L tokens of all sequences, B rows and S columns of a micro-batch,
C longest completion, M some of the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch

from trainer.types import Group, derive_seed


@dataclass(frozen=True)
class Sequences:
    """Prompt and completion of each sample, one after the other, and where each begins."""

    tokens_L: torch.Tensor  # int64
    start_N: torch.Tensor  # int64: where each sample begins in tokens_L
    prompt_length_N: torch.Tensor  # int64, >= 1
    completion_length_N: torch.Tensor  # int64, >= 1
    token_start_N: torch.Tensor  # int64: where each sample begins in per-token arrays

    @property
    def num_tokens(self) -> int:
        """Completion tokens, over all samples."""
        return int(self.token_start_N[-1] + self.completion_length_N[-1])

    def to(self, device: torch.device) -> Sequences:
        return Sequences(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


@dataclass(frozen=True)
class Batch:
    """Samples of one step, in the order of their groups. Small arrays stay on the host, where advantages are made."""

    sequences: Sequences
    rollout_T: torch.Tensor  # float32: log-probs that the sampler gave
    rewards_N: torch.Tensor  # float64, host
    group_N: torch.Tensor  # int64, host: 0, 0, ..., 1, 1, ...
    length_N: torch.Tensor  # int64, host: tokens of each completion
    truncated_N: torch.Tensor  # bool, host: cut by the length cap
    version_N: torch.Tensor  # int64, host: policy version that sampled it

    @property
    def num_samples(self) -> int:
        return len(self.length_N)

    def to(self, device: torch.device) -> Batch:
        """Return the batch with what the model reads on a device."""
        return replace(self, sequences=self.sequences.to(device), rollout_T=self.rollout_T.to(device))


@dataclass(frozen=True)
class MicroBatch:
    """A rectangle of sequences for one forward pass. The last token of each is a target only, never an input."""

    input_ids_BS: torch.Tensor
    where_T: torch.Tensor  # flat index (b * S + s) of the position that predicts each completion token
    target_T: torch.Tensor  # the completion tokens
    token_T: torch.Tensor  # index of each into the batch's per-token arrays
    sample_T: torch.Tensor  # index of each one's sample, 0 to N - 1


def _flat(sequences: Sequence[Sequence[float]], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(chain.from_iterable(sequences), dtype=dtype))


def _starts(length_N: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(length_N, 0) - length_N


def make_sequences(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Sequences:
    """Return the tensors of some (prompt ids, completion ids); neither may be empty."""
    prompt_length_N = torch.tensor([len(ids) for ids in prompts])
    completion_length_N = torch.tensor([len(ids) for ids in completions])
    assert bool((prompt_length_N > 0).all()), "an empty prompt"
    assert bool((completion_length_N > 0).all()), "an empty completion"
    return Sequences(
        tokens_L=_flat(list(chain.from_iterable(zip(prompts, completions, strict=True))), np.int64),
        start_N=_starts(prompt_length_N + completion_length_N),
        prompt_length_N=prompt_length_N,
        completion_length_N=completion_length_N,
        token_start_N=_starts(completion_length_N),
    )


def make_batch(groups: Sequence[Group]) -> Batch:
    """Return the tensors of a step's groups."""
    samples = [sample for group in groups for sample in group.samples]
    sequences = make_sequences([s.prompt.token_ids for s in samples], [s.completion.token_ids for s in samples])
    rollout_T = _flat([sample.completion.logprobs for sample in samples], np.float32)
    assert len(rollout_T) == sequences.num_tokens, "a completion without a log-prob for every token"
    return Batch(
        sequences=sequences,
        rollout_T=rollout_T,
        rewards_N=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        group_N=torch.repeat_interleave(torch.tensor([len(group.samples) for group in groups])),
        length_N=sequences.completion_length_N,
        truncated_N=torch.tensor([sample.completion.finish_reason == "length" for sample in samples]),
        version_N=torch.tensor([sample.completion.policy_version for sample in samples]),
    )


def split_minibatches(num_samples: int, minibatches: int, *seed_parts: int | str) -> list[torch.Tensor]:
    """Return the sample indices of each optimizer step of a pass: a shuffle that only the seed parts decide."""
    generator = np.random.Generator(np.random.PCG64(derive_seed(*seed_parts)))
    order = torch.from_numpy(generator.permutation(num_samples))
    return list(torch.tensor_split(order, min(minibatches, num_samples)))


def split_micro_batches(sequences: Sequences, samples_M: torch.Tensor, padded_tokens: int) -> Iterator[MicroBatch]:
    """Yield some samples as micro-batches of similar lengths.

    Args:
        batch: the step's sequences.
        samples_M: indices of the samples, on the host [M].
        padded_tokens: most input tokens of a micro-batch, padding included; a sample longer than that goes alone.
    """
    device = sequences.tokens_L.device
    lengths_M = (sequences.prompt_length_N + sequences.completion_length_N - 1).cpu()[samples_M]
    lengths_M, order_M = torch.sort(lengths_M, stable=True)
    lengths, sorted_M, first = lengths_M.tolist(), samples_M[order_M], 0
    for end in range(1, len(lengths) + 1):
        if end == len(lengths) or lengths[end] * (end + 1 - first) > padded_tokens:
            yield make_micro_batch(sequences, sorted_M[first:end].to(device), width=lengths[end - 1])
            first = end


def make_micro_batch(sequences: Sequences, samples_B: torch.Tensor, width: int) -> MicroBatch:
    """Return the rectangle of some samples, `width` columns wide."""
    device = sequences.tokens_L.device
    start_B1 = sequences.start_N[samples_B].unsqueeze(1)
    prompt_B1 = sequences.prompt_length_N[samples_B].unsqueeze(1)
    completion_B1 = sequences.completion_length_N[samples_B].unsqueeze(1)
    column_S = torch.arange(width, device=device)
    source_BS = (start_B1 + column_S).clamp(max=len(sequences.tokens_L) - 1)
    # Padding repeats whatever token comes next in the flat array: any valid id will do, since no real token attends to it.
    input_ids_BS = sequences.tokens_L[source_BS]

    column_C = torch.arange(int(completion_B1.max()), device=device)
    real_BC = column_C < completion_B1
    row_B1 = torch.arange(len(samples_B), device=device).unsqueeze(1)
    return MicroBatch(
        input_ids_BS=input_ids_BS,
        where_T=(row_B1 * width + prompt_B1 - 1 + column_C)[real_BC],
        target_T=sequences.tokens_L[(start_B1 + prompt_B1 + column_C)[real_BC]],
        token_T=(sequences.token_start_N[samples_B].unsqueeze(1) + column_C)[real_BC],
        sample_T=samples_B.unsqueeze(1).expand(real_BC.shape)[real_BC],
    )
