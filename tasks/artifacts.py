"""The only file that talks to DVC: dvc.yaml from the registry, commits of finished stages, artifacts out of the cache.

    prepare_workspace   make a campaign's folder a small DVC repository that shares the repository's cache
    render              dvc.yaml: one DVC stage per stage, its command, parameters, inputs, code and artifact
    commit              tell DVC that the finished stages' artifacts are what it would have made (`dvc commit -f`)
    restore             take an artifact that another workspace made from the same key out of the cache

DVC runs as its own command: it costs half a second once a campaign, and its Python interface is not a promise. `commit -f`
believes what lies there, so only stages whose artifact still matches today's parameters, inputs and code are named to it.
dvc.lock of the default campaign is made by a run and not kept in git: it names bytes that lie in this machine's cache only.
Commit it yourself, with a `dvc push`, to share a result.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tasks.registry import Stage
from tasks.workspace import REPOSITORY, Workspace, params_of, state_directory
from trainer.config import as_tree, read_yaml
from trainer.errors import TitheError
from trainer.files import damage, new_directory, read_json, read_manifest, write_json, write_text

_HEADER = "# Generated from tasks/registry.py (`tithe dvc-yaml`): change the stages there, not here.\n"
_BUSY = ("is busy", "Unable to acquire lock", "blocked by", "rwlock")
_ATTEMPTS, _PAUSE_SECONDS = 6, 2.0
_ENVIRONMENT = {"DVC_NO_ANALYTICS": "1", "DO_NOT_TRACK": "true"}


class ArtifactsError(TitheError):
    """DVC could not do what it was asked; the artifacts themselves are untouched."""


def dump_yaml(tree: Any) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 130
    text = io.StringIO()
    yaml.dump(tree, text)
    return text.getvalue()


def command(stage: Stage, root: Path, stages_name: str = "") -> str:
    """Return the shell command of a stage; it runs in the repository's root and prefers the environment that lies there."""
    run = f'PATH="$PWD/.venv/bin:$PATH" python -m tasks {stage.name}'
    if stages_name:
        run += f" --stages {stages_name}"
    if root == REPOSITORY:
        return run
    return f"cd {os.path.relpath(REPOSITORY, root)} && {run} --workspace {os.path.relpath(root, REPOSITORY)}"


def code_dependencies(stage: Stage, root: Path) -> list[str]:
    """Return a stage's code as DVC dependencies.

    In the repository's root a folder is one dependency (.dvcignore leaves compiled files out of it). .dvcignore does not reach
    out of a workspace, so elsewhere every source file is named.
    """
    if root == REPOSITORY:
        return list(stage.code)
    files: set[Path] = set()
    for name in stage.code:
        path = REPOSITORY / name
        files.update([path] if path.is_file() else path.rglob("*.py"))
    return [os.path.relpath(file, root) for file in sorted(files)]


def pipeline(workspace: Workspace) -> dict[str, Any]:
    """Return dvc.yaml of a workspace as a tree."""
    stages: dict[str, Any] = {}
    for stage in workspace.stages:
        external = (
            [] if stage.external is None else [os.path.relpath(p, workspace.root) for p in stage.external(workspace.config)]
        )
        stages[stage.name] = {
            "cmd": command(stage, workspace.root, workspace.stages_name),
            "deps": [f"artifacts/{name}" for name in stage.inputs] + code_dependencies(stage, workspace.root) + external,
            "params": list(stage.params),
            "outs": [f"artifacts/{stage.artifact}"],
        }
    tree: dict[str, Any] = {"stages": stages}
    metrics = [f"artifacts/{stage.artifact}/{name}" for stage in workspace.stages for name in stage.metrics]
    plots = [
        {f"artifacts/{stage.artifact}/{name}": {"x": "step", "y": list(columns)}}
        for stage in workspace.stages
        for name, columns in stage.plots
    ]
    return {**tree, **({"metrics": metrics} if metrics else {}), **({"plots": plots} if plots else {})}


def render(workspace: Workspace) -> str:
    """Return the text of a workspace's dvc.yaml."""
    return _HEADER + dump_yaml(pipeline(workspace))


def prepare_workspace(workspace: Workspace) -> None:
    """Write what DVC and a person need in a workspace: params.yaml, dvc.yaml and, outside the root, a DVC repository."""
    root = workspace.root
    if root == REPOSITORY:
        if not (root / ".git").exists():  # a copy without git: DVC must not look for it
            write_if_other(root / ".dvc" / "config.local", "[core]\n    no_scm = true\n")
    else:
        cache = os.path.relpath(cache_directory(), root / ".dvc")
        settings = "[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n"
        write_if_other(root / ".dvc" / "config", f"{settings}[cache]\n    dir = {cache}\n")
        header = "# Resolved configuration of this campaign, written by `tithe run`.\n"
        write_if_other(root / "params.yaml", header + dump_yaml(as_tree(workspace.config)))
    write_if_other(root / "dvc.yaml", render(workspace))


