"""docs/reference.md is what schema.py says, and every key is explained there."""

from __future__ import annotations

from pathlib import Path

from trainer.config import reference
from trainer.config.schema import CampaignConfig

PAGE = Path(__file__).parents[3] / "docs" / "reference.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference.page(), "docs/reference.md is stale; `make reference` writes it anew"


def test_every_key_is_explained() -> None:
    texts = reference.explanations()
    silent = []
    for prefix, model in reference.sections(CampaignConfig):
        said = {key for base in model.__mro__ for key, text in texts.get(base.__name__, {}).items() if text}
        for name, field in model.model_fields.items():
            if name not in said and reference.section_of(field.annotation)[0] is None:
                silent.append(f"{prefix}.{name}")
    assert not silent, "a string under each of these keys in trainer/config/schema.py is missing"


def test_values_bounds_and_defaults_are_told() -> None:
    page = reference.page()
    assert "| `learning_rate` | number (> 0) | *required* | Peak." in page
    assert "| `kind` | `adamw`, `stateless` | `adamw` |" in page
    assert "| `num_rows` | whole number (≥ 1), or null | `null` |" in page
    assert page.count("## reward.parts[]") == 1
    assert "See [train.optimizer](#trainoptimizer)." in page
