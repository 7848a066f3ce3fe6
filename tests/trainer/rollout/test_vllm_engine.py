"""The real engine on the CPU: one server for the module, asked in every way in which the sampler uses it.

`make vllm-env` makes its environment; without it these tests are skipped. A server that runs already is taken instead
with TITHE_VLLM_URL, and its name of the backbone in TITHE_VLLM_BASE.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.anchors.scorer import Drawn, ServedScorer, Voice
from trainer.config import CampaignConfig, validate
from trainer.errors import MismatchError
from trainer.policy.forward import completion_logprobs
from trainer.policy.load import save_model
from trainer.policy.lora import adapter_off, save_adapter
from trainer.policy.policy import Policy, build_policy
from trainer.policy.tokenizer import character_tokenizer
from trainer.policy.versions import PolicyStore
from trainer.rollout.follower import Follower
from trainer.rollout.probe import Probe
from trainer.rollout.quantised import write_quantised
from trainer.rollout.sync_choice import choose, measure_both, table
from trainer.rollout.vllm import Mode, VllmSampler
from trainer.rollout.vllm_http import Server
from trainer.rollout.vllm_server import VllmServer
from trainer.types import Completion, Request, SamplingParams

PYTHON = Path(__file__).resolve().parents[3] / ".venv-vllm" / "bin" / "python"
GIVEN = os.environ.get("TITHE_VLLM_URL")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists() and not GIVEN, reason="vLLM's environment is not there (make vllm-env)"),
    pytest.mark.timeout(1500),
]

EOS, VOCABULARY, DEADLINE = 1, 20, 600.0
PARAMS = SamplingParams(0.7, 8, (EOS,))
REQUESTS = [Request(f"p{i}", (2 + i % 15, 5, 9), 100 + i, i) for i in range(24)]
SEQUENCES = tuple(((2 + i, 5, 9), (3, 4 + i, 7, 1)) for i in range(6))
CONFIG: CampaignConfig = validate(
    {
        "campaign": {"name": "vllm"},
        "prepare": {"sources": [{"source": "jsonl:nowhere"}]},
        "base": {"source": "scratch"},
        "train": {
            "method": "lora",
            "schedule": "async",
            "lora": {"rank": 4, "alpha": 8},
            "optimizer": {"learning_rate": 1e-3},
            "sampler": {"kind": "vllm", "slots": 32, "vllm": {"environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}}},
            "sync": {"mode": "auto"},
            "stages": [{"steps": 1}],
            "watchdog": {"start_seconds": 1500.0},
        },
    }
)


def base_model() -> LlamaForCausalLM:
    """vLLM's attention on a CPU knows head sizes that are multiples of 32."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=EOS, pad_token_id=EOS, bos_token_id=None))


@dataclass
class Engine:
    base: Path
    url: str
    model: str
    closers: list[Callable[[], None]] = field(default_factory=list)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("engine")
    base = root / "base"
    save_model(base_model(), character_tokenizer("0123456789+="), base)
    if GIVEN:
        yield Engine(base, GIVEN, os.environ["TITHE_VLLM_BASE"])
        return
    server = VllmServer(CONFIG, base, root, 48)
    try:
        server.wait()
        yield Engine(base, server.url, server.name)
    finally:
        server.close()


