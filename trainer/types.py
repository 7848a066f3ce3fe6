"""The types that travel between data, sampler, reward and learner. Plain Python, importable without torch.

A worked example: the prompt "12+34=" and one sampled answer "46".

    Prompt(id="9f2c...", source="main", split="train", text="12+34=", token_ids=(1, 2, 10, 3, 4, 11), answer="46",
           scorer={"kind": "reasoning_gym", "task": "basic_arithmetic", "entry": {...}})
    Request(prompt_id="9f2c...", token_ids=(1, 2, 10, 3, 4, 11), seed=8136, sample_index=0)
    Completion(token_ids=(4, 6, 13), logprobs=(-0.1, -0.3, -0.0), finish_reason="stop", policy_version=8, ...)
               # 13 is EOS: it was sampled, so it is part of the completion and carries a log-prob
    Verdict(status="ok", score=1.0, parts={"reasoning_gym": 1.0})
    Sample(prompt, completion, text="46", verdict)          a completion that was judged
    Group(prompt, samples)                                  all samples of one prompt
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]
VerdictStatus = Literal["ok", "wrong", "unparsable", "timeout", "error"]


@dataclass(frozen=True)
class Prompt:
    """A task as `prepare` wrote it: one line of `prompts/<split>.jsonl`."""

    id: str  # sha256 of the text, first 16 hex digits
    source: str  # name of the entry in prepare.sources
    split: Literal["train", "heldout", "test"]
    text: str  # what the model is shown, after template and chat template
    token_ids: tuple[int, ...]  # length >= 1
    answer: str  # the gold answer; "" where the scorer needs none
    scorer: dict[str, Any] = field(default_factory=dict)  # what a verifier needs beside the answer


@dataclass(frozen=True)
class SamplingParams:
    """The one record of the sampling distribution, used by sampler and learner alike.

    temperature 0 means greedy: allowed for evaluation, never while sampling for training.
    """

    temperature: float
    max_completion_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """Ask for one completion. The seed alone decides its draws: not the batch, the slot or the worker."""

    prompt_id: str
    token_ids: tuple[int, ...]
    seed: int  # 0 <= seed < 2**63
    sample_index: int = 0


@dataclass(frozen=True)
class Completion:
    """One answer as sampled: token ids and, for each, the natural log-prob under the sampling distribution."""

    prompt_id: str
    sample_index: int
    token_ids: tuple[int, ...]  # includes EOS when finish_reason is "stop"; never has one appended
    logprobs: tuple[float, ...]  # len == len(token_ids)
    finish_reason: FinishReason
    policy_version: int
    sampler_id: str = "embedded"


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one answer. `score` is the reward; `parts` are its weighted terms by name."""

    status: VerdictStatus
    score: float
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    detail: str = ""
    statuses: dict[str, str] = field(default_factory=dict)  # of a mix: each part's own status


class AnswerText(str):
    """An answer's text that knows how many tokens it was sampled as, for verifiers that judge length."""

    num_tokens: int

    def __new__(cls, text: str, num_tokens: int = 0) -> AnswerText:
        made = super().__new__(cls, text)
        made.num_tokens = num_tokens
        return made


@dataclass(frozen=True)
class Sample:
    prompt: Prompt
    completion: Completion
    text: str  # the completion decoded, without EOS: for verifiers and people, never tokenised again
    verdict: Verdict

    @property
    def reward(self) -> float:
        return self.verdict.score


@dataclass(frozen=True)
class Group:
    prompt: Prompt
    samples: tuple[Sample, ...]  # len == group_size


class Sampler(Protocol):
    """The port between the learner and whatever produces completions. Token ids in, token ids out."""

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return one completion per request, in the order of the requests."""
        ...

    def load_policy(self, version: int) -> None:
        """Use the weights of this policy version from now on."""
        ...

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """Return, for each (prompt ids, completion ids), the log-prob of every completion token."""
        ...

    def close(self) -> None: ...


class Verifier(Protocol):
    """The port of the reward: judges answers, in the order given, and never raises for a bad one."""

    def score(self, answers: Sequence[tuple[Prompt, str]]) -> list[Verdict]: ...

    def close(self) -> None: ...


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) from (campaign seed, purpose, step, prompt, sample index, ...).

    Seeds never come from a global generator's order, so a restart or another worker draws the same completion.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
