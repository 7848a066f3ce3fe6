"""What the guards measure, against brute force; and whether a dropped reference is really gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.anchors.guard import Audit, exact_kl, spread
from trainer.anchors.recall import BaseRecall, tensors_within
from trainer.anchors.scorer import Voice
from trainer.config.schema import Anchors
from trainer.memory.int8 import Int8Reference
from trainer.types import Completion, Prompt, Sample, Verdict


def build_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def test_exact_kl_is_that_of_the_whole_vocabulary() -> None:
    policy, reference = build_model(1), build_model(2)
    pairs = [((3, 4), (5, 6, 7)), ((2,), (8,)), ((9, 9, 9), (4, 1))]
    expected = []
    for prompt, completion in pairs:
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logits = [model(ids).logits[0, len(prompt) - 1 : -1].double() for model in (policy, reference)]
        both = [torch.log_softmax(one / 0.7, -1) for one in logits]
        expected += (both[0].exp() * (both[0] - both[1])).sum(-1).tolist()
    assert exact_kl(policy, Voice(reference), pairs, 0.7) == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert exact_kl(policy, Voice(policy), pairs, 0.7) == 0


def test_a_dropped_base_is_gone_and_a_leaked_one_is_seen() -> None:
    @contextmanager
    def load() -> Iterator[Any]:
        yield build_model(0), None

    recall = BaseRecall(load)
    assert recall.resident_bytes == 0
    with recall.called() as voice:
        held = recall.resident_bytes
        assert held >= 4 * 2 * 11 * 8
    assert voice.model is None
    assert recall.resident_bytes == 0
    with recall.called() as voice:
        leaked = voice.model
    assert recall.resident_bytes == held
    del leaked


def test_weights_that_a_source_holds_are_counted_too() -> None:
    """With 8 bits or tiers the model itself holds placeholders."""

    @contextmanager
    def load() -> Iterator[Any]:
        reference = Int8Reference(build_model(0), 1.0)
        yield reference.residency.anatomy.model, reference.residency.source

    recall = BaseRecall(load)
    with recall.called() as voice:
        weights = sum(parameter.numel() for parameter in voice.model.parameters())
        assert recall.resident_bytes > weights, "a byte a weight, and scales"
    assert recall.resident_bytes == 0
    assert sum(tensor.numel() for tensor in tensors_within({"a": [torch.zeros(2)], "b": (torch.zeros(3), "c")})) == 5


def test_an_audit_fails_only_past_both_bounds() -> None:
    config = Anchors(audit_relative=0.2, audit_absolute=0.02)
    assert Audit(0.010, 0.025).passes(config), "large as a share, but small"
    assert Audit(0.9, 1.0).passes(config), "large, but small as a share"
    assert not Audit(0.1, 0.2).passes(config)


def test_samples_are_taken_evenly() -> None:
    def sample(i: int) -> Sample:
        prompt, completion = Prompt(str(i), "main", "train", "", (i,), ""), Completion(str(i), 0, (1,), (0.0,), "stop", 0)
        return Sample(prompt, completion, "", Verdict("ok", 0.0))

    samples = [sample(i) for i in range(10)]
    assert [prompt for prompt, _ in spread(samples, 5)] == [(0,), (2,), (4,), (6,), (8,)]
    assert len(spread(samples, 99)) == 10