class Run:
    """A learner with its policies, and a sampler on the engine that follows it."""

    def __init__(self, engine: Engine, root: Path, name: str, urls: list[str] | None = None, tolerance: float = 1e-3):
        self.learner: Policy = build_policy(base_model(), CONFIG.train, seed=3)
        self.store = PolicyStore(root / "policies", keep=3)
        rows = [tuple(tuple(row) for row in self.says(temperature)) for temperature in (0.7, 1.0)]
        Probe(SEQUENCES, 0.7, rows[0], rows[1]).write(root / "policies" / "probe.json")
        servers = [Server(url, DEADLINE) for url in urls or [engine.url]]
        where = (self.store, engine.base, engine.model, "adapter", 8, DEADLINE, root / "merged")
        self.sampler = VllmSampler(servers, *where, namespace=name, life=secrets.token_hex(3), vocabulary=VOCABULARY)
        self.follower = Follower(self.sampler, self.store, tolerance)
        self.version = 0

    def says(self, temperature: float, sequences: Any = SEQUENCES) -> list[list[float]]:
        return completion_logprobs(self.learner.model, sequences, temperature, EOS)

    def learn(self, size: float = 0.05) -> None:
        """Move the adapter and hand it over."""
        self.version += 8
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.learner.trainable.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
        self.store.publish(self.learner, self.version, self.version, self.says(0.7), self.says(1.0))

    def check(self, given: list[Completion]) -> None:
        """The completions' log-probs are those that the learner's weights give the same tokens."""
        assert [(c.prompt_id, c.sample_index) for c in given] == [(r.prompt_id, r.sample_index) for r in REQUESTS]
        assert {completion.policy_version for completion in given} == {self.version}
        assert all((c.finish_reason == "stop") == (c.token_ids[-1] == EOS) for c in given)
        assert all(len(c.token_ids) == 8 for c in given if c.finish_reason == "length")
        sequences = [(request.token_ids, c.token_ids) for request, c in zip(REQUESTS, given, strict=True)]
        expected = self.says(0.7, sequences)
        apart = [abs(a - b) for c, row in zip(given, expected, strict=True) for a, b in zip(c.logprobs, row, strict=True)]
        assert max(apart) < 1e-3, json.dumps(apart)

    def close(self) -> None:
        self.sampler.switch("adapter")
        self.sampler.close()


