"""The embedded sampler: continuous batching in the learner's own process, on the learner's own model object.

Requests are grouped by prompt, longest prompt first. A prompt is prefilled once and its keys and values are copied to all
slots of its group; a slot whose completion ends takes the next request at once; when no request waits, live slots move
together and the batch shrinks. Every token is drawn from log_softmax(logits / T) with a uniform that depends on the
request's seed and the token's index alone (draws.py), and its log-prob under exactly that distribution is returned.

Left out on purpose: paging (the cache is slots x longest sequence), top-p and top-k, tokens of the end appended by hand.

Legend: R rows (slots in use), N requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.errors import DivergedError, ModelError, ResourceError
from trainer.policy.forward import completion_logprobs, head_at, scoring, tempered_logits
from trainer.rollout.draws import draw, mix, uniforms
from trainer.rollout.slots import MaskMaker, SlotCache
from trainer.types import Completion, Request, SamplingParams

Progress = Callable[[int, int], None]


class EmbeddedSampler:
    """A `trainer.types.Sampler` over slots with a static KV cache.

    Args:
        model: a transformers causal language model, or one wrapped by peft; shared with the learner, never copied.
        slots: completions decoded at the same time.
        pad_token_id: any valid id, fills prefill batches; it is never compared with a token.
        version: policy version of the model's weights.
        max_prefill_tokens: padded tokens of one prefill pass (one prompt always fits).
        progress: called with (finished, total) completions as they finish.
    """

    def __init__(
        self,
        model: Any,
        slots: int,
        pad_token_id: int,
        version: int = 0,
        max_prefill_tokens: int = 8192,
        progress: Progress | None = None,
    ):
        assert slots >= 1
        self.model = model
        self.slots = slots
        self.pad_token_id = pad_token_id
        self.version = version
        self.max_prefill_tokens = max_prefill_tokens
        self.progress = progress
        MaskMaker.of(model)  # refuses at once what could not be sampled

    def load_policy(self, version: int) -> None:
        """Name the weights: they are the learner's own, so there is nothing to copy."""
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests.

        Raises:
            DivergedError: the model's logits are not finite.
            ModelError: prompt and length cap exceed the positions that the model has.
            ResourceError: the slots' cache does not fit into the device's memory.
        """
        if not requests:
            return []
        try:
            with scoring(self.model):
                generation = Generation(self, requests, params)
                while not generation.turn():
                    pass
                return generation.completions()
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"train.sampler.slots = {self.slots}: sampling does not fit into the device's memory; lower it ({error})"
            ) from error

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """Return, for each (prompt ids, completion ids), the log-prob of every completion token, by a plain forward pass."""
        return completion_logprobs(self.model, sequences, temperature, self.pad_token_id)


@dataclass
class _Prompt:
    """A prompt that is being handed out, and what the rest of its group needs if the slots run out first."""

    token_ids: tuple[int, ...]
    waiting: list[int]  # request indices, in reverse order
    slot: int = -1  # a slot that holds its keys and values; -1 before the prefill
    probabilities_V: Tensor | None = None  # distribution of the first token


class Generation:
    """One call of `generate`, whose turns may be taken with other work between them; without gradients, in evaluation mode.

    Slot state (first `rows` entries are in use): `owner` is the request that a slot works on, or N for a slot that idles.
    Outputs have one row a request, and one more into which idle slots write.
    """

    def __init__(self, sampler: EmbeddedSampler, requests: Sequence[Request], params: SamplingParams):
        self.sampler, self.model, self.requests, self.params = sampler, sampler.model, requests, params
        assert params.max_completion_tokens >= 1
        self.num = len(requests)
        self.device = next(sampler.model.parameters()).device
        self.queue = _by_prompt(requests)
        self.slots = min(sampler.slots, self.num)
        length = _check_length(self.model, len(self.queue[-1].token_ids), params.max_completion_tokens)
        self.cache = SlotCache(self.slots, length)
        self.mask = MaskMaker.of(self.model)

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=self.device)

        self.rows = self.slots
        self.free = list(range(self.slots - 1, -1, -1))
        self.owner = ints(self.slots, value=self.num)
        self.position = ints(self.slots)  # column of the token to feed next
        self.last = ints(self.slots)  # that token
        self.count = ints(self.slots)  # tokens drawn so far
        self.seeds = mix(torch.tensor([r.seed for r in requests] + [0], dtype=torch.int64, device=self.device))
        self.eos = torch.tensor(params.eos_token_ids, dtype=torch.int64, device=self.device)
        self.tokens = ints(self.num + 1, params.max_completion_tokens)
        self.logprobs = torch.zeros(self.num + 1, params.max_completion_tokens, device=self.device)
        self.lengths = ints(self.num + 1)
        self.width = 0
        self.finished = 0

    def turn(self) -> bool:
        """Fill free slots, or draw one token in every slot; return whether all completions have ended."""
        if self.queue and self.free:
            self._admit()
        elif not self.queue:
            if len(self.free) == self.rows:
                return True
            if len(self.free) * 4 >= self.rows:
                self._compact()
            self._decode()
        else:
            self._decode()
        return False

    # -- filling slots ------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Fill free slots: from a slot that already holds the prompt, or by prefilling new prompts together."""
        prompt = self.queue[-1]
        if prompt.slot >= 0:
            self._share(prompt)
            return
        batch: list[_Prompt] = []
        taken: list[tuple[int, int, int]] = []  # (slot, request, row of the batch)
        width = len(prompt.token_ids)  # longest first
        while self.queue and self.free and (not batch or (len(batch) + 1) * width <= self.sampler.max_prefill_tokens):
            prompt = self.queue[-1]
            while prompt.waiting and self.free:
                prompt.slot = self.free.pop()
                taken.append((prompt.slot, prompt.waiting.pop(), len(batch)))
            batch.append(prompt)
            if prompt.waiting:
                break
            self.queue.pop()
        self._prefill(batch, taken, width)

    def _prefill(self, batch: list[_Prompt], taken: list[tuple[int, int, int]], width: int) -> None:
        slots, owners, rows = torch.tensor(taken, device=self.device).T
        pad = self.sampler.pad_token_id
        ids = torch.tensor([[*p.token_ids, *[pad] * (width - len(p.token_ids))] for p in batch], device=self.device)
        lengths = torch.tensor([len(p.token_ids) for p in batch], device=self.device)
        self.cache.plan_prefill(slots, rows)
        positions = torch.arange(width, device=self.device)[None]
        with head_at(self.model, torch.arange(len(batch), device=self.device), lengths - 1):
            output = self.model(input_ids=ids, position_ids=positions, cache=self.cache, use_cache=True)
        probabilities = self._probabilities(output.logits[0])
        if batch[-1].waiting:
            batch[-1].probabilities_V = probabilities[-1]
        self._begin(slots, owners, lengths[rows])
        self._draw(probabilities[rows], slots)

    def _share(self, prompt: _Prompt) -> None:
        """Give free slots the prompt that another slot holds, without a forward pass."""
        taken = []
        source = prompt.slot
        while prompt.waiting and self.free:
            prompt.slot = self.free.pop()
            taken.append((prompt.slot, prompt.waiting.pop()))
        slots, owners = torch.tensor(taken, device=self.device).T
        length = len(prompt.token_ids)
        self.cache.copy(torch.full_like(slots, source), slots, length)
        assert prompt.probabilities_V is not None
        self._begin(slots, owners, torch.full_like(slots, length))
        self._draw(prompt.probabilities_V.expand(len(taken), -1), slots)
        if not prompt.waiting:
            self.queue.pop()

    def _begin(self, slots: Tensor, owners: Tensor, lengths: Tensor) -> None:
        self.owner[slots] = owners
        self.position[slots] = lengths - 1  # _draw moves it to the column of the first drawn token
        self.count[slots] = 0

    # -- decoding -----------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Feed one token in every row."""
        positions = self.position[: self.rows]
        self.cache.plan_decode(positions, self.width)
        output = self.model(
            input_ids=self.last[: self.rows, None],
            position_ids=positions[:, None],
            attention_mask=self.mask(positions, self.width),
            cache=self.cache,
            use_cache=True,
        )
        self._draw(self._probabilities(output.logits[:, 0]), slice(0, self.rows))

    def _probabilities(self, logits_RV: Tensor) -> Tensor:
        """Return softmax(logits / T), the sampling distribution; greedy keeps the model's own, at temperature 1."""
        return torch.softmax(tempered_logits(logits_RV, self.params.temperature), dim=-1)

    def _draw(self, probabilities_RV: Tensor, rows: Tensor | slice) -> None:
        """Draw a token for each of the rows, record it, and free the slots whose completions end."""
        owner, count = self.owner[rows], self.count[rows]
        if self.params.temperature == 0:
            tokens = probabilities_RV.argmax(dim=-1)
        else:
            tokens = draw(probabilities_RV, uniforms(self.seeds[owner], count))
        self.tokens[owner, count] = tokens
        self.logprobs[owner, count] = probabilities_RV.gather(1, tokens[:, None])[:, 0].log()
        live = owner < self.num
        count = count + live
        self.count[rows] = count
        self.last[rows] = tokens
        self.position[rows] += live
        ends = live & (torch.isin(tokens, self.eos) | (count == self.params.max_completion_tokens))
        ended = ends.nonzero()[:, 0].tolist()  # the step's one synchronisation
        if ended:
            self._retire(ended, rows)
        if ended or not isinstance(rows, slice):
            self.width = int(self.position[: self.rows].max()) + 1
        else:
            self.width += 1

    def _retire(self, ended: list[int], rows: Tensor | slice) -> None:
        index = torch.tensor(ended, device=self.device)
        slots = index if isinstance(rows, slice) else rows[index]
        freed: list[int] = ended if isinstance(rows, slice) else slots.tolist()
        self.lengths[self.owner[slots]] = self.count[slots]
        self.owner[slots] = self.num
        self.position[slots] = 0
        self.count[slots] = 0
        self.free += freed[::-1]
        self.finished += len(ended)
        if self.sampler.progress is not None:
            self.sampler.progress(self.finished, self.num)

    def _compact(self) -> None:
        """Move live slots to the front, so that the batch shrinks. Only when no request waits."""
        live = (self.owner[: self.rows] < self.num).nonzero()[:, 0]
        self.rows = len(live)
        target = torch.arange(self.rows, device=self.device)
        self.cache.copy(live, target, self.width)
        for state in (self.owner, self.position, self.last, self.count):
            state[: self.rows] = state[live]
        self.free = []

    # -- results ------------------------------------------------------------------------------------------------

    def completions(self) -> list[Completion]:
        """Return them in the order of the requests, once they have ended.

        Raises:
            DivergedError: the model's logits are not finite.
        """
        if not torch.isfinite(self.logprobs[: self.num]).all():
            raise DivergedError(f"policy version {self.sampler.version} gives logits that are not finite; nothing can be sampled")
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        eos = set(self.params.eos_token_ids)
        completions = []
        for index, (request, length) in enumerate(zip(self.requests, self.lengths.tolist(), strict=False)):
            ids = tuple(tokens[index][:length])
            completions.append(
                Completion(
                    prompt_id=request.prompt_id,
                    sample_index=request.sample_index,
                    token_ids=ids,
                    logprobs=tuple(logprobs[index][:length]),
                    finish_reason="stop" if ids[-1] in eos else "length",
                    policy_version=self.sampler.version,
                )
            )
        return completions


def _check_length(model: Any, prompt_tokens: int, completion_tokens: int) -> int:
    """Return the columns that the longest request can need: its last token is drawn, but never fed.

    Only a table of learned positions is a hard limit; rotary positions go on.
    """
    length = prompt_tokens + completion_tokens - 1
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        words = model.get_input_embeddings()
        tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words]
        if any(positions <= table.num_embeddings <= positions + 2 for table in tables):
            raise ModelError(
                f"a prompt of {prompt_tokens} tokens and max_completion_tokens = {completion_tokens} exceed the model's "
                f"{positions} positions (max_position_embeddings); lower the cap, or prepare.max_prompt_tokens"
            )
    return length


def _by_prompt(requests: Sequence[Request]) -> list[_Prompt]:
    """Return the requests by prompt as a stack: the longest prompt is on top, and equal lengths in order of appearance."""
    waiting: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        assert request.token_ids, "a prompt needs at least one token"
        waiting.setdefault(tuple(request.token_ids), []).append(index)
    prompts = [_Prompt(ids, indices[::-1]) for ids, indices in waiting.items()]
    return sorted(prompts, key=lambda prompt: -len(prompt.token_ids))[::-1]
