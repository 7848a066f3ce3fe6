"""Optional stage *reward_model*: a small reward model from preference pairs, with its accuracy on held-out prompts.

    pairs.jsonl -> {prompt, chosen, rejected} -> sequence-classification model in artifacts/reward_model, accuracy.json

Runs where the configuration has `reward_training`; use the result with reward.reward_model.model: artifacts/reward_model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.registry import StagePaths
from tasks.sources import find
from trainer.config import CampaignConfig
from trainer.config.schema import RewardTraining
from trainer.errors import ConfigError, DataError
from trainer.files import place_of, write_json
from trainer.metrics import RunWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trainer.reward.preference import Pair


def read_pairs(options: RewardTraining) -> list[Pair]:
    """Return the pairs of the configured file.

    Raises:
        ConfigError: no such file. DataError: a line is no pair, or both answers are equal.
    """
    from trainer.reward.preference import Pair

    path = place_of(options.pairs)
    if not path.is_file():
        raise ConfigError("reward_training.pairs", options.pairs, f"there is no file {path}; give the right path")
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{options.pairs}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(where, f"is not JSON ({error.msg})") from None
        names = (options.prompt_field, options.chosen_field, options.rejected_field)
        values = [row.get(name) if isinstance(row, dict) else None for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, str) or not value:
                raise DataError(where, f"has no text in field {name!r}; every pair needs {', '.join(names)}")
        pair = Pair(*(str(value) for value in values))
        if pair.chosen == pair.rejected:
            raise DataError(where, "its chosen and rejected answers are equal; remove the pair")
        pairs.append(pair)
    return pairs


def start_model(pairs: list[Pair], options: RewardTraining, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the untrained reward model: a tiny one, or a pretrained body with a new head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from trainer.reward.preference import scratch_model
    from trainer.reward.reward_model import find_model
    from trainer.types import derive_seed

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "reward_model", "weights"))
        if options.base == "scratch":
            return scratch_model(pairs, options)
        directory = find(options.base) or find_model(options.base, None, "reward_training")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForSequenceClassification.from_pretrained(
            directory, num_labels=1, dtype="float32", local_files_only=True
        )
    return model, tokenizer


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Train the reward model and write it with its held-out accuracy.

    Raises:
        ConfigError: reward_training is not set. DataError: the pairs cannot be used, or teach nothing.
    """
    options = config.reward_training
    if options is None:
        raise ConfigError("reward_training", None, "is not set; add it with `pairs: <file>` to train a reward model")
    pairs = read_pairs(options)
    from trainer.policy.load import save_model
    from trainer.reward.preference import is_heldout, measure, train
    from trainer.reward.reward_model import FACTS, count_parameters

    heldout = [pair for pair in pairs if is_heldout(pair, options.heldout_fraction)]
    training = [pair for pair in pairs if not is_heldout(pair, options.heldout_fraction)]
    if not heldout or not training:
        raise DataError(options.pairs, f"has {len(pairs)} pairs, too few for training and held-out; give more")
    model, tokenizer = start_model(pairs, options, config.campaign.seed)
    writer = RunWriter(paths.run, resume_step=0)

    def progress(step: int, total: int, metrics: dict[str, float]) -> None:
        writer.metrics(step, {f"reward_model/{name}": value for name, value in metrics.items()})
        writer.heartbeat("training the reward model", step, total)

    train(model, tokenizer, training, options, config.campaign.seed, progress)
    found = measure(model, tokenizer, heldout, options)
    facts: dict[str, Any] = {
        "heldout_accuracy": found["accuracy"],
        "heldout_margin": found["margin"],
        "num_pairs": len(training),
        "num_heldout_pairs": len(heldout),
        "num_parameters": count_parameters(model),
        "longer_chosen_fraction": sum(len(pair.chosen) > len(pair.rejected) for pair in pairs) / len(pairs),
    }
    if found["accuracy"] < options.min_heldout_accuracy:
        raise DataError(
            options.pairs,
            f"the model tells chosen from rejected in {found['accuracy']:.0%} of held-out pairs, below "
            f"{options.min_heldout_accuracy:.0%} (reward_training.min_heldout_accuracy); give more pairs or epochs",
        )
    save_model(model, tokenizer, paths.out)
    write_json(paths.out / FACTS, {"separator": options.separator})
    write_json(Path(paths.out) / "accuracy.json", facts)
    return facts


if __name__ == "__main__":
    from tasks.command import main

    sys.exit(main(["reward_model", *sys.argv[1:]]))
