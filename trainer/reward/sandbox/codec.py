"""Plain data across the border: builtin values to JSON and back, by exact type, never an object of the candidate's making.

    42, "x", None, [1, 2]   as in JSON            (1, 2)   {"t": [1, 2]}          {1: 2}   {"d": [[1, 2]]}
    {1, 2}   {"s": [1, 2]}  frozenset {"f": ...}  b"x"     {"b": "78"}            1+2j     {"c": [1.0, 2.0]}
    2**99999 {"i": "0x..."} (no digit limit)      anything else   {"h": 7, "n": "Node"}: a handle, the object stays behind

What arrives is built from exact builtin types, so comparing it runs no code of the candidate's. A subclass of a builtin
(Counter, namedtuple, IntEnum) arrives as the builtin; an ndarray or a deque as a list.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 200
BIG_INTEGER = 1 << 4096


class NotPlainError(TypeError):
    """A value that cannot cross the border."""


def encode(value: Any, handle: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """Return the JSON form of a value.

    Args:
        handle: makes the JSON form of what is not plain data; None refuses it.

    Raises:
        NotPlainError: not plain data, or nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise NotPlainError("nested too deeply")
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -BIG_INTEGER < value < BIG_INTEGER else {"i": hex(value)}
    many = _encode_container(value, handle, depth)
    if many is not None:
        return many
    if isinstance(value, int):
        return encode(int.__index__(value))
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if hasattr(kind, "__array__") and hasattr(kind, "tolist"):
        return encode(value.tolist(), handle, depth + 1)
    if handle is None:
        raise NotPlainError(f"{kind.__name__} is not plain data")
    return handle(value)


def _encode_container(value: Any, handle: Callable[[Any], Any] | None, depth: int) -> Any:
    if isinstance(value, list | deque):
        return [encode(item, handle, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"t": [encode(item, handle, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(k, handle, depth + 1), encode(v, handle, depth + 1)] for k, v in value.items()]}
    if isinstance(value, set):
        return {"s": [encode(item, handle, depth + 1) for item in value]}
    if isinstance(value, frozenset):
        return {"f": [encode(item, handle, depth + 1) for item in value]}
    return None


def decode(form: Any, resolve: Callable[[int, str], Any]) -> Any:
    """Return the value of a JSON form.

    Args:
        resolve: returns what stands for a handle, from its number and its type's name.

    Raises:
        ValueError, TypeError, KeyError: the form is not one that `encode` makes (the other end may be hostile).
    """
    if form is None or isinstance(form, bool | int | float | str):
        return form
    if isinstance(form, list):
        return [decode(item, resolve) for item in form]
    if "h" in form:
        return resolve(int(form["h"]), str(form["n"]))
    ((tag, body),) = form.items()
    match tag:
        case "t":
            return tuple(decode(item, resolve) for item in body)
        case "d":
            return {decode(k, resolve): decode(v, resolve) for k, v in body}
        case "s":
            return {decode(item, resolve) for item in body}
        case "f":
            return frozenset(decode(item, resolve) for item in body)
        case "b":
            return bytes.fromhex(body)
        case "c":
            return complex(float(body[0]), float(body[1]))
        case "i":
            return int(body, 16)
    raise ValueError(f"no such tag: {str(tag)[:20]}")


def dumps(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def loads(body: bytes) -> Any:
    return json.loads(body)