def write_if_other(path: Path, text: str) -> None:
    """Write a file unless it holds that text already."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def cache_directory() -> Path:
    """Return the cache that all workspaces share: DVC's own place in the repository, or beside a state directory elsewhere."""
    state = state_directory()
    return REPOSITORY / ".dvc" / "cache" if state == REPOSITORY / ".tithe" else state / "dvc-cache"


def committable(workspace: Workspace) -> list[Stage]:
    """Return the stages whose artifact is what params.yaml, whole inputs and the code of this moment make."""
    try:
        here = workspace.with_tree(read_yaml(workspace.root / "params.yaml"))
    except TitheError:  # params.yaml was edited and is wrong now: nothing can be said of it
        return []
    same = [s for s in workspace.stages if params_of(s, here.config) == params_of(s, workspace.config)]
    whole = {s.artifact for s in workspace.stages if damage(workspace.artifact(s.artifact)) is None}
    return [stage for stage in same if whole.issuperset(stage.inputs) and workspace.is_current(stage)]


def dvc(root: Path, *words: str) -> str:
    """Run a dvc command in a workspace, again while somebody else holds DVC's lock there, and return what it printed.

    Raises:
        ArtifactsError: it failed.
    """
    for attempt in range(_ATTEMPTS):
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *words],
            cwd=root,
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
        said = (done.stderr + done.stdout).strip()
        if not any(sign in said for sign in _BUSY):
            break
        if attempt + 1 < _ATTEMPTS:
            time.sleep(_PAUSE_SECONDS)
    errors = [line for line in said.splitlines() if line.startswith("ERROR")] or said.splitlines()[-1:] or ["no message"]
    raise ArtifactsError(f"dvc {' '.join(words)} in {root}: {errors[0].removeprefix('ERROR: ')}")


def commit(workspace: Workspace) -> dict[str, str]:
    """Record the current stages' artifacts in dvc.lock and in the shared cache.

    Returns:
        The md5 that DVC gives to each artifact, by artifact name.

    Raises:
        ArtifactsError: DVC failed or stayed locked.
    """
    stages = committable(workspace)
    if not stages:
        return {}
    every = len(stages) == len(workspace.stages)  # stages that are named are loaded one by one, which takes twice as long
    names = ["dvc.yaml"] if every else [stage.name for stage in stages]
    dvc(workspace.root, "commit", "--force", "--quiet", *names)
    hashes = locked_hashes(workspace.root)
    for stage in stages:
        if stage.artifact in hashes:
            remember(workspace, stage, hashes[stage.artifact])
    return {stage.artifact: hashes[stage.artifact] for stage in stages if stage.artifact in hashes}


def locked_hashes(root: Path) -> dict[str, str]:
    """Return the md5 of each artifact in a workspace's dvc.lock."""
    lock = root / "dvc.lock"
    if not lock.exists():
        return {}
    outs = [out for stage in read_yaml(lock).get("stages", {}).values() for out in stage.get("outs", ())]
    return {Path(out["path"]).name: out["md5"] for out in outs if "md5" in out}


def _index(key: str) -> Path:
    return state_directory() / "results" / f"{key}.json"


def remember(workspace: Workspace, stage: Stage, md5: str) -> None:
    """Note under which md5 the cache holds the result of a key."""
    path = _index(workspace.key(stage))
    if not path.exists() or read_json(path)["md5"] != md5:
        write_json(path, {"stage": stage.name, "artifact": stage.artifact, "md5": md5})


def restore(workspace: Workspace, stage: Stage) -> bool:
    """Put an artifact that was made from the same key elsewhere in place, from the cache; False when there is none, whole.

    Only artifacts before training are taken: what comes after belongs with the run directory that it was made in.
    """
    artifacts = [s.artifact for s in workspace.stages]
    if stage.artifact not in artifacts or "policy" in artifacts[: artifacts.index(stage.artifact) + 1]:
        return False
    if any(read_manifest(workspace.artifact(name)) is None for name in stage.inputs):
        return False
    key = workspace.key(stage)
    if not _index(key).exists():
        return False
    objects = cache_directory() / "files" / "md5"
    target = workspace.artifact(stage.artifact)
    try:
        md5 = str(read_json(_index(key))["md5"])
        entries = json.loads((objects / md5[:2] / md5[2:]).read_text(encoding="utf-8"))
        with new_directory(target) as out:
            for entry in entries:
                file = out / entry["relpath"]
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(objects / entry["md5"][:2] / entry["md5"][2:], file)
            manifest = read_manifest(out)
            if manifest is None or manifest.get("key") != key or damage(out) is not None:
                raise ValueError(f"{md5} is not the result of {key}")
    except (OSError, ValueError, KeyError):  # emptied or damaged cache: make it again
        _index(key).unlink(missing_ok=True)
        return False
    return True
