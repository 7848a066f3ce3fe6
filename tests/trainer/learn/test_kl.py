"""NUMERICS 1 (KL values and terms), 17 (adaptive coefficient) and 21 (anchored KL)."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.config.schema import Kl
from trainer.learn.kl import KlController, anchored_kl, kl_term, kl_value, log1mexp


def categorical(seed: int, size: int = 8) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(loss: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, of)[0]


@pytest.fixture
def theta() -> torch.Tensor:
    return categorical(1).requires_grad_()


@pytest.fixture
def reference() -> torch.Tensor:
    return torch.log_softmax(categorical(2), 0)


@pytest.mark.parametrize("estimator", ["k2", "ratio_k3"])
def test_row_1_expected_gradient_is_that_of_the_exact_kl(theta: torch.Tensor, reference: torch.Tensor, estimator: str) -> None:
    logprobs = torch.log_softmax(theta, 0)
    exact = gradient((logprobs.exp() * (logprobs - reference)).sum(), theta)
    logprobs = torch.log_softmax(theta, 0)
    term = kl_term(logprobs, logprobs.detach(), reference, estimator)  # type: ignore[arg-type]
    assert torch.allclose(gradient((logprobs.exp().detach() * term).sum(), theta), exact, rtol=1e-9, atol=1e-12)


def test_row_1_k3_has_the_gradient_of_the_forward_kl(theta: torch.Tensor, reference: torch.Tensor) -> None:
    logprobs = torch.log_softmax(theta, 0)
    forward = gradient((reference.exp() * (reference - logprobs)).sum(), theta)
    logprobs = torch.log_softmax(theta, 0)
    term = kl_term(logprobs, logprobs.detach(), reference, "k3")
    assert torch.allclose(gradient((logprobs.exp().detach() * term).sum(), theta), forward, rtol=1e-9, atol=1e-12)


def test_row_1_k1_as_a_term_would_have_no_gradient(theta: torch.Tensor, reference: torch.Tensor) -> None:
    logprobs = torch.log_softmax(theta, 0)
    loss = (logprobs.exp().detach() * kl_value(logprobs, reference, "k1")).sum()
    assert torch.allclose(gradient(loss, theta), torch.zeros(8, dtype=torch.float64), atol=1e-12)


def test_row_1_k1_and_k3_have_the_exact_mean(theta: torch.Tensor, reference: torch.Tensor) -> None:
    logprobs = torch.log_softmax(theta.detach(), 0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    for kind in ("k1", "k3"):
        assert torch.allclose((logprobs.exp() * kl_value(logprobs, reference, kind)).sum(), exact)  # type: ignore[arg-type]
    assert kl_value(torch.tensor(-1.0), torch.tensor(-1.5), "k2").item() == pytest.approx(0.125)


def test_row_1_the_term_k2_reports_the_value_of_k3(theta: torch.Tensor, reference: torch.Tensor) -> None:
    logprobs = torch.log_softmax(theta, 0)
    assert torch.equal(kl_term(logprobs, logprobs.detach(), reference, "k2"), kl_value(logprobs, reference, "k3"))


def test_row_1_clamps_keep_values_and_gradients_finite() -> None:
    logprobs = torch.tensor([-1e4, -1.0, -torch.inf], requires_grad=True)
    reference = torch.tensor([-1.0, -1e4, -1.0])
    assert kl_value(logprobs, reference).tolist() == [10.0, 10.0, 10.0]
    assert kl_value(logprobs, reference, "k1").tolist() == [-10.0, 10.0, -10.0]
    grad = gradient(kl_term(logprobs[:2], logprobs[:2].detach(), reference[:2], "k2").sum(), logprobs)
    assert grad[:2].tolist() == [-20.0, 20.0], "a policy that drifted far is still pulled back"


def test_row_17_closed_loop_settles_at_the_target() -> None:
    controller = KlController(Kl(controller="adaptive", coefficient=0.001, target=0.05, horizon=20))
    kl = 0.4
    for _ in range(2000):
        kl += 0.1 * (0.002 / controller.coefficient - kl)  # a plant whose KL falls as the coefficient rises
        controller.update(kl)
    assert kl == pytest.approx(0.05, rel=1e-3)
    assert controller.coefficient == pytest.approx(0.04, rel=1e-3)


def test_row_17_one_update_by_hand() -> None:
    controller = KlController(Kl(controller="adaptive", coefficient=0.5, target=0.1, horizon=100))
    controller.update(0.11, num_steps=10)
    assert controller.coefficient == pytest.approx(0.5 * (1 + 0.1 * 10 / 100))
    controller.update(math.nan)
    assert controller.coefficient == pytest.approx(0.505)
    controller.update(9.0)
    assert controller.coefficient == pytest.approx(0.505 * (1 + 0.2 / 100))
    fixed = KlController(Kl(coefficient=0.5))
    fixed.update(9.0)
    assert fixed.coefficient == 0.5


def top_and_tail(logq: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, log-probs and log tail mass of a [T, V] reference."""
    values, ids = logq.sort(descending=True)
    return ids[:, :k], values[:, :k], torch.logsumexp(values[:, k:], -1)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.log_softmax(2 * torch.randn(6, 30, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    return p, q


def test_row_21_the_whole_vocabulary_is_exact(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    logp, logq = pair
    ids, top, tail = top_and_tail(logq, 30)
    assert (tail == -torch.inf).all()
    exact = (logp.exp() * (logp - logq)).sum(-1)
    assert torch.allclose(anchored_kl(logp.gather(-1, ids), top, tail), exact)


def test_row_21_fewer_tokens_are_a_lower_bound_that_rises_to_the_exact(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    logp, logq = pair
    exact = (logp.exp() * (logp - logq)).sum(-1)
    before = torch.zeros(6, dtype=torch.float64)
    for k in (1, 4, 16, 29):
        ids, top, tail = top_and_tail(logq, k)
        kl = anchored_kl(logp.gather(-1, ids), top, tail)
        assert (kl >= before - 1e-12).all()
        assert (kl <= exact + 1e-12).all()
        before = kl
    assert torch.allclose(before, exact), "29 of 30 tokens and a tail of one are the whole vocabulary"


@pytest.mark.parametrize("k", [1, 4, 30])
def test_row_21_gradient_check(pair: tuple[torch.Tensor, torch.Tensor], k: int) -> None:
    ids, top, tail = top_and_tail(pair[1], k)
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)

    def kl(z: torch.Tensor) -> torch.Tensor:
        return anchored_kl(torch.log_softmax(z, -1).gather(-1, ids), top, tail)

    assert torch.autograd.gradcheck(kl, (logits,))


def test_row_21_equal_distributions_have_no_distance_and_no_gradient() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1), requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    ids, top, tail = top_and_tail(logp.detach(), 5)
    kl = anchored_kl(logp.gather(-1, ids), top, tail)
    assert kl.abs().max().item() < 1e-6
    assert gradient(kl.sum(), logits).abs().max().item() < 1e-6


def test_row_21_a_tail_lost_to_rounding_stays_finite() -> None:
    logits = torch.tensor([[40.0, 0.0, -5.0], [0.0, 40.0, 1.0]], requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    kl = anchored_kl(logp[:, :1], torch.tensor([[0.0], [-0.1]]), torch.tensor([-200.0, -2.35]))
    assert kl.isfinite().all()
    assert gradient(kl.sum(), logits).isfinite().all()


def test_log1mexp_keeps_its_digits_at_both_ends() -> None:
    x = torch.tensor([-1e-10, -1e-3, -math.log(2), -5.0, -50.0], dtype=torch.float64)
    expected = [math.log(-math.expm1(v)) if v > -0.7 else math.log1p(-math.exp(v)) for v in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-14)


def test_row_21_the_other_direction_is_kl_of_anchor_to_policy() -> None:
    torch.manual_seed(4)
    logp, logq = (torch.log_softmax(torch.randn(5, 7), -1) for _ in range(2))
    top, ids = logq.topk(7, -1)
    exact = (logq.exp() * (logq - logp)).sum(-1)
    whole = anchored_kl(logp.gather(-1, ids), top, torch.full((5,), -torch.inf), "reference_to_policy")
    assert torch.allclose(whole, exact, atol=1e-6)
    top, ids = logq.topk(3, -1)
    tail = torch.log1p(-top.exp().sum(-1))
    part = anchored_kl(logp.gather(-1, ids), top, tail, "reference_to_policy")
    assert bool((part <= exact + 1e-6).all())
    assert bool((part >= -1e-6).all())
