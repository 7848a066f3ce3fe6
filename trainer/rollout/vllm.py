"""Sampling with vLLM over HTTP: one or many servers, token ids in, token ids and processed log-probs out.

    generate      one request a completion, spread over the servers that are well; a server that dies loses nothing: its
                  requests go to another
    load_policy   `adapter`: the version's directory is loaded hot under a name of its own, then the older ones are unloaded;
                  `merge`: a merged copy of the backbone is written and the engine reloads it
    score         log-probs of given tokens; vLLM has these at temperature 1 only
    top_logprobs  the backbone's highest log-probs at given tokens, for anchors; likewise

A name per version, because an engine that is given the same name again may answer from caches made with the old weights. The
log-probs of sampled tokens are those of the sampling distribution only with `--logprobs-mode processed_logprobs`, which `check`
looks for in effect: the probe and the mismatch of every step would show it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from trainer.errors import ModelError, StalledError
from trainer.policy.versions import PolicyStore
from trainer.types import Completion, Request, SamplingParams

Mode = Literal["adapter", "merge"]
Scored = tuple[Sequence[int], Sequence[int]]  # prompt ids, completion ids
Progress = Callable[[int, int], None]
_RETRY_SECONDS = 2.0
_LOST = (OSError, HTTPException, TimeoutError)


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, said: str):
        self.status, self.said = status, said
        super().__init__(f"status {status}: {said[:300]}")


@dataclass
class Server:
    """One vLLM server.

    Args:
        url: without a path, for example http://127.0.0.1:8000.
        timeout_seconds: of one request.
    """

    url: str
    timeout_seconds: float
    well: bool = True
    looked_at: float = 0.0
    busy: int = 0
    loaded: list[str] = field(default_factory=list)  # adapters

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout_seconds: float | None = None) -> Any:
        """Return the JSON (or text) that the server answers; GET without a body, else POST.

        Raises:
            Refused: an error status. OSError, HTTPException: no answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_seconds or self.timeout_seconds) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode(errors="replace")) from None
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError:
            return text

    def is_well(self) -> bool:
        """Ask for its health."""
        self.looked_at = time.monotonic()
        try:
            self.ask("/health", timeout_seconds=5.0)
            self.well = True
        except (Refused, *_LOST):
            self.well = False
        return self.well


