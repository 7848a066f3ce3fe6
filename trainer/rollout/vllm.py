"""Sampling with vLLM over HTTP: one or many servers, token ids in, token ids and processed log-probs out.

    generate      one request a completion, spread over the servers that are well; a server that dies, freezes or talks nonsense
                  loses nothing: its requests go to another, and it is asked again later, after longer and longer pauses
    load_policy   `adapter`: the version's directory is loaded hot under a name of its own, then the one before is unloaded;
                  `merge`: a merged copy of the backbone is written and the engine reloads it
    score         log-probs of given tokens; vLLM has these at temperature 1 only
    top_logprobs  the backbone's highest log-probs at given tokens, for anchors; likewise

Every server is inspected (the probe) after every load, before its first request; so is one that was away and comes back, or that
forgot its adapters. A name per run, sampler and version: several runs share servers without touching each other's adapters, and
an engine that is given the same name again may answer from caches made with the old weights. The log-probs of sampled tokens are
those of the sampling distribution only with `--logprobs-mode processed_logprobs`; the mismatch of every step shows it.

A thread per server (the keeper) looks after its health, so nobody who waits for an answer waits for a dead server.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainer.errors import ModelError, StalledError, TitheError
from trainer.policy.versions import PolicyStore
from trainer.rollout.vllm_http import LOST, Garbled, Refused, Server, read_answer, read_prompt_logprobs, refusal
from trainer.types import Completion, Request, SamplingParams

Mode = Literal["adapter", "merge"]
Progress = Callable[[int, int], None]
Scored = tuple[Sequence[int], Sequence[int]]  # prompt ids, completion ids
Score = Callable[[Sequence[Scored]], list[list[float]]]
Inspect = Callable[[str, Score], None]
_LOOK_SECONDS, _LONGEST_PAUSE_SECONDS, _BEAT_SECONDS = 2.0, 60.0, 1.0
_MOST_TRIES = 6  # unusable answers to one request
_SAMPLER_WANTS = {400, 401, 403, 405, 413, 422}  # refusals that another try does not change


class VllmSampler:
    """A `trainer.types.Sampler` over vLLM servers.

    Args:
        servers: or their addresses; they need not be up yet.
        store: where policy versions are; the servers must see it under the same path.
        base: the base artifact, for merging.
        model: name under which the servers know the backbone.
        mode: how a policy reaches the engine.
        concurrency: requests at the same time, on each server.
        deadline_seconds: of one request, and of the wait for a server that is well.
        merged: directory for merged copies.
        max_shard_bytes: of merged copies.
        namespace: of the adapters' names; no other sampler may have it.
        life: of this process, in those names too: what an earlier one left on a server is taken off and never asked again.
        vocabulary: number of token ids; 0: unknown.
        shared: whether others may use the servers too; then they are inspected again after every `generate` in merge mode.
        ended: returns why the servers cannot come back (the process that was started has ended), or None.
    """

    def __init__(
        self,
        servers: Sequence[Server | str],
        store: PolicyStore,
        base: Path,
        model: str,
        mode: Mode,
        concurrency: int,
        deadline_seconds: float,
        merged: Path,
        max_shard_bytes: int = 5 * 1000**3,
        namespace: str = "tithe",
        life: str = "",
        vocabulary: int = 0,
        shared: bool = False,
        ended: Callable[[], str | None] = lambda: None,
    ):
        assert servers
        assert re.fullmatch(r"[\w.-]+", namespace), namespace
        self.servers = [Server(server, deadline_seconds) if isinstance(server, str) else server for server in servers]
        self.store, self.base, self.model, self.mode = store, base, model, mode
        self.deadline_seconds, self.merged, self.max_shard_bytes = deadline_seconds, merged, max_shard_bytes
        self.life = f".{life}" if life else ""
        self.namespace, self.vocabulary, self.shared, self.ended = namespace, vocabulary, shared, ended
        self.version = -1
        self.inspect: Inspect | None = None  # called with (url, score) after every load; raises what is wrong
        self.progress: Progress | None = None
        self.event: Callable[[str, str], None] = lambda kind, reason: None
        self.redispatched = 0
        self._fault: TitheError | None = None
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._workers = ThreadPoolExecutor(concurrency * len(servers), thread_name_prefix="vllm")
        for one in self.servers:
            threading.Thread(target=self._keep, args=(one,), name=f"keeper {one.url}", daemon=True).start()

    @property
    def name(self) -> str:
        """What the servers call the policy."""
        return self.model if self.mode == "merge" or self.version < 0 else self.adapter_name(self.version)

    def adapter_name(self, version: int) -> str:
        return f"{self.namespace}{self.life}-v{version:06d}"

    # -- the port ---------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests.

        Raises:
            StalledError: no server was well for the deadline, or none gives usable answers. ModelError: a server refuses a
                request. MismatchError: a server came back with another policy.
        """
        completions = self._all([partial(self._complete, request=request, params=params) for request in requests])
        if self.shared and self.mode == "merge" and self.inspect is not None:
            for server in self.servers:
                if server.well and server.version == self.version:
                    self.inspect(server.url, partial(self._score_on, server))
        return completions

    def score(self, sequences: Sequence[Scored], temperature: float) -> list[list[float]]:
        """Return the log-prob of every completion token at temperature 1, whatever the one asked for: vLLM has no other."""
        return self._all([partial(self._score, prompt=p, completion=c) for p, c in sequences], report=False)

    def top_logprobs(self, sequences: Sequence[Scored], top_k: int) -> list[list[Mapping[int, float]]]:
        """Return the backbone's log-probs by token id at every completion token, at temperature 1.

        Args:
            sequences: (prompt ids, completion ids).
            top_k: how many of the highest are wanted; the token's own comes too.
        """

        def ask(server: Server, prompt: Sequence[int], completion: Sequence[int]) -> list[Mapping[int, float]]:
            ids = [*prompt, *completion]
            return read_prompt_logprobs(self._scored(server, self.model, ids, top_k), ids, len(prompt))

        return self._all([partial(ask, prompt=p, completion=c) for p, c in sequences], report=False)

    def load_policy(self, version: int) -> None:
        """Bring a version to every server that is well; one that comes back later gets it before its first request.

        Raises:
            ModelError: a server cannot load it. StalledError: no server is well. What `inspect` raises.
        """
        if self.mode == "merge":
            self._write_merged(version)
        with self._changed:
            self.version = version
        for future in [self._workers.submit(self._bring, server) for server in self.servers if server.well]:
            future.result()
        self._on_a_server(lambda server: None)

    def close(self) -> None:
        """Take this sampler's adapters off the servers and end the threads; the servers stay."""
        self._closed.set()
        self._workers.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            if server.well and server.loaded:
                self._unload(server, keep="")

    # -- requests ---------------------------------------------------------------------------------------------------------

    def _all(self, works: Sequence[Callable[[Server], Any]], report: bool = True) -> list[Any]:
        futures: list[Future[Any]] = [self._workers.submit(self._on_a_server, work) for work in works]
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, _BEAT_SECONDS, FIRST_COMPLETED)
                for future in done:
                    future.result()
                if self.progress is not None and report:
                    self.progress(len(futures) - len(waiting), len(futures))
        finally:
            for future in waiting:
                future.cancel()
        return [future.result() for future in futures]

    def _complete(self, server: Server, request: Request, params: SamplingParams) -> Completion:
        version = self.version
        body = {
            "model": self.name,
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
        said = server.ask("/v1/completions", body)
        answer = read_answer(said, request.token_ids, params.max_completion_tokens, params.eos_token_ids, self.vocabulary)
        ids, logprobs = answer.token_ids, answer.logprobs
        return Completion(request.prompt_id, request.sample_index, ids, logprobs, answer.finish_reason, version, "vllm")

    def _score(self, server: Server, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        ids = [*prompt, *completion]
        found = read_prompt_logprobs(self._scored(server, self.name, ids, 0), ids, len(prompt))
        return [logprobs[token] for token, logprobs in zip(completion, found, strict=True)]

    def _scored(self, server: Server, model: str, ids: Sequence[int], count: int) -> Any:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        return server.ask("/v1/completions", body)

    def _score_on(self, server: Server, sequences: Sequence[Scored]) -> list[list[float]]:
        return [self._score(server, prompt, completion) for prompt, completion in sequences]

    def _on_a_server(self, work: Callable[[Server], Any]) -> Any:
        """Do work on the least busy server that is well; when it fails, on another."""
        end, tries = time.monotonic() + self.deadline_seconds, 0
        reason, avoid = "it never answered", set[str]()
        while True:
            server = self._pick(end, avoid)
            if server is None:
                names = ", ".join(server.url for server in self.servers)
                what = f"was not well for {self.deadline_seconds:.0f} s ({reason})"
                raise StalledError(f"vLLM ({names})", what, "start it again, or see its log")
            try:
                result = work(server)
                server.failures, server.heard_at = 0, time.monotonic()
                return result
            except Refused as refused:
                if refused.status in _SAMPLER_WANTS:
                    raise refusal(server, "refuses a request", refused) from None
                reason = str(refused)
            except Garbled as error:
                reason = f"it answered {error}"
            except LOST as error:
                reason = str(error) or type(error).__name__
            finally:
                with self._changed:
                    server.busy -= 1
                    self._changed.notify_all()
            self._lose(server, reason)
            avoid.add(server.url)
            tries += 1
            if tries >= _MOST_TRIES or time.monotonic() > end:
                what = f"gave no usable answer to a request in {tries} tries (the last: {reason})"
                raise StalledError(f"vLLM ({server.url})", what, "see its log")

    def _pick(self, end: float, avoid: Collection[str]) -> Server | None:
        """Return a server that is well and has the policy, one not in `avoid` if there is one; None when none is until `end`.

        Raises:
            TitheError: what a keeper found.
        """
        with self._changed:
            while True:
                if self._fault is not None:
                    raise self._fault
                ready = [server for server in self.servers if server.well and server.version == self.version]
                if ready:
                    server = min(ready, key=lambda server: (server.url in avoid, server.busy))
                    server.busy += 1
                    return server
                left = end - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    return None
                self._changed.wait(min(left, _LOOK_SECONDS))

    def _lose(self, server: Server, reason: str) -> None:
        with self._changed:
            self.redispatched += 1
            was_well, server.well, server.lost_at, server.version = server.well, False, time.monotonic(), -1
            server.failures += was_well
            self._changed.notify_all()
        if was_well:
            self.event("warning", f"vLLM at {server.url} is given no requests until it is well again: {reason}")

    # -- keeping ----------------------------------------------------------------------------------------------------------

    def _keep(self, server: Server) -> None:
        every = min(_LOOK_SECONDS, self.deadline_seconds / 10)
        while not self._closed.wait(every):
            try:
                self._look_after(server)
            except TitheError as error:
                with self._changed:
                    self._fault = error
                    self._changed.notify_all()
                server.hang_up()

    def _look_after(self, server: Server) -> None:
        """Bring a server back that answers again, and hang up on one that does not answer any more."""
        reason = self.ended()
        if reason is not None:
            raise StalledError(f"vLLM ({server.url})", reason, "it is started anew with its sampler")
        now = time.monotonic()
        if server.well:
            patience = min(60.0, self.deadline_seconds / 4)
            if not server.busy:
                server.heard_at = now
            elif now - server.heard_at > patience / 4:
                if server.answers():
                    server.heard_at = time.monotonic()
                elif time.monotonic() - server.heard_at > patience:
                    self._lose(server, f"it did not answer for {patience:.0f} s")
                    server.hang_up()
            if server.version != self.version and self.version >= 0:
                self._bring(server)
            return
        pause = min(_LOOK_SECONDS * 2 ** max(server.failures - 2, 0), _LONGEST_PAUSE_SECONDS, self.deadline_seconds / 10)
        if now - server.lost_at >= pause and server.answers():
            self._bring(server)

    def _bring(self, server: Server) -> None:
        """Load the newest version on a server and inspect it; then it takes requests."""
        try:
            with server.loading:
                version = self.version
                if version >= 0 and not (server.well and server.version == version):
                    self._load(server, version)
                with self._changed:
                    server.well, server.version, server.heard_at = True, version, time.monotonic()
                    self._changed.notify_all()
        except Refused as refused:
            if refused.status < 500:
                raise refusal(server, f"cannot load policy version {self.version}", refused) from None
            self._lose(server, str(refused))
        except (Garbled, *LOST) as error:
            self._lose(server, str(error) or type(error).__name__)

    def _load(self, server: Server, version: int) -> None:
        if self.mode == "adapter":
            self._load_adapter(server, version)
        else:
            self._refuse_to_disturb(server)
            self._reload(server, self._merged_copy(version))
        if self.inspect is not None:
            self.inspect(server.url, partial(self._score_on, server))
        if self.mode == "adapter":
            self._unload(server, keep=self.adapter_name(version))

    # -- policies ---------------------------------------------------------------------------------------------------------

    def _load_adapter(self, server: Server, version: int) -> None:
        name, path = self.adapter_name(version), str(self.store.directory(version).resolve())
        try:
            server.ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except Refused as refused:
            if "already been loaded" not in refused.said:
                raise refusal(server, f"cannot load policy version {version}", refused, "/v1/load_lora_adapter") from None
        if name not in server.loaded:
            server.loaded.append(name)

    def _unload(self, server: Server, keep: str) -> None:
        """Take this sampler's adapters off a server, but one; what an earlier life of this sampler left there too."""
        try:
            there = [model["id"] for model in server.models()]
        except (Refused, Garbled, *LOST):
            there = list(server.loaded)
        for name in there:
            if self._is_own(name) and name != keep:
                try:
                    server.ask("/v1/unload_lora_adapter", {"lora_name": name}, timeout_seconds=30.0)
                except Refused as refused:
                    if refused.status != 404:
                        self.event("warning", f"{server.url} does not unload adapter {name} ({refused})")
                except (Garbled, *LOST) as error:
                    self.event("warning", f"{server.url} does not unload adapter {name} ({error})")
        server.loaded = [keep] if keep else []

    def _reload(self, server: Server, weights: Path) -> None:
        """Have the engine read its backbone anew, and forget what it cached with the old one."""
        server.reloaded = True
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights.resolve())}}
        for path, said in (("/collective_rpc", body), ("/reset_prefix_cache", {})):
            try:
                server.ask(path, said)
            except Refused as refused:
                if refused.status >= 500:
                    raise
                raise refusal(server, f"cannot load policy version {self.version}", refused, path) from None

    def _refuse_to_disturb(self, server: Server) -> None:
        """Raise when adapters of others are on a server whose backbone is about to change."""
        others = [model["id"] for model in server.models() if model.get("parent") and not self._is_own(model["id"])]
        if others:
            problem = f"has adapters of others ({', '.join(others[:3])}), whose backbone a merged copy would change"
            raise ModelError(f"{server.url} {problem}; set train.sync.mode: adapter, or use a server of your own")

    def _is_own(self, name: str) -> bool:
        return re.fullmatch(re.escape(self.namespace) + r"(\.[0-9a-f]+)?-v\d+", name) is not None

    def switch(self, mode: Mode) -> None:
        """Have every server as it was at its start, without a policy, and bring the next one in this way."""
        with self._changed:
            self.version, self._fault = -1, None
        for server in self.servers:
            with server.loading:
                try:
                    if server.reloaded:
                        self._reload(server, self.base)
                        server.reloaded = False
                    if server.loaded:
                        self._unload(server, keep="")
                    server.version = -1
                except (Refused, Garbled, *LOST) as error:
                    self._lose(server, str(error) or type(error).__name__)
        self.mode = mode

    def _merged_copy(self, version: int) -> Path:
        return self.merged / f"v{version:06d}"

    def _write_merged(self, version: int) -> None:
        """Write backbone plus adapter, summed in float32 out of place and rounded once; only the newest copy is kept."""
        from trainer.policy.merge import merge

        target = self._merged_copy(version)
        shutil.rmtree(self.merged, ignore_errors=True)
        target.mkdir(parents=True)
        merge(self.base, self.store.directory(version), target, "base", self.max_shard_bytes)


