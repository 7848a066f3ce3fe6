"""A clock that a test can set, for every Python process with this folder on its path: the file TEST_CLOCK holds the seconds."""

import os
import time

_file, _real = os.environ.get("TEST_CLOCK"), time.time


def _jumped() -> float:
    try:
        with open(str(_file)) as file:
            return _real() + float(file.read() or 0)
    except (FileNotFoundError, ValueError):
        return _real()


if _file:
    time.time = _jumped
