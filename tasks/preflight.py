"""`python -m tasks.preflight`: score a sample of the base's completions before training, and say whether the reward can teach.

Reads the prompts and base artifacts, writes preflight.json to the run directory's `preflight` folder, prints the report. Exit
code 0 for good and caution, 2 for stop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.workspace import Workspace
from trainer.config import CampaignConfig
from trainer.errors import DataError, TitheError
from trainer.files import damage, write_json
from trainer.metrics import RunWriter
from trainer.prompts import prompt_path, read_prompts
from trainer.types import SamplingParams

if TYPE_CHECKING:
    from trainer.reward.preflight import PreflightReport


def preflight(config: CampaignConfig, prompts_directory: Path, base_directory: Path) -> PreflightReport:
    """Return the report on the base.

    Raises:
        DataError: there are no training prompts. ModelError: the base cannot be loaded. ConfigError: no verifier can be built.
    """
    from trainer.policy.load import eos_token_ids, load_model
    from trainer.policy.tokenizer import load_tokenizer
    from trainer.reward import build_verifier
    from trainer.rollout.embedded import EmbeddedSampler
    from trainer.schedule.preflight import look

    train = config.train
    prompts = read_prompts(prompts_directory, "train", train.stages[0].sources)[: max(1, config.preflight.num_prompts)]
    if not prompts:
        raise DataError(str(prompt_path(prompts_directory, "train")), "has no prompts of the first RL stage; prepare some")
    tokenizer = load_tokenizer(base_directory)
    base = load_model(base_directory, config.base.dtype, config.machine.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    sampler = EmbeddedSampler(base, train.sampler.slots, pad)
    cap = train.stages[0].max_completion_tokens or train.sampling.max_completion_tokens
    params = SamplingParams(train.sampling.temperature, cap, eos_token_ids(base, tokenizer))
    verifier = build_verifier(config.reward)
    try:
        size, per_step = train.batch.group_size, train.batch.samples_per_step
        return look(prompts, sampler, tokenizer, verifier, params, size, per_step, config.campaign.seed)
    finally:
        verifier.close()
        sampler.close()


def run_preflight(workspace: Workspace) -> PreflightReport:
    """Look at a workspace's prompts and base, write preflight.json to its run directory, and return the report.

    Raises:
        DataError: the artifacts prompts or base are missing or damaged. Whatever `preflight` raises.
    """
    for name in ("prompts", "base"):
        wrong = damage(workspace.artifact(name))
        if wrong:
            raise DataError(
                wrong, f"the pre-flight needs it; run `python -m tasks {'prepare' if name == 'prompts' else name}` first"
            )
    directory = workspace.run / "preflight"
    RunWriter(directory).heartbeat("looking at the reward")
    report = preflight(workspace.config, workspace.artifact("prompts"), workspace.artifact("base"))
    write_json(directory / "preflight.json", report.as_dict())
    return report


def main(arguments: list[str]) -> int:
    from tasks.command import limit_threads, parse, read_config

    options = parse(["preflight", *arguments])
    try:
        config = read_config(options.config or options.workspace / "params.yaml")
        limit_threads(config)
        workspace = Workspace(options.workspace.resolve(), config, options.run_dir and options.run_dir.resolve())
        workspace.claim_run()
        report = run_preflight(workspace)
    except TitheError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    print("\n".join(report.lines()))
    return 2 if report.verdict == "stop" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
