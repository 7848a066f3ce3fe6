"""Stage *anchors*: completions of training prompts with the base's own log-probs at every token.

The base draws them with the campaign's sampling distribution and scores them, in this process or behind vLLM
(`anchors.reference`); trainer/anchors/store.py has the format. With `anchors.num_prompts: 0` the artifact is empty and the model
is not loaded. Run alone: `python -m tasks.anchors`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tasks.command import main
from tasks.registry import StagePaths
from trainer.anchors.scorer import Scorer, ServedScorer, Voice
from trainer.anchors.store import Origin, Settings, build_anchors, choose_prompts, damaged_files, manifest_facts
from trainer.config import CampaignConfig
from trainer.engine.build import recalled_base, recalled_int8
from trainer.errors import DataError
from trainer.files import read_manifest
from trainer.memory.int8 import WARN_AT
from trainer.memory.lazy import skeleton
from trainer.metrics import RunWriter
from trainer.policy.forward import completion_logprobs
from trainer.policy.load import eos_token_ids
from trainer.policy.tokenizer import load_tokenizer
from trainer.prompts import read_prompts
from trainer.rollout.embedded import EmbeddedSampler
from trainer.rollout.vllm_server import served_base
from trainer.types import Prompt, Sampler

_BEAT_SECONDS = 1.0
_ERROR_PROMPTS = 64  # on which an 8-bit reference is held against the base


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

    def waiting(self) -> None:
        self.writer.heartbeat("starting vLLM")

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
    by = f" ({manifest['reference']})" if manifest["source"] == "reference" and "reference" in manifest else ""
    why = f"; step {manifest['step']}: {manifest['reason']}" if "reason" in manifest else ""
    size = sum(fact["bytes"] for fact in manifest["files"].values())
    counts = {name: manifest[f"num_{name}"] for name in ("prompts", "completions", "tokens")}
    return [
        f"anchors v{manifest['version']:06d} {made}{by}{why}",
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
        ModelError: the base cannot be loaded, or a server refuses. DivergedError: its logits are not finite.
        StalledError: no server answers.
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
    beat = _Beat(writer, "making anchors", len(prompts) * anchors.completions_per_prompt)
    start = time.monotonic()
    with (_served if anchors.reference == "vllm" else _local)(config, paths, prompts, beat) as makers:
        facts = build_anchors(
            paths.out,
            makers.scorer,
            makers.sampler,
            prompts,
            settings,
            origin_of(base),
            makers.eos_token_ids,
            progress=beat.written,
        )
    seconds = max(time.monotonic() - start, 1e-9)
    counted = {f"anchors/{name}": float(facts[name]) for name in ("num_prompts", "num_completions", "num_tokens", "top_k")}
    counted |= {"anchors/seconds": seconds, "anchors/tokens_per_second": facts["num_tokens"] / seconds}
    error = makers.error
    if error is not None:
        counted["anchors/reference_error"] = error
        much = f", more than {WARN_AT}: the KL term pulls to another model than the base" if error > WARN_AT else ""
        said = f"the 8-bit reference is off by {error:.4f} nats a token on the prompts{much}"
        writer.event("warning" if much else "reference", said, error=error)
    writer.metrics(0, counted)
    return {**facts, "reference": "resident" if anchors.reference in ("auto", "adapter_off") else anchors.reference}


@dataclass(frozen=True)
class _Makers:
    """Who draws and who scores."""

    scorer: Scorer
    sampler: Sampler
    eos_token_ids: tuple[int, ...]
    error: float | None = None  # mean absolute, in nats a token, of a scorer that is not exact


@contextmanager
def _local(config: CampaignConfig, paths: StagePaths, prompts: Sequence[Prompt], beat: _Beat) -> Iterator[_Makers]:
    """Have the base in this process: whole, or tiered where train.memory says so; with 8-bit weights to score where asked for."""
    source, tokenizer = paths.inputs["base"], load_tokenizer(paths.inputs["base"])
    place = (source, config.base.dtype, config.machine.device, config.train, paths.run)
    with ExitStack() as open_things:
        model, _ = open_things.enter_context(recalled_base(*place))
        sampler = EmbeddedSampler(model, config.train.sampler.slots, tokenizer.pad_token_id or 0, progress=beat.sampled)
        scorer, error = Voice(model), None
        if config.anchors.reference == "int8_streamed":
            rough, _ = open_things.enter_context(recalled_int8(*place))
            scorer, error = Voice(rough), _error(rough, model, prompts, config.train.sampling.temperature)
        yield _Makers(scorer, sampler, eos_token_ids(model, tokenizer), error)


def _error(rough: Any, model: Any, prompts: Sequence[Prompt], temperature: float) -> float:
    """Return the mean absolute difference of two models' log-probs of the tokens of some prompts."""
    pairs = [(prompt.token_ids[:1], prompt.token_ids[1:]) for prompt in prompts[:_ERROR_PROMPTS]]
    one, other = (chain.from_iterable(completion_logprobs(each, pairs, temperature, 0)) for each in (rough, model))
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return sum(apart) / max(len(apart), 1)


@contextmanager
def _served(config: CampaignConfig, paths: StagePaths, prompts: Sequence[Prompt], beat: _Beat) -> Iterator[_Makers]:
    """Have the base behind vLLM: the servers of the recipe, or one that runs for the span of the block."""
    source, bare = paths.inputs["base"].resolve(), skeleton(paths.inputs["base"])
    cap = config.anchors.max_completion_tokens or config.train.sampling.max_completion_tokens
    longest = max(len(prompt.token_ids) for prompt in prompts) + cap + 1  # scoring asks for one token more
    with served_base(config, source, paths.run, longest, config.anchors.top_k, beat.waiting) as sampler:
        sampler.progress = beat.sampled
        vocabulary = int(bare.get_output_embeddings().weight.shape[0])
        yield _Makers(ServedScorer(sampler, vocabulary), sampler, eos_token_ids(bare, load_tokenizer(source)))


if __name__ == "__main__":
    sys.exit(main(["anchors", *sys.argv[1:]]))
