"""A tiny Llama trained from nothing on the training prompts and their answers: a base that needs no download.

A share of the training can go to a systematic mistake beside the answer, so that the base holds two procedures and a verifier
can tell them apart. Each prompt is then shown once with both continuations, which do not see each other and whose losses are
weighted: drawing one of them instead is the same on average, and takes twice the steps.
AdamW; the rate warms up, stays, and falls linearly to zero.

    Rows          what is shown: prompt, then each continuation with EOS, padded on the right
    train_scratch the training

Legend: N prompts, B those of a batch, T tokens of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from trainer.config.schema import ScratchModel
from trainer.errors import DataError
from trainer.policy.tokenizer import encode
from trainer.types import Prompt, derive_seed

Progress = Callable[[int, dict[str, float]], None]
_PADDING = -1
_SUM = re.compile(r"(\d+)\+(\d+)")


def forget_carry(prompt: str) -> str:
    """Return the first sum `a+b` of a prompt, added digit by digit with every carry dropped: 57+68 gives 15, 55+55 gives 00."""
    match = _SUM.search(prompt.replace(" ", ""))
    if match is None:
        raise DataError(repr(prompt), "holds no sum a+b, so base.scratch.mistake = forget_carry means nothing here; set none")
    left, right = match.groups()
    width = max(len(left), len(right))
    pairs = zip(left.zfill(width), right.zfill(width), strict=True)
    return "".join(str((int(a) + int(b)) % 10) for a, b in pairs)


def build_model(scratch: ScratchModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int, seed: int) -> LlamaForCausalLM:
    """Return a randomly initialised Llama for this tokenizer."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=max(tokenizer.get_vocab().values()) + 1,
            hidden_size=scratch.hidden_size,
            intermediate_size=scratch.intermediate_size,
            num_hidden_layers=scratch.num_layers,
            num_attention_heads=scratch.num_heads,
            max_position_embeddings=max_tokens,
            initializer_range=scratch.hidden_size**-0.5,  # the usual 0.02 learns late at this width, or never
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


@dataclass(frozen=True)
class Rows:
    """Prompts with their continuations.

    Args:
        ids_NT: tokens.
        branch_NT: 0 for a prompt's tokens, k for those of its kth continuation, -1 for padding.
        position_NT: positions; every continuation goes on from the prompt's last.
        before_NT: for each token of a continuation, where the one before it stands.
        weight_NT: share of its continuation, 0 elsewhere.
    """

    ids_NT: torch.Tensor
    branch_NT: torch.Tensor
    position_NT: torch.Tensor
    before_NT: torch.Tensor
    weight_NT: torch.Tensor

    @classmethod
    def of(
        cls, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[tuple[int, ...]]], shares: Sequence[float]
    ) -> Rows:
        """Lay out prompts.

        Args:
            answers: the tokens of each continuation of each prompt.
            shares: weight of the first continuation, the second, ...
        """
        length = max(len(p) + sum(map(len, several)) for p, several in zip(prompts, answers, strict=True))
        shape = (len(prompts), length)
        ids, position, before = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
        branch, weight = torch.full(shape, _PADDING), torch.zeros(shape)
        for row, (prompt, several) in enumerate(zip(prompts, answers, strict=True)):
            last, end = len(prompt) - 1, len(prompt)
            ids[row, :end] = torch.tensor(prompt)
            branch[row, :end] = 0
            position[row, :end] = torch.arange(end)
            for number, (answer, share) in enumerate(zip(several, shares, strict=True), start=1):
                place = slice(end, end + len(answer))
                ids[row, place] = torch.tensor(answer)
                branch[row, place], weight[row, place] = number, share
                position[row, place] = torch.arange(last + 1, last + 1 + len(answer))
                before[row, place] = torch.tensor([last, *range(end, end + len(answer) - 1)])
                end += len(answer)
        return cls(ids, branch, position, before, weight)

    def loss(self, model: LlamaForCausalLM, rows_B: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean cross entropy of the continuations of some prompts."""
        branch_BT = self.branch_NT[rows_B]
        length = int((branch_BT != _PADDING).sum(1).max())
        branch_BT = branch_BT[:, :length]
        ids_BT, position_BT, before_BT, weight_BT = (
            table[rows_B, :length] for table in (self.ids_NT, self.position_NT, self.before_NT, self.weight_NT)
        )
        key_B1T, query_BT1 = branch_BT[:, None, :], branch_BT[:, :, None]
        seen_BTT = ((key_B1T == 0) | (key_B1T == query_BT1)) & torch.ones(length, length, dtype=torch.bool).tril()
        mask_B1TT = torch.zeros(seen_BTT.shape).masked_fill_(~seen_BTT, torch.finfo(torch.float32).min)[:, None]
        out = model(input_ids=ids_BT, attention_mask=mask_B1TT, position_ids=position_BT, use_cache=False)
        logprobs_BTV = out.logits.log_softmax(-1)
        said_BT = logprobs_BTV[torch.arange(len(rows_B))[:, None], before_BT, ids_BT]
        return -(said_BT * weight_BT).sum() / weight_BT.sum()


def train_scratch(
    scratch: ScratchModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], seed: int, progress: Progress
) -> LlamaForCausalLM:
    """Train a tiny base on prompts and answers.

    Args:
        scratch: sizes, steps and the mistake that is taught.
        prompts: the training split; held-out prompts must not be among them.
        seed: decides the initial weights and the order of examples.
        progress: called with (step, metrics) after every step.
    """
    end = (tokenizer.eos_token_id,)
    answers = [[encode(tokenizer, prompt.answer) + end] for prompt in prompts]
    shares = [1.0]
    if scratch.mistake != "none":
        shares = [1.0 - scratch.mistake_fraction, scratch.mistake_fraction]
        for several, prompt in zip(answers, prompts, strict=True):
            several.append(encode(tokenizer, forget_carry(prompt.text)) + end)
    longest = max(len(p.token_ids) + max(map(len, several)) for p, several in zip(prompts, answers, strict=True))
    model = build_model(scratch, tokenizer, max(64, 2 * longest), derive_seed(seed, "scratch", "weights")).train()
    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")  # on rows of a dozen tokens the plain one is the fastest
    optimizer = torch.optim.AdamW(model.parameters(), lr=scratch.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = Rows.of([prompt.token_ids for prompt in prompts], answers, shares)
    draw = torch.Generator().manual_seed(derive_seed(seed, "scratch", "examples"))
    for step in range(1, scratch.steps + 1):
        left = scratch.steps - step + 1
        slope = min(1.0, step / max(1, scratch.warmup_steps), left / max(1, scratch.decay_steps))
        for group in optimizer.param_groups:
            group["lr"] = scratch.learning_rate * slope
        loss = rows.loss(model, torch.randint(len(prompts), (scratch.batch_size,), generator=draw))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, {"base/loss": loss.item(), "base/learning_rate": optimizer.param_groups[0]["lr"]})
    model.set_attn_implementation(chosen)
    return model.eval()
