"""Where a campaign lives, and what makes a result its own.

A *workspace* is a folder with params.yaml, dvc.yaml, `artifacts/` (what stages hand on) and `runs/` (what they wrote while
they worked). The repository's root is the default campaign's; any other campaign has `campaigns/<name>/`.

    key(stage)      sha256 of the stage's name, its part of the configuration, its inputs' content and its code. A manifest
                    with the same key is the same result: the stage need not run. `identity` is the same without code.
    run_dir         runs/<campaign>-<hash of all that decides training>: kill a run, start it again, and it is the same one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tasks.registry import STAGES, Stage, StagePaths
from trainer.config import CampaignConfig, as_tree, validate
from trainer.errors import BusyError, ConfigError, DataError, first_line, without_password
from trainer.files import (
    MANIFEST,
    REPOSITORY,
    canonical_json,
    damage,
    read_json,
    read_manifest,
    sha256_file,
    sha256_text,
    write_json,
)


def state_directory() -> Path:
    """Return where databases, server addresses and the like of this machine lie: TITHE_STATE, or `.tithe/` in the repository."""
    return Path(os.environ.get("TITHE_STATE") or REPOSITORY / ".tithe").resolve()


def server_database(part: str, driver: str) -> str | None:
    """Return the PostgreSQL database of `prefect` or `mlflow`, or None for SQLite in the state directory.

    TITHE_DATABASE names a database, postgresql://user@host/name; theirs are called name_prefect and name_mlflow, for each keeps
    a table of its own that is called alembic_version.

    Raises:
        ConfigError: TITHE_DATABASE is no such address.
    """
    url = os.environ.get("TITHE_DATABASE")
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme != "postgresql" or not parts.hostname or not parts.path.strip("/"):
        raise ConfigError("TITHE_DATABASE", without_password(url), "expected postgresql://user:password@host:port/name")
    return urlunsplit(parts._replace(scheme=f"postgresql+{driver}", path=f"{parts.path}_{part}"))


def campaigns_directory() -> Path:
    """Return where campaigns beside the default one lie: TITHE_CAMPAIGNS, or `campaigns/` in the repository."""
    return Path(os.environ.get("TITHE_CAMPAIGNS") or REPOSITORY / "campaigns")


def pick(tree: dict[str, Any], dotted: str) -> Any:
    """Return the value at a dotted key of a configuration tree."""
    node: Any = tree
    for part in dotted.split("."):
        node = node[part]
    return node


def params_of(stage: Stage, config: CampaignConfig) -> dict[str, Any]:
    """Return the part of the configuration that a stage's result depends on, by dotted key."""
    tree = as_tree(config)
    return {dotted: pick(tree, dotted) for dotted in stage.params}


def code_digest(stage: Stage) -> str:
    """Return one sha256 over the source files that a stage's result depends on."""
    files: dict[str, str] = {}
    for name in stage.code:
        path = REPOSITORY / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            files[str(file.relative_to(REPOSITORY))] = sha256_text(file.read_text(encoding="utf-8"))
    return sha256_text(canonical_json(files))


