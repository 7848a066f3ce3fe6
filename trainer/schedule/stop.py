"""SIGTERM and SIGINT as a wish that is read at safe points, so that no optimizer step is cut in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainer.errors import StopRequested


class StopWish:
    """Whether somebody asked to stop, and how."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def error(self) -> StopRequested:
        return StopRequested(f"stopped by {self.signal_name} after a checkpoint; run the same command again to go on")


@contextmanager
def deferred_stop() -> Iterator[StopWish]:
    """Inside the block SIGTERM and SIGINT only set the wish; a second SIGINT raises at once (nothing on disk is lost by it).

    The handlers from before come back at the end. Off the main thread, where no handler can be set, the wish stays unset.
    """
    wish = StopWish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if wish and number == signal.SIGINT:
            raise StopRequested(
                "stopped at once by a second SIGINT; run the same command again to go on from the last checkpoint"
            )
        wish.signal_name = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
