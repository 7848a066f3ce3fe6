"""Log-probs and entropy over a vocabulary of which only a block of rows, for some tokens, exists at a time.

    forward    for each block of rows: logits -> running log-sum-exp, looked-up logits, mean logit
    backward   for each block of rows: logits again -> their gradient in closed form -> gradients of rows and hidden states

With p = softmax(z), l_k = z_k - lse and H = lse - sum p z, the gradient of sum g_k l_k + h H is
dz = sum_k g_k (e_k - p) - h p (z - mean z). Temperature, caps and scales of the model lie before z and are left to autograd.

Legend: T tokens of one forward pass, t of a chunk, D hidden size, V vocabulary, v rows of a block, K ids looked up at each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.engine.port import TokenScores, Work
from trainer.memory.anatomy import Unit
from trainer.memory.residency import Residency


@dataclass
class Scored:
    """What the forward pass found for the tokens of one work, and what backward needs of it again."""

    hidden_TD: Tensor
    ids_TK: Tensor
    entropy: bool
    picked_TK: Tensor
    log_total_T: Tensor
    mean_T: Tensor | None = None  # of the logits under the distribution

    def scores(self) -> TokenScores:
        logprobs_TK = self.picked_TK - self.log_total_T.unsqueeze(-1)
        return TokenScores(logprobs_TK, None if self.mean_T is None else self.log_total_T - self.mean_T)


class ChunkedHead:
    """Runs the head of a model over blocks of its rows.

    Args:
        residency: gives the rows.
        temperature: that of the sampling distribution.
        chunk_elements: most elements of [t, v] that exist at a time.
    """

    def __init__(self, residency: Residency, temperature: float, chunk_elements: int):
        self.residency, self.pieces, self.temperature = residency, residency.pieces, temperature
        self.rows = residency.anatomy.head_rows
        widest = max(unit.parts[0].shape[0] for unit in self.rows.units)
        self.chunk_tokens = max(chunk_elements // widest, 1)

    def _chunks(self, total: int) -> Iterator[slice]:
        for begin in range(0, total, self.chunk_tokens):
            yield slice(begin, min(begin + self.chunk_tokens, total))

    def _here(self, hidden_tD: Tensor) -> Tensor:
        """Hidden states may wait on the host."""
        return hidden_tD.to(self.residency.device, non_blocking=True)

    def _scaled(self, hidden_tD: Tensor) -> Tensor:
        logits_tv = self.pieces.logits(hidden_tD).float()
        return logits_tv if self.temperature == 1.0 else logits_tv / self.temperature

    @torch.no_grad()
    def forward(self, hiddens: Sequence[Tensor], works: Sequence[Work]) -> list[Scored]:
        """Return the scores of all works, hidden states [T, D] given."""
        found: list[Scored] = []
        for unit in self.rows.units:
            first, last = self.rows.rows(unit)
            with self.residency.opened(unit), self.residency.head_bias(first, last):
                for index, (hidden_TD, work) in enumerate(zip(hiddens, works, strict=True)):
                    parts = [
                        self._look(self._here(hidden_TD[s]), work.ids_TK[s], work.entropy, first)
                        for s in self._chunks(len(hidden_TD))
                    ]
                    log_T, picked_TK = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
                    mean_T = torch.cat([p[2] for p in parts]) if work.entropy else None
                    if first == 0:
                        found.append(Scored(hidden_TD, work.ids_TK, work.entropy, picked_TK, log_T, mean_T))
                    else:
                        _merge(found[index], log_T, picked_TK, mean_T, first)
        return found

    def _look(self, hidden_tD: Tensor, ids_tK: Tensor, entropy: bool, first: int) -> tuple[Tensor, Tensor, Tensor]:
        scaled_tv = self._scaled(hidden_tD)
        log_t = torch.logsumexp(scaled_tv, -1)
        picked_tK = scaled_tv.gather(-1, (ids_tK - first).clamp(0, scaled_tv.shape[-1] - 1))
        if not entropy:
            return log_t, picked_tK, log_t
        return log_t, picked_tK, (torch.exp(scaled_tv - log_t.unsqueeze(-1)) * scaled_tv).sum(-1)

    def backward(
        self, unit: Unit, scored: Sequence[Scored], slopes: Sequence[TokenScores], hidden_slopes: Sequence[Tensor] | None
    ) -> Tensor | None:
        """Return the gradient of one block of rows, over all works, in float32 [v, D]; None where the head does not train.

        Args:
            unit: the block; it is opened and closed here.
            scored: from forward.
            slopes: gradients of the loss by the scores of each work.
            hidden_slopes: take the gradient by the hidden states, added up over blocks in float32; None: not wanted.
        """
        first, last = self.rows.rows(unit)
        wanted = hidden_slopes is not None
        with self.residency.opened(unit) as leaves, self.residency.head_bias(first, last):
            leaf, total = leaves[self.rows.name], None
            for index, (seen, slope) in enumerate(zip(scored, slopes, strict=True)):
                for part in self._chunks(len(seen.hidden_TD)):
                    hidden_tD = self._here(seen.hidden_TD[part]).detach().requires_grad_(wanted)
                    self._push(hidden_tD, seen, slope, part, first)
                    if hidden_slopes is not None:
                        assert hidden_tD.grad is not None
                        held_tD = hidden_slopes[index][part]
                        held_tD.copy_(hidden_tD.grad if first == 0 else self._here(held_tD) + hidden_tD.grad, non_blocking=True)
                    if leaf.dtype != torch.float32 and leaf.grad is not None:
                        total = leaf.grad.float() if total is None else total.add_(leaf.grad)
                        leaf.grad = None
            if not self.residency.trains:
                return None
            gradient = total if leaf.grad is None else leaf.grad
            leaf.grad = None
        assert gradient is not None
        return gradient

    def _push(self, hidden_tD: Tensor, seen: Scored, slope: TokenScores, part: slice, first: int) -> None:
        """Compute the logits of a chunk again and push the gradient of its scores through them."""
        with torch.enable_grad():
            scaled_tv = self._scaled(hidden_tD)
        with torch.no_grad():
            slope_tK, log_t1 = slope.logprobs_TK[part], seen.log_total_T[part].unsqueeze(-1)
            probs_tv = torch.exp(scaled_tv - log_t1)
            if seen.mean_T is not None and slope.entropy_T is not None:
                centred_tv = scaled_tv - seen.mean_T[part].unsqueeze(-1)
                down_tv = probs_tv * (-slope_tK.sum(-1, keepdim=True) - slope.entropy_T[part].unsqueeze(-1) * centred_tv)
            else:
                down_tv = probs_tv.mul_(-slope_tK.sum(-1, keepdim=True))
            local_tK = seen.ids_TK[part] - first
            inside_tK = (local_tK >= 0) & (local_tK < down_tv.shape[-1])
            down_tv.scatter_add_(-1, torch.where(inside_tK, local_tK, 0), torch.where(inside_tK, slope_tK, 0.0))
        torch.autograd.backward(scaled_tv, down_tv)


def _merge(seen: Scored, log_T: Tensor, picked_TK: Tensor, mean_T: Tensor | None, first: int) -> None:
    """Take the logits of a further block of rows into what was found so far."""
    total_T = torch.logaddexp(seen.log_total_T, log_T)
    if mean_T is not None and seen.mean_T is not None:
        seen.mean_T = seen.mean_T * torch.exp(seen.log_total_T - total_T) + mean_T * torch.exp(log_T - total_T)
    seen.log_total_T = total_T
    seen.picked_TK = torch.where(seen.ids_TK >= first, picked_TK, seen.picked_TK)
