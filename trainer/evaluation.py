"""How well a model answers prompts: sample, judge, count, and put two models beside each other.

    answer_prompts   a model directory's greedy and sampled answers to prompts, judged
    measure          one row of numbers a prompt: pass@k, greedy accuracy, reward, length, truncation
    summarise        means over prompts with bootstrap intervals; of several models also the paired difference

A draw is decided by (seed, prompt, sample index) alone, so every model meets the same luck. One model is in memory at a time.

Legend: P prompts, M metrics.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.config.schema import Evaluate
from trainer.files import read_json
from trainer.policy.load import eos_token_ids, load_model, pick_device
from trainer.policy.tokenizer import load_tokenizer
from trainer.rollout.embedded import EmbeddedSampler
from trainer.schedule.judge import judge
from trainer.statistics import Floats, bootstrap_intervals, pass_at_k
from trainer.types import Prompt, Request, Sample, Sampler, SamplingParams, Verifier, derive_seed

Progress = Callable[[int, int], None]
_REQUESTS_AT_ONCE = 8192


@dataclass(frozen=True)
class Answers:
    """One model's judged answers to one prompt."""

    prompt: Prompt
    greedy: Sample
    samples: tuple[Sample, ...]  # len == samples_per_prompt


@dataclass(frozen=True)
class Protocol:
    """What is asked of every model: the same for all that are compared."""

    settings: Evaluate
    max_completion_tokens: int
    seed: int  # the campaign's
    slots: int = 256
    device: str = "auto"


def choose_prompts(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, or all if there are fewer: by their ids, which are hashes, so from all sources alike."""
    return sorted(prompts, key=lambda prompt: prompt.id)[:count]


def compute_dtype(directory: Path, device: str) -> str:
    """Return the type to compute in: a CPU takes float32, in which it is fast; a GPU the type that the weights are stored in."""
    config = read_json(directory / "config.json") if (directory / "config.json").is_file() else {}
    stored = config.get("dtype") or config.get("torch_dtype")
    return "bfloat16" if stored == "bfloat16" and pick_device(device).type != "cpu" else "float32"


def answer_prompts(
    directory: Path, prompts: Sequence[Prompt], protocol: Protocol, verifier: Verifier, progress: Progress | None = None
) -> list[Answers]:
    """Answer prompts with the model of a directory.

    Args:
        directory: complete Hugging Face model directory with its tokenizer.
        prompts: encoded with that tokenizer.
        protocol: how often, how long, at which temperature.
        verifier: judges the answers.
        progress: called with (completions finished, completions in all).

    Raises:
        ModelError: the directory cannot be loaded.
    """
    tokenizer = load_tokenizer(directory)
    model = load_model(directory, compute_dtype(directory, protocol.device), protocol.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    total = len(prompts) * (1 + protocol.settings.samples_per_prompt)
    done = 0

    def report(finished: int, _: int) -> None:
        if progress is not None:
            progress(done + finished, total)

    sampler = EmbeddedSampler(model, protocol.slots, pad, progress=report)
    eos = eos_token_ids(model, tokenizer)
    answers: list[Answers] = []
    try:
        step = max(1, _REQUESTS_AT_ONCE // protocol.settings.samples_per_prompt)
        for begin in range(0, len(prompts), step):
            part = prompts[begin : begin + step]
            greedy = _draw(sampler, part, 1, 0.0, protocol, eos, tokenizer, verifier)
            done += len(greedy)
            count = protocol.settings.samples_per_prompt
            drawn = _draw(sampler, part, count, protocol.settings.temperature, protocol, eos, tokenizer, verifier)
            done += len(drawn)
            answers += [Answers(prompt, greedy[i], tuple(drawn[i * count : (i + 1) * count])) for i, prompt in enumerate(part)]
    finally:
        sampler.close()
        del model, sampler
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return answers


def _draw(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    count: int,
    temperature: float,
    protocol: Protocol,
    eos: tuple[int, ...],
    tokenizer: Any,
    verifier: Verifier,
) -> list[Sample]:
    requests = [
        Request(prompt.id, prompt.token_ids, derive_seed(protocol.seed, "evaluate", prompt.id, index), index)
        for prompt in prompts
        for index in range(count)
    ]
    completions = sampler.generate(requests, SamplingParams(temperature, protocol.max_completion_tokens, eos))
    return judge([prompt for prompt in prompts for _ in range(count)], completions, tokenizer, verifier)


def metric_names(settings: Evaluate) -> list[str]:
    passes = [f"pass@{k}" for k in sorted({1, *settings.pass_at})]
    return [*passes, "greedy_accuracy", "mean_reward", "mean_length", "truncated_fraction"]


def measure(answers: Sequence[Answers], settings: Evaluate) -> Floats:
    """Return the metrics of every prompt, [P, M], in the order of `metric_names`."""
    rows = []
    for answer in answers:
        samples = answer.samples
        correct = sum(sample.reward >= settings.correct_at for sample in samples)
        passes = [pass_at_k(len(samples), correct, k) for k in sorted({1, *settings.pass_at})]
        rows.append(
            [
                *passes,
                float(answer.greedy.reward >= settings.correct_at),
                float(np.mean([sample.reward for sample in samples])),
                float(np.mean([len(sample.completion.token_ids) for sample in samples])),
                float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
            ]
        )
    return np.array(rows, dtype=np.float64)


def summarise(models: Mapping[str, Sequence[Answers]], settings: Evaluate, seed: int) -> dict[str, Any]:
    """Return the summary of one or two models over the same prompts.

    Args:
        models: name -> answers; of two, `difference` is the second minus the first, paired by prompt.
        settings: pass@k, threshold and bootstrap.
        seed: the campaign's.

    Returns:
        {name: {metric: {"value", "low", "high"}, "statuses": {status: count}}, "difference": {metric: ...}}
    """
    names, values = metric_names(settings), {model: measure(answers, settings) for model, answers in models.items()}
    draw = derive_seed(seed, "evaluate", "bootstrap")

    def intervals(values_PM: Floats) -> dict[str, Any]:
        found = bootstrap_intervals(values_PM, settings.bootstrap_resamples, settings.confidence, draw)
        return {
            name: {"value": round(x.value, 6), "low": round(x.low, 6), "high": round(x.high, 6)}
            for name, x in zip(names, found, strict=True)
        }

    summary: dict[str, Any] = {}
    for model, answers in models.items():
        statuses = Counter(sample.verdict.status for answer in answers for sample in answer.samples)
        summary[model] = {**intervals(values[model]), "statuses": dict(sorted(statuses.items()))}
    if len(models) == 2:
        first, second = values.values()
        summary["difference"] = intervals(second - first)
    return summary


def sample_lines(models: Mapping[str, Sequence[Answers]]) -> list[dict[str, Any]]:
    """Return one record a prompt with every model's greedy and sampled answers, for people and reports."""
    lines = []
    for beside in zip(*models.values(), strict=True):
        prompt = beside[0].prompt
        assert all(answers.prompt.id == prompt.id for answers in beside), "models answered other prompts"
        line: dict[str, Any] = {"id": prompt.id, "source": prompt.source, "prompt": prompt.text, "answer": prompt.answer}
        for name, answers in zip(models, beside, strict=True):
            line[name] = {**_record(answers.greedy), "samples": [_record(sample) for sample in answers.samples]}
        lines.append(line)
    return lines


def _record(sample: Sample) -> dict[str, Any]:
    return {
        "text": sample.text,
        "score": round(sample.reward, 6),
        "status": sample.verdict.status,
        "length": len(sample.completion.token_ids),
        "finish_reason": sample.completion.finish_reason,
    }
