"""The recipes that belong to the project: those that git knows. One that a person has just begun is theirs."""

from __future__ import annotations

import subprocess

from trainer.files import REPOSITORY

_LISTED = subprocess.run(["git", "ls-files", ":(glob)recipes/*.yaml"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
RECIPES = [REPOSITORY / line for line in _LISTED.stdout.splitlines()]
