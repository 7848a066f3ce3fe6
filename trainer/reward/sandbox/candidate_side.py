"""The candidate side: a keeper that forks jailed inmates, and what an inmate does with the code that it is sent.

    keeper     {"run": 7, "limits": {...}} and a socket  ->  {"pid": ...}        on its socket to the test side's keeper
               {"kill": 7, "wait_seconds": 0.0}          ->  {"ended": exit status, or -1 when killed, "signal": ...}
    inmate     first frame on its socket: {"style", "text", "preamble", "entry_point"}. Style `function`: load the code, then
               answer calls. Style `program`: the socket becomes stdin and stdout, and the code runs as a script

The keeper never reads code. The inmate finds the code in the answer's text itself, because that text is hostile too.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import signal
import socket
import sys
from types import ModuleType
from typing import Any, NoReturn

from . import codec, extract, jail, kernel
from .wire import frame, read_exactly, read_frame

MAX_HANDLES = 10_000


class Desk:
    """Answers the tests' calls from the candidate's namespace."""

    def __init__(self, namespace: dict[str, Any]):
        self.namespace = namespace
        self.objects: list[Any] = []

    def handle(self, value: Any) -> Any:
        if len(self.objects) >= MAX_HANDLES:
            raise MemoryError("too many objects")
        self.objects.append(value)
        return {"h": len(self.objects) - 1, "n": type(value).__name__}

    def out(self, value: Any) -> Any:
        return codec.encode(value, self.handle)

    def into(self, form: Any) -> Any:
        return codec.decode(form, lambda number, _: self.objects[number])

    def describe(self, names: list[str]) -> Any:
        """Return the form of a mapping of those names that the candidate defined."""
        return self.out({name: self.namespace[name] for name in names if name in self.namespace})

    def act(self, request: dict[str, Any]) -> Any:
        """Do what one request asks; whatever the candidate raises passes through."""
        match request["do"]:
            case "describe":
                return {"ok": self.describe(request["names"])}
            case "call":
                arguments = self.into(request["args"])
                result = self.objects[request["h"]](*arguments, **self.into(request["kwargs"]))
                if result is None:  # done in place, perhaps: the tests see what became of the arguments
                    return {"ok": None, "args": self.out(list(arguments))}
                return {"ok": self.out(result)}
            case "get":
                return {"ok": self.out(getattr(self.objects[request["h"]], request["name"]))}
            case "item":
                return {"ok": self.out(self.objects[request["h"]][self.into(request["key"])])}
            case "len":
                return {"ok": len(self.objects[request["h"]])}
            case "iter":
                return {"ok": self.handle(iter(self.objects[request["h"]]))}
            case "next":
                try:
                    return {"ok": self.out(next(self.objects[request["h"]]))}
                except StopIteration:
                    return {"stop": True}
            case "text":
                return {"ok": str.__str__(str(self.objects[request["h"]]))}
        return {"raise": ["TypeError", "unknown request"]}


def answer_calls(stream: socket.socket, desk: Desk) -> None:
    while (body := read_frame(stream)) is not None:
        try:
            answer = desk.act(codec.loads(body))
        except BaseException as error:  # noqa: BLE001  (SystemExit too: it is the candidate's answer to this call)
            answer = {"raise": [type(error).__name__, fault_text(error)]}
        stream.sendall(frame(codec.dumps(answer)))


def fault_text(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except BaseException:  # noqa: BLE001  (its __str__ is the candidate's)
        return "?"


def run_functions(stream: socket.socket, job: dict[str, Any]) -> None:
    """Load the candidate as a module, say how that went, then answer calls."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    module = ModuleType("candidate")
    sys.modules["candidate"] = module
    try:
        code = extract.find_code(job["text"], job["preamble"], job["entry_point"])
        compiled = compile(code, "candidate.py", "exec")
    except (extract.NoCodeError, SyntaxError, ValueError, MemoryError, RecursionError) as error:
        stream.sendall(frame(codec.dumps({"unparsable": f"{type(error).__name__}: {fault_text(error)}"})))
        return
    try:
        exec(compiled, module.__dict__)
    except BaseException as error:  # noqa: BLE001  (SystemExit at import is the candidate's fault, not its success)
        stream.sendall(frame(codec.dumps({"raise": [type(error).__name__, fault_text(error)]})))
        return
    stream.sendall(frame(codec.dumps({"ok": None})))
    answer_calls(stream, Desk(module.__dict__))


