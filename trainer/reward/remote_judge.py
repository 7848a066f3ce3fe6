"""Ask a judge over HTTP: one POST, retried while its deadline allows. Runs in a worker that is killed past the deadline."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

MAX_REPLY_BYTES = 1024**2
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class Straight(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would take the token to another host, and lose the question."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class RemoteJudge:
    """A remote judge: takes JSON {prompt, answer, gold, scorer}, replies {"score": number}.

    Args:
        token_variable: environment variable that holds the bearer token, or None.
        retries: further attempts after a lost connection or a status of RETRIED.
        backoff_seconds: before the first retry; doubles each time.
        deadline_seconds: for all attempts together.
    """

    def __init__(
        self, url: str, token_variable: str | None, retries: int, backoff_seconds: float, deadline_seconds: float
    ) -> None:
        self.url, self.retries, self.backoff_seconds, self.deadline_seconds = url, retries, backoff_seconds, deadline_seconds
        self.headers = {"Content-Type": "application/json"}
        if token_variable is not None:
            if token_variable not in os.environ:
                raise ValueError(f"the environment has no {token_variable}, which http.token_variable names")
            self.headers["Authorization"] = f"Bearer {os.environ[token_variable]}"

    def ask(self, question: dict[str, Any]) -> float:
        """Return the score.

        Raises:
            TimeoutError: no reply before the deadline. OSError, ValueError: a reply that is none.
        """
        end = time.monotonic() + self.deadline_seconds
        body = json.dumps(question).encode()
        for attempt in range(self.retries + 1):
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                return self._once(body, left)
            except urllib.error.HTTPError as error:
                if error.code not in RETRIED or attempt == self.retries:
                    raise OSError(f"the judge replied {error.code} to attempt {attempt + 1}") from None
            except (TimeoutError, urllib.error.URLError, HTTPException, ConnectionError) as error:
                if time.monotonic() < end and attempt == self.retries:
                    raise OSError(f"no reply to {attempt + 1} attempts ({error})") from None
            time.sleep(max(0.0, min(self.backoff_seconds * 2**attempt, end - time.monotonic())))
        raise TimeoutError(f"no reply within {self.deadline_seconds:g} s")

    def _once(self, body: bytes, timeout_seconds: float) -> float:
        request = urllib.request.Request(self.url, data=body, headers=self.headers, method="POST")
        with urllib.request.build_opener(Straight).open(request, timeout=timeout_seconds) as reply:
            text = reply.read(MAX_REPLY_BYTES)
        said = json.loads(text)
        score = said.get("score") if isinstance(said, dict) else None
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f"the judge's reply has no number `score`: {text[:100]!r}")
        return float(score)
