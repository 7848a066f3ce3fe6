"""The embedded sampler against plain forward passes and transformers `generate`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.errors import DivergedError, ModelError, ResourceError
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Completion, Request, SamplingParams, derive_seed

VOCABULARY = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def build(family: str) -> Any:
    torch.manual_seed(1)
    builders = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
        "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, attn_implementation="eager")),
        "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=True)),
        "gemma3-sliding": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, sliding_window=4, layer_types=MIXED)),
        "mistral-sliding": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=5)),
        "gpt2-absolute": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
        ),
    }
    return builders[family]().eval()


FAMILIES = ["llama", "llama-eager", "qwen3-tied", "gemma3-sliding", "mistral-sliding", "gpt2-absolute"]


def make_requests(num_prompts: int = 9, group_size: int = 4, longest: int = 14) -> list[Request]:
    numbers = random.Random(3)
    requests = []
    for prompt in range(num_prompts):
        ids = tuple(numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, longest)))
        requests += [Request(str(prompt), ids, derive_seed(7, prompt, sample), sample) for sample in range(group_size)]
    return requests


def plain_logprobs(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...], temperature: float) -> list[float]:
    """One sequence, no cache, no batch: the definition."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(completion)]


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_pass(family: str, temperature: float) -> None:
    model = build(family)
    requests = make_requests()
    sampler = EmbeddedSampler(model, slots=5, pad_token_id=0)
    completions = sampler.generate(requests, SamplingParams(temperature, 12, (1, 5)))
    scores = sampler.score([(r.token_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)], temperature)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for request, completion, score in zip(requests, completions, scores, strict=True):
        plain = plain_logprobs(model, request.token_ids, completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(plain, abs=1e-4)
        assert score == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3-sliding"])
def test_a_completion_depends_on_its_seed_alone(family: str) -> None:
    model, requests, params = build(family), make_requests(), SamplingParams(1.0, 12, (1, 5))
    expected = EmbeddedSampler(model, slots=len(requests), pad_token_id=0).generate(requests, params)
    for slots in (1, 3, 8):
        assert tokens(EmbeddedSampler(model, slots, 0).generate(requests, params)) == tokens(expected)
    assert tokens(EmbeddedSampler(model, 6, 0, max_prefill_tokens=1).generate(requests, params)) == tokens(expected)
    mixed = random.Random(0).sample(range(len(requests)), len(requests))
    shuffled = EmbeddedSampler(model, 6, 0).generate([requests[i] for i in mixed], params)
    assert tokens(shuffled) == [expected[i].token_ids for i in mixed]
    alone = EmbeddedSampler(model, 6, 0).generate(requests[5:6], params)
    assert tokens(alone) == tokens(expected[5:6])
    other = [Request(r.prompt_id, r.token_ids, r.seed + 1, r.sample_index) for r in requests]
    assert tokens(EmbeddedSampler(model, 6, 0).generate(other, params)) != tokens(expected)


def test_completions_come_in_the_order_of_the_requests() -> None:
    requests = make_requests()[::-1]
    completions = EmbeddedSampler(build("llama"), 4, 0, version=3).generate(requests, SamplingParams(1.0, 6, (1,)))
    assert [(c.prompt_id, c.sample_index) for c in completions] == [(r.prompt_id, r.sample_index) for r in requests]
    assert {c.policy_version for c in completions} == {3}


def test_eos_is_kept_when_sampled_and_never_appended() -> None:
    """Padding has the id of EOS here, so a mask made by comparing with it would be wrong."""
    requests = make_requests(num_prompts=20)
    eos = (1, 5)
    for completion in EmbeddedSampler(build("llama"), 7, pad_token_id=1).generate(requests, SamplingParams(1.0, 8, eos)):
        ids = completion.token_ids
        assert len(completion.logprobs) == len(ids)
        assert not set(ids[:-1]) & set(eos)
        if completion.finish_reason == "stop":
            assert ids[-1] in eos
        else:
            assert len(ids) == 8
            assert ids[-1] not in eos


def test_without_eos_every_completion_reaches_the_cap() -> None:
    completions = EmbeddedSampler(build("llama"), 3, 0).generate(make_requests(), SamplingParams(1.0, 5, ()))
    assert {len(c.token_ids) for c in completions} == {5}
    assert EmbeddedSampler(build("llama"), 3, 0).generate([], SamplingParams(1.0, 5, ())) == []


def test_a_cap_of_one_token_needs_no_decoding() -> None:
    completions = EmbeddedSampler(build("llama"), 3, 0).generate(make_requests(), SamplingParams(1.0, 1, (1,)))
    assert {len(c.token_ids) for c in completions} == {1}


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gemma3-sliding"])
def test_greedy_equals_generate(family: str) -> None:
    model, requests = build(family), make_requests(group_size=1)
    completions = EmbeddedSampler(model, 4, 0).generate(requests, SamplingParams(0.0, 10, (1,)))
    settings = GenerationConfig(do_sample=False, max_new_tokens=10, eos_token_id=1, pad_token_id=0)
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([request.token_ids])
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        assert completion.token_ids == tuple(output[0, len(request.token_ids) :].tolist())
        assert completion.logprobs == pytest.approx(plain_logprobs(model, request.token_ids, completion.token_ids, 1.0), abs=1e-4)


def test_equal_in_distribution_to_the_model_and_to_generate() -> None:
    """All sequences of three tokens over a vocabulary of four: exact probabilities beside both samplers' counts."""
    torch.manual_seed(2)
    small = {**COMMON, "vocab_size": 4, "hidden_size": 16, "head_dim": 4, "num_hidden_layers": 2, "initializer_range": 0.6}
    model = LlamaForCausalLM(LlamaConfig(**small)).eval()
    prompt, eos, temperature, num = (2, 3, 2), 1, 0.8, 6000
    sequences = []
    for ids in itertools.product(range(4), repeat=3):
        cut = ids[: ids.index(eos) + 1] if eos in ids else ids
        if cut not in sequences:
            sequences.append(cut)
    sampler = EmbeddedSampler(model, slots=512, pad_token_id=0)
    exact = [sum(s) for s in sampler.score([(prompt, s) for s in sequences], temperature)]
    probabilities = torch.tensor(exact).exp()
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-5)

    requests = [Request("p", prompt, derive_seed("distribution", i), i) for i in range(num)]
    ours = Counter(tokens(sampler.generate(requests, SamplingParams(temperature, 3, (eos,)))))
    torch.manual_seed(0)
    settings = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=3, eos_token_id=eos, pad_token_id=0
    )
    ids = torch.tensor([prompt]).expand(num, -1)
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)[:, 3:].tolist()
    theirs = Counter(tuple(row[: row.index(eos) + 1]) if eos in row else tuple(row) for row in output)

    expected = probabilities * num
    for counts in (ours, theirs):
        assert set(counts) <= set(sequences)
        observed = torch.tensor([float(counts[s]) for s in sequences])
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        # mean is the degrees of freedom, variance twice that; five standard deviations
        freedom = len(sequences) - 1
        assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
        # and a distribution at another temperature is told apart
        distorted = probabilities**0.8
        distorted = distorted / distorted.sum() * num
        assert float(((observed - distorted) ** 2 / distorted).sum()) > freedom + 5 * (2 * freedom) ** 0.5


