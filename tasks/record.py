"""What happened to a campaign or a stage, written down in its run directory as `record.json`: no tracker needed.

    begin     RUNNING, with who runs it, from what (identity, parameters, code) and which attempt it is
    finish    FINISHED, FAILED or KILLED, with the facts, the final numbers and the artifact

A record is the truth that `tasks.tracking` mirrors to MLflow, now or later. Begun again after a failure it is the same
record with one more attempt; a stage begun again after a success gets a new one. `truth` corrects a record whose process
died.
"""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tasks.locks import Owner
from trainer.config import CampaignConfig, as_tree
from trainer.files import canonical_json, read_json, sha256_text, write_json

RECORD = "record.json"
Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
Kind = Literal["campaign", "stage", "sweep"]
PRUNED = "pruned at step "  # how the error of a trial begins that its sweep stopped as hopeless


@dataclass(frozen=True)
class Record:
    id: str  # one per MLflow run
    kind: Kind
    name: str  # run id of the campaign, or name of the stage, the sweep or the trial
    campaign: str  # campaign.name
    identity: str  # sha256 of what it is made from; another identity is another record
    status: Status
    attempt: int
    started: float  # seconds since the epoch, of the first attempt
    ended: float | None
    owner: dict[str, Any]
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)  # numbers that sum the result up
    artifact: dict[str, Any] | None = None  # {"path", "content_sha256", "upload"}
    error: str | None = None
    parent: str = ""  # of a trial: where its sweep's record is, relative to this one

    @property
    def ending(self) -> str:
        return ending(self.status, self.error)


def ending(status: str, error: str | None) -> str:
    """Return a status in a person's words: running, finished, failed, killed, or pruned."""
    return "pruned" if status == "KILLED" and (error or "").startswith(PRUNED) else status.lower()


def read_record(directory: Path) -> Record | None:
    """Return the record of a run directory, or None where there is none."""
    try:
        return Record(**read_json(directory / RECORD))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_record(directory: Path, record: Record) -> Record:
    write_json(directory / RECORD, asdict(record))
    return record


def begin(
    directory: Path,
    kind: Kind,
    name: str,
    config: CampaignConfig,
    identity: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    parent: str = "",
) -> Record:
    """Write that a campaign or stage runs, as a new record or as the next attempt of the one that is there.

    A stage that had ended well is made anew and gets a record of its own; a campaign of the same configuration goes on.
    """
    old = read_record(directory)
    again = old is not None and old.identity == identity and (kind != "stage" or old.status != "FINISHED")
    record = Record(
        id=old.id if old and again else uuid.uuid4().hex,
        kind=kind,
        name=name,
        campaign=config.campaign.name,
        identity=identity,
        status="RUNNING",
        attempt=old.attempt + 1 if old and again else 1,
        started=old.started if old and again else time.time(),
        ended=None,
        owner=Owner.me().to_json(),
        params=dict(params),
        tags={**(old.tags if old and again else {}), **tags, "seed": str(config.campaign.seed), "config": config_hash(config)},
        parent=parent,
    )
    return write_record(directory, record)


def finish(directory: Path, status: Status, **changes: Any) -> Record:
    """Write how it ended; `changes` are further fields of the record, `ended` too where that is not now."""
    record = read_record(directory)
    assert record is not None, f"{directory} has no {RECORD} to finish"
    return write_record(directory, replace(record, **{"ended": time.time(), **changes, "status": status}))


def add_tags(directory: Path, tags: Mapping[str, str]) -> None:
    """Add tags to a record."""
    record = read_record(directory)
    assert record is not None, f"{directory} has no {RECORD}"
    if {**record.tags, **tags} != record.tags:
        write_record(directory, replace(record, tags={**record.tags, **tags}))


def truth(directory: Path) -> Record | None:
    """Return the record; one that says RUNNING although its process is gone is first corrected to KILLED."""
    record = read_record(directory)
    if record is not None and record.status == "RUNNING" and not Owner.from_json(record.owner).is_alive:
        last = read_record(directory)
        if last != record:  # it was written to the end between the two looks
            return last
        traces = [path.stat().st_mtime for path in directory.iterdir() if path.is_file()]
        ended = max([record.started, *traces])
        record = write_record(directory, replace(record, status="KILLED", ended=ended, error="its process is gone"))
    return record


def config_hash(config: CampaignConfig) -> str:
    """Return the sha256 of a configuration, without what never changes a result."""
    tree = as_tree(config)
    return sha256_text(canonical_json({key: value for key, value in tree.items() if key not in ("machine", "limits")}))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a tree's leaves by dotted key; a list of mappings goes on by index, any other list is one leaf."""
    if isinstance(tree, dict) and tree:
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(entry, dict) for entry in tree):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else key))
    return flat


def numbers(tree: Any) -> dict[str, float]:
    """Return the numeric leaves of a tree by slash-separated key."""
    return {
        key.replace(".", "/"): float(value)
        for key, value in flatten(tree).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def git_tags(repository: Path) -> dict[str, str]:
    """Return `git.commit` and `git.dirty` of the code, or nothing outside a git checkout."""

    def ask(*words: str) -> str | None:
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        try:
            done = subprocess.run(
                ["git", "-C", str(repository), *words], capture_output=True, text=True, timeout=10, env=environment, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    changed = ask("status", "--porcelain", "--untracked-files=no", "--", ":!dvc.lock")
    return {"git.commit": commit, "git.dirty": str(bool(changed)).lower()}
