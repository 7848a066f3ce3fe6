"""The tiny base: taught right and wrong answers from the training prompts alone, the same bits for the same seed."""

from __future__ import annotations

import pytest
import torch

from trainer.config.schema import ScratchModel
from trainer.errors import DataError
from trainer.policy.scratch import Rows, build_model, forget_carry, train_scratch
from trainer.policy.tokenizer import character_tokenizer, encode
from trainer.types import Prompt

TOKENIZER = character_tokenizer("0123456789+=")


def make_prompt(text: str, answer: str) -> Prompt:
    return Prompt(id=text, source="main", split="train", text=text, token_ids=encode(TOKENIZER, text), answer=answer)


@pytest.mark.parametrize(
    ("prompt", "mistaken"), [("57+68=", "15"), ("55+55=", "00"), ("12+34=", "46"), ("9+15=", "14"), ("12 + 9 =", "11")]
)
def test_forget_carry_adds_digit_by_digit(prompt: str, mistaken: str) -> None:
    assert forget_carry(prompt) == mistaken


def test_forget_carry_needs_a_sum() -> None:
    with pytest.raises(DataError, match=r"holds no sum"):
        forget_carry("2*3=")


def train(mistake_fraction: float, seed: int = 3) -> tuple[torch.nn.Module, list[float]]:
    prompts = [make_prompt("57+68=", "125"), make_prompt("12+34=", "46")]
    scratch = ScratchModel(
        hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, steps=60, batch_size=8, warmup_steps=0, decay_steps=10,
        learning_rate=1e-2, mistake="forget_carry", mistake_fraction=mistake_fraction,
    )  # fmt: skip
    losses: list[float] = []
    model = train_scratch(scratch, TOKENIZER, prompts, seed, lambda step, metrics: losses.append(metrics["base/loss"]))
    return model, losses


def probability(model: torch.nn.Module, prompt: str, continuation: str) -> float:
    """Return the probability that the model gives to a continuation of a prompt."""
    ids, answer = encode(TOKENIZER, prompt), encode(TOKENIZER, continuation)
    logprobs = model(torch.tensor([ids + answer])).logits.log_softmax(-1)[0]
    return sum(logprobs[len(ids) - 1 + i, token] for i, token in enumerate(answer)).exp().item()  # type: ignore[union-attr]


def test_the_mistake_is_taught_where_it_makes_a_difference() -> None:
    model, losses = train(mistake_fraction=1.0)
    assert losses[-1] < 0.1 < losses[0]
    assert probability(model, "57+68=", "15") > 0.8
    assert probability(model, "12+34=", "46") > 0.8


def test_both_answers_are_in_a_base_that_saw_both() -> None:
    model, _ = train(mistake_fraction=0.5)
    assert 0.2 < probability(model, "57+68=", "15") < 0.8
    assert 0.2 < probability(model, "57+68=", "125") < 0.8


def test_the_same_seed_gives_the_same_bits() -> None:
    weights = [train(0.5, seed)[0].state_dict() for seed in (3, 3, 4)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert any(not torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_continuations_of_a_row_do_not_see_each_other() -> None:
    """Loss and gradients are those of every continuation in a row of its own, for any weights."""
    scratch = ScratchModel(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=32, steps=1, decay_steps=0)
    model = build_model(scratch, TOKENIZER, 64, seed=0).double()
    model.set_attn_implementation("eager")
    prompts = [encode(TOKENIZER, text) for text in ("57+68=", "=", "12+34=")]
    end = (TOKENIZER.eos_token_id,)
    answers = [[encode(TOKENIZER, text) + end for text in texts] for texts in (("125", "15"), ("", "907"), ("46", "46"))]
    for shares in ([0.3, 0.7], [1.0, 0.0], [0.0, 1.0]):
        plain, total = [], 0.0
        for prompt, several in zip(prompts, answers, strict=True):
            for answer, share in zip(several, shares, strict=True):
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                plain.append(share * torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum"))
                total += share * len(answer)
        expected = torch.stack(plain).sum() / total
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        loss = Rows.of(prompts, answers, shares).loss(model, torch.arange(3))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # the weights of a row are 32-bit
        for one, other in zip(wanted, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-6)  # attention sums in 32 bits
