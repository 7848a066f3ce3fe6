"""Packed logits equal those of one plain forward pass, whatever the batching."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.errors import ModelError
from trainer.policy.forward import completion_logits, completion_logprobs, scoring


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


SEQUENCES = [((3, 4), (5, 6, 7)), ((2,), ()), ((9, 8, 7, 6), (1,)), ((4,), (0, 0, 0, 0, 0, 1)), ((5, 5), (5,))]


@pytest.mark.parametrize("max_batch_tokens", [1, 12, 1000])
def test_any_batching_gives_the_plain_answer(model: LlamaForCausalLM, max_batch_tokens: int) -> None:
    got = completion_logprobs(model, SEQUENCES, 0.7, pad_token_id=0, max_batch_tokens=max_batch_tokens)
    for (prompt, completion), logprobs in zip(SEQUENCES, got, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
        plain = torch.log_softmax(logits / 0.7, -1)
        expected = [plain[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_only_completion_positions_get_logits(model: LlamaForCausalLM) -> None:
    with scoring(model):
        batches = list(completion_logits(model, SEQUENCES, pad_token_id=0, max_batch_tokens=14))
    assert sum(batch.logits_NV.shape[0] for batch in batches) == sum(len(c) for _, c in SEQUENCES)
    assert [i for batch in batches for i in batch.indices] == [3, 0, 2, 4]
    assert batches[0].tokens_N.tolist() == [0, 0, 0, 0, 0, 1, 5, 6, 7]
    assert not model.lm_head._forward_pre_hooks


def test_a_model_that_bypasses_its_head_is_refused(model: LlamaForCausalLM) -> None:
    class Bypass(LlamaForCausalLM):
        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Linear(16, 20)

    with pytest.raises(ModelError, match="does not call its output embedding"):
        completion_logprobs(Bypass(model.config).eval(), SEQUENCES, 1.0, pad_token_id=0)
