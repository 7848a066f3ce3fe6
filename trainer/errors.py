"""Every failure that tithe names, and the exit code each one ends a process with.

TitheError
 |- ConfigError       2   the user's configuration: names the key, the value and the fix
 |- DataError         3   the user's data: names the file, the line and the fix
 |- ModelError        4   the user's model directory, tokenizer or adapter
 |- DivergedError     5   training cannot go on (non-finite updates in a row)
 |- CheckpointError   6   no checkpoint can be trusted
 |- BusyError         7   a port, a lock or a run directory that something else holds
 |- ResourceError     8   disk or memory is exhausted, or a file cannot be written; what was written before is intact
 |- StalledError      9   a wait passed its deadline: names who was waited for
 |- MismatchError    10   sampler and learner give other log-probs for the same tokens
 |- RankError        11   a rank of a sharded run died or was lost: names it
 `- StopRequested    75  asked to stop (SIGTERM, SIGINT); a checkpoint was written, run again to go on

A bad sample is none of these: it is data with a status (see trainer.types.Verdict). A broken invariant is an `assert`.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable


class TitheError(Exception):
    """A failure with a one-line message for a person and an exit code for a program."""

    exit_code = 1


class ConfigError(TitheError):
    """The configuration is wrong.

    Args:
        key: dotted path of the field, such as `train.batch.group_size`.
        value: what was given there.
        problem: why it cannot be used, and what to set instead.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, problem: str):
        self.key, self.value, self.problem = key, value, problem
        super().__init__(f"{key} = {value!r}: {problem}")


class ConfigErrors(ConfigError):
    """Several configuration errors at once, one line each."""

    def __init__(self, errors: list[ConfigError]):
        first = errors[0]
        super().__init__(first.key, first.value, first.problem)
        self.errors = errors
        self.args = ("\n".join(str(error) for error in errors),)


class DataError(TitheError):
    """A data file cannot be used. The message starts with `file:line` where a line is known."""

    exit_code = 3

    def __init__(self, where: str, problem: str):
        self.where, self.problem = where, problem
        super().__init__(f"{where}: {problem}")


class ModelError(TitheError):
    """A model directory, tokenizer or adapter cannot be used."""

    exit_code = 4


class DivergedError(TitheError):
    """Training cannot go on: updates were not finite several times in a row."""

    exit_code = 5


class CheckpointError(TitheError):
    """A checkpoint is damaged or belongs to another run."""

    exit_code = 6


class BusyError(TitheError):
    """Something else holds the port, the lock or the directory."""

    exit_code = 7


class ResourceError(TitheError):
    """Disk or memory is exhausted."""

    exit_code = 8


class StalledError(TitheError):
    """A wait passed its deadline.

    Args:
        culprit: who was waited for, as the start of the sentence.
        what: what it did not do, and for how long.
        fix: what a person can do.
    """

    exit_code = 9

    def __init__(self, culprit: str, what: str, fix: str):
        self.culprit = culprit
        super().__init__(f"{culprit} {what}; {fix}")


class MismatchError(TitheError):
    """Sampler and learner disagree on the log-probs of fixed tokens, so training would be wrong."""

    exit_code = 10


class RankError(TitheError):
    """A rank of a run over several processes is gone, and the others cannot go on without it."""

    exit_code = 11


class StopRequested(TitheError):
    """The process was asked to stop and has written what it needs to go on later."""

    exit_code = 75


NOBODYS_FAULT = (StopRequested, MemoryError)
"""What code around somebody else's reader lets pass: a stop arrives as an exception wherever the program is."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the closest valid name, or the list of valid names."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "valid here: " + ", ".join(valid)


def name_os_error(error: OSError) -> TitheError:
    """Return a failing file system as a failure that tithe names.

    Raises:
        OSError: the error itself, where it is none of a file: such a one is a bug, and its traceback is wanted.
    """
    if error.filename is None or error.errno not in _OF_THE_PLACE:
        raise error
    problem = f"{error.filename}: {(error.strerror or '').lower()}; nothing written before is lost. {_OF_THE_PLACE[error.errno]}"
    return ResourceError(problem)


_OF_THE_PLACE = {
    errno.EACCES: "Give the rights to it, or name another place",
    errno.EPERM: "Give the rights to it, or name another place",
    errno.EROFS: "Make it writable, or name another place",
    errno.ENOTDIR: "Name a directory",
    errno.ELOOP: "Name another place",
    errno.ENAMETOOLONG: "Name a shorter one",
    errno.EIO: "See to the disk, then run the same command again",
    errno.ENOSPC: "Free space, then run the same command again",
    errno.EDQUOT: "Free space, then run the same command again",
    errno.EMFILE: "Raise the limit of open files (ulimit -n), then run the same command again",
}


def without_password(text: str) -> str:
    """Return a text in which the password of every address is hidden: for messages, and for files that are passed on."""
    hidden = re.sub(r"(?<=://)([^:/@\s]*):\S*@", r"\1:***@", text)
    return re.sub(r"([?&](?:ssl)?password=)[^&\s]*", r"\1***", hidden, flags=re.IGNORECASE)


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, or its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
