"""Stage *anchors*: completions of training prompts with the base's own log-probs at every token.

The base draws them with the campaign's sampling distribution and scores them; trainer/anchors/store.py has the format. With
`anchors.num_prompts: 0` the artifact is empty and the model is not loaded. Run alone: `python -m tasks.anchors`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tasks.command import main
from tasks.registry import StagePaths
from trainer.anchors.store import Origin, Settings, build_anchors, choose_prompts, damaged_files, manifest_facts
from trainer.config import CampaignConfig
from trainer.errors import DataError
from trainer.files import read_manifest
from trainer.metrics import RunWriter
from trainer.policy.load import eos_token_ids, load_model
from trainer.policy.tokenizer import load_tokenizer
from trainer.prompts import read_prompts
from trainer.rollout.embedded import EmbeddedSampler

_BEAT_SECONDS = 1.0


def origin_of(base: dict[str, Any]) -> Origin:
    """Return whose anchors a campaign can use, from its base artifact's manifest."""
    return Origin(base["content_sha256"], base["tokenizer_hash"])


class _Beat:
    """Heartbeats at most once a second, however often it is called."""

    def __init__(self, writer: RunWriter, doing: str, total: int):
        self.writer, self.doing, self.total, self.before, self.last = writer, doing, total, 0, 0.0

    def sampled(self, done: int, total: int) -> None:
        if time.monotonic() - self.last >= _BEAT_SECONDS:
            self.last = time.monotonic()
            self.writer.heartbeat(self.doing, self.before + done, self.total)

    def written(self, done: int, total: int) -> None:
        self.before = done
        self.writer.heartbeat(self.doing, done, total)


def describe(directory: Path) -> list[str]:
    """Return what a directory of anchors holds, line by line.

    Raises:
        DataError: it holds no anchors, or files of it are damaged.
    """
    manifest = read_manifest(directory)
    if manifest is None or "shards" not in manifest or "num_completions" not in manifest:
        raise DataError(str(directory), "holds no anchors; name artifacts/anchors or a version in a run's train/anchors")
    damaged = damaged_files(directory)
    if damaged:
        what = "a run scores them again when it goes on; for the artifact run `tithe anchors` again"
        raise DataError(str(directory), f"damaged by its sha256: {', '.join(damaged)}; {what}")
    made = f"on completions of policy version {manifest['policy_version']}, scored by the {manifest['source']}"
    why = f"; step {manifest['step']}: {manifest['reason']}" if "reason" in manifest else ""
    size = sum(fact["bytes"] for fact in manifest["files"].values())
    counts = {name: manifest[f"num_{name}"] for name in ("prompts", "completions", "tokens")}
    return [
        f"anchors v{manifest['version']:06d} {made}{why}",
        "  " + ", ".join(f"{count:,} {name}" for name, count in counts.items()),
        f"  top K {manifest['top_k']}, temperature {manifest['temperature']:g}, length cap {manifest['max_completion_tokens']}",
        f"  {len(manifest['shards'])} shards, {size:,} bytes, every sha256 right",
        f"  model {manifest['model_sha256']}",
        f"  tokenizer {manifest['tokenizer_hash']}",
        f"  content {manifest['content_sha256']}",
    ]


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Write the anchors of a campaign.

    Raises:
        ModelError: the base cannot be loaded. DivergedError: its logits are not finite.
    """
    anchors, sampling = config.anchors, config.train.sampling
    writer = RunWriter(paths.run, resume_step=0)
    base = read_manifest(paths.inputs["base"])
    assert base is not None
    prompts = choose_prompts(read_prompts(paths.inputs["prompts"], "train"), anchors.num_prompts, config.campaign.seed)
    if len(prompts) < anchors.num_prompts:
        writer.event("warning", f"anchors.num_prompts = {anchors.num_prompts}: there are only {len(prompts)} training prompts")
    settings = Settings(
        completions_per_prompt=anchors.completions_per_prompt,
        top_k=anchors.top_k,
        temperature=sampling.temperature,
        max_completion_tokens=anchors.max_completion_tokens or sampling.max_completion_tokens,
        seed=config.campaign.seed,
    )
    if not prompts:
        return manifest_facts(settings, origin_of(base), prompts)
    tokenizer = load_tokenizer(paths.inputs["base"])
    model = load_model(paths.inputs["base"], config.base.dtype, config.machine.device)
    beat = _Beat(writer, "making anchors", len(prompts) * anchors.completions_per_prompt)
    sampler = EmbeddedSampler(model, config.train.sampler.slots, tokenizer.pad_token_id or 0, progress=beat.sampled)
    start = time.monotonic()
    facts = build_anchors(
        paths.out,
        model,
        sampler,
        prompts,
        settings,
        origin_of(base),
        eos_token_ids(model, tokenizer),
        progress=beat.written,
    )
    seconds = max(time.monotonic() - start, 1e-9)
    counted = {f"anchors/{name}": float(facts[name]) for name in ("num_prompts", "num_completions", "num_tokens", "top_k")}
    writer.metrics(0, {**counted, "anchors/seconds": seconds, "anchors/tokens_per_second": facts["num_tokens"] / seconds})
    return facts


if __name__ == "__main__":
    sys.exit(main(["anchors", *sys.argv[1:]]))
