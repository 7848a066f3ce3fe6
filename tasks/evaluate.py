"""Stage *evaluate*: the base beside the trained model on prompts that training never saw.

evaluation.json   per model and for the paired difference: value, low, high of every metric (trainer.evaluation)
samples.jsonl     one line a prompt: gold answer, both models' greedy and sampled answers with their verdicts
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.registry import StagePaths
from trainer.config import CampaignConfig
from trainer.errors import DataError, ModelError
from trainer.files import canonical_json, read_manifest, write_json, write_text
from trainer.metrics import RunWriter
from trainer.prompts import prompt_path, read_prompts


def completion_cap(config: CampaignConfig) -> int:
    """Return the longest completion that any RL stage was trained with."""
    common = config.train.sampling.max_completion_tokens
    return max(stage.max_completion_tokens or common for stage in config.train.stages)


def check_tokenizers(prompts: Path, models: Mapping[str, Path]) -> None:
    """Refuse a model whose tokenizer is not the one that the prompts were encoded with.

    Raises:
        ModelError: names the model.
    """
    from trainer.policy.tokenizer import load_tokenizer, tokenizer_hash

    expected = (read_manifest(prompts) or {}).get("tokenizer_hash")
    for directory in models.values():
        found = tokenizer_hash(load_tokenizer(directory))
        if expected is not None and found != expected:
            raise ModelError(
                f"{directory}: its tokenizer ({found[:12]}) is not the one that the prompts in {prompts} were encoded with "
                f"({expected[:12]}); evaluate it on prompts prepared with its own tokenizer"
            )


def evaluate(config: CampaignConfig, prompts: Path, models: Mapping[str, Path], out: Path, run: Path) -> dict[str, Any]:
    """Evaluate one model, or two beside each other, and write evaluation.json and samples.jsonl.

    Args:
        config: its sections evaluate, reward, train.sampling and campaign.seed decide the result.
        prompts: the prompts artifact.
        models: name -> model directory; the difference is the second minus the first.
        out: an existing directory.
        run: run directory for heartbeat and metrics.

    Raises:
        DataError: the split has no prompts. ModelError: a model cannot be loaded or has another tokenizer.
    """
    from trainer.evaluation import Protocol, answer_prompts, choose_prompts, sample_lines, summarise
    from trainer.reward import build_verifier

    settings = config.evaluate
    chosen = choose_prompts(read_prompts(prompts, settings.split), settings.num_prompts)
    if not chosen:
        path = prompt_path(prompts, settings.split)
        raise DataError(str(path), f"has no prompts; set evaluate.split, or prepare.{settings.split}_fraction above 0")
    check_tokenizers(prompts, models)
    writer = RunWriter(run, resume_step=0)
    slots, device = config.train.sampler.slots, config.machine.device
    protocol = Protocol(settings, completion_cap(config), config.campaign.seed, slots, device)
    verifier = build_verifier(config.reward)
    answers = {}
    try:
        for name, directory in models.items():

            def beat(done: int, total: int, name: str = name) -> None:
                writer.heartbeat(f"evaluating {name}", done, total)

            answers[name] = answer_prompts(directory, chosen, protocol, verifier, beat)
    finally:
        verifier.close()
    summary = summarise(answers, settings, config.campaign.seed)
    facts = {
        "split": settings.split,
        "num_prompts": len(chosen),
        "samples_per_prompt": settings.samples_per_prompt,
        "temperature": settings.temperature,
        "max_completion_tokens": protocol.max_completion_tokens,
    }
    write_json(out / "evaluation.json", {**facts, **summary})
    write_text(out / "samples.jsonl", "".join(canonical_json(line) + "\n" for line in sample_lines(answers)))
    writer.metrics(0, flat_metrics(summary))
    return facts | {name: {k: v["value"] for k, v in summary[name].items() if k != "statuses"} for name in summary}


def flat_metrics(summary: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the values under names that every tracker takes: `evaluate/trained/pass_at_1`."""
    return {
        f"evaluate/{model}/{metric.replace('@', '_at_')}": value["value"]
        for model, metrics in summary.items()
        for metric, value in metrics.items()
        if metric != "statuses"
    }


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Evaluate the base beside the trained model.

    Raises:
        DataError: the split has no prompts. ModelError: a model cannot be loaded or has another tokenizer.
    """
    models = {"base": paths.inputs["base"], "trained": paths.inputs["merged"]}
    return evaluate(config, paths.inputs["prompts"], models, paths.out, paths.run)


if __name__ == "__main__":
    from tasks.command import main

    sys.exit(main(["evaluate", *sys.argv[1:]]))
