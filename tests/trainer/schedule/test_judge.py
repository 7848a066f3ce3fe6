"""Decoding and judging: what the verifier sees, and that it sees equal answers once."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.policy.tokenizer import character_tokenizer
from trainer.schedule.judge import group, judge
from trainer.types import Completion, Prompt, Verdict

TOKENIZER = character_tokenizer("0123456789+=")
PROMPTS = [Prompt("a", "main", "train", "1+2=", (4, 13, 5, 14), "3"), Prompt("b", "main", "train", "4+4=", (7, 13, 7, 14), "8")]


def completion(prompt: Prompt, ids: tuple[int, ...], index: int, reason: str = "stop") -> Completion:
    return Completion(prompt.id, index, ids, (-0.5,) * len(ids), reason, 0)  # type: ignore[arg-type]


class Recorder:
    """Judges by equality and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        self.asked += [(prompt.id, text) for prompt, text in answers]
        return [Verdict("ok", 1.0) if text == prompt.answer else Verdict("wrong", 0.0) for prompt, text in answers]

    def close(self) -> None: ...


def test_samples_carry_text_without_the_end_and_their_own_verdict() -> None:
    eos, pad = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
    of_each = [PROMPTS[0], PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    completions = [
        completion(PROMPTS[0], (6, eos), 0),
        completion(PROMPTS[0], (6, eos), 1),
        completion(PROMPTS[0], (6, pad), 2, "length"),
        completion(PROMPTS[1], (6, eos), 0),
    ]
    verifier = Recorder()
    samples = judge(of_each, completions, TOKENIZER, verifier)
    assert [s.text for s in samples] == ["3", "3", "3<pad>", "3"], "a special token in the middle is seen, not hidden"
    assert [s.reward for s in samples] == [1.0, 1.0, 0.0, 0.0]
    assert verifier.asked == [("a", "3"), ("a", "3<pad>"), ("b", "3")], "equal answers to one prompt are judged once"
    assert [g.prompt.id for g in group(samples, 2)] == ["a", "a"]
    assert [len(g.samples) for g in group(samples, 4)] == [4]


def test_an_answer_that_is_only_the_end_is_empty_text() -> None:
    samples = judge(PROMPTS[:1], [completion(PROMPTS[0], (TOKENIZER.eos_token_id,), 0)], TOKENIZER, Recorder())
    assert samples[0].text == ""
