"""The nursery: a small process that imports a judge once and forks workers that are cheap to kill and to replace.

    trainer --(spawn, with a socket)--> nursery --fork--> worker: answers in, one verdict frame out per answer

The nursery never runs a judge, so it always answers: when a worker hangs, it kills it and forks the next one from the
warm image in milliseconds. It has one thread, hence forking is safe, which it is not in a process that runs torch.
Started by `trainer.reward.pool`; it ends when the trainer's end of its socket closes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from trainer.reward.sandbox.wire import frame, read_frame

Payload = tuple[str, str, dict[str, Any], str]  # the prompt's text, its gold answer, its scorer's data, the answer to judge
Finding = tuple[str, float, str]  # status, score, detail
Judge = Callable[[Payload], Finding]


def resolve(factory: str) -> Callable[..., Any]:
    """Return the object at `module:name`."""
    module, _, name = factory.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def judge_one(judge: Judge, payload: Payload) -> tuple[str, float, str, float]:
    """Judge one answer and return status, score, detail and seconds; what the judge raises is its status `error`."""
    start = time.perf_counter()
    try:
        status, score, detail = judge(payload)
    except (RecursionError, MemoryError) as error:
        status, score, detail = "unparsable", 0.0, f"too deep or too large to judge ({type(error).__name__})"
    except Exception as error:  # noqa: BLE001  (a bad sample is data, whatever its judge trips over)
        status, score, detail = "error", 0.0, f"{type(error).__name__}: {error}"[:300]
    return status, score, detail, time.perf_counter() - start


def serve(stream: socket.socket, judge: Judge, memory_bytes: int) -> NoReturn:
    """Run a worker: read batches of payloads, send one frame per judged answer, end when the stream does."""
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    own_pid = os.getpid()
    while (body := read_frame(stream)) is not None:
        for index, payload in pickle.loads(body):
            finding = judge_one(judge, payload)
            if os.getpid() != own_pid:  # a fork that came back from a user's function: the worker itself answers
                os._exit(0)
            stream.sendall(frame(pickle.dumps((index, *finding))))
    os._exit(0)


def silence_stdout() -> None:
    """Let nothing that a judge prints reach the trainer's output."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)


def kill_worker(pid: int) -> None:
    """Kill a worker with all that it started, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> None:
    """Be a nursery until the trainer's end of the socket closes, whenever that is; leave nothing behind."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence_stdout()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a trainer that ended before it asked for anything
        nurse(control)
    os.killpg(0, signal.SIGKILL)


def nurse(control: socket.socket) -> None:
    """Build the judge, then fork a worker for every socket that arrives and kill the workers that are named."""
    asked = read_frame(control)
    if asked is None:
        return
    factory, arguments, memory_bytes = pickle.loads(asked)
    try:
        judge = resolve(factory)(**arguments)
    except Exception as error:  # noqa: BLE001  (told to the trainer, which names the key)
        control.sendall(frame(pickle.dumps(f"{type(error).__name__}: {error}")))
        return
    control.sendall(frame(pickle.dumps(None)))
    workers: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 4, 1)
        if not data:
            for pid in workers:
                kill_worker(pid)
            return
        if descriptors:
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                control.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                serve(socket.socket(fileno=descriptors[0]), judge, memory_bytes)
            os.setpgid(pid, pid)  # in both, so that neither races the other
            workers.add(pid)
            os.close(descriptors[0])
            control.sendall(pid.to_bytes(4, "big"))
        else:
            pid = int.from_bytes(data, "big")
            kill_worker(pid)
            workers.remove(pid)
            control.sendall(data)
