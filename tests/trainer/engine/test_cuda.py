"""Engines on a GPU: the CPU's arithmetic, tiers bit for bit, whole steps, adapters, the 8-bit reference, ranks, the sampler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.trainer.engine import test_sharded
from tests.trainer.memory.kit import V, loss_of, make_model, make_works
from trainer.config.load import lay_over
from trainer.config.schema import Train
from trainer.engine import stateless
from trainer.engine.build import boundary_device, build_stateless, place_reference, place_weights
from trainer.engine.port import Engine, Term, TokenScores
from trainer.engine.stateless import StatelessEngine
from trainer.learn.logprobs import TokenScorer
from trainer.learn.plain import PlainEngine
from trainer.learn.tiered import TieredAdapterEngine
from trainer.memory.device import DeviceSource
from trainer.memory.int8 import logprob_error
from trainer.memory.source import MemorySource
from trainer.policy.load import load_model
from trainer.policy.policy import build_policy
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Request, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
TRAIN = {
    "method": "full",
    "optimizer": {"kind": "stateless", "rule": "rms", "learning_rate": 1e-3, "max_grad_norm": 1e9},
    "heartbeat": {"factor": 0},
    "stages": [{"steps": 5}],
}
Bases = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def _same_order_of_sums() -> Iterator[None]:
    """Fused attention adds up its gradients in any order on a GPU; here bits are compared."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Random models as directories, by kind and type."""

    def made(kind: str, dtype: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / "bases" / f"{kind}-{dtype}"
        if not directory.exists():
            make_model(kind, getattr(torch, dtype)).save_pretrained(directory)
        return directory

    return made


def train_of(difference: dict[str, Any] | None = None) -> Train:
    return Train.model_validate_json(json.dumps(lay_over(TRAIN, difference or {})))


def engine_on(
    device: str, bases: Bases, run: Path, difference: dict[str, Any], kind: str = "llama", dtype: str = "float32"
) -> StatelessEngine:
    train = train_of(difference)
    _, residency = place_weights(bases(kind, dtype), dtype, device, train, run)
    return build_stateless(residency, train, 7)


def terms_on(device: str, entropy: bool = False) -> list[Term]:
    works = make_works(entropy=entropy, device=device)
    return [Term(work, partial(loss_of, index)) for index, work in enumerate(works)]


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: flat.detach().to("cpu", copy=True) for name, flat in engine.weights().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def alike(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> float:
    """Return the share of elements that are equal but for rounding; a sign of a gradient near 0 may come out either way."""
    return float(torch.isclose(one.float(), other.float(), rtol=1e-4, atol=tolerance).double().mean())


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("llama", rule) for rule in ("sgd", "sign", "rms", "sinkhorn")]
    + [(kind, "rms") for kind in ("llama_tied", "gemma3", "qwen3_moe", "deepseek_v3")],
)
def test_every_rule_moves_weights_as_a_cpu_does(kind: str, rule: str, bases: Bases, tmp_path: Path) -> None:
    optimizer = {"rule": rule, "clipping": "two_pass" if rule == "sgd" else "per_layer"}
    here = engine_on(DEVICE, bases, tmp_path, {"optimizer": optimizer}, kind)
    there = engine_on("cpu", bases, tmp_path, {"optimizer": optimizer}, kind)
    rate = 1e-2 if rule == "sgd" else 1e-3
    for number in range(2):
        one = here.step(terms_on(DEVICE, entropy=True), rate, number)
        other = there.step(terms_on("cpu", entropy=True), rate, number)
        assert one.applied
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.norm == pytest.approx(other.norm, rel=1e-3)
    moved = here.weights()
    assert all(flat.device.type == DEVICE for flat in moved.values())
    found, expected = weights(here), weights(there)
    assert found.keys() == expected.keys()
    assert min(alike(found[name], expected[name]) for name in expected) > 0.99


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "sign", "rms", "sinkhorn"])
def test_bfloat16_weights_take_the_whole_step(rule: str, split: bool, bases: Bases, tmp_path: Path) -> None:
    difference = {"optimizer": {"rule": rule}, "memory": {"split": split}}
    here = engine_on(DEVICE, bases, tmp_path, difference, dtype="bfloat16")
    there = engine_on("cpu", bases, tmp_path, difference, dtype="bfloat16")
    start, rate = weights(here), 1e-2 if rule == "sgd" else 1e-4
    outcome, expected = here.step(terms_on(DEVICE), rate, 0), there.step(terms_on("cpu"), rate, 0)
    assert outcome.loss == pytest.approx(expected.loss, rel=5e-2), "the CPU computes in float32"
    assert outcome.metrics["update/relative"] == pytest.approx(expected.metrics["update/relative"], rel=5e-2)
    assert outcome.metrics["update/realised_fraction"] == pytest.approx(1.0, abs=1e-3 if split else 0.2)
    changed = sum(int((weights(here)[name] != flat).sum()) for name, flat in start.items())
    assert changed > 0
    again = engine_on(DEVICE, bases, tmp_path, difference, dtype="bfloat16")
    again.step(terms_on(DEVICE), rate, 0)
    assert same(weights(here), weights(again)), "the same seed gives the same bits"


