"""Writes docs/reference.md: every key of a campaign with its values, default and explanation, taken from schema.py itself.

python -m trainer.config.reference > docs/reference.md          (`make reference`; a test says when it is stale)
"""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from trainer.config import schema
from trainer.config.schema import CampaignConfig

HEAD = """# Every key of a campaign

Written by `make reference` from [trainer/config/schema.py](../trainer/config/schema.py); do not edit by hand. A recipe sets a key
under its section (`train: {optimizer: {learning_rate: 2e-5}}`), the command line by its dotted name
(`-S train.optimizer.learning_rate=2e-5`). Where the default says *required*, params.yaml or the recipe has to set it.
"""


def explanations() -> dict[str, dict[str, str]]:
    """Return class name -> key -> the string that stands under it in schema.py; the class's own docstring under ''."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = {"": " ".join((ast.get_docstring(node) or "").split())}
        for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                texts[statement.target.id] = " ".join(str(after.value.value).split()) if is_text else ""  # type: ignore[union-attr]
        found[node.name] = texts
    return found


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every section by dotted name, `[]` standing for each entry of a list; in the order of the schema."""
    yield prefix, model
    for name, field in model.model_fields.items():
        inner, many = section_of(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{prefix}.{name}".lstrip(".") + ("[]" if many else ""))


def section_of(kind: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the section that a key holds, or None, and whether it holds a list of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, False
    for inner in get_args(kind):
        found, many = section_of(inner)
        if found is not None:
            return found, many or get_origin(kind) in (list, tuple)
    return None, False


def values(kind: Any, field: FieldInfo | None = None) -> str:
    """Return in words what a key takes."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *rest = get_args(kind)
        return values(inner) + bounds(rest)
    bound = bounds(field.metadata) if field is not None else ""
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind)) + bound
    if origin in (Union, types.UnionType):
        named = [values(inner) for inner in get_args(kind) if inner is not type(None)]
        return " or ".join(named) + bound + (", or null" if type(None) in get_args(kind) else "")
    if origin in (list, tuple):
        inner = [values(entry) for entry in get_args(kind) if entry is not Ellipsis]
        return f"list of {inner[0]}{bound}"
    if origin is dict:
        return "mapping" + bound
    return {int: "whole number", float: "number", str: "text", bool: "true, false"}.get(kind, "section") + bound


def bounds(metadata: Any) -> str:
    """Return the limits of a value in words."""
    said = []
    for rule in metadata:
        for part in (rule, *getattr(rule, "metadata", ())):
            words = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
            if type(part) in words:
                sign, name = words[type(part)]
                said.append(f"{sign} {getattr(part, name)}")
            elif isinstance(part, MinLen):
                said.append(f"at least {part.min_length}")
            elif isinstance(part, MaxLen):
                said.append(f"at most {part.max_length}")
    return f" ({', '.join(said)})" if said else ""


def default(field: FieldInfo) -> str:
    if section_of(field.annotation)[0] is not None and not field.is_required():
        return "`null`" if field.default is None else "its defaults"
    if field.default is PydanticUndefined:
        return "*required*"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return f"`{text}`" if text else "empty"


def page() -> str:
    """Return the whole reference."""
    texts, lines = explanations(), [HEAD]
    first: dict[type[BaseModel], str] = {}  # where a section is explained that is there more than once
    for prefix, model in sections(CampaignConfig):
        if first.setdefault(model, prefix) != prefix:
            continue
        own = {key: text for base in reversed(model.__mro__) for key, text in texts.get(base.__name__, {}).items() if key}
        lines += [f"## {prefix or 'The sections'}", ""]
        if texts[model.__name__][""]:
            lines += [texts[model.__name__][""], ""]
        lines += ["| key | values | default | |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            inner, many = section_of(field.annotation)
            said = own.get(name, "")
            if inner is not None:
                place = first.setdefault(inner, f"{prefix}.{name}".lstrip(".") + ("[]" if many else ""))
                said = f"{said} See [{place}](#{place.lower().translate({ord(c): None for c in '.[]'})}).".strip()
            row = (f"`{name}`", values(field.annotation, field), default(field), said)
            lines.append("| " + " | ".join(part.replace("|", "\\|") for part in row) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
