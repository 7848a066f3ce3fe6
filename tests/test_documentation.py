"""What README.md and docs/ show is there; `make docs-check` also runs it."""

from __future__ import annotations

from tests.documentation import REPOSITORY, mistake, problems


def test_every_command_option_recipe_and_link_is_there() -> None:
    assert problems() == []


def test_the_readme_fits_two_screens() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_mistakes_are_found() -> None:
    assert mistake("tithe rnu") == "no such command: rnu"
    assert mistake(".venv/bin/tithe run --forse train") == "no such option: --forse"
    assert mistake("tithe run recipes/absent.yaml") == "no such recipe: recipes/absent.yaml"
    assert mistake("make absent") == "no such target: absent"
    assert mistake("tithe run recipes/stateless.yaml -S base.dtype=bfloat16   # comment") == ""
