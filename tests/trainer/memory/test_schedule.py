"""The layer-major schedule against plain autograd that runs the works one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.trainer.memory.kit import CONFIGS, TIED, loss_of, make_model, make_works
from trainer.engine.port import TokenScores, Work
from trainer.learn.logprobs import TokenScorer
from trainer.memory.anatomy import Part, Unit
from trainer.memory.build import resident
from trainer.memory.residency import Residency
from trainer.memory.schedule import LayerMajor, squared_norm


class Collector:
    """Keeps all gradients, whole."""

    moves = True
    whole = False

    def __init__(self, residency: Residency):
        self.gradients = {name: torch.zeros(p.shape) for name, p in residency.anatomy.parameters.items()}
        self.squares: dict[str, float] = {}
        self.seen: list[str] = []

    def passes(self, group: str, squares: Tensor) -> bool:
        self.squares[group] = float(squares)
        return True

    def take(self, unit: Unit, gradients: dict[str, Tensor], rows_U: Tensor | None = None) -> bool:
        self.passes(unit.name, squared_norm(gradients.values(), torch.device("cpu")))
        for part in unit.parts:
            self.apply(unit, part, gradients[part.name])
        return True

    def apply(self, unit: Unit, part: Part, gradient: Tensor, mean_square: Tensor | None = None) -> None:
        self.seen.append(unit.name)
        self.gradients[part.name].view(-1)[part.offset : part.offset + part.numel].copy_(gradient.flatten())

    def apply_rows(self, unit: Unit, part: Part, rows_U: Tensor, gradient_UD: Tensor, mean_square: Tensor) -> None:
        part_view = self.gradients[part.name].view(-1)[part.offset : part.offset + part.numel].view(part.shape)
        part_view[rows_U] = gradient_UD


def plain(model: PreTrainedModel, works: list[Work], temperature: float) -> tuple[list[TokenScores], dict[str, Tensor]]:
    scorer = TokenScorer(model, temperature)
    scores = []
    for index, work in enumerate(works):
        found = scorer.score(work.input_ids_BS, work.where_T, work.ids_TK, work.entropy)
        loss_of(index, found).backward()
        scores.append(found)
    return scores, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def slopes_of(scores: list[TokenScores]) -> list[TokenScores]:
    slopes = []
    for index, found in enumerate(scores):
        leaf = found.logprobs_TK.detach().requires_grad_()
        entropy = None if found.entropy_T is None else found.entropy_T.detach().requires_grad_()
        loss_of(index, TokenScores(leaf, entropy)).backward()
        slopes.append(TokenScores(leaf.grad, None if entropy is None else entropy.grad))
    return slopes


def layer_major(
    residency: Residency, works: list[Work], temperature: float, **options: int
) -> tuple[list[TokenScores], Collector]:
    schedule, collector = LayerMajor(residency, temperature, **options), Collector(residency)
    passage = schedule.forward(works)
    scores = [seen.scores() for seen in passage.scored]
    assert schedule.backward(passage, slopes_of(scores), collector)
    return scores, collector


@pytest.mark.parametrize("kind", CONFIGS)
def test_scores_and_accumulated_gradients_equal_plain_autograd(kind: str) -> None:
    works = make_works()
    scores, gradients = plain(make_model(kind), works, temperature=0.7)
    found, collector = layer_major(resident(make_model(kind)), works, temperature=0.7)
    for one, other in zip(scores, found, strict=True):
        assert torch.equal(one.logprobs_TK, other.logprobs_TK)
    assert collector.gradients.keys() >= gradients.keys()
    shared = {"model.embed_tokens.weight", "transformer.wte.weight"} if kind in TIED else set()
    for name, gradient in gradients.items():
        if name in shared:  # added up head first, then embedding: another order of the same sums
            torch.testing.assert_close(collector.gradients[name], gradient, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(collector.gradients[name], gradient), name


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma2"])
def test_a_chunked_vocabulary_changes_nothing_but_rounding(kind: str) -> None:
    works = make_works(entropy=True)
    scores, gradients = plain(make_model(kind), works, temperature=1.3)
    residency = resident(make_model(kind), block_elements=32 * 10)
    assert len(residency.anatomy.head_rows.units) == 6
    found, collector = layer_major(residency, works, temperature=1.3, chunk_elements=30)
    for one, other in zip(scores, found, strict=True):
        torch.testing.assert_close(one.logprobs_TK, other.logprobs_TK)
        torch.testing.assert_close(one.entropy_T, other.entropy_T)
    for name, gradient in gradients.items():
        torch.testing.assert_close(collector.gradients[name], gradient, rtol=1e-4, atol=1e-6)
    total = sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    assert sum(collector.squares.values()) == pytest.approx(total, rel=1e-5)


def test_a_tied_matrix_is_applied_once() -> None:
    residency = resident(make_model("llama_tied"))
    _, collector = layer_major(residency, make_works(), temperature=1.0)
    assert collector.seen.count("embedding.0") == 1
    assert collector.seen.index("layers.2") < collector.seen.index("layers.0") < collector.seen.index("embedding.0")


def test_padding_row_gets_no_gradient() -> None:
    works = make_works()
    works[0].input_ids_BS[:, 0] = 0  # the padding id, used as a real token
    _, gradients = plain(make_model("llama"), works, 1.0)
    _, collector = layer_major(resident(make_model("llama")), works, 1.0)
    assert torch.equal(collector.gradients["model.embed_tokens.weight"], gradients["model.embed_tokens.weight"])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_bfloat16_weights_compute_in_float32(kind: str) -> None:
    works, model = make_works(), make_model(kind, torch.bfloat16)
    twin = make_model(kind, torch.bfloat16).float()
    scores, gradients = plain(twin, works, 1.0)
    residency = resident(model)
    found, collector = layer_major(residency, works, 1.0)
    for one, other in zip(scores, found, strict=True):
        assert torch.equal(one.logprobs_TK, other.logprobs_TK)
    for name, gradient in gradients.items():
        torch.testing.assert_close(collector.gradients[name], gradient, rtol=1e-5, atol=1e-6)
    ids_BS = works[0].input_ids_BS
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids_BS, use_cache=False).logits, twin(input_ids=ids_BS, use_cache=False).logits)
    assert model.dtype == torch.float32
