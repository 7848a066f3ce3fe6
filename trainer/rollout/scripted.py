"""A sampler that says what it is told: for tests of schedules, rewards and stages, without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from trainer.types import Completion, Request, SamplingParams

Script = Callable[[str, int, int], Sequence[int]] | Mapping[str, Sequence[Sequence[int]]]
TokenLogprob = Callable[[str, int, int, int], float]


class ScriptedSampler:
    """A `trainer.types.Sampler` whose completions are written down beforehand.

    Args:
        script: a function of (prompt id, sample index, policy version) that returns token ids, or a table from prompt id
            to a list of completions (sample i says entry i, modulo their number).
        logprob: one value for every token, or a function of (prompt id, sample index, token index, token id).
        version: policy version at the start.
        delay_seconds: how long every `generate` takes.
        fail_at: the number of the `generate` call (from 0) that raises `failure` instead.
        failure: what it raises.
    """

    def __init__(
        self,
        script: Script,
        logprob: float | TokenLogprob = -1.0,
        version: int = 0,
        delay_seconds: float = 0.0,
        fail_at: int | None = None,
        failure: Exception | None = None,
    ):
        self.script = script
        self.logprob = logprob
        self.version = version
        self.delay_seconds = delay_seconds
        self.fail_at = fail_at
        self.failure = failure or RuntimeError("the scripted sampler was told to fail")
        self.calls: list[list[Request]] = []
        self.loaded: list[int] = []
        self.closed = False

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return what the script says, cut at the first EOS and at the length cap."""
        assert not self.closed, "a closed sampler was asked to generate"
        call = len(self.calls)
        self.calls.append(list(requests))
        if self.delay_seconds:
            time.sleep(self.delay_seconds)
        if call == self.fail_at:
            raise self.failure
        return [self._complete(request, params) for request in requests]

    def _complete(self, request: Request, params: SamplingParams) -> Completion:
        if callable(self.script):
            said = list(self.script(request.prompt_id, request.sample_index, self.version))
        else:
            choices = self.script[request.prompt_id]
            said = list(choices[request.sample_index % len(choices)])
        ends = [index for index, token in enumerate(said) if token in params.eos_token_ids]
        said = said[: ends[0] + 1 if ends else None][: params.max_completion_tokens]
        assert said, f"the script says nothing for prompt {request.prompt_id}"
        stopped = said[-1] in params.eos_token_ids
        return Completion(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            token_ids=tuple(said),
            logprobs=tuple(self._logprob(request.prompt_id, request.sample_index, i, token) for i, token in enumerate(said)),
            finish_reason="stop" if stopped else "length",
            policy_version=self.version,
            sampler_id="scripted",
        )

    def _logprob(self, prompt_id: str, sample_index: int, index: int, token: int) -> float:
        return self.logprob(prompt_id, sample_index, index, token) if callable(self.logprob) else self.logprob

    def load_policy(self, version: int) -> None:
        self.loaded.append(version)
        self.version = version

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float) -> list[list[float]]:
        """Return the scripted log-probs; a function is asked with an empty prompt id and the sequence's number."""
        return [
            [self._logprob("", number, i, token) for i, token in enumerate(completion)]
            for number, (_, completion) in enumerate(sequences)
        ]

    def close(self) -> None:
        self.closed = True
