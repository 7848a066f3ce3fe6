"""Stage *merge*: the trained policy as one plain model directory, made from a copy of the base that is never touched.

Writes the model, its tokenizer and merge.json: how much of the update the rounded weights realise (trainer.policy.merge).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tasks.registry import StagePaths
from trainer.config import CampaignConfig
from trainer.errors import ModelError
from trainer.files import damage, read_manifest, write_json
from trainer.metrics import RunWriter

_ENOUGH = 0.9  # cosine below which the merged model is not the one that was trained


def check_same_base(base: Path, policy: Path) -> None:
    """Refuse a policy whose manifest names another base.

    Raises:
        ModelError: it was trained from other weights.
    """
    there = (read_manifest(base) or {}).get("content_sha256")
    trained_from = (read_manifest(policy) or {}).get("inputs", {}).get("base")
    if there and trained_from and there != trained_from:
        raise ModelError(
            f"{policy}: was trained from another base ({trained_from[:12]}) than {base} ({there[:12]}); run the train stage again"
        )


def run(config: CampaignConfig, paths: StagePaths) -> dict[str, Any]:
    """Write the merged model.

    Raises:
        ModelError: the policy is damaged, or was trained from another base.
    """
    from trainer.policy.merge import merge

    base, policy = paths.inputs["base"], paths.inputs["policy"]
    check_same_base(base, policy)
    writer = RunWriter(paths.run, resume_step=0)
    settings = config.merge
    report = merge(
        base,
        policy,
        paths.out,
        settings.dtype,
        settings.max_shard_bytes,
        lambda done, total: writer.heartbeat("writing shards", done, total),
    )
    wrong = damage(base) if read_manifest(base) else None
    assert wrong is None, f"merging changed the base: {wrong}"
    facts = report.facts()
    write_json(paths.out / "merge.json", facts)
    kept = {key: facts[key] for key in ("cosine", "norm_ratio", "relative_change")}
    writer.metrics(0, {f"merge/{key}": value for key, value in kept.items()})
    if facts["num_changed"] == 0 or facts["relative_change"] == 0:
        writer.event("warning", "the policy is the base: no update reached its weights; see the train stage's rewards", **kept)
    elif facts["cosine"] < _ENOUGH:
        fix = "set merge.dtype: float32, or serve the adapter beside the base"
        writer.event("warning", f"rounding lost much of the update (cosine {facts['cosine']:.3f}); {fix}", **kept)
    return {key: value for key, value in facts.items() if key != "tensors"}


if __name__ == "__main__":
    from tasks.command import main

    sys.exit(main(["merge", *sys.argv[1:]]))
