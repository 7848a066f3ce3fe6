"""Functions as a user writes them, for the `python` verifier."""

from __future__ import annotations

import os
import time
from typing import Any


def length(prompt: str, answer: str, gold: str, scorer: dict[str, Any]) -> float:
    return len(answer) / 10


def same(prompt: str, answer: str, gold: str, scorer: dict[str, Any]) -> bool:
    print("this must not reach the trainer's output")
    return answer == gold


def misbehaving(prompt: str, answer: str, gold: str, scorer: dict[str, Any]) -> float:
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(1)
    if answer == "raise":
        raise KeyError(answer)
    return float("nan") if answer == "nan" else 1.0


def forking(prompt: str, answer: str, gold: str, scorer: dict[str, Any]) -> float:
    if answer == "fork and return":
        os.fork()
    if answer.startswith("leave a child "):
        child = os.fork()
        if child == 0:
            time.sleep(600)
        with open(answer.removeprefix("leave a child "), "w", encoding="utf-8") as file:
            file.write(str(child))
        time.sleep(600)
    return 1.0


def make_glutton() -> Any:
    return lambda payload: ("ok", float(len(bytearray(2 * 1024**3))), "")
