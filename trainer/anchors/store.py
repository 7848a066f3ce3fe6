"""Anchors on disk: made once by the reference, read a few at a time by the learner.

    prompts --sampler--> completions --reference, one forward pass--> top K log-probs, log mass of the tail --> shards

A shard is a safetensors file with some completions end to end; lengths say where each begins. Everything is at the sampling
temperature. The log mass of the tail is -inf where K is the vocabulary. Who scores: scorer.py; a model in this process gives
equal bytes for equal inputs. What the shards hold is said by the directory's manifest, whose facts `build_anchors` returns. The
drawn tokens alone are in `completions.safetensors` too: small, and enough to score a damaged shard again to the same bytes. When
anchors are made anew while training: guard.py.

Legend: N completions of a shard, P prompt tokens and T completion tokens of all of them, K cached tokens at each.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from trainer.anchors.scorer import Drawn, Scorer
from trainer.errors import DataError, ModelError
from trainer.files import MANIFEST, damage, disk_full_is_named, read_manifest, sha256_file
from trainer.types import Prompt, Request, Sampler, SamplingParams, derive_seed

FORMAT = 2
SHARD_BYTES = 2**28
COMPLETIONS = "completions.safetensors"
_PER_TOKEN = ("completion_tokens", "logprobs", "top_ids", "top_logprobs", "tail_logprobs", "sampler_logprobs")


@dataclass(frozen=True)
class Origin:
    """Who made the anchors: a store is only read by a campaign with the same."""

    model_sha256: str  # content_sha256 of the base artifact
    tokenizer_hash: str


@dataclass(frozen=True)
class Settings:
    """What is anchored, and how finely."""

    completions_per_prompt: int
    top_k: int  # K; capped at the vocabulary's size
    temperature: float  # of the sampling distribution, above 0; completions and cached log-probs have it
    max_completion_tokens: int
    seed: int  # the campaign's


@dataclass(frozen=True)
class Version:
    """Which of a run's anchors these are: the stage's, or made anew on completions of a later policy."""

    version: int = 0
    policy_version: int = 0  # of the policy that drew the completions
    source: Literal["reference", "policy"] = "reference"  # who scored them


@dataclass(frozen=True)
class AnchorBatch:
    """Some anchored completions. Per-token tensors are flat, completion after completion, on the host."""

    prompt_ids: list[str]
    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs_T: Tensor  # float32: the reference's log-prob of the token itself
    top_ids_TK: Tensor  # int64, most probable first
    top_logprobs_TK: Tensor  # float32, natural log
    tail_T: Tensor  # float32: log of the mass outside the top K; -inf where K is the vocabulary
    sampler_logprobs_T: Tensor  # float32: the log-prob of the token under the policy that drew it


def choose_prompts(prompts: Sequence[Prompt], num: int, seed: int) -> list[Prompt]:
    """Return up to `num` prompts by the hash of their id: the same ones on every machine, and more when more are asked for."""
    return sorted(prompts, key=lambda prompt: (derive_seed(seed, "anchors", prompt.id), prompt.id))[:num]


def drawn_tensors(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Return some completions, end to end."""
    return {
        "prompt_tokens": torch.tensor(list(chain.from_iterable(d.prompt for d in drawn)), dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(d.prompt) for d in drawn], dtype=torch.int32),
        "completion_tokens": torch.tensor(list(chain.from_iterable(d.completion for d in drawn)), dtype=torch.int32),
        "completion_lengths": torch.tensor([len(d.completion) for d in drawn], dtype=torch.int32),
        "sampler_logprobs": torch.tensor(list(chain.from_iterable(d.logprobs for d in drawn)), dtype=torch.float32),
    }


def shard_tensors(scorer: Scorer, drawn: Sequence[Drawn], top_k: int, temperature: float) -> dict[str, Tensor]:
    """Return the tensors of one shard for some completions."""
    return {**drawn_tensors(drawn), **scorer.score(drawn, top_k, temperature)}


def manifest_facts(
    settings: Settings,
    origin: Origin,
    prompts: Sequence[Prompt],
    num_tokens: int = 0,
    shards: Sequence[str] = (),
    num_fed: int = 0,
    per_shard: int = 1,
    version: Version | None = None,
) -> dict[str, Any]:
    """Return what the directory's manifest says of the shards; by default, of a store without any."""
    return {
        "format": FORMAT,
        **asdict(version or Version()),
        **asdict(origin),
        **asdict(settings),
        "num_prompts": len(prompts),
        "num_completions": len(prompts) * settings.completions_per_prompt,
        "num_tokens": num_tokens,
        "num_fed_tokens": num_fed,
        "shards": list(shards),
        "completions_per_shard": per_shard,
        "prompt_ids": [prompt.id for prompt in prompts],
    }


