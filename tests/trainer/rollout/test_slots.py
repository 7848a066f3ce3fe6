"""The cache of the slots is gone as soon as nobody holds it."""

from __future__ import annotations

import gc
import weakref

from trainer.rollout.slots import SlotCache


def test_a_cache_needs_no_garbage_collector() -> None:
    gc.disable()  # it runs seldom, and every generation would leave its keys and values until then
    try:
        cache = SlotCache(slots=2, length=4)
        alive = weakref.ref(cache)
        del cache
        assert alive() is None
    finally:
        gc.enable()
