"""Kills a stage's process once at a chosen place, for every Python process with this folder on its path.

The folder TEST_KILL holds one file per kill, named `<stage>.<place>`; it goes when the kill happens. The places:

    begun         the stage has written that it runs, and nothing else
    made          all of its artifact is written, but not in place
    in-place      the artifact is in place, and nobody was told
    step-000002   a directory of that name, a checkpoint, has come into place
"""

import multiprocessing
import os
import signal
from pathlib import Path

_wishes = Path(os.environ.get("TEST_KILL", "/nonexistent"))
_replace, _rename = os.replace, os.rename


def _die(place: str) -> None:
    stage = multiprocessing.current_process().name
    wish = _wishes / f"{stage}.{place}"
    if wish.exists():
        wish.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _replaced(source: str, target: str) -> None:
    _replace(source, target)
    if os.path.basename(target) == "record.json":
        _die("begun")


def _renamed(source: str, target: str) -> None:
    is_new = str(source).endswith(".partial")
    is_artifact = is_new and os.path.basename(os.path.dirname(target)) == "artifacts"
    if is_artifact:
        _die("made")
    _rename(source, target)
    if is_artifact:
        _die("in-place")
    elif is_new:
        _die(os.path.basename(target))


if _wishes.is_dir():
    os.replace, os.rename = _replaced, _renamed  # type: ignore[assignment]
