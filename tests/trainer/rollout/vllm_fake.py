"""A stand-in for a vLLM server: the part of its interface that tithe uses, over a tiny model, misbehaving on order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from trainer.policy.forward import completion_logits, scoring
from trainer.policy.lora import adapter_off
from trainer.policy.policy import Policy
from trainer.policy.versions import PolicyStore
from trainer.processes import free_port
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Request, SamplingParams


@dataclass(frozen=True)
class Raw:
    """An answer of bytes: with a promise of more than comes, the connection breaks off in the midst of it."""

    body: bytes
    status: int = 200
    promised: int | None = None


Mischief = Callable[[str, dict[str, Any], int], Raw | str | None]
"""From (path, body, number of the completion request): what to answer instead; `hang`, `close`, or None for the truth."""


class FakeVllm:
    """Serves until `die`; `dies_at` is the number of the completion request (from 1) in whose midst it dies."""

    def __init__(
        self,
        policy: Policy,
        store: PolicyStore,
        dies_at: int | None = None,
        max_logprobs: int = 20,
        model: str = "base",
        port: int = 0,
    ):
        self.policy, self.store, self.dies_at, self.model, self.max_logprobs = policy, store, dies_at, model, max_logprobs
        self.names: dict[str, Path] = {}  # adapters that are loaded
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.num_completions = 0
        self.mischief: Mischief = lambda path, body, number: None
        self.is_ill = False  # answers 503 to /health
        self.released = threading.Event()  # ends what hangs
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    listed = [{"id": fake.model, "parent": None}, *({"id": name, "parent": fake.model} for name in fake.names)]
                    self.reply(fake.mischief(self.path, {}, 0) or (200, {"data": listed}))
                else:
                    self.reply((503 if fake.is_ill else 200, ""))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(fake.act(self.path, body))

            def reply(self, said: Raw | str | tuple[int, Any]) -> None:
                if said == "hang":
                    fake.released.wait(60)
                elif isinstance(said, Raw):
                    self.answer(said.status, said.body, said.promised)
                elif isinstance(said, tuple):
                    text = said[1] if isinstance(said[1], str) else json.dumps(said[1])
                    self.answer(said[0], text.encode(), None)
                self.close_connection = True

            def answer(self, status: int, body: bytes, promised: int | None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) if promised is None else promised))
                self.end_headers()
                self.wfile.write(body)

        class Silent(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the other side hung up

        self.server = Silent(("127.0.0.1", port or free_port()), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.port = int(self.server.server_address[1])
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def die(self) -> None:
        self.released.set()
        self.server.shutdown()  # returns at once where it serves no longer
        self.server.server_close()

    def act(self, path: str, body: dict[str, Any]) -> Raw | str | tuple[int, Any]:
        if path == "/v1/completions" and "prompt_logprobs" not in body:
            with self._lock:
                self.num_completions += 1
                number = self.num_completions
        else:
            number = 0
        instead = self.mischief(path, body, number)
        if instead is not None:
            return instead
        with self._lock:
            self.asked.append((path, body))
            if path == "/v1/load_lora_adapter":
                if not (Path(body["lora_path"]) / "adapter_config.json").exists():
                    return 404, f"Loading lora {body['lora_name']} failed: No adapter found"
                if body["lora_name"] in self.names:
                    return 400, f"The lora adapter '{body['lora_name']}' has already been loaded."
                self.names[body["lora_name"]] = Path(body["lora_path"])
                return 200, "loaded"
            if path == "/v1/unload_lora_adapter":
                if self.names.pop(body["lora_name"], None) is None:
                    return 404, "cannot be found"
                return 200, "unloaded"
            if path == "/v1/completions":
                return self.complete(body, number)
            return 200, {}

    def complete(self, body: dict[str, Any], number: int) -> str | tuple[int, Any]:
        backbone = body["model"] == self.model
        if not backbone:
            if body["model"] not in self.names:
                return 404, f"The model `{body['model']}` does not exist."
            path = self.names[body["model"]]
            PolicyStore(path.parent, 2).load(self.policy, int(path.name[1:]))
        if "prompt_logprobs" in body:
            with adapter_off(self.policy.model) if backbone else nullcontext():
                return self.score_prompt(body["prompt"], body["prompt_logprobs"])
        if number == self.dies_at:
            threading.Thread(target=self.die).start()
            return "close"
        params = SamplingParams(body["temperature"], body["max_tokens"], tuple(body["stop_token_ids"]))
        request = Request("x", tuple(body["prompt"]), body["seed"])
        (made,) = EmbeddedSampler(self.policy.model, 1, 1).generate([request], params)
        choice = {"token_ids": list(made.token_ids), "logprobs": {"token_logprobs": list(made.logprobs)}}
        return 200, {"choices": [{**choice, "prompt_token_ids": body["prompt"], "finish_reason": made.finish_reason}]}

    def score_prompt(self, ids: list[int], count: int) -> tuple[int, Any]:
        """The token's own log-prob, and so many of the highest."""
        if count > self.max_logprobs:
            return 400, f"Requested prompt logprobs of {count}, which is greater than max allowed: {self.max_logprobs}"
        with scoring(self.policy.model):
            (batch,) = completion_logits(self.policy.model, [(ids[:1], ids[1:])], 1)
            logprobs_TV = torch.log_softmax(batch.logits_NV.float(), -1)
        found: list[Any] = [None]
        for token, row in zip(ids[1:], logprobs_TV, strict=True):
            chosen = {token, *row.topk(min(count, len(row))).indices.tolist()}
            found.append({str(one): {"logprob": float(row[one]), "rank": 1, "decoded_token": "?"} for one in chosen})
        return 200, {"choices": [{"prompt_logprobs": found}]}
