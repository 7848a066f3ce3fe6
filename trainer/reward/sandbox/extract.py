"""Find the program in an answer: the fenced block that defines what is asked for, or the text itself, tail cut off.

Runs inside the jail: the text is hostile. Standard library only.
"""

from __future__ import annotations

import ast
import re

FENCE = re.compile(r"^[ \t]*(```|~~~)[ \t]*([A-Za-z0-9_+.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
PYTHON_NAMES = ("", "python", "python3", "py", "py3")
MAX_TEXT = 1_000_000
MAX_CUTS = 400


class NoCodeError(ValueError):
    """The answer holds no program."""


def defines(code: str, name: str) -> bool:
    return (
        re.search(rf"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*=", code, re.M)
        is not None
    )


def compiles(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def cut_tail(code: str) -> str:
    """Return the longest run of leading lines that is a program: completions often run on into prose."""
    lines = code.split("\n")
    for end in range(len(lines), max(0, len(lines) - MAX_CUTS), -1):
        head = "\n".join(lines[:end])
        if head.strip() and compiles(head):
            return head
    return code


def fenced_blocks(text: str) -> list[str]:
    """Return the bodies of fenced blocks that are Python's or nobody's; a last block may lack its closing fence."""
    return [body for _, language, body in FENCE.findall(text) if language.lower() in PYTHON_NAMES]


def find_code(text: str, preamble: str, entry_point: str) -> str:
    """Return the program to run.

    Args:
        text: the whole answer.
        preamble: what the prompt gave: imports and helpers, perhaps ending in the signature that the answer continues.
        entry_point: the function asked for; "" for a script.

    Raises:
        NoCodeError: there is nothing to run.
    """
    if len(text) > MAX_TEXT:
        raise NoCodeError(f"{len(text)} characters")
    blocks = fenced_blocks(text)
    if blocks:
        asked = [block for block in blocks if entry_point and defines(block, entry_point)]
        code = (asked or blocks)[-1]
    else:
        code = text
    if not code.strip():
        raise NoCodeError("the answer is empty")
    if not preamble:
        return code if blocks else cut_tail(code)
    if entry_point and defines(code, entry_point):
        whole = head_of(preamble, entry_point) + "\n" + code
        return whole if blocks else cut_tail(whole)
    joined = preamble + code
    return joined if blocks and compiles(joined) else cut_tail(joined)


def head_of(preamble: str, entry_point: str) -> str:
    """Return the preamble up to the definition that the answer repeats."""
    match = re.search(rf"^(?:async[ \t]+def|def|class)[ \t]+{re.escape(entry_point)}\b", preamble, re.M)
    return preamble[: match.start()] if match else preamble
