"""Which configuration a command means, and in which workspace it lives.

    params.yaml as it is          -> the repository's root
    a recipe, or any -S           -> campaigns/<campaign.name>/; a recipe that sets no name is called as its file.
                                     TITHE_CAMPAIGNS names another folder for them

`machine` and `limits` never move a campaign: they decide no result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tasks.command import load_stages
from tasks.record import config_hash
from tasks.workspace import REPOSITORY, Workspace, campaigns_directory
from trainer.config import CampaignConfig, load_config, read_yaml

PARAMS = REPOSITORY / "params.yaml"


def recipe_names(*folders: str) -> tuple[str, ...]:
    """Return the campaigns there are files for: the default one, then those in `recipes/` or the folders given, by path."""
    found = [path for folder in folders or ("recipes",) for path in sorted((REPOSITORY / folder).glob("*.yaml"))]
    return (PARAMS.name, *(str(path.relative_to(REPOSITORY)) for path in found))


def resolve_config(recipe: Path | None, overrides: Sequence[str] = (), params: Path = PARAMS) -> CampaignConfig:
    """Return the configuration of a recipe with overrides; None is the default campaign.

    Raises:
        ConfigError: it is wrong.
    """
    if recipe is None or recipe.resolve() == params.resolve():
        return load_config(params, overrides)
    tree = read_yaml(recipe)
    section = tree.get("campaign")
    named = isinstance(section, dict) and "name" in section
    name = re.sub(r"[^a-z0-9._-]+", "-", recipe.stem.lower()).strip("-._")
    first = [] if named or not name else [f"campaign.name={name}"]
    return load_config(recipe, [*first, *overrides], params)


def resolve_workspace(
    config: CampaignConfig,
    run_directory: Path | None = None,
    root: Path | None = None,
    stages_name: str = "",
    params: Path = PARAMS,
) -> Workspace:
    """Return the workspace of a configuration.

    Args:
        run_directory: an explicit run directory, or None.
        root: an explicit folder, or None for the rule above.
        stages_name: another list of stages than the registry's, as `module:NAME`.
    """
    if root is None:
        is_default = config_hash(config) == config_hash(load_config(params))
        folder = campaigns_directory()
        root = REPOSITORY if is_default else folder / config.campaign.name
    return Workspace(root.resolve(), config, run_directory and run_directory.resolve(), load_stages(stages_name), stages_name)
