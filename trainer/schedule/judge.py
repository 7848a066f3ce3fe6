"""From completions to judged samples: decode, ask the verifier, put groups together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.reward.hacking import answer_signals
from trainer.reward.summary import summarise
from trainer.types import AnswerText, Completion, Group, Prompt, Sample, Verifier


def completion_text(tokenizer: Any, completion: Completion) -> str:
    """Return what a verifier reads: the completion without the token that ended it, special tokens kept visible."""
    ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def judge(prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: Any, verifier: Verifier) -> list[Sample]:
    """Return one judged sample per completion; equal answers to one prompt are judged once.

    Args:
        prompts: the prompt of each completion.
        completions: in the same order.
        tokenizer: decodes.
        verifier: judges.
    """
    decoded: dict[tuple[int, ...], str] = {}
    for completion in completions:
        if completion.token_ids not in decoded:
            text = completion_text(tokenizer, completion)
            decoded[completion.token_ids] = AnswerText(text, len(completion.token_ids))
    texts = [decoded[completion.token_ids] for completion in completions]
    answers = {(prompt.id, text): (prompt, text) for prompt, text in zip(prompts, texts, strict=True)}
    verdicts = dict(zip(answers, verifier.score(list(answers.values())), strict=True))
    return [
        Sample(prompt, completion, text, verdicts[prompt.id, text])
        for prompt, completion, text in zip(prompts, completions, texts, strict=True)
    ]


def group(samples: Sequence[Sample], group_size: int) -> list[Group]:
    """Return samples that lie group by group as groups."""
    assert len(samples) % group_size == 0
    starts = range(0, len(samples), group_size)
    return [Group(samples[start].prompt, tuple(samples[start : start + group_size])) for start in starts]


def reward_metrics(samples: Sequence[Sample], group_size: int) -> dict[str, float]:
    """Return what a step's verdicts and answers look like: statuses, parts, cost, distinct answers, repetition.

    Args:
        samples: group by group.
    """
    texts = [sample.text for sample in samples]
    groups = [texts[start : start + group_size] for start in range(0, len(texts), group_size)]
    return summarise([sample.verdict for sample in samples]) | answer_signals(groups)
