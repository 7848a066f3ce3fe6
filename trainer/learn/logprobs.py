"""Log-probs (and entropy) of completion tokens: the decoder runs over whole sequences, the head only where they are needed.

    input_ids_BS --decoder--> hidden_BSD --select--> hidden_TD --head, chunk by chunk--> logprobs_TK, entropy_T

Logits are made in float32 and divided by the temperature, as in the sampler: log_softmax(logits / temperature). At most
`CHUNK_ELEMENTS` of [tokens, vocabulary] exist at a time; with gradient, longer batches recompute a chunk's logits in backward.
There is no attention mask: sequences are padded on the right, so under causal attention no real token sees padding.

Legend: B sequences, S positions, D hidden, T completion tokens, K token ids looked up at each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainer.engine.port import TokenScores
from trainer.policy.forward import head_at

CHUNK_ELEMENTS = 2**25


def score_logits(logits_TV: torch.Tensor, ids_TK: torch.Tensor, temperature: float, entropy: bool = False) -> TokenScores:
    """Return log-probs, and the entropy on demand, from logits.

    Args:
        logits_TV: raw logits of any float type [T, V].
        ids_TK: token ids to look up at each position [T, K].
        temperature: that of the sampling distribution, > 0.
        entropy: whether to compute the entropy of each position.
    """
    scaled_TV = logits_TV.float()
    if temperature != 1.0:
        scaled_TV = scaled_TV / temperature
    log_total_T1 = torch.logsumexp(scaled_TV, -1, keepdim=True)
    logprobs_TK = scaled_TV.gather(-1, ids_TK) - log_total_T1
    if not entropy:
        return TokenScores(logprobs_TK)
    probs_TV = torch.exp(scaled_TV - log_total_T1)
    return TokenScores(logprobs_TK, log_total_T1.squeeze(-1) - (probs_TV * scaled_TV).sum(-1))


class TokenScorer:
    """Scores completion tokens with any decoder-only transformers model.

    Most models end in `head(decoder(x))`. Some scale or cap the logits after the head; these are found by trying, and their
    own forward is used, with the head's input cut down to the positions that are needed.

    Args:
        model: the causal language model; LoRA layers inside it are used as they are switched.
        temperature: that of the sampling distribution.
    """

    def __init__(self, model: PreTrainedModel, temperature: float):
        self.model, self.temperature = model, temperature
        self.head: Any = model.get_output_embeddings()
        self.decoder: Any = model.get_decoder()
        self.head_is_last = self._head_is_last()

    @torch.no_grad()
    def _head_is_last(self) -> bool:
        ids_BS = torch.zeros((1, 2), dtype=torch.int64, device=self.model.device)
        hidden_BSD = self.decoder(input_ids=ids_BS, use_cache=False).last_hidden_state
        return torch.equal(self.head(hidden_BSD), self.model(input_ids=ids_BS, use_cache=False).logits)

    def score(
        self, input_ids_BS: torch.Tensor, where_T: torch.Tensor, ids_TK: torch.Tensor, entropy: bool = False
    ) -> TokenScores:
        """Return log-probs and entropy at some positions.

        Args:
            input_ids_BS: token ids, padded on the right with any valid id [B, S].
            where_T: flat indices (b * S + s) of the positions whose next token is scored [T].
            ids_TK: token ids to look up there [T, K].
            entropy: whether to compute the entropy too.
        """
        if not self.head_is_last:
            width = input_ids_BS.shape[1]
            with head_at(self.model, where_T // width, where_T % width):
                logits_TV = self.model(input_ids=input_ids_BS, use_cache=False).logits[0]
            return score_logits(logits_TV, ids_TK, self.temperature, entropy)
        hidden_TD = self.hidden(input_ids_BS, where_T)
        return in_chunks(self.head, self.head.weight.shape[0], hidden_TD, ids_TK, self.temperature, entropy)

    def hidden(self, input_ids_BS: torch.Tensor, where_T: torch.Tensor) -> torch.Tensor:
        """Return the head's input at some positions [T, D]."""
        hidden_BSD: torch.Tensor = self.decoder(input_ids=input_ids_BS, use_cache=False).last_hidden_state
        return hidden_BSD.flatten(0, 1).index_select(0, where_T)


def in_chunks(
    head: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    hidden_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    temperature: float,
    entropy: bool,
) -> TokenScores:
    """Return log-probs and entropy from the head's input, at most `CHUNK_ELEMENTS` logits at a time.

    Args:
        head: hidden states to logits.
        vocabulary: number of logits of a position.
        hidden_TD, ids_TK, temperature, entropy: as in `TokenScorer.score`.
    """

    def chunk(hidden_TD: torch.Tensor, ids_TK: torch.Tensor) -> TokenScores:
        return score_logits(head(hidden_TD), ids_TK, temperature, entropy)

    chunk_tokens = max(CHUNK_ELEMENTS // vocabulary, 1)
    if len(hidden_TD) <= chunk_tokens:
        return chunk(hidden_TD, ids_TK)
    recompute = torch.is_grad_enabled()
    chunks = []
    for hidden_cD, ids_cK in zip(hidden_TD.split(chunk_tokens), ids_TK.split(chunk_tokens), strict=True):
        if recompute:
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            chunks.append(checkpoint(chunk, hidden_cD, ids_cK, **options))
        else:
            chunks.append(chunk(hidden_cD, ids_cK))
    entropies = [part.entropy_T for part in chunks if part.entropy_T is not None]
    return TokenScores(torch.cat([part.logprobs_TK for part in chunks]), torch.cat(entropies) if entropies else None)
