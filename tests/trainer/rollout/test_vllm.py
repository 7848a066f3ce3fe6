"""The vLLM sampler: what it asks, what it makes of a dead server, and (marked vllm) parity with the real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.policy.test_versions import Pair, move, tiny_policy
from tests.trainer.rollout.vllm_fake import FakeVllm
from trainer.anchors.scorer import Drawn, ServedScorer, Voice
from trainer.config import validate
from trainer.config.load import lay_over
from trainer.errors import ModelError, StalledError
from trainer.policy.forward import completion_logprobs
from trainer.policy.lora import adapter_off
from trainer.rollout.embedded import EmbeddedSampler
from trainer.rollout.follower import Follower
from trainer.rollout.vllm import VllmSampler
from trainer.rollout.vllm_server import VllmServer, arguments, lora_rank
from trainer.types import Request, SamplingParams

PARAMS = SamplingParams(0.7, 6, (1,))
REQUESTS = [Request(f"p{i}", (2 + i % 15, 5, 9), 100 + i, i) for i in range(12)]
CONFIG: dict[str, Any] = {
    "campaign": {"name": "vllm"},
    "prepare": {"sources": [{"source": "jsonl:nowhere"}]},
    "base": {"source": "scratch"},
    "train": {
        "method": "lora",
        "schedule": "async",
        "lora": {"rank": 4, "alpha": 8},
        "optimizer": {"learning_rate": 1e-3},
        "sampler": {"kind": "vllm", "slots": 16, "vllm": {"environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}},
        "stages": [{"steps": 1}],
        "watchdog": {"start_seconds": 900.0},
    },
}


class Many:
    """Fake servers, a learner's policies, and a sampler over them."""

    def __init__(self, root: Path, num_servers: int = 1, deadline_seconds: float = 30.0, dies_at: int | None = None):
        self.pair = Pair(root, temperature=0.7)
        store = self.pair.store
        self.servers = [FakeVllm(tiny_policy(), store, dies_at if number == 0 else None) for number in range(num_servers)]
        urls = [server.url for server in self.servers]
        self.sampler = VllmSampler(urls, store, root, "base", "adapter", 2, deadline_seconds, root / "merged")
        self.follower = Follower(self.sampler, store, 1e-3)

    def close(self) -> None:
        self.sampler.close()
        for server in self.servers:
            server.server.server_close()


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Callable[..., Many]]:
    made: list[Many] = []

    def make(*args: Any, **options: Any) -> Many:
        made.append(Many(tmp_path, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_completions_are_those_of_the_policy_in_the_order_of_the_requests(many: Callable[..., Many]) -> None:
    one = many()
    move(one.pair.learner, 0.05, 1)
    one.pair.publish(3)
    assert one.follower.follow()
    assert one.follower.mismatch < 1e-5
    given = one.sampler.generate(REQUESTS, PARAMS)
    expected = EmbeddedSampler(one.pair.learner.model, 4, 1).generate(REQUESTS, PARAMS)
    assert [(c.prompt_id, c.sample_index, c.token_ids, c.finish_reason) for c in given] == [
        (c.prompt_id, c.sample_index, c.token_ids, c.finish_reason) for c in expected
    ]
    assert {completion.policy_version for completion in given} == {3}


def test_every_version_has_a_name_of_its_own_and_the_old_one_is_unloaded(many: Callable[..., Many]) -> None:
    one = many()
    for version in (0, 8, 16):
        one.pair.publish(version)
        one.follower.follow()
        move(one.pair.learner, 0.05, version)
    (server,) = one.servers
    assert server.names == ["v000016"]
    assert [body["lora_name"] for path, body in server.asked if path == "/v1/load_lora_adapter"] == [
        "v000000",
        "v000008",
        "v000016",
    ]


def test_a_dead_servers_requests_go_to_another(many: Callable[..., Many]) -> None:
    one = many(num_servers=2, dies_at=3)
    one.pair.publish(0)
    one.follower.follow()
    given = one.sampler.generate(REQUESTS, PARAMS)
    assert [completion.prompt_id for completion in given] == [request.prompt_id for request in REQUESTS]
    assert one.sampler.redispatched >= 1
    expected = EmbeddedSampler(one.pair.learner.model, 4, 1).generate(REQUESTS, PARAMS)
    assert [completion.token_ids for completion in given] == [completion.token_ids for completion in expected]


def test_when_no_server_is_well_the_wait_ends_with_its_name(many: Callable[..., Many]) -> None:
    one = many(deadline_seconds=0.5)
    one.pair.publish(0)
    one.follower.follow()
    one.servers[0].die()
    with pytest.raises(StalledError, match=r"vLLM \(http://127\.0\.0\.1:\d+\) was not well for 0 s"):
        one.sampler.generate(REQUESTS[:1], PARAMS)


def test_a_policy_that_the_server_cannot_load_is_named(many: Callable[..., Many]) -> None:
    one = many()
    with pytest.raises(ModelError, match="cannot load policy version 5"):
        one.sampler.load_policy(5)


def test_the_command_line_says_what_the_recipe_says(tmp_path: Path) -> None:
    vllm = {
        "kv_cache_dtype": "fp8",
        "kv_offload_bytes": 2**31,
        "prefix_caching": False,
        "arguments": {"--seed": "1", "--flag": ""},
    }
    config = validate(lay_over(CONFIG, {"train": {"sampler": {"vllm": vllm}}}))
    line = " ".join(arguments(config, tmp_path, 8123, 96))
    for part in ("--kv-cache-dtype fp8", "--kv-offloading-size 2", "--no-enable-prefix-caching", "--seed 1", "--max-lora-rank 8"):
        assert part in line
    assert "--logprobs-mode processed_logprobs" in line
    assert "--flag" in line.split()
    assert "--enable-lora" not in " ".join(
        arguments(validate(lay_over(CONFIG, {"train": {"sync": {"mode": "merge"}}})), tmp_path, 1, 96)
    )
    assert [lora_rank(rank) for rank in (1, 8, 9, 33, 512)] == [8, 8, 16, 64, 512]


PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM's environment is not there (make vllm-env)")
@pytest.mark.parametrize("mode", ["adapter", "merge"])
def test_the_real_engine_gives_the_learners_log_probs(tmp_path: Path, mode: str) -> None:
    """Two versions through the probe, and sampled completions whose log-probs the learner finds again within 1e-3."""
    from trainer.policy.load import save_model
    from trainer.policy.tokenizer import character_tokenizer

    pair = Pair(tmp_path, temperature=0.7)
    tokenizer = character_tokenizer("0123456789+=")
    save_model(tiny_policy("full").model, tokenizer, tmp_path / "base")
    config = validate(lay_over(CONFIG, {"train": {"sync": {"mode": mode}}}))
    server = VllmServer(config, tmp_path / "base", tmp_path, 48)
    try:
        server.wait()
        model = str((tmp_path / "base").resolve())
        sampler = VllmSampler(
            [server.url], pair.store, tmp_path / "base", model, config.train.sync.mode, 4, 300.0, tmp_path / "merged"
        )
        follower = Follower(sampler, pair.store, 1e-3)
        for version in (0, 8):
            pair.publish(version)
            assert follower.follow()
            given = sampler.generate(REQUESTS, PARAMS)
            sequences = [(request.token_ids, c.token_ids) for request, c in zip(REQUESTS, given, strict=True)]
            expected = completion_logprobs(pair.learner.model, sequences, PARAMS.temperature, 1)
            apart = [abs(a - b) for c, row in zip(given, expected, strict=True) for a, b in zip(c.logprobs, row, strict=True)]
            assert max(apart) < 1e-3, json.dumps(apart)
            move(pair.learner, 0.05, 1)
        if mode == "adapter":  # the backbone is still there: it scores anchors
            drawn = [Drawn(p, c, (0.0,) * len(c)) for p, c in sequences]
            base = Voice(pair.learner.model, lambda: adapter_off(pair.learner.model))
            mine, theirs = base.score(drawn, 5, 1.0), ServedScorer(sampler, base.vocabulary).score(drawn, 5, 1.0)
            for name in ("logprobs", "top_logprobs"):
                assert torch.allclose(mine[name], theirs[name], atol=1e-3), name
        sampler.close()
    finally:
        server.close()
