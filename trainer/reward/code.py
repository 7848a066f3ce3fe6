"""Programs as answers: judged by unit tests, in the sandbox of `trainer.reward.sandbox`.

    CodeChannel      one worker of the pool: a test side and a candidate side, each in its own sandbox
    self_test        runs a probe program as a candidate and says which walls do not stand on this machine
    choose_kind      bubblewrap, else our own namespaces: the first whose walls stand; never unisolated by itself

A job comes from the prompt's scorer data, see `to_job`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.errors import ConfigError, DataError, TitheError
from trainer.reward import isolation
from trainer.reward.isolation import Kind
from trainer.reward.pool import START_SECONDS, Finding
from trainer.reward.sandbox import codec
from trainer.reward.sandbox.jail import Limits
from trainer.reward.sandbox.wire import FrameReader, frame, read_frame
from trainer.types import Prompt

UNISOLATED: Kind = "none-i-accept-the-risk"

# What the candidate of the self-test tries. Each value must be true where the sandbox holds.
PROBE = """
import ctypes, os, socket, sys

def refused(act):
    try:
        act()
    except (OSError, MemoryError):
        return True
    return False

def nothing_at(paths):
    return all(not os.path.exists(p) for p in paths)

def capabilities():
    head, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capget(head, held) == 0
    return any(held[:6])

def walls(hidden, host_pid, memory):
    own_pid = os.getpid()
    return {
        "network": refused(lambda: socket.socket()),
        "writes to the system": all(refused(lambda p=p: open(p, "w")) for p in ("/x", "/usr/x", "/etc/x", "/dev/x", "/proc/x")),
        "other files": nothing_at(hidden),
        "other processes": own_pid == 1 and refused(lambda: os.kill(host_pid, 0)),
        "forks": refused(os.fork),
        "memory": refused(lambda: bytearray(memory)),
        "privileges": os.getuid() != 0 and not capabilities(),
        "libraries": bool(__import__("random").random() and __import__("csv").reader),
        "scratch": os.getcwd() == "/tmp" and os.listdir(".") == [] and open("a", "w").write("b") == 1,
    }
