"""Packing: every completion token comes once, in rectangles of similar lengths, by shuffles that only seeds decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer.learn.batch import make_batch, make_sequences, split_micro_batches, split_minibatches
from trainer.types import Group


def test_flat_arrays_lead_back_to_the_samples(make_model: Any, sample_groups: Callable[..., list[Group]]) -> None:
    groups = sample_groups(make_model())
    samples = [sample for group in groups for sample in group.samples]
    batch = make_batch(groups)
    for number, sample in enumerate(samples):
        start, length = int(batch.sequences.token_start_N[number]), int(batch.length_N[number])
        assert batch.rollout_T[start : start + length].tolist() == pytest.approx(sample.completion.logprobs, rel=1e-6)
        first, prompt = int(batch.sequences.start_N[number]), sample.prompt.token_ids
        tokens = batch.sequences.tokens_L[first : first + len(prompt) + length].tolist()
        assert tuple(tokens) == prompt + sample.completion.token_ids
        assert bool(batch.truncated_N[number]) is (sample.completion.finish_reason == "length")
    assert batch.group_N.tolist() == [i // 4 for i in range(16)]


def test_row_5_rewards_stay_float64(make_model: Any, sample_groups: Callable[..., list[Group]]) -> None:
    groups = sample_groups(make_model(), reward=lambda index, completion: 0.1 + index / 3)
    assert make_batch(groups).rewards_N.tolist() == [sample.reward for group in groups for sample in group.samples]


@pytest.mark.parametrize("padded_tokens", [1, 20, 55, 10_000])
def test_micro_batches_hold_every_token_once(padded_tokens: int) -> None:
    lengths = [(1 + i % 5, 1 + (i * 7) % 11) for i in range(40)]
    sequences = make_sequences([[i] * p for i, (p, _) in enumerate(lengths)], [[100 + i] * c for i, (_, c) in enumerate(lengths)])
    chosen = torch.arange(3, 37)
    seen = []
    for micro in split_micro_batches(sequences, chosen, padded_tokens):
        rows, width = micro.input_ids_BS.shape
        assert rows == 1 or rows * width <= padded_tokens
        assert torch.equal(micro.target_T, 100 + micro.sample_T)
        predicts = micro.input_ids_BS.flatten()[micro.where_T]
        assert bool(((predicts == micro.sample_T) | (predicts == 100 + micro.sample_T)).all()), (
            "a token predicted from another row"
        )
        seen += micro.token_T.tolist()
    starts = sequences.token_start_N.tolist()
    assert sorted(seen) == list(range(starts[3], starts[37]))


def test_sorting_keeps_padding_small() -> None:
    lengths = [1 + (i * 37) % 64 for i in range(256)]
    sequences = make_sequences([[2]] * 256, [[3] * length for length in lengths])
    padded = sum(micro.input_ids_BS.numel() for micro in split_micro_batches(sequences, torch.arange(256), 512))
    assert padded < 1.2 * sum(lengths), "in the order given it would be 1.9 times"


def test_minibatches_partition_the_samples_by_seed_alone() -> None:
    parts = split_minibatches(10, 4, 7, "minibatches", 3, 0)
    assert sorted(torch.cat(parts).tolist()) == list(range(10))
    assert sorted(len(part) for part in parts) == [2, 2, 3, 3]
    torch.manual_seed(99)
    again = split_minibatches(10, 4, 7, "minibatches", 3, 0)
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    assert [p.tolist() for p in parts] != [p.tolist() for p in split_minibatches(10, 4, 7, "minibatches", 3, 1)]


def test_an_empty_completion_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="empty completion"):
        make_sequences([[1]], [[]])
