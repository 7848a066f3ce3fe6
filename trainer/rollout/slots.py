"""The static KV cache of the embedded sampler: one row a slot, one column a position.

Every layer holds keys and values [S, L, H, D], so a token's entry is contiguous and is written by one scatter. A pass is
either a *prefill* (a batch of prompts attends to itself; its entries are copied to all slots that want the prompt) or a
*decode* (the first R slots feed one token each, at their own positions, and attend to the first W columns). The plan of
the pass is shared by all layers. Columns beyond a slot's position hold old but finite numbers and are masked.

Legend: S slots, R rows in use, L columns, W columns in use, H key heads, D head size, U prompts of a prefill, P their width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from trainer.errors import ModelError

MASKED_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass
class Plan:
    """What the next pass does with the cache."""

    slots: int
    length: int
    decoding: bool = False
    rows: int = 0  # decode: R
    width: int = 0  # decode: W
    flat_R: Tensor | None = None  # decode: row * L + position
    target_slots: Tensor | None = None  # prefill: slots to fill
    source_rows: Tensor | None = None  # prefill: for each, the row of the batch with its prompt


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values for all slots."""

    is_sliding = False

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def zeros(like: Tensor) -> Tensor:  # zeros: a masked column may hold anything but NaN
            return like.new_zeros((self.plan.slots, self.plan.length, like.shape[1], like.shape[3]))

        self.keys, self.values = zeros(key_states), zeros(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if self.plan.decoding:
            return self._decode(self.keys, key_states), self._decode(self.values, value_states)
        self._prefill(self.keys, key_states)
        self._prefill(self.values, value_states)
        return key_states, value_states

    def _decode(self, stored: Tensor, new: Tensor) -> Tensor:
        plan = self.plan
        assert plan.flat_R is not None
        stored.view(-1, *stored.shape[2:]).index_copy_(0, plan.flat_R, new[:, :, 0])
        return stored[: plan.rows, : plan.width].transpose(1, 2)

    def _prefill(self, stored: Tensor, new: Tensor) -> None:
        stored[self.plan.target_slots, : new.shape[2]] = new.transpose(1, 2)[self.plan.source_rows]

    def copy(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy the first columns of some slots to others; gathered first, so they may overlap."""
        for stored in (self.keys, self.values):
            assert stored is not None
            stored[target, :width] = stored[source, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # asked for in a prefill only: a decode brings its own mask

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.plan.length


class SlotCache(Cache):
    """The cache handed to the model; layers appear as the model asks for them."""

    def __init__(self, slots: int, length: int):
        self.plan = plan = Plan(slots, length)
        # The factory must not hold the cache: a cycle would keep its tensors until the collector happens to run.
        super().__init__(layer_class_to_replicate=lambda: SlotLayer(plan))  # type: ignore[arg-type]

    def plan_prefill(self, target_slots: Tensor, source_rows: Tensor) -> None:
        self.plan.decoding = False
        self.plan.target_slots, self.plan.source_rows = target_slots, source_rows

    def plan_decode(self, positions_R: Tensor, width: int) -> None:
        plan = self.plan
        plan.decoding, plan.rows, plan.width = True, len(positions_R), width
        plan.flat_R = torch.arange(plan.rows, device=positions_R.device) * plan.length + positions_R

    def copy(self, source: Tensor, target: Tensor, width: int) -> None:
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            layer.copy(source, target, width)


@dataclass(frozen=True)
class MaskMaker:
    """Builds the decode mask that a model's layers expect: one tensor, or one for each kind of layer."""

    kinds: tuple[str, ...]  # kinds of attention among the layers
    keyed: bool  # the model takes a mapping from kind to mask
    window: int = 0  # sliding_attention: a token sees this many positions, itself included
    chunk: int = 0  # chunked_attention: a token sees its own chunk only
    dtype: torch.dtype = field(default=torch.float32)

    @classmethod
    def of(cls, model: Any) -> MaskMaker:
        """Read a model's configuration.

        Raises:
            ModelError: a kind of layer or an attention implementation that cannot work with slots.
        """
        config = model.config.get_text_config()
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager"):
            raise ModelError(f"attention {implementation!r} takes no mask per slot; load the model with sdpa or eager")
        window = getattr(config, "sliding_window", None) or 0
        chunk = getattr(config, "attention_chunk_size", None) or 0
        layer_types = getattr(config, "layer_types", None)
        if layer_types is None:
            kinds: tuple[str, ...] = ("sliding_attention" if window else "chunked_attention" if chunk else "full_attention",)
        else:
            kinds = tuple(sorted(set(layer_types)))
        unknown = [kind for kind in kinds if kind not in MASKED_KINDS]
        if unknown:
            raise ModelError(f"layers of kind {unknown[0]!r} keep no keys and values per position; use another sampler")
        return cls(kinds, layer_types is not None, window, chunk, model.dtype)

    def __call__(self, positions_R: Tensor, width: int) -> Any:
        """Return additive masks [R, 1, 1, W] for tokens at these positions."""
        columns = torch.arange(width, device=positions_R.device)
        positions = positions_R[:, None]
        causal = columns <= positions
        masks = {}
        for kind in self.kinds:
            visible = causal
            if kind == "sliding_attention":
                visible = causal & (columns > positions - self.window)
            elif kind == "chunked_attention":
                visible = causal & (columns // self.chunk == positions // self.chunk)
            hidden = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
            masks[kind] = hidden.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None, None]
        return masks if self.keyed else masks[self.kinds[0]]
