"""Signals inside the block are wishes; outside they are what they were."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainer.errors import StopRequested
from trainer.schedule.stop import deferred_stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_wish_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with deferred_stop() as wish:
        assert not wish
        os.kill(os.getpid(), number)
        assert wish
    assert wish.signal_name == number.name
    assert wish.error().exit_code == 75
    assert signal.getsignal(number) is before


def test_a_second_interrupt_does_not_wait() -> None:
    with deferred_stop():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopRequested, match="at once"):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_sigterm_is_still_a_wish() -> None:
    with deferred_stop() as wish:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wish.signal_name == "SIGTERM"


def test_off_the_main_thread_there_is_no_wish() -> None:
    wishes = []

    def work() -> None:
        with deferred_stop() as wish:
            wishes.append(bool(wish))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert wishes == [False]
