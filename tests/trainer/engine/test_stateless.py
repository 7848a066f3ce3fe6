"""The stateless engine: exact updates, clipping (NUMERICS 15), atomic steps (NUMERICS 20), checkpoints."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.memory.kit import loss_of, make_model, make_works
from trainer.config.schema import Optimizer
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term, TokenScores
from trainer.engine.stateless import StatelessEngine
from trainer.learn.logprobs import TokenScorer
from trainer.memory.build import resident
from trainer.memory.rules import direction


def make_engine(kind: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> StatelessEngine:
    journal, split = options.pop("journal", None), options.pop("split", False)
    block_elements, factor = options.pop("block_elements", None), options.pop("factor", 5.0)
    settings = {"rule": "sgd", "weight_decay": 0.0, "learning_rate": 0.1, "max_grad_norm": 1e9, **options}
    config = Optimizer(kind="stateless", **settings)
    residency = resident(make_model(kind, dtype), split=split, journal_directory=journal, block_elements=block_elements)
    return StatelessEngine(residency, config, Heartbeat(factor, warmup=3), temperature=1.0, seed=7, chunk_elements=200)


def make_terms(scale: float = 1.0) -> list[Term]:
    def loss(index: int, scores: TokenScores) -> Tensor:
        return scale * loss_of(index, scores)

    return [Term(work, partial(loss, index)) for index, work in enumerate(make_works())]


def plain_gradients(kind: str) -> tuple[Any, dict[str, Tensor]]:
    model = make_model(kind)
    scorer = TokenScorer(model, 1.0)
    for index, work in enumerate(make_works()):
        loss_of(index, scorer.score(work.input_ids_BS, work.where_T, work.ids_TK)).backward()
    return model, {name: p.grad for name, p in model.named_parameters()}


def weights(engine: StatelessEngine) -> dict[str, Tensor]:
    return {name: flat.clone() for name, flat in engine.weights().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("block_elements", [None, 320])
def test_a_step_is_plain_sgd(kind: str, block_elements: int | None) -> None:
    model, gradients = plain_gradients(kind)
    engine = make_engine(kind, block_elements=block_elements)
    outcome = engine.step(make_terms(), 0.1, 0)
    assert outcome.applied
    stepped = engine.residency.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stepped[name], parameter.detach() - 0.1 * gradients[name], rtol=1e-5, atol=1e-6)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    assert outcome.norm == pytest.approx(norm, rel=1e-5)
    ids = make_works()[0].input_ids_BS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stepped[name])
        logits = engine.residency.anatomy.model(input_ids=ids).logits
        assert torch.equal(logits, model(input_ids=ids).logits), "the model object that the sampler shares has moved"


@pytest.mark.parametrize("rule", ["sign", "rms", "sinkhorn"])
def test_normalised_rules_over_whole_matrices(rule: str) -> None:
    model, gradients = plain_gradients("llama")
    engine = make_engine(rule=rule, block_elements=320)
    engine.step(make_terms(), 1e-3, 0)
    stepped = engine.residency.state_dict()
    for name, parameter in model.named_parameters():
        gradient = gradients[name]
        if "embed_tokens" in name and rule != "sign":
            used = torch.unique(torch.cat([work.input_ids_BS.flatten() for work in make_works()]))
            mean_square = gradient.square().sum() / (len(used) * gradient.shape[1])
            expected = direction("rms", gradient.clone(), mean_square)
        else:
            expected = direction("rms" if "lm_head" in name and rule == "sinkhorn" else rule, gradient.clone())  # type: ignore[arg-type]
        torch.testing.assert_close(stepped[name], parameter.detach() - 1e-3 * expected, rtol=1e-4, atol=2e-6)


# -- clipping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_row_15_two_pass_clipping_equals_torch(kind: str) -> None:
    model, gradients = plain_gradients(kind)
    engine = make_engine(kind, clipping="two_pass", max_grad_norm=0.05, block_elements=320)
    outcome = engine.step(make_terms(), 0.1, 0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.1, "it clips"
    assert outcome.norm == pytest.approx(float(norm), rel=1e-6)
    stepped = engine.residency.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stepped[name], parameter.detach() - 0.1 * gradients[name], rtol=1e-5, atol=1e-7)


def test_per_layer_clipping_clips_each_layer_by_its_own_norm() -> None:
    model, gradients = plain_gradients("llama")
    engine = make_engine(clipping="per_layer", max_grad_norm=0.02)
    engine.step(make_terms(), 1.0, 0)
    stepped = engine.residency.state_dict()
    layer = {name: g for name, g in gradients.items() if ".layers.1." in name}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in layer.values()))
    assert norm > 0.04
    for name, parameter in model.named_parameters():
        if name in layer:
            expected = parameter.detach() - layer[name] * (0.02 / norm)
            torch.testing.assert_close(stepped[name], expected, rtol=1e-4, atol=1e-6)


def test_previous_clipping_takes_the_coefficient_of_the_step_before() -> None:
    engine = make_engine(clipping="previous", max_grad_norm=0.1)
    first = engine.step(make_terms(), 1e-6, 0)
    before = weights(engine)
    engine.step(make_terms(), 1e-2, 1)
    free = make_engine()
    free.step(make_terms(), 1e-6, 0)
    start = weights(free)
    free.step(make_terms(), 1e-2, 1)
    for name, flat in weights(engine).items():
        full = weights(free)[name] - start[name]
        torch.testing.assert_close(flat - before[name], full * (0.1 / first.norm), rtol=1e-2, atol=1e-7)


# -- atomic steps ---------------------------------------------------------------------------------------------------------

LAYERS = ["layers.0", "layers.1", "layers.2", "head", "embedding", "outer"]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "split", "on_disk", "two_pass"])
def test_row_20_a_nan_in_any_layer_changes_no_weight(
    layer: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dtype": torch.float32 if kind in ("float32", "two_pass") else torch.bfloat16, "rule": "rms"}
    options |= {"split": kind == "split", "journal": tmp_path if kind == "on_disk" else None, "block_elements": 320}
    if kind == "two_pass":
        options["clipping"] = "two_pass"
    engine = make_engine(**options)
    assert engine.step(make_terms(), 1e-3, 0).applied
    before = weights(engine)
    ids = make_works()[0].input_ids_BS
    logits = engine.residency.anatomy.model(input_ids=ids).logits.detach().clone()

    from trainer.engine import stateless

    real = stateless.Watch.passes

    def poisoned(self: Any, group: str, squares: Tensor) -> bool:
        return real(self, group, squares * (math.nan if group == layer else 1.0))

    monkeypatch.setattr(stateless.Watch, "passes", poisoned)
    outcome = engine.step(make_terms(), 1e-3, 1)
    assert not outcome.applied
    assert (outcome.culprit, outcome.reason) == (layer, "not finite")
    assert same(before, weights(engine))
    assert torch.equal(engine.residency.anatomy.model(input_ids=ids).logits, logits)
    monkeypatch.undo()
    assert engine.step(make_terms(), 1e-3, 1).applied, "and it goes on"


def test_row_20_a_real_nan_inside_a_backward_pass_is_caught() -> None:
    engine = make_engine()
    before = weights(engine)
    block = engine.residency.anatomy.blocks[1]
    handle = block.mlp.down_proj.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * math.nan,))
    outcome = engine.step(make_terms(), 0.1, 0)
    handle.remove()
    assert not outcome.applied
    assert outcome.culprit == "layers.1"
    assert same(before, weights(engine))


def test_row_20_a_loss_that_is_not_finite_skips_before_backward() -> None:
    engine = make_engine()
    before = weights(engine)
    outcome = engine.step(make_terms(math.inf), 0.1, 0)
    assert not outcome.applied
    assert outcome.culprit == "loss"
    assert same(before, weights(engine))


def test_a_jump_of_the_norm_is_undone_and_named() -> None:
    engine = make_engine()
    for number in range(3):
        assert engine.step(make_terms(), 1e-3, number).applied
    before = weights(engine)
    outcome = engine.step(make_terms(10.0), 1e-3, 3)
    assert not outcome.applied
    assert outcome.value > outcome.limit > 0
    assert same(before, weights(engine))


# -- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_bfloat16_with_the_same_seed_gives_the_same_bits_and_goes_on_from_a_checkpoint(split: bool) -> None:
    one, other = (make_engine(dtype=torch.bfloat16, rule="rms", split=split) for _ in range(2))
    for number in range(4):
        one.step(make_terms(), 1e-3, number)
    for number in range(2):
        other.step(make_terms(), 1e-3, number)
    resumed = make_engine(dtype=torch.bfloat16, rule="rms", split=split)
    resumed.load(weights(other), {}, other.facts())
    for number in (2, 3):
        resumed.step(make_terms(), 1e-3, number)
    assert same(weights(one), weights(resumed))
    assert one.facts() == resumed.facts()


def test_the_norm_that_clips_the_next_step_is_in_the_checkpoint() -> None:
    one = make_engine(clipping="previous", max_grad_norm=0.1)
    one.step(make_terms(), 1e-6, 0)
    resumed = make_engine(clipping="previous", max_grad_norm=0.1)
    resumed.load(weights(one), {}, one.facts())
    for engine in (one, resumed):
        engine.step(make_terms(), 1e-2, 1)
    assert same(weights(one), weights(resumed))


def test_it_reports_what_the_update_did() -> None:
    metrics = make_engine(rule="rms").step(make_terms(), 1e-3, 0).metrics
    assert metrics["update/realised_fraction"] == pytest.approx(1.0, abs=1e-3)
    assert 1e-3 < metrics["update/relative"] < 1e-1
    assert metrics.keys() >= {f"grad_norm/{layer}" for layer in LAYERS}
    bf16 = make_engine(dtype=torch.bfloat16, rule="rms").step(make_terms(), 1e-4, 0).metrics
    assert bf16["update/realised_fraction"] == pytest.approx(1.0, abs=0.2)
    nearest = make_engine(dtype=torch.bfloat16, rule="rms", rounding="nearest").step(make_terms(), 1e-5, 0).metrics
    assert nearest["update/realised_fraction"] < 0.2


def test_no_terms_move_nothing() -> None:
    engine = make_engine()
    before = weights(engine)
    assert engine.step([], 0.1, 0).applied
    assert same(before, weights(engine))