def file_digest(path: Path) -> str:
    """Return a file's sha256; asked again for the same file, it is not read again."""
    status = path.stat()
    return _file_digest(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(path: Path, size_bytes: int, changed_ns: int) -> str:
    return sha256_file(path)


def replayable(run: Path) -> CampaignConfig:
    """Return the configuration of a run with an experience pool: what `tithe replay` asks before it loads anything heavy.

    Raises:
        ConfigError: it is no run directory, or that of a sync run.
    """
    try:
        config = validate(read_json(run / "config.json"))
    except (OSError, ValueError) as error:
        why = "" if isinstance(error, FileNotFoundError | NotADirectoryError) else f" ({first_line(error)})"
        raise ConfigError("RUN", str(run), f"is no run directory{why}; name one, for example runs/<campaign>-<hash>") from None
    if config.train.schedule == "sync":
        raise ConfigError("RUN", str(run), "was a sync run, so it has no pool; it is repeated with `tithe run`")
    return config


@dataclass(frozen=True)
class Workspace:
    root: Path
    config: CampaignConfig
    run_directory: Path | None = None  # given explicitly; None derives it
    stages: tuple[Stage, ...] = STAGES
    stages_name: str = ""  # `module:NAME` of that list when it is not the registry's, for the command line of a stage

    def artifact(self, name: str) -> Path:
        return self.root / "artifacts" / name

    @property
    def run_id(self) -> str:
        """`<campaign>-<8 hex digits>` of everything that decides what is trained."""
        artifacts = [stage.artifact for stage in self.stages]
        deciding = self.stages[: artifacts.index("policy") + 1] if "policy" in artifacts else self.stages
        params = {stage.name: params_of(stage, self.config) for stage in deciding}
        return f"{self.config.campaign.name}-{sha256_text(canonical_json(params))[:8]}"

    @property
    def run(self) -> Path:
        return self.run_directory or self.root / "runs" / self.run_id

    def paths(self, stage: Stage, out: Path) -> StagePaths:
        names = [s.name for s in self.stages]
        before = names[: names.index(stage.name)] if stage.name in names else []
        return StagePaths(
            inputs={name: self.artifact(name) for name in stage.inputs},
            out=out,
            run=self.run / stage.name,
            identity=self.identity(stage),
            runs={name: self.run / name for name in before},
        )

    def with_tree(self, tree: dict[str, Any]) -> Workspace:
        """Return the same workspace with another configuration.

        Raises:
            ConfigError: the tree is no configuration.
        """
        return replace(self, config=validate(tree))

    def claim_run(self) -> None:
        """Make the run directory and write the resolved config.json into it.

        Raises:
            BusyError: the directory belongs to a run of another configuration.
        """
        path = self.run / "config.json"
        if path.exists():
            try:
                other = self.with_tree(read_json(path))
            except (ConfigError, ValueError) as error:
                raise BusyError(
                    f"{path} is no configuration of this version ({first_line(error)}); move {self.run} away to begin anew"
                ) from None
            if other.run_id != self.run_id:
                raise BusyError(
                    f"{self.run} belongs to run {other.run_id}, this configuration is run {self.run_id}; "
                    "leave --run-dir out, or name an empty directory"
                )
        elif self.run.is_dir() and any(not other.name.startswith(f".{path.name}.") for other in self.run.iterdir()):
            raise BusyError(f"{self.run} is not empty and holds no config.json; name an empty directory")
        write_json(path, as_tree(self.config))

    def identity(self, stage: Stage) -> str:
        """Return the sha256 of what a stage's result is made from, code apart: its parameters and its inputs' content.

        Raises:
            DataError: an input artifact is missing or damaged.
        """
        inputs = {}
        for name in stage.inputs:
            manifest = read_manifest(self.artifact(name))
            if manifest is None:
                maker = next(s.name for s in self.stages if s.artifact == name)
                raise DataError(str(self.artifact(name)), f"is missing or has no {MANIFEST}; run `python -m tasks {maker}` first")
            inputs[name] = manifest["content_sha256"]
        made_from = {"stage": stage.name, "params": params_of(stage, self.config), "inputs": inputs}
        if stage.external is not None:
            made_from["external"] = [file_digest(path) for path in stage.external(self.config)]
        return sha256_text(canonical_json(made_from))

    def key(self, stage: Stage) -> str:
        """Return the identity of a stage's result, code included."""
        return sha256_text(canonical_json({"identity": self.identity(stage), "code": code_digest(stage)}))

    def is_current(self, stage: Stage) -> bool:
        """Whether the artifact is there, whole, and what this configuration would make."""
        manifest = read_manifest(self.artifact(stage.artifact))
        if manifest is None or any(read_manifest(self.artifact(name)) is None for name in stage.inputs):
            return False
        return manifest.get("key") == self.key(stage) and damage(self.artifact(stage.artifact)) is None

    def forget(self, stage: Stage) -> None:
        """Remove a stage's artifact."""
        shutil.rmtree(self.artifact(stage.artifact), ignore_errors=True)
