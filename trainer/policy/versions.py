"""Handing a policy from the learner to its samplers: one directory a version, and one pointer that is replaced atomically.

    policies/v000120/      a peft adapter (lora) or weights.safetensors (full); probe.json: what the learner's weights say of the
                           probe; manifest.json with hashes, version and step
    policies/current.json  the newest version that is whole
    policies/probe.json    the fixed completions of the probe

A version is written once, and its directory is renamed into place when it is complete, so a reader sees all of it or
nothing. Old versions go when nobody uses them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file

from trainer.errors import ModelError
from trainer.files import MANIFEST, damage, new_directory, read_json, read_manifest, write_json, write_manifest
from trainer.policy.adapter import WEIGHTS as ADAPTER_WEIGHTS
from trainer.policy.checkpoint import write_tensors
from trainer.policy.lora import save_adapter
from trainer.policy.policy import Policy

POINTER, SCORES, FULL_WEIGHTS = "current.json", "probe.json", "weights.safetensors"
_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True)
class Version:
    version: int
    directory: Path
    weights_sha256: str


def weights_sha256(policy: Policy) -> str:
    """Return one hash over the names and bytes of all trained weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(policy.trainable.items()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class PolicyStore:
    """The `policies` directory of a run.

    Args:
        root: that directory.
        keep: newest versions that are never removed.
    """

    def __init__(self, root: Path, keep: int):
        self.root, self.keep = root, keep

    def directory(self, version: int) -> Path:
        return self.root / f"v{version:06d}"

    def newest(self) -> Version | None:
        """Return the version that the pointer names; None before the first."""
        try:
            pointer = read_json(self.root / POINTER)
        except FileNotFoundError:
            return None
        except json.JSONDecodeError as error:
            raise ModelError(f"{self.root / POINTER}: is no JSON ({error}); remove it and start the run again") from None
        return Version(pointer["version"], self.root / pointer["directory"], pointer["weights_sha256"])

    def publish(
        self,
        policy: Policy,
        version: int,
        step: int,
        scores: list[list[float]],
        untempered: list[list[float]],
        in_use: Collection[int] = (),
    ) -> Version:
        """Write a version, point at it, and remove the old ones that nobody uses.

        Args:
            policy: its trained weights are written.
            version: the learner's.
            step: after which it is.
            scores: the learner's log-probs of the probe. untempered: the same at temperature 1.
            in_use: versions that samplers still work with.
        """
        target, digest = self.directory(version), weights_sha256(policy)
        before = read_manifest(target) or {}
        if before.get("weights_sha256") != digest or damage(target) is not None:
            with new_directory(target) as directory:
                if policy.adapter is not None:
                    save_adapter(policy.adapter, directory)
                else:
                    write_tensors(directory / FULL_WEIGHTS, policy.trainable)
                write_json(directory / SCORES, {"logprobs": scores, "untempered": untempered})
                write_manifest(directory, {"version": version, "step": step, "weights_sha256": digest})
        manifest = read_manifest(target)
        assert manifest is not None
        pointer = {"version": version, "directory": target.name, "content_sha256": manifest["content_sha256"]}
        write_json(self.root / POINTER, {**pointer, "weights_sha256": digest})
        self._remove_old(in_use)
        return Version(version, target, digest)

    def _remove_old(self, in_use: Collection[int]) -> None:
        found = [(int(match[1]), path) for path in self.root.glob("v*") if (match := _NAME.fullmatch(path.name))]
        for version, path in sorted(found, reverse=True)[self.keep :]:
            if version not in in_use:
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def scores(self, version: int, untempered: bool = False) -> list[list[float]]:
        """Return what the learner's weights of a version say of the probe; untempered: at temperature 1."""
        found: list[list[float]] = read_json(self.directory(version) / SCORES)["untempered" if untempered else "logprobs"]
        return found

    def load(self, policy: Policy, version: int) -> None:
        """Put the weights of a version into a policy of the same shape.

        Raises:
            ModelError: the version is damaged, gone, or of another policy.
        """
        directory = self.directory(version)
        wrong = damage(directory)
        if wrong is not None:
            raise ModelError(f"{wrong}; policy version {version} cannot be loaded")
        if policy.adapter is not None:
            _load_adapter(policy.adapter, directory)
        else:
            _load_weights(policy, directory)


def _load_adapter(adapter: PeftModel, directory: Path) -> None:
    tensors = load_file(directory / ADAPTER_WEIGHTS)
    with torch.no_grad():
        result: Any = set_peft_model_state_dict(adapter, tensors)
    if result.unexpected_keys or any("lora_" in key for key in result.missing_keys):
        raise ModelError(f"{directory}: is an adapter of other layers; sampler and learner have different configurations")


def _load_weights(policy: Policy, directory: Path) -> None:
    tensors, wanted = load_file(directory / FULL_WEIGHTS), policy.trainable
    if tensors.keys() != wanted.keys():
        raise ModelError(f"{directory}: holds other weights; sampler and learner have different configurations")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
