"""Who scores anchored completions: the reference as a model in this process, whole or layer by layer, or vLLM servers.

    Voice          a transformers model: resident, its adapter off, or with 8-bit weights that stream (whole_model)
    ServedScorer   the base behind vLLM: the log-probs of a prompt's tokens, which vLLM has at temperature 1 only

Both give the same tensors. The log mass of the tail is summed over the tail itself where its logits are there, never 1 minus the
top, so a tiny one keeps its digits, down to e^-87; a server tells the top alone, and then log(1 - mass) has float32's digits.

Legend: T completion tokens of all completions, K cached tokens at each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.errors import ModelError
from trainer.learn.kl import MAX_LOG_MASS, log1mexp
from trainer.policy.forward import TokenPair, completion_logits, scoring, tempered_logits
from trainer.policy.load import true_shape


@dataclass(frozen=True)
class Drawn:
    """A completion and the prompt that it answers."""

    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]  # under the policy that drew it

    @property
    def num_fed(self) -> int:
        """Tokens of one forward pass over it."""
        return len(self.prompt) + len(self.completion) - 1


class Scorer(Protocol):
    """The reference at work."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids that it gives a probability."""
        ...

    def score(self, drawn: Sequence[Drawn], top_k: int, temperature: float) -> dict[str, Tensor]:
        """Return a shard's tensors of the reference: logprobs, top_ids, top_logprobs and tail_logprobs.

        Args:
            drawn: completions, which come end to end.
            top_k: K, at most V.
            temperature: of the sampling distribution, above 0.
        """
        ...


def top_and_tail(logits_TV: Tensor, top_k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [T, K] and log-probs [T, K] of the K most probable tokens, and the log mass of the others [T].

    Args:
        logits_TV: raw logits; may be overwritten.
        top_k: K, at most V.
        temperature: of the sampling distribution, above 0.
    """
    return _top_and_tail(tempered_logits(logits_TV, temperature), top_k)[1:]


def _top_and_tail(scaled_TV: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log of the sum of everything [T, 1] too; the logits are overwritten, and each is exponentiated once."""
    top_TK, ids_TK = scaled_TV.topk(top_k, dim=-1)
    highest_T1 = top_TK[:, :1].clone()
    mass_TV = scaled_TV.sub_(highest_T1).exp_()
    log_mass_T1 = mass_TV.sum(-1, keepdim=True).log()
    tail_T = mass_TV.scatter_(1, ids_TK, 0.0).sum(-1)
    log_tail_T = tail_T.clamp(min=torch.finfo(tail_T.dtype).tiny).log() - log_mass_T1[:, 0]
    if top_k == scaled_TV.shape[1]:
        log_tail_T = torch.full_like(log_tail_T, -torch.inf)
    return highest_T1 + log_mass_T1, ids_TK, top_TK - highest_T1 - log_mass_T1, log_tail_T


@dataclass
class Voice:
    """The reference as a model, while it is here."""

    model: Any  # None afterwards
    switched: Callable[[], AbstractContextManager[object]] = nullcontext  # around every forward pass

    @property
    def vocabulary(self) -> int:
        return int(true_shape(self.model.get_output_embeddings().weight)[0])

    def score(self, drawn: Sequence[Drawn], top_k: int, temperature: float) -> dict[str, Tensor]:
        lengths = [len(d.completion) for d in drawn]
        starts = [0, *accumulate(lengths)]
        tensors = _empty(starts[-1], top_k)
        with scoring(self.model), self.switched():
            for batch in completion_logits(self.model, [(d.prompt, d.completion) for d in drawn], pad_token_id=0):
                where = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in batch.indices])
                scaled_TV = tempered_logits(batch.logits_NV, temperature)
                own_T = scaled_TV.gather(1, batch.tokens_N[:, None])[:, 0]
                log_total_T1, ids_TK, top_TK, tail_T = _top_and_tail(scaled_TV, top_k)
                tensors["logprobs"][where] = (own_T - log_total_T1[:, 0]).cpu()
                tensors["top_ids"][where] = ids_TK.int().cpu()
                tensors["top_logprobs"][where] = top_TK.cpu()
                tensors["tail_logprobs"][where] = tail_T.cpu()
        return tensors


def _empty(num_tokens: int, top_k: int) -> dict[str, Tensor]:
    return {
        "logprobs": torch.empty(num_tokens),
        "top_ids": torch.empty((num_tokens, top_k), dtype=torch.int32),
        "top_logprobs": torch.empty((num_tokens, top_k)),
        "tail_logprobs": torch.empty(num_tokens),
    }


class Server(Protocol):
    """What is asked of vLLM: `trainer.rollout.vllm.VllmSampler`."""

    def top_logprobs(self, sequences: Sequence[TokenPair], top_k: int) -> list[list[Mapping[int, float]]]:
        """Return log-probs by token id at every completion token: at least the K highest, and the token's own."""
        ...


class ServedScorer:
    """The base behind vLLM servers.

    Args:
        server: asks them.
        vocabulary: number of token ids.
    """

    def __init__(self, server: Server, vocabulary: int):
        self.server, self.vocabulary = server, vocabulary

    def score(self, drawn: Sequence[Drawn], top_k: int, temperature: float) -> dict[str, Tensor]:
        assert temperature == 1, "the configuration refuses it: vLLM scores prompts at temperature 1"
        found = self.server.top_logprobs([(d.prompt, d.completion) for d in drawn], top_k)
        tokens = [token for d in drawn for token in d.completion]
        tensors = _empty(len(tokens), top_k)
        for index, (token, logprobs) in enumerate(zip(tokens, (row for rows in found for row in rows), strict=True)):
            top = sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:top_k]
            if len(top) < top_k:
                raise ModelError(
                    f"vLLM tells {len(top)} log-probs at a token, anchors.top_k is {top_k}; start it with --max-logprobs {top_k}"
                )
            tensors["logprobs"][index] = logprobs[token]
            tensors["top_ids"][index] = torch.tensor([one for one, _ in top], dtype=torch.int32)
            tensors["top_logprobs"][index] = torch.tensor([value for _, value in top])
        log_mass_T = tensors["top_logprobs"].logsumexp(-1).clamp(max=MAX_LOG_MASS)
        tensors["tail_logprobs"] = log1mexp(log_mass_T) if top_k < self.vocabulary else torch.full_like(log_mass_T, -torch.inf)
        return tensors
