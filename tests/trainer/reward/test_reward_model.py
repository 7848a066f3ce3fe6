"""Learned rewards: training from pairs, scoring in batches, INT8, sizes, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from trainer.config.schema import LearnedReward, Reward, RewardTraining
from trainer.errors import ConfigError, ModelError
from trainer.policy.load import save_model
from trainer.reward import build_verifier, size_warnings
from trainer.reward.preference import Pair, is_heldout, measure, preference_loss, scratch_model, train
from trainer.reward.reward_model import Int8Linear, count_parameters, load, logits, quantise, size_warning
from trainer.types import Prompt

OPTIONS = RewardTraining(pairs="x", hidden_size=32, num_layers=1, num_heads=2, epochs=8, batch_size=16, max_tokens=64)
PAIRS = [Pair(f"{a}+{b}=", str(a + b), str(a + b + 1 + a % 3)) for a in range(10) for b in range(10)]
POLITE = [Pair(f"q{i}", f"thanks {i}", f"go away {i}") for i in range(64)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model that likes politeness."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokenizer = scratch_model(POLITE, OPTIONS)
    train(model, tokenizer, POLITE, OPTIONS, 0, lambda step, total, metrics: None)
    path = tmp_path_factory.mktemp("reward_model")
    save_model(model, tokenizer, path)
    return path


def answers(*texts: str) -> list[tuple[Prompt, str]]:
    return [(Prompt("0" * 16, "main", "train", "q7", (1,), ""), text) for text in texts]


def test_the_loss_is_bradley_terry() -> None:
    loss = preference_loss(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert float(loss) == pytest.approx((0.3132617 + 0.6931472) / 2, rel=1e-5)


def test_held_out_prompts_are_chosen_by_their_text() -> None:
    held = [pair.prompt for pair in PAIRS if is_heldout(pair, 0.3)]
    assert 15 < len(held) < 45
    assert held == [pair.prompt for pair in PAIRS if is_heldout(Pair(pair.prompt, "other", "answers"), 0.3)]


def test_a_small_model_learns_a_preference(directory: Path) -> None:
    model, tokenizer = load(directory, "float32")
    found = measure(model, tokenizer, [Pair("q99", "thanks 7", "go away 7")], OPTIONS)
    assert found["accuracy"] == 1
    assert found["margin"] > 0.5


def test_training_is_reproducible() -> None:
    made = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, tokenizer = scratch_model(POLITE, OPTIONS)
        train(model, tokenizer, POLITE[:32], OPTIONS.model_copy(update={"epochs": 1}), 3, lambda *_: None)
        made.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*made)


@pytest.mark.parametrize("squash", ["sigmoid", "none"])
def test_it_judges_as_a_verifier(directory: Path, squash: str) -> None:
    options = LearnedReward.model_validate({"model": str(directory), "squash": squash, "batch_size": 2})
    verifier = build_verifier(Reward(verifier="reward_model", reward_model=options))
    rude, polite, again = verifier.score(answers("go away 1", "thanks 1", "go away 1"))
    verifier.close()
    assert polite.score > rude.score
    assert rude.score == pytest.approx(again.score, abs=1e-5)
    assert rude.status == "ok"
    assert rude.parts == {"reward_model": rude.score}
    assert (0 < rude.score < 1) == (squash == "sigmoid")


def test_the_batch_does_not_matter(directory: Path) -> None:
    model, tokenizer = load(directory, "float32")
    texts = ["q1thanks", "q2go away and stay away", "q3", "thanks for all of it 12345"]
    alone = [logits(model, tokenizer, [text], 1, 64)[0] for text in texts]
    assert logits(model, tokenizer, texts, 4, 64) == pytest.approx(alone, abs=1e-4)


def test_long_texts_lose_their_beginning(directory: Path) -> None:
    model, tokenizer = load(directory, "float32")
    cut = logits(model, tokenizer, ["q" * 50 + "thanks 1"], 1, 8)
    assert cut == pytest.approx(logits(model, tokenizer, ["thanks 1"], 1, 8), abs=1e-5)


def test_int8_is_close_and_smaller(directory: Path) -> None:
    model, tokenizer = load(directory, "float32")
    before, texts = count_parameters(model), ["q1thanks 1", "q1go away 1"]
    exact = logits(model, tokenizer, texts, 2, 64)
    quantise(model)
    assert any(isinstance(module, Int8Linear) for module in model.modules())
    assert count_parameters(model) == before
    assert logits(model, tokenizer, texts, 2, 64) == pytest.approx(exact, abs=0.1, rel=0.1)


def test_int8_rounds_each_row_to_its_own_scale() -> None:
    linear = torch.nn.Linear(16, 8)
    with torch.no_grad():
        linear.weight *= torch.logspace(-3, 3, 8)[:, None]
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    wanted, found = linear(inputs), Int8Linear(linear)(inputs)
    assert torch.all((found - wanted).abs() <= 0.02 * linear.weight.abs().amax(1) * 16)


def test_a_small_judge_of_a_large_policy_is_a_warning(directory: Path) -> None:
    assert size_warning(40, 100) is None
    assert "30% of the policy" in str(size_warning(30, 100))
    verifier = build_verifier(Reward(verifier="reward_model", reward_model=LearnedReward(model=str(directory))))
    assert size_warnings(verifier, 1000) == []
    assert len(size_warnings(verifier, 10**9)) == 1
    verifier.close()


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        build_verifier(Reward(verifier="reward_model", reward_model=LearnedReward(model="./nowhere")))
    model, tokenizer = scratch_model(POLITE, OPTIONS)
    body = LlamaForSequenceClassification(model.config).model
    save_model(body, tokenizer, tmp_path)
    with pytest.raises(ModelError, match="no weights for score"):
        load(tmp_path, "float32")
