"""The test side: takes jobs from the trainer, runs the tests against a jailed candidate, keeps the clock, gives the verdict.

{"style": "function", "text", "preamble", "entry_point", "tests": [source, ...], "limits"}
    a fork runs the tests, the candidate's functions are proxies in it; the verdict comes over a pipe of the fork's own
{"style": "program", "text", "preamble", "cases": [{"stdin", "stdout"}, ...], "limits"}
    nothing but comparing text: done here, one jailed run of the program per case
-> [index, status, score, detail, seconds]      score: share of tests passed; 1 only when all did
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import time
from typing import Any, NoReturn

from . import codec, jail, tests
from .wire import frame, read_frame

Finding = tuple[str, float, str]
TESTS_MEMORY_BYTES = 1024**3
DYING_SECONDS = 0.1  # between a dead candidate's last byte and its exit status


class Keeper:
    """Judges one job at a time.

    Args:
        trainer: socket to the trainer.
        candidates: socket to the candidate side's keeper.
    """

    def __init__(self, trainer: socket.socket, candidates: socket.socket):
        self.trainer, self.candidates = trainer, candidates

    def run(self) -> None:
        self._order({"kill": 0, "wait_seconds": 0.0})  # answered as soon as the candidate side is up
        self.trainer.sendall(frame(codec.dumps("ready")))
        while (body := read_frame(self.trainer)) is not None:
            for index, job in codec.loads(body):
                start = time.monotonic()
                status, score, detail = self.judge(job, jail.Limits(**job["limits"]))
                seconds = time.monotonic() - start
                self.trainer.sendall(frame(codec.dumps([index, status, score, detail, seconds])))

    def judge(self, job: dict[str, Any], limits: jail.Limits) -> Finding:
        deadline = time.monotonic() + limits.wall_seconds
        if job["style"] == "function":
            return self.judge_functions(job, limits, deadline)
        return self.judge_program(job, limits, deadline)

    def _order(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        body = codec.dumps(request)
        socket.send_fds(self.candidates, [len(body).to_bytes(4, "big")], list(descriptors))
        self.candidates.sendall(body)
        answer = read_frame(self.candidates)
        if answer is None:
            raise EOFError("the candidate side's keeper is gone")
        reply: dict[str, Any] = codec.loads(answer)
        return reply

    def _start(self, limits: jail.Limits) -> socket.socket:
        """Have an inmate forked and return our end of the socket to it."""
        ours, theirs = socket.socketpair()
        answer = self._order({"run": 1, "limits": vars(limits)}, theirs.fileno())
        theirs.close()
        if "failed" in answer:
            ours.close()
            raise OSError(answer["failed"])
        return ours

    def judge_functions(self, job: dict[str, Any], limits: jail.Limits, deadline: float) -> Finding:
        try:
            stream = self._start(limits)
        except OSError as error:
            return "error", 0.0, f"the sandbox could not start: {error}"
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            run_tests(job, stream, write_end, limits)
        os.close(write_end)
        stream.close()
        said = read_until(read_end, deadline)
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        _, how = os.waitpid(pid, 0)
        if said == b"" and os.WIFSIGNALED(how) and os.WTERMSIG(how) == signal.SIGKILL:
            said = None  # its CPU limit: what a candidate returned was too much work for the tests
        status, score, detail, gone = codec.loads(said) if said else ("error", 0.0, "the tests' process died", False)
        ended = self._order({"kill": 1, "wait_seconds": DYING_SECONDS if gone else 0.0})
        if said is None:
            return "timeout", 0.0, f"no verdict within {limits.wall_seconds:g} s"
        if ended["signal"] == signal.SIGKILL and gone:
            return "timeout", 0.0, f"CPU limit of {limits.cpu_seconds} s"
        return status, float(score), detail

    def judge_program(self, job: dict[str, Any], limits: jail.Limits, deadline: float) -> Finding:
        passed, detail = 0, ""
        for number, case in enumerate(job["cases"]):
            try:
                stream = self._start(limits)
            except OSError as error:
                return "error", 0.0, f"the sandbox could not start: {error}"
            order = frame(codec.dumps({"style": "program", "text": job["text"], "preamble": job["preamble"]}))
            output = talk(stream, order + case["stdin"].encode("utf-8", "surrogateescape"), deadline, limits.output_bytes)
            left = deadline - time.monotonic() if output is not None and len(output) <= limits.output_bytes else 0.0
            ended = self._order({"kill": 1, "wait_seconds": max(0.0, left)})
            stream.close()
            if output is None:
                return "timeout", 0.0, f"case {number}: no end within {limits.wall_seconds:g} s"
            if ended["signal"] == signal.SIGKILL:
                return "timeout", 0.0, f"case {number}: CPU limit of {limits.cpu_seconds} s"
            if output[:1] != b"y":
                return "unparsable", 0.0, "no program in the answer"
            if len(output) > limits.output_bytes:
                detail = detail or f"case {number}: more than {limits.output_bytes} bytes of output"
            elif ended["ended"] == -1:
                return "timeout", 0.0, f"case {number}: no end within {limits.wall_seconds:g} s"
            elif ended["ended"] != 0:
                detail = detail or f"case {number}: exit status {ended['ended']}"
            elif same_output(output[1:].decode("utf-8", "replace"), case["stdout"]):
                passed += 1
            else:
                detail = detail or f"case {number}: wrong output"
        total = len(job["cases"])
        return ("ok" if passed == total else "wrong"), passed / total, detail or f"{passed} of {total} cases"


def read_until(descriptor: int, deadline: float) -> bytes | None:
    """Read to the end; None when the deadline comes first."""
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return None
            more = os.read(descriptor, 65536)
            if not more:
                return data
            data += more


def talk(stream: socket.socket, to_send: bytes, deadline: float, max_bytes: int) -> bytes | None:
    """Send, close our direction, and read to the end or past `max_bytes`; None when the deadline comes first."""
    stream.setblocking(False)
    view, data = memoryview(to_send), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while True:
            left = deadline - time.monotonic()
            events = selector.select(left) if left > 0 else []  # one who never stops writing is late all the same
            if not events:
                return None
            mask = events[0][1]
            try:
                if mask & selectors.EVENT_WRITE and view is not None:
                    view = view[stream.send(view) :]
                    if not view:
                        stream.shutdown(socket.SHUT_WR)
                        selector.modify(stream, selectors.EVENT_READ)
                if mask & selectors.EVENT_READ:
                    more = stream.recv(65536)
                    data += more
                    if not more or len(data) > max_bytes:
                        return bytes(data)
            except (BrokenPipeError, ConnectionResetError):  # it did not read its input to the end
                selector.modify(stream, selectors.EVENT_READ)
                view = memoryview(b"")


def same_output(output: str, expected: str) -> bool:
    """Whether two outputs agree: trailing blanks apart, and numbers with a decimal point to 1e-6."""
    got, want = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (output, expected))
    if got == want:
        return True
    got_words, want_words = output.split(), expected.split()
    return len(got_words) == len(want_words) and all(_same_word(g, w) for g, w in zip(got_words, want_words, strict=True))


def _same_word(got: str, want: str) -> bool:
    if got == want:
        return True
    if "." not in want or len(got) > 100:
        return False
    try:
        a, b = float(got), float(want)
    except ValueError:
        return False
    return abs(a - b) <= 1e-6 * max(1.0, abs(b))


def run_tests(job: dict[str, Any], stream: socket.socket, write_end: int, limits: jail.Limits) -> NoReturn:
    """Be the fork that runs the tests: bound as an inmate is, and alone with the candidate's socket and the verdict's pipe."""
    try:
        os.setsid()
        jail.close_all_but(stream.fileno(), write_end)
        jail.shut(
            jail.Limits(cpu_seconds=limits.cpu_seconds + 1, memory_bytes=TESTS_MEMORY_BYTES, open_files=32, scratch_bytes=1024**2)
        )
        finding = tests.judge(job, stream)
        os.write(write_end, codec.dumps(finding))
    finally:
        os._exit(0)


def main(trainer: int, candidates: int, isolated: bool) -> None:
    """Warm up, then keep."""
    if isolated:
        jail.become_nobody()
    gc.collect()
    gc.freeze()
    Keeper(socket.socket(fileno=trainer), socket.socket(fileno=candidates)).run()
