"""A reference behind vLLM and one with 8-bit weights give the anchors that the base gives, as far as they can."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.policy.test_versions import tiny_policy
from tests.trainer.rollout.vllm_fake import FakeVllm
from trainer.anchors.scorer import Drawn, ServedScorer, Voice
from trainer.errors import ModelError
from trainer.memory.int8 import Int8Reference
from trainer.policy.lora import adapter_off
from trainer.policy.policy import Policy
from trainer.policy.versions import PolicyStore
from trainer.rollout.vllm import VllmSampler

DRAWN = [Drawn((2, 5), (7, 3, 1), (0.0,) * 3), Drawn((4,), (9,), (0.0,)), Drawn((3, 3, 8), (6, 6, 6, 2), (0.0,) * 4)]


class Served:
    def __init__(self, root: Path):
        self.policy: Policy = tiny_policy()
        self.vocabulary = Voice(self.policy.model).vocabulary
        self.server = FakeVllm(self.policy, PolicyStore(root, 2))
        self.sampler = VllmSampler([self.server.url], PolicyStore(root, 2), root, "base", "adapter", 3, 60.0, root / "merged")
        self.scorer = ServedScorer(self.sampler, self.vocabulary)
        self.voice = Voice(self.policy.model, lambda: adapter_off(self.policy.model))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.sampler.close()
    made.server.die()


def test_a_server_gives_the_tensors_of_the_model(served: Served) -> None:
    with torch.no_grad():
        for parameter in served.policy.trainable.values():
            parameter.add_(0.1)  # the reference is the backbone, whatever the adapter has learnt
    mine, theirs = (scorer.score(DRAWN, 4, 1.0) for scorer in (served.voice, served.scorer))
    assert list(mine) == list(theirs)
    assert torch.equal(mine["top_ids"], theirs["top_ids"])
    for name in ("logprobs", "top_logprobs", "tail_logprobs"):
        assert torch.allclose(mine[name], theirs[name], atol=1e-5), name
    assert len({path for path, _ in served.server.asked}) == 1
    assert {body["prompt_logprobs"] for _, body in served.server.asked} == {4}


def test_the_whole_vocabulary_leaves_no_tail(served: Served) -> None:
    served.server.max_logprobs = served.vocabulary
    tensors = served.scorer.score(DRAWN, served.vocabulary, 1.0)
    assert (tensors["tail_logprobs"] == -torch.inf).all()
    assert torch.allclose(tensors["top_logprobs"].logsumexp(-1), torch.zeros(8), atol=1e-5)


def test_a_server_that_tells_fewer_log_probs_is_named(served: Served) -> None:
    served.server.max_logprobs = 2
    with pytest.raises(ModelError, match="greater than max allowed: 2"):
        served.scorer.score(DRAWN, 4, 1.0)


def test_eight_bits_are_close_and_stream(served: Served) -> None:
    exact = served.voice.score(DRAWN, 4, 0.7)
    model = tiny_policy("full").model
    reference = Int8Reference(model, 0.7)
    reference.residency.whole_model()
    rough = Voice(reference.residency.anatomy.model).score(DRAWN, 4, 0.7)
    apart = (exact["logprobs"] - rough["logprobs"]).abs().mean()
    assert 0 < apart < 0.05
    assert torch.allclose(exact["top_logprobs"].exp().sum(-1) + exact["tail_logprobs"].exp(), torch.ones(8), atol=1e-5)