class VllmSampler:
    """A `trainer.types.Sampler` over vLLM servers.

    Args:
        urls: of the servers.
        store: where policy versions are; the servers must see it under the same path.
        base: the base artifact, for merging.
        model: name under which the servers know the backbone.
        mode: how a policy reaches the engine.
        concurrency: requests at the same time, on each server.
        deadline_seconds: of one request, and of the wait for a server that is well.
        merged: directory for merged copies.
        max_shard_bytes: of merged copies.
    """

    def __init__(
        self,
        urls: Sequence[str],
        store: PolicyStore,
        base: Path,
        model: str,
        mode: Mode,
        concurrency: int,
        deadline_seconds: float,
        merged: Path,
        max_shard_bytes: int = 5 * 1000**3,
    ):
        assert urls
        self.servers = [Server(url, deadline_seconds) for url in urls]
        self.store, self.base, self.model, self.mode = store, base, model, mode
        self.deadline_seconds, self.merged, self.max_shard_bytes = deadline_seconds, merged, max_shard_bytes
        self.version, self.name = -1, model
        self.progress: Progress | None = None
        self.redispatched = 0
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(concurrency * len(urls), thread_name_prefix="vllm")

    # -- the port ---------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests.

        Raises:
            StalledError: no server was well for the deadline. ModelError: a server refuses a request.
        """
        futures = [self._workers.submit(self._complete, request, params) for request in requests]
        completions = []
        try:
            for number, future in enumerate(futures, start=1):
                completions.append(future.result())
                if self.progress is not None:
                    self.progress(number, len(futures))
        finally:
            for future in futures:
                future.cancel()
        return completions

    def score(self, sequences: Sequence[Scored], temperature: float) -> list[list[float]]:
        """Return the log-prob of every completion token at temperature 1, whatever the one asked for: vLLM has no other."""
        return [self._on_a_server(partial(self._score, prompt=p, completion=c)) for p, c in sequences]

    def top_logprobs(self, sequences: Sequence[Scored], top_k: int) -> list[list[Mapping[int, float]]]:
        """Return the backbone's log-probs by token id at every completion token, at temperature 1.

        Args:
            sequences: (prompt ids, completion ids).
            top_k: how many of the highest are wanted; the token's own comes too.
        """

        def ask(server: Server, prompt: Sequence[int], completion: Sequence[int]) -> list[Mapping[int, float]]:
            found = self._prompt_logprobs(server, self.model, [*prompt, *completion], top_k)
            return [{int(token): float(fact["logprob"]) for token, fact in here.items()} for here in found[len(prompt) :]]

        asked = [self._workers.submit(self._on_a_server, partial(ask, prompt=p, completion=c)) for p, c in sequences]
        try:
            return [future.result() for future in asked]
        finally:
            for future in asked:
                future.cancel()

    def load_policy(self, version: int) -> None:
        """Bring a version to every server that is well; one that comes back later gets it before its first request.

        Raises:
            ModelError: a server cannot load it. StalledError: no server is well.
        """
        self.version = version
        self.name = self.model if self.mode == "merge" else f"v{version:06d}"
        if self.mode == "merge":
            self._write_merged(version)
        reached = sum(self._bring(server) for server in self.servers)
        if not reached:
            self._on_a_server(lambda server: None)

    def close(self) -> None:
        """End the threads; the servers stay."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    # -- requests ---------------------------------------------------------------------------------------------------------

    def _complete(self, request: Request, params: SamplingParams) -> Completion:
        body = {
            "prompt": list(request.token_ids),
            "max_tokens": params.max_completion_tokens,
            "temperature": params.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "seed": request.seed,
            "stop_token_ids": list(params.eos_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        choice = self._on_a_server(lambda server: server.ask("/v1/completions", {**body, "model": self.name}))["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if not ids or len(ids) != len(logprobs) or choice["finish_reason"] not in ("stop", "length"):
            raise ModelError(f"vLLM answered {len(ids)} tokens, {len(logprobs)} log-probs, end {choice['finish_reason']!r}")
        return Completion(
            request.prompt_id, request.sample_index, tuple(ids), tuple(logprobs), choice["finish_reason"], self.version, "vllm"
        )

    def _score(self, server: Server, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        ids = [*prompt, *completion]
        found = self._prompt_logprobs(server, self.name, ids, 0)
        return [float(found[i][str(ids[i])]["logprob"]) for i in range(len(prompt), len(ids))]

    def _prompt_logprobs(self, server: Server, model: str, ids: list[int], count: int) -> Any:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        return server.ask("/v1/completions", body)["choices"][0]["prompt_logprobs"]

    def _on_a_server(self, work: Callable[[Server], Any]) -> Any:
        """Do work on the least busy server that is well; when it dies, on another."""
        end = time.monotonic() + self.deadline_seconds
        reason = "it never answered"
        while True:
            server = self._pick()
            if server is None:
                if time.monotonic() > end:
                    names = ", ".join(server.url for server in self.servers)
                    raise StalledError(
                        f"vLLM ({names})",
                        f"was not well for {self.deadline_seconds:.0f} s ({reason})",
                        "start it again, or see its log",
                    )
                time.sleep(min(_RETRY_SECONDS, self.deadline_seconds / 10))
                continue
            try:
                return work(server)
            except Refused as refused:
                if refused.status < 500:
                    raise ModelError(f"{server.url} refuses a request ({refused})") from None
                reason = str(refused)
            except _LOST as error:
                reason = str(error)
            finally:
                with self._lock:
                    server.busy -= 1
            with self._lock:
                server.well = False
                self.redispatched += 1

    def _pick(self) -> Server | None:
        with self._lock:
            for server in self.servers:
                if not server.well and time.monotonic() - server.looked_at > _RETRY_SECONDS and server.is_well():
                    self._bring(server)
            well = [server for server in self.servers if server.well]
            if not well:
                return None
            server = min(well, key=lambda server: server.busy)
            server.busy += 1
            return server

    # -- policies ---------------------------------------------------------------------------------------------------------

    def _bring(self, server: Server) -> bool:
        """Load the current version on a server; return whether it was reached."""
        if self.version < 0:
            return True
        try:
            if self.mode == "adapter":
                self._load_adapter(server)
            else:
                self._reload(server)
        except Refused as refused:
            raise ModelError(f"{server.url} cannot load policy version {self.version} ({refused})") from None
        except _LOST:
            server.well = False
            return False
        return True

    def _load_adapter(self, server: Server) -> None:
        path = str(self.store.directory(self.version).resolve())
        try:
            server.ask("/v1/load_lora_adapter", {"lora_name": self.name, "lora_path": path})
        except Refused as refused:
            if "already been loaded" not in refused.said:
                raise
        for old in server.loaded:
            if old != self.name:
                server.ask("/v1/unload_lora_adapter", {"lora_name": old})
        server.loaded = [self.name]

    def _reload(self, server: Server) -> None:
        path = str((self.merged / f"v{self.version:06d}").resolve())
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        server.ask("/collective_rpc", body)
        server.ask("/reset_prefix_cache", {})

    def _write_merged(self, version: int) -> None:
        """Write backbone plus adapter, summed in float32 out of place and rounded once; only the newest copy is kept."""
        from trainer.policy.merge import merge

        target = self.merged / f"v{version:06d}"
        shutil.rmtree(self.merged, ignore_errors=True)
        target.mkdir(parents=True)
        merge(self.base, self.store.directory(version), target, "base", self.max_shard_bytes)