MEMORY: list[dict[str, Any]] = [
    {"source": source, "prefetch": prefetch, "split": split, "resident_layers": hot}
    for source in ("host", "disk")
    for prefetch, split, hot in ((0, False, 0), (1, True, 0), (2, False, 0), (2, True, 2))
]


@pytest.mark.parametrize("memory", MEMORY, ids=lambda m: "-".join(str(value) for value in m.values()))
def test_tiers_are_resident_weights_bit_for_bit(memory: dict[str, Any], bases: Bases, tmp_path: Path) -> None:
    tiered = engine_on(DEVICE, bases, tmp_path, {"memory": {"weights": "tiered", **memory}}, dtype="bfloat16")
    assert isinstance(tiered.residency.source, DeviceSource)
    inner = tiered.residency.source.inner
    if isinstance(inner, MemorySource):
        assert all(flat.is_pinned() for flat in inner.flats.values())
    resident = engine_on(DEVICE, bases, tmp_path, {"memory": {"split": memory["split"]}}, dtype="bfloat16")
    works = make_works(device=DEVICE)
    for number in range(3):
        for one, other in zip(tiered.score(works), resident.score(works), strict=True):
            assert torch.equal(one.logprobs_TK, other.logprobs_TK)
        assert tiered.step(terms_on(DEVICE), 1e-3, number).loss == resident.step(terms_on(DEVICE), 1e-3, number).loss
    assert same(weights(tiered), weights(resident))
    ids = works[0].input_ids_BS
    with torch.no_grad():
        found = [engine.residency.anatomy.model(input_ids=ids).logits for engine in (tiered, resident)]
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)  # the head's blocks are other products
    tiered.residency.source.shutdown()


