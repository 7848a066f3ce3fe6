"""A server that speaks the part of vLLM's HTTP interface that tithe uses, with a real tiny model behind it."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from trainer.policy.forward import completion_logits, scoring
from trainer.policy.lora import adapter_off
from trainer.policy.policy import Policy
from trainer.policy.versions import PolicyStore
from trainer.rollout.embedded import EmbeddedSampler
from trainer.types import Request, SamplingParams


class FakeVllm:
    """Serves until `die`; `dies_at` is the number of the completion request (from 1) in whose midst it dies."""

    def __init__(self, policy: Policy, store: PolicyStore, dies_at: int | None = None, max_logprobs: int = 20):
        self.policy, self.store, self.dies_at = policy, store, dies_at
        self.names: list[str] = []  # adapters that are loaded
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.num_completions = 0
        self.max_logprobs = max_logprobs
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "base"}]} if self.path == "/v1/models" else "")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, said = fake.act(self.path, body)
                if status:
                    self.answer(status, said)
                else:
                    self.connection.close()

            def answer(self, status: int, said: Any) -> None:
                text = (said if isinstance(said, str) else json.dumps(said)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def act(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.asked.append((path, body))
            if path == "/v1/load_lora_adapter":
                if not (Path(body["lora_path"]) / "adapter_config.json").exists():
                    return 404, "no adapter there"
                self.names.append(body["lora_name"])
                return 200, "loaded"
            if path == "/v1/unload_lora_adapter":
                self.names.remove(body["lora_name"])
                return 200, "unloaded"
            if path == "/v1/completions":
                return self.complete(body)
            return 200, {}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in ("base", *self.names):
            return 404, f"the model {body['model']} does not exist"
        backbone = body["model"] == "base"
        if not backbone:
            self.store.load(self.policy, int(body["model"][1:]))
        if "prompt_logprobs" in body:
            with adapter_off(self.policy.model) if backbone else nullcontext():
                return self.score_prompt(body["prompt"], body["prompt_logprobs"])
        self.num_completions += 1
        if self.num_completions == self.dies_at:
            threading.Thread(target=self.die).start()
            return 0, ""
        params = SamplingParams(body["temperature"], body["max_tokens"], tuple(body["stop_token_ids"]))
        request = Request("x", tuple(body["prompt"]), body["seed"])
        (made,) = EmbeddedSampler(self.policy.model, 1, 1).generate([request], params)
        choice = {"token_ids": list(made.token_ids), "logprobs": {"token_logprobs": list(made.logprobs)}}
        return 200, {"choices": [{**choice, "finish_reason": made.finish_reason}]}

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
