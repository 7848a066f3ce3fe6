"""YAML and `key=value` in, a frozen CampaignConfig out; every mistake becomes a ConfigError before torch is imported.

    read_tree(recipe)        params.yaml, then the recipe's difference laid over it (mappings merge, lists and scalars replace)
    apply_overrides(tree)    -S train.optimizer.learning_rate=1e-4; values are YAML
    validate(tree)           types, ranges, combinations; an unknown key is an error with the nearest valid name

YAML 1.2 (ruamel), as DVC reads it: there `1e-6` is a number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from trainer.config.schema import CampaignConfig, Refusal
from trainer.errors import ConfigError, ConfigErrors, nearest

Tree = dict[str, Any]
_DEEPEST = 32  # levels of a configuration; the deepest key has 6
Schema = TypeVar("Schema", bound=BaseModel)


def read_yaml(path: Path, key: str = "recipe") -> Tree:
    """Read one YAML file whose top level is a mapping.

    Args:
        key: what the file is, for messages.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        problem = "no such file; " + nearest(str(path), siblings) if siblings else "no such file"
        raise ConfigError(key, str(path), problem) from None
    except IsADirectoryError:
        raise ConfigError(key, str(path), "is a directory; name a file") from None
    except OSError as error:
        raise ConfigError(key, str(path), f"cannot be read ({error.strerror}); name a file that can") from None
    except UnicodeDecodeError as error:
        raise ConfigError(key, str(path), f"is not UTF-8 text ({error.reason})") from None
    try:
        tree = _parse(text)
    except NoYaml as error:
        raise ConfigError(key, str(path), f"is not YAML:{error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            key, str(path), "must be a mapping of keys" + (" (sections, as in params.yaml)" if key == "recipe" else "")
        )
    return tree


class NoYaml(ValueError):
    """Why a text is no YAML; starts with a space and, where it is known, the place."""


def _parse(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        NoYaml: it has none.
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise NoYaml(f"{where} {getattr(error, 'problem', error)}") from None
    except ValueError as error:  # a scalar that looks like a date or a number and is none, such as 2024-13-45
        raise NoYaml(f" {error}; quote it") from None
    except RecursionError:
        raise NoYaml(" it is nested too deeply") from None


def lay_over(base: Tree, difference: Tree) -> Tree:
    """Return base with the difference laid over it: mappings merge, everything else replaces."""
    merged = dict(base)
    for key, value in difference.items():
        old = merged.get(key)
        merged[key] = lay_over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> Tree:
    """Lay `dotted.key=value` overrides over a tree; a list's entry is named by its index."""
    for text in overrides:
        key, equals, raw = text.partition("=")
        key = key.strip()
        path = key.split(".")
        if not equals or not all(path):
            raise ConfigError("-S", text, "expected key=value, for example -S train.optimizer.learning_rate=1e-4")
        if len(path) > _DEEPEST:
            raise ConfigError("-S", _short(text), f"names {len(path)} levels; no key is that deep")
        try:
            value = _parse(raw) if raw.strip() else None
        except NoYaml:
            raise ConfigError(key, _short(raw), "is not a YAML value; quote it") from None
        tree = _set(tree, path, value, key)
    return tree


def _set(node: Any, path: list[str], value: Any, key: str) -> Any:
    if not path:
        return value
    if isinstance(node, list):
        if not re.fullmatch("[0-9]+", path[0]) or int(path[0]) >= len(node):
            raise ConfigError(key, value, f"{path[0]!r} is not an index of this list of {len(node)}")
        index = int(path[0])
        return [*node[:index], _set(node[index], path[1:], value, key), *node[index + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise ConfigError(key, value, f"there is nothing below {node!r}")
    return {**(node or {}), path[0]: _set((node or {}).get(path[0]), path[1:], value, key)}


def validate(tree: Tree) -> CampaignConfig:
    """Return the configuration of a tree.

    Raises:
        ConfigError: one mistake. ConfigErrors: several.
    """
    return validate_as(CampaignConfig, tree)


def validate_as(schema: type[Schema], tree: Tree, prefix: str = "") -> Schema:
    """Return a tree as an instance of any schema of this kind; mistakes are named as in `validate`.

    Args:
        schema: a frozen pydantic model that forbids unknown keys.
        tree: JSON types.
        prefix: put before the key in messages.
    """
    _check_json(tree, [prefix] if prefix else [])
    try:
        return schema.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        # A list with a wrong entry is also reported as too short, because pydantic leaves that entry out.
        wrong = {e["loc"][:depth] for e in error.errors() for depth in range(len(e["loc"]))}
        errors = [_explain(e, schema, prefix) for e in error.errors() if e["type"] != "too_short" or e["loc"] not in wrong]
        raise (errors[0] if len(errors) == 1 else ConfigErrors(errors)) from None


def _check_json(node: Any, path: list[str]) -> None:
    """Refuse what JSON cannot hold, and name its key: dates, sets, keys that are no text, aliases that hold themselves."""
    key = ".".join(path) or "recipe"
    if len(path) > _DEEPEST:
        raise ConfigError(".".join(path[:4]), "...", "is nested too deeply, or an alias that holds itself")
    if isinstance(node, dict):
        for name, value in node.items():
            if not isinstance(name, str):
                raise ConfigError(key, name, "is no text, and a key must be; quote it")
            _check_json(value, [*path, name])
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _check_json(value, [*path, str(index)])
    elif isinstance(node, str):
        if any("\ud800" <= letter <= "\udfff" for letter in node):
            raise ConfigError(key, node, "holds half a surrogate pair, which is no text; write the character itself")
    elif node is not None and not isinstance(node, bool | int | float):
        raise ConfigError(key, node, f"is a {type(node).__name__}; quote it to make it text")


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + " ..."


def load_config(recipe: Path, overrides: Sequence[str] = (), params: Path | None = None) -> CampaignConfig:
    """Load a campaign's configuration.

    Args:
        recipe: `params.yaml` itself, or a recipe that differs from it.
        overrides: `key=value` texts, laid over last.
        params: the default campaign that a recipe differs from; None takes the recipe as complete.
    """
    tree = read_yaml(recipe)
    if params is not None and params.resolve() != recipe.resolve():
        tree = lay_over(read_yaml(params), tree)
    return validate(apply_overrides(tree, overrides))


def _explain(error: Any, schema: type[BaseModel], prefix: str) -> ConfigError:
    location = [part for part in error["loc"] if not str(part).startswith("function-")]
    key, value, kind = ".".join(str(part) for part in ([prefix] if prefix else []) + location), error.get("input"), error["type"]
    if kind == "extra_forbidden":
        return ConfigError(key, value, "unknown key; " + nearest(str(location[-1]), _fields_at(schema, location[:-1])))
    if kind == "missing":
        return ConfigError(key, None, "is missing; set it in the recipe")
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Refusal):
        return ConfigError(".".join(part for part in (key, cause.key) if part), cause.value, cause.problem)
    if cause is not None:
        return ConfigError(key, value, str(cause))
    message = error["msg"]
    return ConfigError(key, value, message[0].lower() + message[1:])


def _fields_at(schema: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """Return the valid keys at a location of a schema, walking through optional and list types."""
    model: Any = schema
    for part in location:
        if isinstance(part, int):
            continue
        model = _model_in(model.model_fields[part].annotation) if model else None
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found:
            return found
    return None
