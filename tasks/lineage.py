"""Where a result comes from, in one tree with hashes: data, base, anchors, configuration, code, environment, policy, evaluation.

The tree is read from the artifacts' manifests, each of which names the content of what it was made from, so it is the truth even
where a workspace has moved on: an artifact that is another run's now is called so instead of being shown as this one's. Of what
is not made the tree says why, and what it would be made from.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tasks.record import Record, config_hash, read_record, truth
from tasks.registry import Stage
from tasks.runs import standing, workspace_of
from tasks.sweep import read_trial
from tasks.workspace import Workspace, code_digest, file_digest, params_of
from trainer.files import canonical_json, damage, read_manifest, sha256_file

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "tokenizers",
    "numpy",
    "reasoning-gym",
    "math-verify",
    "prefect",
    "mlflow",
    "dvc",
)
_SKIPPED = ("files", "key", "params", "inputs", "stage", "content_sha256")


@dataclass
class Node:
    """One thing and what it was made from."""

    name: str
    says: str = ""
    sha256: str = ""
    children: list[Node] = field(default_factory=list)

    def as_tree(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **({"says": self.says} if self.says else {}),
            **({"sha256": self.sha256} if self.sha256 else {}),
            **({"from": [child.as_tree() for child in self.children]} if self.children else {}),
        }

    def lines(self, indent: str = "", short: bool = True) -> list[str]:
        """Return the tree as text, one node a line."""
        hash_ = f"  {self.sha256[:12] if short else self.sha256}" if self.sha256 else ""
        says = f"  {self.says}" if self.says else ""
        lines = [f"{self.name}{hash_}{says}"]
        for number, child in enumerate(self.children):
            last = number == len(self.children) - 1
            first, *rest = child.lines("", short)
            lines.append(("└── " if last else "├── ") + first)
            lines += [("    " if last else "│   ") + line for line in rest]
        return [indent + line for line in lines]


def lineage(run: Path) -> Node:
    """Return where a run's result comes from.

    Raises:
        DataError: its configuration cannot be read.
    """
    workspace, record = workspace_of(run), truth(run)
    root = Node(run.name, "; ".join([standing(run), *_trial(workspace), f"workspace {workspace.root}"]))
    last = [stage for stage in workspace.stages if stage.artifact == "evaluation"] or list(workspace.stages[-1:])
    root.children = [
        Node("configuration", str(run / "config.json"), config_hash(workspace.config)),
        _code(record),
        _environment(record),
        *_artifact(workspace, last[0].artifact, run, set()),
    ]
    merged = workspace.artifact("merged")
    if read_manifest(merged) is not None and not any(node.name == "merged" for node in _walk(root)):
        root.children += _artifact(workspace, "merged", run, set())
    return root


def _walk(node: Node) -> list[Node]:
    return [node, *(below for child in node.children for below in _walk(child))]


def _trial(workspace: Workspace) -> list[str]:
    trial = read_trial(workspace.root)
    return [f"trial {trial['number']} ({trial['name']}) of sweep {trial['sweep']}"] if trial is not None else []


def _artifact(workspace: Workspace, name: str, run: Path, seen: set[str]) -> list[Node]:
    stage = next((stage for stage in workspace.stages if stage.artifact == name), None)
    if stage is None:
        return []
    place = workspace.artifact(name)
    manifest = read_manifest(place)
    sha256, ours = str((manifest or {}).get("content_sha256", "")), _own(workspace, stage, run)
    if manifest is None or ours is None:
        node = Node(name, _why_missing(stage, run, place), ours or "")
    elif ours != sha256:
        return [Node(name, f"{place} was replaced since by another run's; this run's is no longer in the workspace", ours)]
    else:
        wrong = damage(place)
        node = Node(name, f"DAMAGED: {wrong}" if wrong else _facts(manifest), sha256)
    if name in seen:
        node.says = "as above"
        return [node]
    seen.add(name)
    if manifest is None or ours is None:
        node.children = [below for name_of_input in stage.inputs for below in _artifact(workspace, name_of_input, run, seen)]
        return [node]
    node.children.append(Node("code", f"stage {stage.name}{_changed(workspace, stage, manifest)}", code_digest(stage)))
    node.children += [Node("data", str(path), file_digest(path)) for path in _external(workspace, stage)]
    for name_of_input, was in manifest.get("inputs", {}).items():
        below = _artifact(workspace, name_of_input, run, seen)
        if below and below[0].sha256 != was:
            below = [Node(name_of_input, "made from another one than lies in the workspace now", str(was))]
        node.children += below
    if name == "prompts":
        node.children += [Node("source", f"{source.name}: {source.source}") for source in workspace.config.prepare.sources]
    if name == "base":
        node.children.append(Node("source", workspace.config.base.source))
    return [node]


def _own(workspace: Workspace, stage: Stage, run: Path) -> str | None:
    """Return the content of a run's own artifact; None where it has none, and what lies there is another run's."""
    record, manifest = read_record(run / stage.name), read_manifest(workspace.artifact(stage.artifact))
    if record is not None and record.artifact:
        return str(record.artifact["content_sha256"])
    if manifest is None:
        return None
    wanted = params_of(stage, workspace.config)  # taken from the cache or pulled: known by what it was made from
    if canonical_json(manifest.get("params", wanted)) != canonical_json(wanted):
        return None
    makers = {maker.artifact: maker for maker in workspace.stages}
    for name, was in manifest.get("inputs", {}).items():
        if name in makers and _own(workspace, makers[name], run) != was:
            return None
    return str(manifest.get("content_sha256", ""))


def _why_missing(stage: Stage, run: Path, place: Path) -> str:
    """Say why a run has no such artifact, or none any more."""
    record = truth(run / stage.name)
    if record is None:
        says = f"not made: the run did not come to stage {stage.name}"
    elif record.artifact:
        says = f"no longer in {place}, or without its manifest; run the stage {stage.name} again to have it back"
    else:
        says = f"not made: stage {stage.name} {'is' if record.status == 'RUNNING' else 'was'} {standing(run / stage.name)}"
    return f"{says}; what lies in {place} is another run's" if read_manifest(place) is not None else says


def _facts(manifest: dict[str, Any]) -> str:
    simple = {key: value for key, value in manifest.items() if key not in _SKIPPED and isinstance(value, str | int | float)}
    facts = {key: value for key, value in simple.items() if len(str(value)) < 64}  # other hashes are in the manifest
    texts = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items()]
    return ", ".join(texts[:5])


def _external(workspace: Workspace, stage: Stage) -> list[Path]:
    return [path for path in stage.external(workspace.config) if path.is_file()] if stage.external is not None else []


def _changed(workspace: Workspace, stage: Stage, manifest: dict[str, Any]) -> str:
    """Say when today's code, parameters or inputs would not make this artifact again."""
    if any(read_manifest(workspace.artifact(name)) is None for name in stage.inputs):
        return ""
    return "" if manifest.get("key") == workspace.key(stage) else "; the code or an input has changed since"


def _code(record: Record | None) -> Node:
    tags = record.tags if record else {}
    dirty = " with changes that are not committed" if tags.get("git.dirty") == "true" else ""
    return Node("code", f"git {tags['git.commit']}{dirty}" if "git.commit" in tags else "not in a git checkout")


def _environment(record: Record | None) -> Node:
    """Say in what it ran; the packages are those of this environment, and the lock that it was made from."""
    where = str(record.owner.get("host", "")) if record else ""
    node = Node(
        "environment",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}{f', host {where}' if where else ''}",
    )
    lock = Path(__file__).resolve().parent.parent / "constraints.txt"
    if lock.exists():
        node.children.append(Node("lock", lock.name, sha256_file(lock)))
    node.children.append(Node("packages", ", ".join(_versions())))
    return node


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found
