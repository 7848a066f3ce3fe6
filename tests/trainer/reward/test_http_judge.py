"""A remote judge over real HTTP: retries, deadlines, refusals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainer.config.schema import Http, Reward
from trainer.reward import build_verifier
from trainer.types import Prompt, Verdict


class Judge(BaseHTTPRequestHandler):
    """Scores 1 when the answer is the gold one. The answer's first word says how it misbehaves."""

    attempts: dict[str, int]  # replaced by every test's server

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = question["answer"]
        self.attempts[answer] = self.attempts.get(answer, 0) + 1
        if (answer == "busy once" and self.attempts[answer] == 1) or answer == "always busy":
            self.send_error(503)
        elif answer == "forbidden" or self.headers["Authorization"] != "Bearer s3cret":
            self.send_error(403)
        elif answer == "moved":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
        elif answer == "drips":
            self.drip()
        elif answer == "rubbish":
            self.reply(b"<html>")
        elif answer == "no score":
            self.reply(b'{"points": 1}')
        else:
            self.reply(json.dumps({"score": float(answer == question["gold"])}).encode())

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def drip(self) -> None:
        """Send a byte now and then, so that no read ever times out."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(200):
            try:
                self.wfile.write(b" ")
                self.wfile.flush()
            except OSError:
                return
            time.sleep(0.05)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Handler", (Judge,), {"attempts": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.attempts = handler.attempts  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def judge(url: str, answers: list[str], **options: Any) -> list[Verdict]:
    http = Http(url=url, token_variable="JUDGE_TOKEN", retries=2, backoff_seconds=0.05, concurrency=4)
    made = build_verifier(Reward.model_validate({"verifier": "http", "http": http, "timeout_seconds": 10.0, **options}))
    try:
        return made.score([(Prompt("0" * 16, "main", "train", "q", (1,), "right", {"x": 1}), answer) for answer in answers])
    finally:
        made.close()


def test_a_remote_judge_scores_retries_and_gives_up(url: str) -> None:
    answers = ["right", "wrong", "busy once", "always busy", "forbidden", "rubbish", "no score", "moved"]
    verdicts = dict(zip(answers, judge(url, answers), strict=True))
    assert {name: v.status for name, v in verdicts.items()} == {
        "right": "ok",
        "wrong": "wrong",
        "busy once": "wrong",
        "always busy": "error",
        "forbidden": "error",
        "rubbish": "error",
        "no score": "error",
        "moved": "error",
    }
    assert verdicts["right"].score == 1.0
    assert "503 to attempt 3" in verdicts["always busy"].detail
    assert "403 to attempt 1" in verdicts["forbidden"].detail
    assert "302 to attempt 1" in verdicts["moved"].detail
    assert "no number `score`" in verdicts["no score"].detail


def test_a_judge_that_drips_is_cut_off_at_the_deadline(url: str) -> None:
    (slow, right) = judge(url, ["drips", "right"], timeout_seconds=3.0)
    assert slow.status == "timeout"
    assert right.status == "ok"


def test_nobody_listening_is_an_error_verdict() -> None:
    http = Http(url="http://127.0.0.1:9/", retries=1, backoff_seconds=0.01)
    made = build_verifier(Reward(verifier="http", http=http))
    try:
        (verdict,) = made.score([(Prompt("0" * 16, "main", "train", "q", (1,), ""), "x")])
    finally:
        made.close()
    assert verdict.status == "error"
    assert "2 attempts" in verdict.detail
