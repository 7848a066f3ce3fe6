"""What the tests hold of a candidate: proxies that call over a socket and get plain data back.

A value that is not plain data stays on the other side; here it is a `RemoteObject`, which can be called, indexed, measured,
iterated and asked for attributes, but is equal to nothing but itself and has no truth value: the candidate's own `__eq__`
or `__bool__` never decides a test.
"""

from __future__ import annotations

import builtins
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

from . import codec
from .wire import frame, read_frame

MAX_ANSWER_BYTES = 8 * 1024**2


class CandidateGoneError(BaseException):
    """The candidate's process ended or broke the protocol. Not an Exception: no test may swallow it."""


class RemoteError(Exception):
    """The candidate raised something that is no builtin exception."""


class Candidate:
    """The tests' end of the socket to an inmate.

    Attributes:
        gone: why the candidate is of no use any more, or None. Set once, checked before any verdict of success.
    """

    def __init__(self, stream: socket.socket):
        self._stream = stream
        self.gone: str | None = None

    def _lost(self, why: str) -> NoReturn:
        self.gone = self.gone or why
        raise CandidateGoneError(why)

    def receive(self) -> dict[str, Any]:
        try:
            body = read_frame(self._stream, MAX_ANSWER_BYTES)
            if body is None:
                self._lost("the candidate's process ended")
            message = codec.loads(body)
            if not isinstance(message, dict):
                raise ValueError("not an object")
            return message
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            self._lost(f"the candidate's answer cannot be read: {type(error).__name__}")

    def ask(self, **request: Any) -> Any:
        """Send a request and return the value of its answer, or raise what the candidate raised."""
        return self.exchange(request)[0]

    def exchange(self, request: dict[str, Any]) -> tuple[Any, list[Any] | None]:
        """Send a request; return the value of its answer and, after a call that returned None, the arguments as it left them."""
        try:
            self._stream.sendall(frame(codec.dumps(request)))
        except OSError:
            self._lost("the candidate's process ended")
        answer = self.receive()
        if "raise" in answer:
            raise to_exception(answer["raise"])
        if "stop" in answer:
            raise StopIteration
        try:
            value, replaced = self.decode(answer["ok"]), self.decode(answer.get("args"))
            if replaced is not None and type(replaced) is not list:
                raise TypeError("arguments are a list")
            return value, replaced
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            self._lost(f"the candidate's answer cannot be read: {type(error).__name__}")

    def decode(self, form: Any) -> Any:
        return codec.decode(form, lambda number, name: RemoteObject(self, number, name))

    def describe(self, names: list[str]) -> dict[str, Any]:
        """Return those of the names that the candidate defined, as data or proxies."""
        try:
            found = self.ask(do="describe", names=names)
        except Exception as error:  # noqa: BLE001  (no test asks here, so whatever the candidate raises is its fault)
            self._lost(f"the candidate's names cannot be read: {type(error).__name__}")
        if not isinstance(found, dict):
            self._lost("the candidate's answer cannot be read: no mapping of names")
        return {name: found[name] for name in names if name in found}  # nothing that was not asked for


def to_exception(said: Any) -> Exception:
    """Return the builtin exception of that name, or a RemoteError."""
    name, text = (str(said[0]), str(said[1])) if isinstance(said, list) and len(said) == 2 else ("?", "")
    kind = getattr(builtins, name, None)
    odd = StopIteration | UnicodeError | ExceptionGroup  # take other arguments, or mean something to our own loops
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, odd):
        return kind(text)
    return RemoteError(f"{name}: {text}")


def _encode_argument(value: Any) -> Any:
    if isinstance(value, RemoteObject):
        return {"h": value._number, "n": ""}
    raise codec.NotPlainError(f"a test passes a {type(value).__name__}; only plain data can go to a candidate")


def _replace(old: Any, new: Any) -> None:
    """Make a mutable argument what the candidate's in-place call made of it."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict | set) and type(old) is type(new):
        old.clear()
        old.update(new)


class RemoteObject:
    """An object that lives in the candidate's process."""

    def __init__(self, candidate: Candidate, number: int, name: str):
        self._candidate, self._number, self._name = candidate, number, name
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forms = [codec.encode(a, _encode_argument) for a in args]
        keywords = {"d": [[k, codec.encode(v, _encode_argument)] for k, v in kwargs.items()]}
        result, left = self._candidate.exchange({"do": "call", "h": self._number, "args": forms, "kwargs": keywords})
        for old, new in zip(args, left or (), strict=False):
            _replace(old, new)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._candidate.ask(do="get", h=self._number, name=name)

    def __getitem__(self, key: Any) -> Any:
        return self._candidate.ask(do="item", h=self._number, key=codec.encode(key, _encode_argument))

    def __len__(self) -> int:
        length = self._candidate.ask(do="len", h=self._number)
        if type(length) is not int or length < 0:
            raise TypeError("len() of a candidate's object is no number")
        return length

    def __iter__(self) -> Iterator[Any]:
        return RemoteIterator(self._candidate, self._candidate.ask(do="iter", h=self._number))

    def __next__(self) -> Any:
        return self._candidate.ask(do="next", h=self._number)

    def __str__(self) -> str:
        return str(self._candidate.ask(do="text", h=self._number))

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and other._number == self._number

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        raise TypeError(f"a {self._name} of the candidate's is not plain data and has no truth value here")


class RemoteIterator:
    def __init__(self, candidate: Candidate, iterator: Any):
        self._candidate, self._iterator = candidate, iterator

    def __iter__(self) -> RemoteIterator:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)
