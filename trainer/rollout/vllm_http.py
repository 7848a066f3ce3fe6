"""One vLLM server behind HTTP: asked with an end to every wait, and three ways in which it fails.

    Refused   it answered with an error status
    Garbled   it answered what vLLM does not answer: no JSON, a field that is missing, tokens that cannot be
    LOST      it did not answer, or broke off: connections refused, closed, silent past the deadline

Every request has a connection of its own, so that `hang_up` can end all that are open when the server is found dead. Importable
without torch.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import ModelError
from trainer.types import FinishReason

LOST = (OSError, HTTPException)
_MOST_BYTES = 256 * 1024**2  # of an answer
_PING_SECONDS = 5.0


class Refused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, said: str):
        self.status, self.said = status, said
        super().__init__(f"status {status}: {said[:300]}")


class Garbled(Exception):
    """The server answered something that vLLM does not answer."""


@dataclass
class Server:
    """One server, and what is known of it. The fields below `key` belong to the sampler, which holds a lock over them.

    Args:
        url: without a path, for example http://127.0.0.1:8000.
        timeout_seconds: of one request, from its beginning to the last byte of its answer.
        key: sent as a bearer token.
    """

    url: str
    timeout_seconds: float
    key: str = ""
    well: bool = True
    busy: int = 0
    failures: int = 0  # in a row
    heard_at: float = 0.0
    lost_at: float = 0.0
    version: int = -1  # of the policy that it was given last
    loaded: list[str] = field(default_factory=list)  # our adapters on it
    reloaded: bool = False  # its backbone is a merged copy of ours
    loading: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout_seconds: float | None = None) -> Any:
        """Return the JSON (or text) that the server answers; GET without a body, else POST.

        Raises:
            Refused: an error status. Garbled: more than an answer can be. OSError, HTTPException: no answer.
        """
        end = time.monotonic() + (timeout_seconds or self.timeout_seconds)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        with self._connection(end) as connection:
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, data, headers)
            line = connection.sock
            with connection.getresponse() as reply:  # it holds the socket open
                text = _read(reply, line, end)
        if reply.status >= 300:
            raise Refused(reply.status, text)
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    @contextmanager
    def _connection(self, end: float) -> Iterator[HTTPConnection]:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=max(0.1, end - time.monotonic()))
        connection.connect()
        line: socket.socket = connection.sock
        with self._lock:
            self._open.add(line)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(line)
            line.close()
            connection.close()

    def hang_up(self) -> None:
        """Break off all requests that are under way; who waits for them gets an OSError."""
        with self._lock:
            for line in self._open:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def answers(self) -> bool:
        """Ask for its health."""
        try:
            self.ask("/health", timeout_seconds=_PING_SECONDS)
        except (Refused, Garbled, *LOST):
            return False
        return True

    def models(self) -> list[dict[str, Any]]:
        """Return its list of models: the backbone first, then adapters, which have a parent.

        Raises:
            Refused, Garbled, OSError, HTTPException: see `ask`.
        """
        listed = self.ask("/v1/models", timeout_seconds=30.0)
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in models):
            raise Garbled("/v1/models lists no models")
        return models


def _read(reply: HTTPResponse, line: socket.socket | None, end: float) -> str:
    chunks, size = [], 0
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer did not end in time")
        if line is not None:
            line.settimeout(left)
        chunk = reply.read1(1 << 16)
        if not chunk:
            break
        size += len(chunk)
        if size > _MOST_BYTES:
            raise Garbled(f"an answer of more than {_MOST_BYTES} bytes")
        chunks.append(chunk)
    if reply.length:  # it promised more
        raise OSError(f"the connection ended {reply.length} bytes before the answer did")
    return b"".join(chunks).decode(errors="replace")


@dataclass(frozen=True)
class Answer:
    """What /v1/completions says of one request, checked."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def read_answer(said: Any, prompt: Sequence[int], cap: int, eos_token_ids: Sequence[int], vocabulary: int) -> Answer:
    """Return a completion as the engine gave it, or find out why it cannot be one.

    Args:
        said: the JSON of /v1/completions with `return_token_ids` and `logprobs`.
        prompt: the token ids that were sent; the engine repeats them.
        cap: most tokens.
        eos_token_ids: at which a completion ends.
        vocabulary: number of token ids; 0: unknown.

    Raises:
        Garbled: with what is wrong.
    """
    try:
        (choice,) = said["choices"]
        ids, logprobs, finish = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        echoed = choice.get("prompt_token_ids")
        whole = all(isinstance(token, int) and not isinstance(token, bool) for token in ids)
        values = [float(value) for value in logprobs]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Garbled(f"no completion with token ids and log-probs ({type(error).__name__}: {str(error)[:100]})") from None
    if not whole or not ids or len(ids) != len(values) or len(ids) > cap:
        raise Garbled(f"{len(ids)} token ids with {len(values)} log-probs where at most {cap} were asked for")
    if min(ids) < 0 or (vocabulary and max(ids) >= vocabulary):
        raise Garbled(f"token id {max(ids) if min(ids) >= 0 else min(ids)}, which the model does not have")
    if not all(math.isfinite(value) and value < 1e-3 for value in values):
        raise Garbled("log-probs that are not finite or above 0")
    if echoed is not None and list(echoed) != list(prompt):
        raise Garbled("an answer to another prompt")
    ended = ids[-1] in eos_token_ids
    if finish not in ("stop", "length") or (finish == "stop" and not ended):
        raise Garbled(f"the end {finish!r} after token {ids[-1]}, where completions end at {list(eos_token_ids)}")
    if not ended and len(ids) < cap:
        raise Garbled(f"an end after {len(ids)} of {cap} tokens; its --max-model-len is too small")
    return Answer(tuple(ids), tuple(values), "stop" if ended else "length")


def read_prompt_logprobs(said: Any, ids: Sequence[int], first: int) -> list[Mapping[int, float]]:
    """Return the log-probs by token id, the token's own among them, at every position from `first` on.

    Args:
        said: the JSON of /v1/completions with `prompt_logprobs`.
        ids: the prompt that was sent.

    Raises:
        Garbled: they are not all there, or not finite.
    """
    try:
        found: list[Mapping[int, float]] = [
            {int(token): float(fact["logprob"]) for token, fact in here.items()}
            for here in said["choices"][0]["prompt_logprobs"][first : len(ids)]
        ]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Garbled(f"no log-probs of a prompt ({type(error).__name__}: {str(error)[:100]})") from None
    own = [row.get(token, math.nan) for token, row in zip(ids[first:], found, strict=False)]
    if len(own) != len(ids) - first or not all(math.isfinite(value) for value in own):
        raise Garbled("no finite log-prob for every token of a prompt")
    return found


def hint(refused: Refused, path: str) -> str:
    """Return what to do about a refusal, for what people forget when they start a server themselves."""
    if refused.status in (401, 403):
        return "; it wants a key: set train.sampler.vllm.token_variable"
    if path.startswith("/v1/load_lora_adapter") and refused.status in (404, 405):
        return "; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    if path in ("/collective_rpc", "/reset_prefix_cache") and refused.status in (404, 405):
        return "; start it with VLLM_SERVER_DEV_MODE=1, or set train.sync.mode: adapter"
    return ""


def refusal(server: Server, what: str, refused: Refused, path: str = "") -> ModelError:
    return ModelError(f"{server.url} {what} ({refused}){hint(refused, path)}")
