"""The original reference, called back for a refresh or an audit and gone again afterwards.

    AdapterRecall   the policy's own backbone with the adapter switched off: never a second model
    BaseRecall      the base, loaded from its artifact and dropped, whole, tiered, or with 8-bit weights; weak references to its
                    tensors tell whether it is really gone

`resident_bytes` is counted over tensors that are alive, not over what was meant to be dropped.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from trainer.anchors.scorer import Voice
from trainer.policy.lora import adapter_off


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


Loaded = tuple[Any, object]  # a model with its weights, and what holds them where that is not the model


class BaseRecall:
    """Of a policy whose every weight trains.

    Args:
        load: loads the base where there is room for it, for the span of a block.
    """

    def __init__(self, load: Callable[[], AbstractContextManager[Loaded]]):
        self.load = load
        self._alive: list[weakref.ref[torch.Tensor]] = []

    @contextmanager
    def called(self) -> Iterator[Voice]:
        voice = Voice(None)
        try:
            with self.load() as (model, holder):
                voice.model = model
                held = [*model.parameters(), *model.buffers(), *tensors_within(holder)]
                self._alive = [weakref.ref(tensor) for tensor in held]
                del model, holder, held
                yield voice
                voice.model = None
        finally:
            voice.model = None
            gc.collect()  # modules and their hooks refer to each other

    @property
    def resident_bytes(self) -> int:
        return sum(tensor.nbytes for ref in self._alive if (tensor := ref()) is not None)


def tensors_within(thing: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that a source of weights holds, however deep in it they lie."""
    seen, waiting = set[int](), [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | deque):
            waiting += one
        elif type(one).__module__.startswith("trainer.memory"):
            waiting += vars(one).values()
