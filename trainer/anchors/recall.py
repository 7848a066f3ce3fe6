"""The original reference, called back for a refresh or an audit and gone again afterwards.

    adapter   the policy's own backbone with the adapter switched off: never a second model
    full      the base, loaded from its artifact and dropped; weak references to its tensors tell whether it is really gone

`resident_bytes` is counted over tensors that are alive, not over what was meant to be dropped.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainer.policy.lora import adapter_off


@dataclass
class Voice:
    """The reference while it is here."""

    model: Any  # None afterwards
    switched: Callable[[], AbstractContextManager[object]] = nullcontext  # around every forward pass


class Recall(Protocol):
    """Calls the reference."""

    def called(self) -> AbstractContextManager[Voice]:
        """Have the reference for the span of a block."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that are in memory for the reference alone."""
        ...


class AdapterRecall:
    """Of a policy with an adapter.

    Args:
        model: with the adapter inside it.
    """

    resident_bytes = 0

    def __init__(self, model: Any):
        self.model = model

    @contextmanager
    def called(self) -> Iterator[Voice]:
        yield Voice(self.model, lambda: adapter_off(self.model))


class BaseRecall:
    """Of a policy whose every weight trains.

    Args:
        load: loads the base with its weights where there is room for them, for the span of a block.
    """

    def __init__(self, load: Callable[[], AbstractContextManager[Any]]):
        self.load = load
        self._alive: list[weakref.ref[torch.Tensor]] = []

    @contextmanager
    def called(self) -> Iterator[Voice]:
        voice = Voice(None)
        try:
            with self.load() as model:
                voice.model = model
                self._alive = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
                del model
                yield voice
                voice.model = None
        finally:
            voice.model = None
            gc.collect()  # modules and their hooks refer to each other

    @property
    def resident_bytes(self) -> int:
        return sum(tensor.nbytes for ref in self._alive if (tensor := ref()) is not None)