@pytest.mark.parametrize("layer", ["head", "layers.2", "layers.0", "embedding", "outer"])
@pytest.mark.parametrize("where", ["resident", "host", "disk"])
def test_a_nan_leaves_every_weight_bit_equal(
    layer: str, where: str, bases: Bases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = {"weights": "resident"} if where == "resident" else {"weights": "tiered", "source": where, "resident_layers": 1}
    engine = engine_on(DEVICE, bases, tmp_path, {"memory": memory}, dtype="bfloat16")
    assert engine.step(terms_on(DEVICE), 1e-3, 0).applied
    before, real = weights(engine), stateless.Watch.passes
    scores = engine.score(make_works(device=DEVICE))

    def poisoned(self: Any, group: str, squares: Tensor) -> bool:
        return real(self, group, squares * (math.nan if group == layer else 1.0))

    monkeypatch.setattr(stateless.Watch, "passes", poisoned)
    outcome = engine.step(terms_on(DEVICE), 1e-3, 1)
    assert (outcome.applied, outcome.culprit) == (False, layer)
    assert same(before, weights(engine))
    for one, other in zip(engine.score(make_works(device=DEVICE)), scores, strict=True):
        assert torch.equal(one.logprobs_TK, other.logprobs_TK), "nor does the device hold what was undone"
    monkeypatch.undo()
    assert engine.step(terms_on(DEVICE), 1e-3, 1).applied, "and it goes on"
    engine.residency.source.shutdown()


def test_a_checkpoint_goes_on_to_the_same_bits(bases: Bases, tmp_path: Path) -> None:
    memory = {"memory": {"weights": "tiered", "source": "host"}}
    one, other, resumed = (engine_on(DEVICE, bases, tmp_path, memory, dtype="bfloat16") for _ in range(3))
    for number in range(4):
        one.step(terms_on(DEVICE), 1e-3, number)
    for number in range(2):
        other.step(terms_on(DEVICE), 1e-3, number)
    resumed.load(weights(other), {}, other.facts())
    for number in (2, 3):
        resumed.step(terms_on(DEVICE), 1e-3, number)
    assert same(weights(one), weights(resumed))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_hidden_states_may_wait_on_the_host(kind: str, bases: Bases, tmp_path: Path) -> None:
    here = engine_on(DEVICE, bases, tmp_path, {"memory": {"boundaries": "host"}}, kind)
    there = engine_on(DEVICE, bases, tmp_path, {}, kind)
    passage = here.schedule.forward(make_works(device=DEVICE))
    assert {hidden.device.type for row in passage.boundaries for hidden in row} == {"cpu"}
    for number in range(2):
        assert here.step(terms_on(DEVICE), 1e-3, number).loss == there.step(terms_on(DEVICE), 1e-3, number).loss
    assert same(weights(here), weights(there))


@pytest.mark.parametrize("where", ["resident", "host", "disk"])
def test_an_adapter_with_adamw_learns_as_on_a_cpu(where: str, bases: Bases, tmp_path: Path) -> None:
    difference: dict[str, Any] = {
        "method": "lora",
        "lora": {"rank": 4, "target_modules": ["q_proj", "o_proj", "gate_proj"], "dropout": 0.0},
        "optimizer": {"kind": "adamw", "rule": "rms", "learning_rate": 1e-2, "max_grad_norm": 1.0},
    }
    train = train_of(difference)
    plain = PlainEngine(build_policy(load_model(bases("llama", "float32")), train, 3), train)
    if where == "resident":
        policy = build_policy(load_model(bases("llama", "float32"), device=DEVICE), train, 3)
        engine: PlainEngine = PlainEngine(policy, train)
    else:
        train = train_of(lay_over(difference, {"memory": {"weights": "tiered", "source": where}}))
        model, residency = place_weights(bases("llama", "float32"), "float32", DEVICE, train, tmp_path)
        policy = build_policy(model, train, 3)
        engine = TieredAdapterEngine(policy, train, residency, boundary_device(train.memory))
    assert policy.device.type == DEVICE
    for number in range(4):
        one, other = engine.step(terms_on(DEVICE), 1e-2, number), plain.step(terms_on("cpu"), 1e-2, number)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.norm == pytest.approx(other.norm, rel=1e-3)
    found, expected = weights(engine), weights(plain)
    assert found.keys() == expected.keys()
    assert min(alike(found[name], expected[name], 1e-4) for name in expected) > 0.98
    assert all(value.device.type == DEVICE for name, value in engine.state().items() if "exp_avg" in name)


@pytest.mark.parametrize("where", ["resident", "host", "disk"])
def test_the_8_bit_reference_streams(where: str, bases: Bases, tmp_path: Path) -> None:
    memory = {"weights": "resident"} if where == "resident" else {"weights": "tiered", "source": where}
    for dtype, most in (("float32", 0.02), ("bfloat16", 0.06)):
        reference = place_reference(bases("llama", dtype), dtype, DEVICE, train_of({"memory": memory}), tmp_path)
        scorer = TokenScorer(load_model(bases("llama", dtype)), 1.0)
        with torch.no_grad():
            whole = [scorer.score(work.input_ids_BS, work.where_T, work.ids_TK) for work in make_works()]
        for _ in range(2):
            found = reference.score(make_works(device=DEVICE))
            error = logprob_error([TokenScores(each.logprobs_TK.cpu()) for each in found], whole)
            assert 0 < error < most
        reference.residency.source.shutdown()


@pytest.mark.parametrize(
    ("dtype", "memory"), [("float32", {}), ("bfloat16", {}), ("float32", {"weights": "tiered", "source": "host"})]
)
def test_sampled_log_probs_are_the_learners(dtype: str, memory: dict[str, Any], bases: Bases, tmp_path: Path) -> None:
    engine = engine_on(DEVICE, bases, tmp_path, {"memory": memory}, "qwen3", dtype)
    sampler = EmbeddedSampler(engine.residency.anatomy.model, slots=5, pad_token_id=0)
    requests = [Request(str(i), tuple(range(2, 5 + i)), 10 * i + j, j) for i in range(4) for j in range(3)]
    completions = sampler.generate(requests, SamplingParams(1.0, 12, (1,)))
    pairs = [(request.token_ids, completion.token_ids) for request, completion in zip(requests, completions, strict=True)]
    assert all(0 <= token < V for _, ids in pairs for token in ids)
    tolerance = 1e-3 if dtype == "float32" else 0.15
    for completion, again in zip(completions, sampler.score(pairs, 1.0), strict=True):
        assert completion.logprobs == pytest.approx(again, abs=tolerance)
    learner = engine.schedule.score(make_works(device=DEVICE))
    scorer = TokenScorer(engine.residency.anatomy.model, 1.0)
    with torch.no_grad():
        for work, scores in zip(make_works(device=DEVICE), learner, strict=True):
            expected = scorer.score(work.input_ids_BS, work.where_T, work.ids_TK).logprobs_TK
            torch.testing.assert_close(scores.logprobs_TK, expected, rtol=tolerance, atol=tolerance)
    assert sampler.generate(requests, SamplingParams(1.0, 12, (1,))) == completions or dtype == "bfloat16"


def test_one_rank_over_nccl_is_no_other_than_none(tmp_path: Path) -> None:
    found = test_sharded.run(1, tmp_path / "one", "llama", "float32", "rms", "per_layer", "", "nccl")
    losses, norms = test_sharded.alone("llama", "float32", "rms", "per_layer")
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    assert found["norms"] == pytest.approx(norms, rel=1e-3)
    for layer, ranks in found["skipped"].items():
        assert set(ranks) == {(False, layer, True)}


def test_two_ranks_on_one_device_over_gloo(tmp_path: Path) -> None:
    """NCCL takes one rank a device; gloo moves the same tensors through the host."""
    found = test_sharded.run(2, tmp_path / "two", "llama", "float32", "rms", "per_layer", "", "cuda-gloo")
    losses, _ = test_sharded.alone("llama", "float32", "rms", "per_layer")
    assert found["losses"] == pytest.approx(losses, rel=1e-4)
    for layer, ranks in found["skipped"].items():
        assert set(ranks) == {(False, layer, True)}