def build_anchors(
    directory: Path,
    scorer: Scorer,
    sampler: Sampler,
    prompts: Sequence[Prompt],
    settings: Settings,
    origin: Origin,
    eos_token_ids: tuple[int, ...],
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    version: Version | None = None,
) -> dict[str, Any]:
    """Sample completions, score them with the reference and write shards into a directory.

    Args:
        scorer: the reference.
        sampler: draws the completions.
        shard_bytes: about how large a shard gets.
        progress: called with (finished, total) completions after every shard.
        version: of the anchors; None: the first, drawn by the reference itself.

    Returns:
        The facts for the directory's manifest.
    """
    settings = replace(settings, top_k=min(settings.top_k, scorer.vocabulary))
    params = SamplingParams(settings.temperature, settings.max_completion_tokens, eos_token_ids)
    version = version or Version()
    seed: tuple[int | str, ...] = (settings.seed, "anchors", *([version.version] if version.version else []))
    requests = [
        Request(prompt.id, prompt.token_ids, derive_seed(*seed, prompt.id, index), index)
        for prompt in prompts
        for index in range(settings.completions_per_prompt)
    ]
    longest_prompt = max((len(prompt.token_ids) for prompt in prompts), default=0)
    largest = settings.max_completion_tokens * (8 * settings.top_k + 12) + 4 * longest_prompt  # bytes of one completion
    per_shard = max(1, shard_bytes // largest)
    everything, shards = list[Drawn](), list[str]()
    for start in range(0, len(requests), per_shard):
        part = requests[start : start + per_shard]
        completions = sampler.generate(part, params)
        drawn = [Drawn(r.token_ids, c.token_ids, c.logprobs) for r, c in zip(part, completions, strict=True)]
        tensors = shard_tensors(scorer, drawn, settings.top_k, settings.temperature)
        shards.append(f"shard-{len(shards):05d}.safetensors")
        _write(directory / shards[-1], tensors)
        everything += drawn
        if progress is not None:
            progress(start + len(part), len(requests))
    if everything:
        _write(directory / COMPLETIONS, drawn_tensors(everything))
    num_tokens, num_fed = sum(len(d.completion) for d in everything), sum(d.num_fed for d in everything)
    return manifest_facts(settings, origin, prompts, num_tokens, shards, num_fed, per_shard, version)


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    with disk_full_is_named(path):
        path.write_bytes(save(tensors))


def _read_drawn(path: Path) -> list[Drawn]:
    tensors = load_file(path)
    prompts = tensors["prompt_tokens"].split(tensors["prompt_lengths"].tolist())
    lengths = tensors["completion_lengths"].tolist()
    each = zip(prompts, tensors["completion_tokens"].split(lengths), tensors["sampler_logprobs"].split(lengths), strict=True)
    return [Drawn(prompt.tolist(), completion.tolist(), logprobs.tolist()) for prompt, completion, logprobs in each]


def damaged_files(directory: Path) -> list[str]:
    """Return the files of a directory that differ from its manifest, by size and sha256; no readable manifest is named itself."""
    manifest = read_manifest(directory)
    if manifest is None:
        return [MANIFEST]
    return [name for name, fact in sorted(manifest["files"].items()) if not _is_whole(directory / name, fact)]


def _is_whole(path: Path, fact: dict[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == fact["bytes"] and sha256_file(path) == fact["sha256"]


def rebuild_files(directory: Path, damaged: Sequence[str], scorer: Scorer | None) -> bool:
    """Make damaged files again: shards by scoring their completions, lost completions from the shards, which hold them too.

    Args:
        directory: of anchors that the reference scored, with a whole manifest.
        damaged: from `damaged_files`.
        scorer: the reference; None where no shard is damaged.

    Returns:
        Whether the directory is whole again. False where the completions are lost, or the machine computes other bits.
    """
    manifest = read_manifest(directory)
    if manifest is None or manifest.get("format") != FORMAT or not {*damaged} <= {*manifest["shards"], COMPLETIONS}:
        return False
    shards = [name for name in damaged if name != COMPLETIONS]
    if len(shards) < len(damaged):
        if shards:
            return False
        everything = [one for name in manifest["shards"] for one in _read_drawn(directory / name)]
        _write(directory / COMPLETIONS, drawn_tensors(everything))
    drawn, size = _read_drawn(directory / COMPLETIONS), manifest["completions_per_shard"]
    for name in shards:
        assert scorer is not None
        first = manifest["shards"].index(name) * size
        tensors = shard_tensors(scorer, drawn[first : first + size], manifest["top_k"], manifest["temperature"])
        _write(directory / name, tensors)
    return damage(directory) is None


class _Shard:
    """One file, read slice by slice; only the lengths are kept in memory."""

    def __init__(self, path: Path):
        self.file = safe_open(path, framework="pt")
        self.prompt_starts = [0, *accumulate(self.file.get_tensor("prompt_lengths").tolist())]
        self.starts = [0, *accumulate(self.file.get_tensor("completion_lengths").tolist())]
        self.prompt_tokens = self.file.get_slice("prompt_tokens")
        self.per_token = {name: self.file.get_slice(name) for name in _PER_TOKEN}

    def __len__(self) -> int:
        return len(self.starts) - 1

    def prompt(self, index: int) -> list[int]:
        ids: list[int] = self.prompt_tokens[self.prompt_starts[index] : self.prompt_starts[index + 1]].tolist()
        return ids

    def tokens(self, index: int) -> dict[str, Tensor]:
        start, stop = self.starts[index], self.starts[index + 1]
        return {name: piece[start:stop] for name, piece in self.per_token.items()}


class AnchorStore:
    """Anchored completions by number. Made by `open_anchors`."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest
        self.top_k: int = manifest["top_k"]
        self.temperature: float = manifest["temperature"]
        self.num_tokens: int = manifest["num_tokens"]
        self.shards = [_Shard(directory / name) for name in manifest["shards"]]
        self.first = [0, *accumulate(len(shard) for shard in self.shards)]  # number of each shard's first completion
        assert self.first[-1] == manifest["num_completions"]

    def __len__(self) -> int:
        """Return the number of anchored completions."""
        return self.first[-1]

    def take(self, indices: Sequence[int]) -> AnchorBatch:
        """Return some of them, read from disk, in the order asked for."""
        prompts, pieces = [], []
        for index in indices:
            which = bisect.bisect_right(self.first, index) - 1
            shard, local = self.shards[which], index - self.first[which]
            prompts.append(shard.prompt(local))
            pieces.append(shard.tokens(local))

        def joined(name: str) -> Tensor:
            return torch.cat([piece[name] for piece in pieces])

        per_prompt = self.manifest["completions_per_prompt"]
        return AnchorBatch(
            prompt_ids=[self.manifest["prompt_ids"][index // per_prompt] for index in indices],
            prompts=prompts,
            completions=[piece["completion_tokens"].tolist() for piece in pieces],
            logprobs_T=joined("logprobs"),
            top_ids_TK=joined("top_ids").long(),
            top_logprobs_TK=joined("top_logprobs"),
            tail_T=joined("tail_logprobs"),
            sampler_logprobs_T=joined("sampler_logprobs"),
        )


def open_anchors(directory: Path, origin: Origin, temperature: float | None = None) -> AnchorStore:
    """Open a store after checking every file against its sha256.

    Args:
        temperature: that it must have; None takes any.

    Raises:
        DataError: the directory is missing, damaged, in another format, or at another temperature.
        ModelError: the anchors were made by another model or tokenizer.
    """
    wrong = damage(directory)
    if wrong:
        raise DataError(wrong, "the anchors are damaged; remove their directory and run `python -m tasks anchors` again")
    manifest = read_manifest(directory)
    assert manifest is not None
    if manifest.get("format") != FORMAT or "shards" not in manifest:
        raise DataError(str(directory), f"holds no anchors of format {FORMAT}; remove it and run `python -m tasks anchors` again")
    for key, kind in (("model_sha256", "model"), ("tokenizer_hash", "tokenizer")):
        made, here = manifest[key], getattr(origin, key)
        if made != here:
            raise ModelError(
                f"{directory}: its anchors come from {kind} {made}, this campaign has {kind} {here}; "
                "run `python -m tasks anchors` again"
            )
    if temperature is not None and manifest["temperature"] != temperature:
        raise DataError(
            str(directory),
            f"its log-probs are at temperature {manifest['temperature']:g}, training samples at {temperature:g}; "
            "run `python -m tasks anchors` again",
        )
    return AnchorStore(directory, manifest)
