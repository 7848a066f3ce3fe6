"""Log-probs of completion tokens equal those of one plain forward pass, in any chunking, for any model. NUMERICS 7, 8, 10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from trainer.learn import logprobs
from trainer.learn.batch import make_batch, make_sequences, split_micro_batches
from trainer.learn.logprobs import TokenScorer
from trainer.types import Group

# The tokenizer's pad is its EOS (1), and 0 is an ordinary token: no id may be mistaken for padding.
PROMPTS = [(3, 4), (1, 1, 2), (0,), (5, 6, 7, 8)]
COMPLETIONS = [(5, 6, 1), (1,), (0, 1, 0, 0, 1), (1, 1)]


def plain(model: Any, temperature: float) -> torch.Tensor:
    """Score one sequence at a time, without padding."""
    scored = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        scored.append(torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(scored)


def scored(model: Any, temperature: float, padded_tokens: int = 1000) -> torch.Tensor:
    """Score all sequences by micro-batches, back in the order of the sequences."""
    scorer, sequences = TokenScorer(model, temperature), make_sequences(PROMPTS, COMPLETIONS)
    pieces = list(split_micro_batches(sequences, torch.arange(4), padded_tokens))
    values = [scorer.score(m.input_ids_BS, m.where_T, m.target_T[:, None]).logprobs_TK[:, 0] for m in pieces]
    return torch.cat(values)[torch.argsort(torch.cat([m.token_T for m in pieces]))]


@pytest.mark.parametrize("padded_tokens", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_row_7_padding_is_told_by_lengths_when_pad_is_eos(make_model: Any, temperature: float, padded_tokens: int) -> None:
    model = make_model()
    with torch.no_grad():
        assert torch.allclose(scored(model, temperature, padded_tokens), plain(model, temperature), atol=1e-5)


def other_models() -> list[Any]:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 1}
    gemma = Gemma2Config(
        **sizes,
        **ids,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=3.0,
        initializer_range=0.5,
        query_pre_attn_scalar=8,
    )
    cohere = CohereConfig(**sizes, **ids, logit_scale=0.25, initializer_range=0.5)
    gpt2 = GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)
    return [(Gemma2ForCausalLM, gemma, False), (CohereForCausalLM, cohere, False), (GPT2LMHeadModel, gpt2, True)]


@pytest.mark.parametrize(("kind", "config", "head_is_last"), other_models())
def test_models_that_change_their_logits_after_the_head(kind: Any, config: Any, head_is_last: bool) -> None:
    torch.manual_seed(0)
    model = kind(config).eval()
    assert TokenScorer(model, 1.0).head_is_last is head_is_last
    with torch.no_grad():
        assert torch.allclose(scored(model, 0.7), plain(model, 0.7), atol=1e-5)


def test_chunks_change_neither_value_nor_gradient(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    micro = next(iter(split_micro_batches(make_sequences(PROMPTS, COMPLETIONS), torch.arange(4), 1000)))

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model.zero_grad()
        scores = TokenScorer(model, 0.7).score(micro.input_ids_BS, micro.where_T, micro.target_T[:, None], entropy=True)
        assert scores.entropy_T is not None
        (scores.logprobs_TK.sum() + 2 * scores.entropy_T.sum()).backward()
        return scores.logprobs_TK.detach(), scores.entropy_T.detach(), model.model.embed_tokens.weight.grad.clone()

    whole = run()
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 3 * 20)
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked = run()
    for a, b in zip(whole, chunked, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert not [shape for shape in kept if shape[-1:] == (20,)], "logits of a chunk are made again, not kept"


def test_entropy_is_that_of_the_sampling_distribution() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    scores = logprobs.score_logits(logits, torch.zeros(5, 1, dtype=torch.int64), 0.7, entropy=True)
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    assert scores.entropy_T is not None
    assert torch.allclose(scores.entropy_T, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_8_and_10_learner_and_sampler_agree(
    make_model: Any, sample_groups: Callable[..., list[Group]], temperature: float
) -> None:
    model = make_model()
    batch = make_batch(sample_groups(model, temperature=temperature))
    scorer = TokenScorer(model, temperature)
    with torch.no_grad():
        for micro in split_micro_batches(batch.sequences, torch.arange(batch.num_samples), 60):
            mine_T = scorer.score(micro.input_ids_BS, micro.where_T, micro.target_T[:, None]).logprobs_TK[:, 0]
            assert (mine_T - batch.rollout_T[micro.token_T]).abs().mean().item() < 1e-5