"""
WALLS = (
    "network",
    "writes to the system",
    "other files",
    "other processes",
    "forks",
    "memory",
    "privileges",
    "libraries",
    "scratch",
)


@dataclass
class CodeChannel:
    """A worker of two keepers. Jobs go to the test side, which keeps the clock of each.

    Args:
        preload: modules that the candidate side imports once, so that candidates get them for free.
    """

    kind: Kind
    preload: tuple[str, ...] = ()
    batch_size: int = 4
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _stream: socket.socket = field(init=False)
    _reader: FrameReader = field(init=False)
    _ready: bool = False

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        ours, tests = socket.socketpair()
        tests_candidates, candidates = socket.socketpair()
        isolated = self.kind != UNISOLATED
        with tests, tests_candidates, candidates:
            self._processes = [
                isolation.start(
                    self.kind,
                    f"test_side.main({tests.fileno()}, {tests_candidates.fileno()}, {isolated})",
                    [tests.fileno(), tests_candidates.fileno()],
                ),
                isolation.start(
                    self.kind,
                    f"candidate_side.main({candidates.fileno()}, {isolated}, {list(self.preload)!r})",
                    [candidates.fileno()],
                ),
            ]
        self._stream, self._reader, self._ready = ours, FrameReader(), False

    def fileno(self) -> int:
        return self._stream.fileno()

    def wait_until_ready(self) -> None:
        """Wait until both keepers are up, so that no answer's clock pays for their start.

        Raises:
            TitheError: they died, or took longer than START_SECONDS.
        """
        if self._ready:
            return
        self._stream.settimeout(START_SECONDS)
        try:
            self._ready = read_frame(self._stream) is not None
        except OSError:  # a timeout is one
            self._ready = False
        self._stream.settimeout(None)
        if not self._ready:
            raise TitheError(f"the {self.kind} sandbox did not start; see what it wrote to stderr above")

    def send(self, batch: Sequence[tuple[int, Any]]) -> None:
        self.wait_until_ready()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead worker shows as EOF in receive
            self._stream.sendall(frame(codec.dumps([[index, job] for index, job in batch])))

    def receive(self) -> list[tuple[int, Finding]]:
        try:
            data = self._stream.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        found = []
        for body in self._reader.feed(data):
            index, status, score, detail, seconds = codec.loads(body)
            found.append((index, Finding(status, score, detail, seconds)))
        return found

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """Kill both keepers; their sandboxes die with them, also one that is only just being built."""
        self._stream.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def judge_alone(channel: CodeChannel, job: dict[str, Any], seconds: float) -> Finding:
    """Judge one job on an idle channel, outside a pool."""
    channel.send([(0, job)])
    with selectors.DefaultSelector() as selector:
        selector.register(channel.fileno(), selectors.EVENT_READ)
        while selector.select(seconds):
            try:
                for _, finding in channel.receive():
                    return finding
            except EOFError:
                return Finding("error", 0.0, "the sandbox ended at once", 0.0)
    return Finding("timeout", 0.0, f"the sandbox said nothing for {seconds:g} s", seconds)


def self_test(kind: Kind) -> str | None:
    """Run the probe in a sandbox of this kind; return what does not hold on this machine, or None.

    The probe also looks for this very file and for the user's home, which must not be there.
    """
    hidden = [os.path.abspath(__file__), os.path.expanduser("~/.ssh"), os.path.expanduser("~/.config"), "/etc/passwd", "/home"]
    memory = 256 * 1024**2
    checks = "\n".join(f"assert found[{wall!r}] is True, {wall!r}" for wall in WALLS)
    job = {
        "style": "function",
        "text": PROBE,
        "preamble": "",
        "entry_point": "walls",
        "tests": [f"found = walls({hidden!r}, {os.getpid()}, {2 * memory})\n{checks}"],
        "limits": vars(replace(Limits(), memory_bytes=memory, wall_seconds=20.0, cpu_seconds=20)),
    }
    try:
        channel = CodeChannel(kind)
    except OSError as error:
        return str(error)
    try:
        finding = judge_alone(channel, job, 30.0)
    except TitheError as error:
        return str(error)
    finally:
        channel.close()
    return None if finding.status == "ok" else f"{finding.status}: {finding.detail}"


def to_job(prompt: Prompt, answer: str, limits: dict[str, Any]) -> dict[str, Any]:
    """Return the job of one answer, from the prompt's scorer data.

    Args:
        prompt: its scorer holds `tests` and, where there are any, `entry_point` and `preamble`. Tests are a text of Python, a
            list of such texts, or a list of cases {"stdin" or "input": text, "stdout" or "output": text}; such a list may also
            come as JSON text.

    Raises:
        DataError: there are no tests that can be read.
    """
    scorer = prompt.scorer
    tests = scorer.get("tests")
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError):
            tests = json.loads(tests)
    if isinstance(tests, dict) and "inputs" in tests and "outputs" in tests:
        pairs = zip(tests["inputs"], tests["outputs"], strict=False)
        tests = [{"stdin": given, "stdout": wanted} for given, wanted in pairs]
    job = {"text": answer, "preamble": str(scorer.get("preamble") or ""), "limits": limits}
    if isinstance(tests, str) and tests.strip():
        return {**job, "style": "function", "entry_point": str(scorer.get("entry_point") or ""), "tests": [tests]}
    if isinstance(tests, list | tuple) and tests and all(isinstance(test, str) for test in tests):
        return {**job, "style": "function", "entry_point": str(scorer.get("entry_point") or ""), "tests": list(tests)}
    if isinstance(tests, list | tuple) and tests and all(isinstance(test, dict) for test in tests):
        cases = [{"stdin": t.get("stdin", t.get("input")), "stdout": t.get("stdout", t.get("output"))} for t in tests]
        if all(isinstance(text, str) for case in cases for text in case.values()):
            return {**job, "style": "program", "cases": cases}
    raise DataError(
        f"prompt {prompt.id} of source {prompt.source}", "its scorer data has no `tests` that the code verifier can read"
    )


def choose_kind(asked: str, key: str = "reward.code.sandbox") -> Kind:
    """Return the kind of sandbox to use.

    Args:
        asked: `auto`, or one kind.
        key: configuration key to name.

    Raises:
        ConfigError: none isolates here, and the recipe did not accept the risk.
    """
    if asked == UNISOLATED:
        return UNISOLATED
    kinds: tuple[Kind, ...] = ("bubblewrap", "namespaces")
    problems = []
    for kind in kinds:
        if asked in ("auto", kind):
            problem = isolation.available(kind) or self_test(kind)
            if problem is None:
                return kind
            problems.append(f"{kind}: {problem}")
    raise ConfigError(
        key,
        asked,
        "this machine does not isolate ("
        + "; ".join(problems)
        + "). Install bubblewrap and allow user namespaces, or judge code elsewhere; "
        f"{UNISOLATED} runs candidates with your rights",
    )