def test_gradients_and_modes_are_left_as_they_were() -> None:
    model = build("llama")
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    sampler = EmbeddedSampler(model, 4, 0)
    completions = sampler.generate(make_requests(2), SamplingParams(1.0, 4, (1,)))
    sampler.score([((2, 3), completions[0].token_ids)], 1.0)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    model(input_ids=torch.tensor([[2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_lora_dropout_is_off_and_the_adapter_counts() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj", "o_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.train()
    requests, params = make_requests(4), SamplingParams(1.0, 8, (1,))
    sampler = EmbeddedSampler(model, 4, 0)
    completions = sampler.generate(requests, params)
    pairs = [(r.token_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)]
    assert sampler.score(pairs, 1.0) == sampler.score(pairs, 1.0)
    for completion, score in zip(completions, sampler.score(pairs, 1.0), strict=True):
        assert completion.logprobs == pytest.approx(score, abs=1e-4)
    with model.disable_adapter():
        assert tokens(sampler.generate(requests, params)) != tokens(completions)


def test_new_weights_are_used_at_once() -> None:
    model, requests, params = build("llama"), make_requests(3), SamplingParams(1.0, 8, (1,))
    sampler = EmbeddedSampler(model, 4, 0)
    before = sampler.generate(requests, params)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-3)
    sampler.load_policy(1)
    after = sampler.generate(requests, params)
    assert tokens(after) != tokens(before)
    assert {c.policy_version for c in after} == {1}


def test_a_prompt_is_prefilled_once_for_its_group() -> None:
    model = build("llama")
    prefilled = []

    def watch(_: Any, __: Any, keywords: dict[str, Any]) -> None:
        if keywords.get("attention_mask") is None:
            prefilled.append(keywords["input_ids"].shape[0])

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    EmbeddedSampler(model, 3, 0).generate(make_requests(num_prompts=5, group_size=7), SamplingParams(1.0, 6, (1,)))
    handle.remove()
    assert sum(prefilled) == 5


def test_slots_are_refilled_at_once_and_the_batch_shrinks_at_the_end() -> None:
    model, fed = build("llama"), []

    def watch(_: Any, __: Any, keywords: dict[str, Any]) -> None:
        if keywords.get("attention_mask") is not None:
            fed.append(keywords["input_ids"].shape[0])

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    requests = make_requests(num_prompts=20)
    completions = EmbeddedSampler(model, 8, 0).generate(requests, SamplingParams(1.0, 40, (1, 5)))
    handle.remove()
    assert fed[0] == 8
    assert fed == sorted(fed, reverse=True)
    assert fed[-1] < 8
    decoded = sum(len(c.token_ids) - 1 for c in completions)  # the first token comes from the prefill
    assert decoded <= sum(fed) <= 1.15 * decoded  # rows that idled: less than a quarter, and only near the end


def test_progress_counts_every_completion() -> None:
    seen: list[tuple[int, int]] = []
    sampler = EmbeddedSampler(build("llama"), 3, 0, progress=lambda done, total: seen.append((done, total)))
    sampler.generate(make_requests(), SamplingParams(1.0, 6, (1,)))
    assert seen[-1] == (36, 36)
    assert seen == sorted(seen)


def test_weights_that_are_not_finite_are_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(DivergedError, match="version 4 gives logits that are not finite"):
        EmbeddedSampler(model, 3, 0, version=4).generate(make_requests(2), SamplingParams(1.0, 6, (1,)))


def test_a_request_longer_than_the_model_is_refused() -> None:
    sampler = EmbeddedSampler(build("gpt2-absolute"), 3, 0)
    request = Request("p", (2,) * 1000, 0)
    assert len(sampler.generate([request], SamplingParams(1.0, 25, ()))[0].token_ids) == 25
    with pytest.raises(ModelError, match=r"1000 tokens and max_completion_tokens = 26 exceed the model's 1024"):
        sampler.generate([request], SamplingParams(1.0, 26, ()))
    rotary = EmbeddedSampler(build("llama"), 3, 0)  # made for 128 positions, which is no hard limit
    assert len(rotary.generate([Request("p", (2,) * 125, 0)], SamplingParams(1.0, 8, ()))[0].token_ids) == 8


def test_exhausted_device_memory_names_the_knob() -> None:
    model = build("llama")

    def exhaust(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.layers[0].register_forward_pre_hook(exhaust)
    with pytest.raises(ResourceError, match=r"train\.sampler\.slots = 7: .* lower it"):
        EmbeddedSampler(model, 7, 0).generate(make_requests(2), SamplingParams(1.0, 6, (1,)))


def test_models_without_slots_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="flex_attention"):
        EmbeddedSampler(LlamaForCausalLM(LlamaConfig(**COMMON, attn_implementation="flex_attention")), 2, 0)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match="linear_attention"):
        EmbeddedSampler(mamba, 2, 0)
