"""The vLLM sampler against a stand-in: what it asks, and what it makes of servers that die, freeze, lie or come back.

The real engine: test_vllm_engine.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.policy.test_versions import Pair, move, tiny_policy
from tests.trainer.rollout.vllm_fake import FakeVllm, Mischief, Raw
from trainer.config import validate
from trainer.config.load import lay_over
from trainer.errors import ConfigError, MismatchError, ModelError, StalledError
from trainer.metrics import RunWriter
from trainer.policy.versions import PolicyStore
from trainer.rollout.embedded import EmbeddedSampler
from trainer.rollout.follower import Follower
from trainer.rollout.vllm import VllmSampler, introduce
from trainer.rollout.vllm_http import Garbled, Server, read_answer
from trainer.rollout.vllm_server import VllmServer, arguments, free_port, lora_rank
from trainer.schedule.sampler_process import Assignment
from trainer.schedule.sampling import quantised_backbone
from trainer.types import Completion, Request, SamplingParams

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

    def __init__(
        self, root: Path, num_servers: int = 1, deadline_seconds: float = 30.0, dies_at: int | None = None, name: str = "run"
    ):
        self.pair = Pair(root, temperature=0.7)
        store = self.pair.store
        self.servers = [FakeVllm(tiny_policy(), store, dies_at if number == 0 else None) for number in range(num_servers)]
        self.sampler = self.sampler_over(root, name, deadline_seconds)
        self.follower = Follower(self.sampler, store, 1e-3)
        self.reasons: list[str] = []
        self.sampler.event = lambda kind, reason: self.reasons.append(reason)

    def sampler_over(self, root: Path, name: str, deadline_seconds: float) -> VllmSampler:
        servers = [Server(server.url, deadline_seconds) for server in self.servers]
        merged = root / "merged"
        return VllmSampler(
            servers, self.pair.store, root, "base", "adapter", 2, deadline_seconds, merged, namespace=name, vocabulary=20
        )

    def hurry(self, seconds: float) -> None:
        """Have the waits end soon from now on; everything before may be as slow as the machine."""
        self.sampler.deadline_seconds = seconds
        for server in self.sampler.servers:
            server.timeout_seconds = seconds

    def expected(self) -> list[Completion]:
        return EmbeddedSampler(self.pair.learner.model, 4, 1).generate(REQUESTS, PARAMS)

    def close(self) -> None:
        self.sampler.close()
        for server in self.servers:
            server.die()


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Callable[..., Many]]:
    made: list[Many] = []

    def make(*args: Any, **options: Any) -> Many:
        made.append(Many(tmp_path, *args, **options))
        made[-1].pair.publish(0)
        return made[-1]

    yield make
    for one in made:
        one.close()


def ids_of(completions: list[Completion]) -> list[Any]:
    return [(c.prompt_id, c.sample_index, c.token_ids, c.finish_reason) for c in completions]


def test_completions_are_those_of_the_policy_in_the_order_of_the_requests(many: Callable[..., Many]) -> None:
    one = many()
    move(one.pair.learner, 0.05, 1)
    one.pair.publish(3)
    assert one.follower.follow()
    assert one.follower.mismatch < 1e-5
    given = one.sampler.generate(REQUESTS, PARAMS)
    assert ids_of(given) == ids_of(one.expected())
    assert {completion.policy_version for completion in given} == {3}


def test_every_version_has_a_name_of_its_own_and_the_old_one_is_unloaded(many: Callable[..., Many]) -> None:
    one = many()
    (server,) = one.servers
    server.names["run-v000777"] = Path("left by an earlier life of this sampler")
    server.names["other-v000001"] = Path("of another run")
    for version in (0, 8, 16):
        one.pair.publish(version)
        one.follower.follow()
        move(one.pair.learner, 0.05, version)
    assert sorted(server.names) == ["other-v000001", "run-v000016"]
    loads = [body["lora_name"] for path, body in server.asked if path == "/v1/load_lora_adapter"]
    assert loads == ["run-v000000", "run-v000008", "run-v000016"]
    one.sampler.close()
    assert sorted(server.names) == ["other-v000001"]


def test_a_dead_servers_requests_go_to_another(many: Callable[..., Many]) -> None:
    one = many(num_servers=2, dies_at=3)
    one.follower.follow()
    given = one.sampler.generate(REQUESTS, PARAMS)
    assert one.sampler.redispatched >= 1
    assert ids_of(given) == ids_of(one.expected())
    assert any(one.servers[0].url in reason for reason in one.reasons)


def good(path: str, body: dict[str, Any], number: int) -> None:
    return None


def in_place_of_completions(said: Raw | str) -> Mischief:
    return lambda path, body, number: said if number else None


def changed(change: Callable[[dict[str, Any]], Any]) -> Raw:
    choice = {"token_ids": [3, 1], "logprobs": {"token_logprobs": [-1.0, -0.5]}, "finish_reason": "stop"}
    change(choice)
    return Raw(json.dumps({"choices": [choice]}).encode())


NONSENSE = {
    "status 500": Raw(b"EngineCore encountered an issue", 500),
    "status 429": Raw(b"too many requests", 429),
    "no JSON": Raw(b"<html>bad gateway</html>"),
    "nothing": Raw(b""),
    "half an answer": Raw(b'{"choices": [{"token_ids"', promised=4000),
    "a closed connection": "close",
    "no choices": Raw(b'{"choices": []}'),
    "ids of a larger vocabulary": changed(lambda choice: choice.update(token_ids=[3, 999])),
    "negative ids": changed(lambda choice: choice.update(token_ids=[-3, 1])),
    "text for ids": changed(lambda choice: choice.update(token_ids=["3", "1"])),
    "too many tokens": changed(lambda choice: choice.update(token_ids=[3] * 7, logprobs={"token_logprobs": [-1.0] * 7})),
    "a log-prob too few": changed(lambda choice: choice.update(logprobs={"token_logprobs": [-1.0]})),
    "log-probs that are no numbers": changed(lambda choice: choice.update(logprobs={"token_logprobs": [float("nan"), -1.0]})),
    "probabilities": changed(lambda choice: choice.update(logprobs={"token_logprobs": [0.5, 0.5]})),
    "an end that is none": changed(lambda choice: choice.update(token_ids=[3, 4])),
    "an end before the cap": changed(lambda choice: choice.update(token_ids=[3, 4], finish_reason="length")),
    "an aborted request": changed(lambda choice: choice.update(finish_reason="abort")),
    "an answer to another prompt": changed(lambda choice: choice.update(prompt_token_ids=[7, 7])),
}


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_of_one_server_is_answered_by_another(many: Callable[..., Many], said: Raw | str) -> None:
    one = many(num_servers=2)
    one.follower.follow()
    one.servers[0].mischief = in_place_of_completions(said)
    given = one.sampler.generate(REQUESTS, PARAMS)
    assert ids_of(given) == ids_of(one.expected())
    assert one.sampler.redispatched >= 1


def test_nonsense_of_the_only_server_ends_with_its_name_and_its_words(many: Callable[..., Many]) -> None:
    one = many()
    one.follower.follow()
    one.hurry(2.0)
    one.servers[0].mischief = in_place_of_completions(Raw(b"<html>bad gateway</html>"))
    with pytest.raises(StalledError, match=rf"{one.servers[0].url}.*no completion with token ids"):
        one.sampler.generate(REQUESTS[:1], PARAMS)


def test_a_server_that_hangs_loses_its_requests_to_another(many: Callable[..., Many]) -> None:
    one = many(num_servers=2, deadline_seconds=24.0)
    one.follower.follow()
    hung = one.servers[0]
    hung.is_ill = True
    hung.mischief = in_place_of_completions("hang")
    seen: list[tuple[int, int]] = []
    one.sampler.progress = lambda finished, total: seen.append((finished, total))
    given = one.sampler.generate(REQUESTS, PARAMS)
    assert ids_of(given) == ids_of(one.expected())
    assert seen[-1] == (12, 12)
    assert any("did not answer for" in reason for reason in one.reasons)


def test_the_only_server_hangs_and_the_wait_ends(many: Callable[..., Many]) -> None:
    one = many()
    one.follower.follow()
    one.hurry(1.0)
    one.servers[0].mischief = in_place_of_completions("hang")
    with pytest.raises(StalledError, match=r"gave no usable answer|was not well"):
        one.sampler.generate(REQUESTS[:1], PARAMS)


def test_when_no_server_is_well_the_wait_ends_with_its_name(many: Callable[..., Many]) -> None:
    one = many()
    one.follower.follow()
    one.hurry(0.5)
    one.servers[0].die()
    with pytest.raises(StalledError, match=r"vLLM \(http://127\.0\.0\.1:\d+\) was not well for 0 s"):
        one.sampler.generate(REQUESTS[:1], PARAMS)


def test_a_server_that_forgot_the_adapter_gets_it_again(many: Callable[..., Many]) -> None:
    one = many()
    one.follower.follow()
    one.servers[0].names.clear()  # as after a quick restart that nobody saw
    assert ids_of(one.sampler.generate(REQUESTS, PARAMS)) == ids_of(one.expected())
    assert list(one.servers[0].names) == ["run-v000000"]


def test_a_server_that_comes_back_gets_the_newest_policy_and_the_probe_before_its_first_request(
    many: Callable[..., Many],
) -> None:
    one = many(num_servers=2)
    one.follower.follow()
    port = one.servers[0].port
    one.servers[0].die()
    one.sampler.generate(REQUESTS, PARAMS)
    move(one.pair.learner, 0.05, 1)
    one.pair.publish(8)
    one.follower.follow()
    one.servers[0] = FakeVllm(tiny_policy(), one.pair.store, port=port)
    end = time.monotonic() + 120
    while not one.servers[0].num_completions:
        assert time.monotonic() < end
        assert ids_of(one.sampler.generate(REQUESTS, PARAMS)) == ids_of(one.expected())
    asked = [path for path, body in one.servers[0].asked if path != "/v1/completions" or "prompt_logprobs" in body]
    assert asked[:2] == ["/v1/load_lora_adapter", "/v1/completions"]
    assert list(one.servers[0].names) == ["run-v000008"]


def test_a_server_that_comes_back_with_another_model_stops_the_sampler(many: Callable[..., Many]) -> None:
    one = many(num_servers=2)
    one.follower.follow()
    port = one.servers[0].port
    one.servers[0].die()
    one.sampler.generate(REQUESTS, PARAMS)
    one.servers[0] = FakeVllm(tiny_policy(seed=5), one.pair.store, port=port)

    def go_on() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            one.sampler.generate(REQUESTS, PARAMS)

    with pytest.raises(MismatchError, match=rf"127\.0\.0\.1:{port} gives .* another base"):
        go_on()


def test_every_server_is_probed_not_only_one(many: Callable[..., Many]) -> None:
    one = many(num_servers=2)
    one.servers[1].policy = tiny_policy(seed=5)
    with pytest.raises(MismatchError, match=one.servers[1].url):
        one.follower.follow()


def test_a_server_that_stays_at_an_old_version_is_noticed(many: Callable[..., Many]) -> None:
    one = many(num_servers=2)
    one.follower.follow()
    stuck = one.servers[1]
    old = PolicyStore.directory(one.pair.store, 0)
    act = stuck.act

    def ignore(path: str, body: dict[str, Any]) -> Any:
        answer = act(path, body)
        stuck.names = dict.fromkeys(stuck.names, old)
        return answer

    stuck.act = ignore  # type: ignore[method-assign]
    move(one.pair.learner, 0.002, 1)  # within the tolerance
    one.pair.publish(8)
    with pytest.raises(MismatchError, match=rf"{stuck.url} .* those of version 0: the new weights never reached the engine"):
        one.follower.follow()


def at_once(samplers: dict[str, VllmSampler]) -> dict[str, list[Completion]]:
    """Return the completions of several samplers that sample at the same time."""
    with ThreadPoolExecutor(len(samplers)) as pool:
        futures = {name: pool.submit(sampler.generate, REQUESTS, PARAMS) for name, sampler in samplers.items()}
        return {name: future.result() for name, future in futures.items()}


def test_samplers_of_two_runs_share_servers_and_keep_apart(many: Callable[..., Many], tmp_path: Path) -> None:
    one, root = many(num_servers=2, name="first"), tmp_path / "other"
    other = Pair(root, temperature=0.7)
    move(other.learner, 0.3, 4)
    other.publish(0)
    sampler = VllmSampler(
        [Server(server.url, 30.0) for server in one.servers],
        other.store, root, "base", "adapter", 2, 30.0, root / "merged", namespace="second", vocabulary=20,
    )  # fmt: skip
    follower = Follower(sampler, other.store, 1e-3)
    try:
        for version in (0, 8):
            one.pair.publish(version)
            other.publish(version)
            assert one.follower.follow()
            assert follower.follow()
            given = at_once({"first": one.sampler, "second": sampler})
            assert ids_of(given["first"]) == ids_of(one.expected())
            assert ids_of(given["second"]) == ids_of(EmbeddedSampler(other.learner.model, 4, 1).generate(REQUESTS, PARAMS))
            assert ids_of(given["first"]) != ids_of(given["second"])
            assert all(sorted(server.names) == [f"first-v{version:06d}", f"second-v{version:06d}"] for server in one.servers)
            move(one.pair.learner, 0.05, version)
            move(other.learner, 0.05, version + 1)
        one.sampler.switch("merge")
        one.sampler.mode, one.follower.version = "merge", -1
        one.sampler._write_merged = lambda version: None  # type: ignore[method-assign]
        with pytest.raises(ModelError, match=r"has adapters of others \(second-v000008\)"):
            one.follower.follow()
    finally:
        sampler.close()


def test_a_policy_that_the_server_cannot_load_is_named(many: Callable[..., Many]) -> None:
    one = many()
    with pytest.raises(ModelError, match=r"cannot load policy version 5.*VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        one.sampler.load_policy(5)


def test_a_request_that_the_server_refuses_is_a_mistake_and_named(many: Callable[..., Many]) -> None:
    one = many()
    one.follower.follow()
    one.servers[0].mischief = in_place_of_completions(Raw(b"maximum context length is 64", 400))
    with pytest.raises(ModelError, match=r"refuses a request .*maximum context length"):
        one.sampler.generate(REQUESTS, PARAMS)


def test_servers_are_waited_for_and_asked_who_they_are(many: Callable[..., Many]) -> None:
    one, late = many(num_servers=2), Server("http://127.0.0.1:9", 1.0)
    servers = [Server(server.url, 1.0) for server in one.servers]
    one.servers[0].names["a"] = Path("an adapter is no backbone")
    assert introduce(servers, "", 5.0) == "base"
    with pytest.raises(StalledError, match=r"http://127\.0\.0\.1:9\) did not list its models for 0 s"):
        introduce([late], "", 0.2)
    with pytest.raises(ModelError, match=r"serves base, not mine; start it with the campaign's base"):
        introduce(servers, "mine", 5.0)
    one.servers[1].model = "another"
    with pytest.raises(ModelError, match="serves another, not base"):
        introduce(servers, "", 5.0)
    one.servers[1].mischief = lambda path, body, number: Raw(b"[1, 2]") if path == "/v1/models" else None
    with pytest.raises(StalledError, match="lists no models"):
        introduce(servers[1:], "", 0.2)
    assert introduce([servers[0], late], "", 0.4) == "base"  # the other may come later
    assert not late.well


def test_an_answer_says_why_it_ended_by_its_last_token() -> None:
    choice = {"token_ids": [3, 1], "logprobs": {"token_logprobs": [-1.0, -0.5]}, "finish_reason": "length"}
    assert read_answer({"choices": [choice]}, (2,), 2, (1,), 20).finish_reason == "stop"
    with pytest.raises(Garbled, match="no completion"):
        read_answer("", (2,), 2, (1,), 20)


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
    assert "--quantization fp8" in " ".join(arguments(config, tmp_path, 8123, 96, more={"--quantization": "fp8"}))
    for mode, with_adapters in (("merge", False), ("auto", True)):
        other = validate(lay_over(CONFIG, {"train": {"sync": {"mode": mode}}}))
        assert ("--enable-lora" in arguments(other, tmp_path, 1, 96)) == with_adapters
    assert [lora_rank(rank) for rank in (1, 8, 9, 33, 512)] == [8, 8, 16, 64, 512]


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ({"sampler": {"kind": "embedded", "quantization": "int8"}}, "sampler.quantization.*only vLLM computes"),
        (
            {"sampler": {"quantization": "fp8", "vllm": {"urls": ["http://a:1"]}}},
            "sampler.quantization.*have loaded their weights",
        ),
        ({"sampler": {"quantization": "int4"}, "sync": {"mode": "auto"}}, "sync.mode.*rounding a merged backbone"),
        ({"method": "full", "sync": {"mode": "auto"}}, "sync.mode.*a full policy is no adapter"),
    ],
)
def test_choices_that_make_no_sense_are_refused(difference: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(lay_over(CONFIG, {"train": difference}))


def test_fp8_on_a_cpu_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    tree = lay_over(CONFIG, {"train": {"sampler": {"quantization": "fp8"}}})
    said = "sampler.quantization.*vLLM's CPU engine has no fp8 matrices; set int8 or none"
    with pytest.raises(ConfigError, match=said):
        validate(lay_over(tree, {"machine": {"device": "cpu"}}))
    if not torch.cuda.is_available():  # `auto` is known only where the sampler runs
        assignment = Assignment("s0", str(tmp_path), "", "base", "prompts", 1, {})
        with pytest.raises(ConfigError, match=said):
            quantised_backbone(assignment, validate(tree), tmp_path / "base", RunWriter(tmp_path))


STRANGER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "%s"}]}' % NAME.encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
port, NAME = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[sys.argv.index("--served-model-name") + 1]
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_port_that_a_stranger_took_is_left_to_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in place of vLLM's Python serves --served-model-name on --port, or ends like vLLM when it cannot."""
    program = tmp_path / "python"
    program.write_text(f"#!/usr/bin/env python3{STRANGER}")
    program.chmod(0o755)
    pair = Pair(tmp_path)
    stranger = FakeVllm(tiny_policy(), pair.store, model="base")
    ports = iter([stranger.port])
    monkeypatch.setattr("trainer.rollout.vllm_server.free_port", lambda: next(ports, None) or free_port())
    config = validate(lay_over(CONFIG, {"train": {"sampler": {"vllm": {"python": str(program)}}}}))
    server = VllmServer(config, tmp_path, tmp_path / "log", 48)
    try:
        server.wait()
        assert server.url != stranger.url
        assert server.starts == 2
        assert server.ended() is None
        server.process.kill()
        server.process.wait()
        assert "was ended by SIGKILL" in str(server.ended())
    finally:
        server.close()
        stranger.die()


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_error(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Worker RuntimeError: Unsupported CPU attention configuration: head_dim=8' >&2\nexit 3\n")
    program.chmod(0o755)
    config = validate(lay_over(CONFIG, {"train": {"sampler": {"vllm": {"python": str(program)}}}}))
    server = VllmServer(config, tmp_path, tmp_path / "log", 48)
    with pytest.raises(StalledError, match=r"ended with exit code 3 \(RuntimeError: Unsupported CPU attention.*see .*vllm.log"):
        server.wait()
    server.close()


def test_a_server_of_its_own_that_ends_is_not_waited_for(many: Callable[..., Many]) -> None:
    one = many(deadline_seconds=60.0)
    one.follower.follow()
    one.servers[0].mischief = in_place_of_completions("hang")
    one.sampler.ended = lambda: "was ended by SIGKILL"
    with pytest.raises(StalledError, match="was ended by SIGKILL"):
        one.sampler.generate(REQUESTS, PARAMS)
