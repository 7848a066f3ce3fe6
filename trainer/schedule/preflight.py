"""Look at the reward with the policy as it is: sample a few groups, judge them twice, and report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from trainer.errors import ConfigError
from trainer.files import write_json
from trainer.metrics import RunWriter
from trainer.reward.preflight import PreflightReport, analyse
from trainer.schedule.judge import completion_text, group, judge
from trainer.types import AnswerText, Prompt, Request, Sampler, SamplingParams, Verifier, derive_seed


def look(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    tokenizer: Any,
    verifier: Verifier,
    params: SamplingParams,
    group_size: int,
    samples_per_step: int,
    seed: int,
) -> PreflightReport:
    """Return the report on a sample of prompts.

    Args:
        prompts: those to look at, at least one.
        params: the sampling distribution of training.
        samples_per_step: of training, for the cost.
    """
    of_each = [prompt for prompt in prompts for _ in range(group_size)]
    requests = [
        Request(prompt.id, prompt.token_ids, derive_seed(seed, "preflight", prompt.id, index % group_size), index % group_size)
        for index, prompt in enumerate(of_each)
    ]
    completions = sampler.generate(requests, params)
    verifier.score([(of_each[0], AnswerText(completion_text(tokenizer, completions[0]), 1))])  # starts the workers
    begin = time.perf_counter()
    samples = judge(of_each, completions, tokenizer, verifier)
    seconds = time.perf_counter() - begin
    again = judge(of_each, completions, tokenizer, verifier)
    groups = group(samples, group_size)
    return analyse(
        [[sample.verdict for sample in one.samples] for one in groups],
        [sample.verdict for sample in again],
        [[sample.text for sample in one.samples] for one in groups],
        sum(completion.finish_reason == "length" for completion in completions) / len(completions),
        seconds,
        samples_per_step,
    )


def record(report: PreflightReport, writer: RunWriter, stop: bool) -> None:
    """Write a report to the run directory: preflight.json, and an event where it is not good.

    Raises:
        ConfigError: the reward cannot teach, and `stop` says that training must not begin.
    """
    write_json(writer.directory / "preflight.json", report.as_dict())
    if report.verdict != "good":
        kind = "alarm" if report.verdict == "stop" else "warning"
        writer.event(kind, "pre-flight: " + "; ".join(report.advice), step=0, figures="preflight.json")
    if report.verdict == "stop" and stop:
        raise ConfigError(
            "preflight.stop", True, "the pre-flight says that this reward cannot teach this base: " + "; ".join(report.advice)
            + ". Set preflight.stop: false to train all the same"
        )  # fmt: skip