def introduce(servers: Sequence[Server], model: str, seconds: float, on_wait: Callable[[], None] = lambda: None) -> str:
    """Wait for servers that run already, and return the backbone's name there.

    Args:
        model: the name that the configuration gives; empty: what they list.
        seconds: how long one of them may be away.
        on_wait: called now and then.

    Raises:
        StalledError: none came. ModelError: they list other backbones, or none.
    """
    end, names = time.monotonic() + seconds, dict[str, list[str]]()
    reason = "no answer"
    while True:
        for server in servers:
            if server.url in names:
                continue
            try:
                names[server.url] = [entry["id"] for entry in server.models() if not entry.get("parent")]
            except Refused as refused:
                if refused.status < 500:
                    raise refusal(server, "does not list its models", refused) from None
                reason = str(refused)
            except (Garbled, *LOST) as error:
                reason = str(error) or type(error).__name__
        if len(names) == len(servers) or (names and time.monotonic() > end - seconds / 2):
            break
        if time.monotonic() > end:
            culprit = f"vLLM ({', '.join(server.url for server in servers)})"
            raise StalledError(culprit, f"did not list its models for {seconds:.0f} s ({reason})", "start it, or see its log")
        on_wait()
        time.sleep(min(1.0, seconds / 10))
    for server in servers:
        server.well = server.url in names
    wanted = model or next((listed[0] for listed in names.values() if listed), "")
    for url, listed in names.items():
        if wanted not in listed:
            there = ", ".join(listed) or "no model"
            problem = f"serves {there}, not {wanted or 'a backbone'}; start it with the campaign's base"
            raise ModelError(f"{url} {problem}, or set train.sampler.vllm.model")
    return wanted