def run_program(stream: socket.socket, job: dict[str, Any]) -> None:
    """Run the candidate as a script whose stdin and stdout are the socket; ends the process with the script's status.

    The first byte of the output is ours: `y` when the code compiles, `n` when not.
    """
    try:
        code = extract.find_code(job["text"], job["preamble"], "")
        compiled = compile(code, "candidate.py", "exec")
    except (extract.NoCodeError, SyntaxError, ValueError, MemoryError, RecursionError):
        stream.sendall(b"n")
        return
    stream.sendall(b"y")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(stream.fileno(), 0)
    os.dup2(stream.fileno(), 1)
    os.dup2(null, 2)
    stream.close()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "rb")), encoding="utf-8", errors="surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "wb")), encoding="utf-8", errors="surrogateescape")
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "wb")), encoding="utf-8", errors="replace")
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    status = 0
    try:
        exec(compiled, module.__dict__)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  (a traceback: status 1, as Python itself does)
        status = 1
    try:
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  (the candidate may have put anything there)
        status = status or 1
    os._exit(status & 255)


def be_inmate(stream: socket.socket, limits: jail.Limits, isolated: bool) -> NoReturn:
    """Shut the jail, then run what arrives; never returns."""
    status = 70
    try:
        os.setsid()  # kill(0) reaches the whole process group, past any process namespace
        jail.close_all_but(stream.fileno())
        if isolated:
            jail.private_files(limits)
            os.chdir(jail.SCRATCH)
        jail.shut(limits)
        body = read_frame(stream)
        if body is not None:
            job = codec.loads(body)
            (run_functions if job["style"] == "function" else run_program)(stream, job)
            status = 0
    finally:
        os._exit(status)


def kill_group(pid: int, number: int) -> None:
    """Kill a process and its group: what there is of a process tree where there are no namespaces."""
    os.kill(pid, number)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


class Keeper:
    """Forks inmates on request and ends them on request; holds no code.

    Args:
        control: the socket to the test side's keeper.
        isolated: False skips the namespaces (a recipe accepted the risk).
    """

    def __init__(self, control: socket.socket, isolated: bool):
        self.control, self.isolated = control, isolated
        self.pid = 0

    def start(self, stream: socket.socket, limits: jail.Limits) -> dict[str, Any]:
        """Fork an inmate that talks on the stream and return its pid, or what the kernel refused."""
        read_end, write_end = os.pipe()
        doorman = os.fork()
        if doorman == 0:
            self._be_doorman(stream, limits, write_end)
        os.close(write_end)
        stream.close()
        with os.fdopen(read_end, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(doorman, 0)
        if not said.isdigit():
            return {"failed": said or "the doorman died"}
        self.pid = int(said)
        return {"pid": self.pid}

    def _be_doorman(self, stream: socket.socket, limits: jail.Limits, write_end: int) -> NoReturn:
        try:
            if self.isolated:
                jail.new_namespaces()
            pid = os.fork()
            if pid == 0:
                os.close(write_end)
                be_inmate(stream, limits, self.isolated)
            os.write(write_end, str(pid).encode())
        except OSError as error:
            os.write(write_end, f"{error}".encode())
        os._exit(0)

    def end(self, wait_seconds: float) -> dict[str, Any]:
        """Give the inmate time to end, kill it with everything in its process namespace, and say how it ended."""
        if not self.pid:
            return {"ended": 0, "signal": 0}
        pid, self.pid = self.pid, 0
        if wait_seconds > 0:
            handle = os.pidfd_open(pid)
            select.select([handle], [], [], wait_seconds)
            os.close(handle)
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            (os.kill if self.isolated else kill_group)(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"ended": -1, "signal": 0}
        return {"ended": os.waitstatus_to_exitcode(status), "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}

    def run(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.control, 4, 1)
            if not data:
                return
            rest = read_exactly(self.control, int.from_bytes(data, "big"))
            if rest is None:
                return
            request = codec.loads(rest)
            if "run" in request:
                answer = self.start(socket.socket(fileno=descriptors[0]), jail.Limits(**request["limits"]))
            else:
                answer = self.end(request["wait_seconds"])
            self.control.sendall(frame(codec.dumps(answer)))


def main(descriptor: int, isolated: bool, preload: list[str]) -> None:
    """Warm up (imports, then freeze the heap so that forks share it), then keep."""
    if isolated:
        jail.become_nobody()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    for name in preload:
        __import__(name)
    gc.collect()
    gc.freeze()
    Keeper(socket.socket(fileno=descriptor), isolated).run()