@pytest.fixture
def make_run(engine: Engine, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(name: str = "one", **options: Any) -> Run:
        made.append(Run(engine, tmp_path / name, name, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()


def adapters(engine: Engine) -> list[str]:
    return [model["id"] for model in Server(engine.url, DEADLINE).models() if model.get("parent")]


@pytest.mark.parametrize("mode", ["adapter", "merge"])
def test_sampled_log_probs_are_the_learners_at_every_version(engine: Engine, make_run: Callable[..., Run], mode: Mode) -> None:
    run = make_run()
    run.sampler.switch(mode)
    seen = set()
    for _ in range(3):
        run.learn()
        assert run.follower.follow()
        assert run.follower.mismatch < 1e-4
        given = run.sampler.generate(REQUESTS, PARAMS)
        run.check(given)
        seen.add(tuple(c.token_ids for c in given))
    assert len(seen) == 3  # the versions differ
    assert adapters(engine) == ([run.sampler.name] if mode == "adapter" else [])
    reasons = {c.finish_reason for c in run.sampler.generate(REQUESTS, PARAMS)}
    assert "length" in reasons
    if mode == "adapter":  # the backbone is still there: it scores anchors
        drawn = [Drawn(p, c, (0.0,) * len(c)) for p, c in SEQUENCES]
        base = Voice(run.learner.model, lambda: adapter_off(run.learner.model))
        mine, theirs = base.score(drawn, 5, 1.0), ServedScorer(run.sampler, base.vocabulary).score(drawn, 5, 1.0)
        for name in ("logprobs", "top_logprobs"):
            assert torch.allclose(mine[name], theirs[name], atol=1e-3), name


def test_a_wrong_adapter_does_not_pass_the_probe(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.learn()
    assert run.follower.follow()
    shutil.copytree(run.store.directory(8), run.store.directory(16))  # as if version 16 had never reached the disk
    scores = run.store.directory(16) / "probe.json"
    for parameter in run.learner.trainable.values():
        parameter.data.mul_(1.5)
    scores.write_text(json.dumps({"logprobs": run.says(0.7), "untempered": run.says(1.0)}))
    with pytest.raises(
        MismatchError, match=r"policy version 16: .* those of version 8: the new weights never reached the engine"
    ):
        run.follower.load(16)
    other = build_policy(base_model(), CONFIG.train, seed=4)
    for parameter in other.trainable.values():
        parameter.data.add_(0.1)
    assert other.adapter is not None
    run.learn()
    for file in run.store.directory(run.version).glob("adapter*"):
        file.unlink()
    save_adapter(other.adapter, run.store.directory(run.version))
    run.follower.forget()
    with pytest.raises(MismatchError, match="Likely causes: another base"):
        run.follower.load(run.version)


class Relay:
    """A second address of the engine, which can be cut in the midst of everything."""

    def __init__(self, engine: Engine):
        self.target = engine.url.rpartition("/")[2].split(":")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.ends: list[socket.socket] = []
        self.num_answers = 0
        self.cut_after = 0  # answers; 0 never
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection((self.target[0], int(self.target[1])))
                self.ends += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink, source is far), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_answer and b"token_logprobs" in data:
                    self.num_answers += 1
                    if self.num_answers == self.cut_after:
                        self.cut()
                        return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_requests_of_a_server_that_is_cut_off_go_to_another(engine: Engine, make_run: Callable[..., Run]) -> None:
    relay = Relay(engine)
    run = make_run(urls=[relay.url, engine.url])
    run.learn()
    assert run.follower.follow()
    assert set(run.follower.looks) == {relay.url, engine.url}  # every server is probed
    relay.cut_after = 3
    run.check(run.sampler.generate(REQUESTS, PARAMS))
    assert run.sampler.redispatched >= 1
    assert not run.sampler.servers[0].well


def test_two_campaigns_share_the_engine_and_keep_apart(engine: Engine, make_run: Callable[..., Run]) -> None:
    runs = [make_run(name) for name in ("first", "second")]
    runs[1].learn(0.2)
    for _ in range(2):
        for run in runs:
            run.learn()
            assert run.follower.follow()
        assert sorted(adapters(engine)) == [run.sampler.name for run in runs]
        assert [run.sampler.name[:5] for run in runs] == ["first", "secon"]
        ends: list[str] = []

        def sample(run: Run, ends: list[str] = ends) -> list[Completion]:
            given = run.sampler.generate(REQUESTS, PARAMS)
            ends.append(run.sampler.namespace)
            return given

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(sample, run) for run in runs for _ in range(3)]
        for index, future in enumerate(futures):
            runs[index // 3].check(future.result())
        assert set(ends[:4]) == {"first", "second"}  # neither waits until the other has had everything
    runs[0].close()
    assert adapters(engine) == [runs[1].sampler.name]


def test_both_ways_into_the_engine_are_measured_and_one_is_taken(engine: Engine, make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.learn()
    trials = measure_both(run.follower, run.version, REQUESTS, PARAMS)
    print(table(trials, 1000.0))
    assert [trial.mode for trial in trials] == ["adapter", "merge"]
    for trial in trials:
        assert trial.problem == ""
        assert trial.mismatch < 1e-3
        assert trial.sync_seconds > 0
        assert trial.tokens_per_second > 0
    run.sampler.switch(choose(trials, 1000.0).mode)
    assert run.follower.follow()
    run.check(run.sampler.generate(REQUESTS, PARAMS))


def test_the_mismatch_decides_whether_an_int8_backbone_may_be_used(
    engine: Engine, make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run()
    run.learn()
    copy = write_quantised(engine.base, tmp_path / "int8", "int8", round_only=True)
    run.sampler._reload(run.sampler.servers[0], copy)
    with pytest.raises(MismatchError, match="quantization of the backbone"):
        run.follower.follow()
    run.follower.tolerance = 0.2  # a random model is far more sensitive than a trained one
    run.follower.forget()
    run.follower.load(run.version)
    assert 1e-3 < run.follower.mismatch < 0.2
    run.learn(0.01)  # a small step on a coarse backbone is not taken for a stale policy
    assert run.follower.follow()
