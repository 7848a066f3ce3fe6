"""What a model's config.json must say, under the names that configs give it: checked before anything is built of it.

    clean(tree)           whole numbers where sizes are, a mapping where a part is; ConfigError names the field
    translate(tree, kind) an unknown architecture's sizes under the names of the one that it is laid out like

A part of a model that is not its text model (`text_config` and the like) is looked through, not planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError

# What a causal language model cannot be sized without, and the names that configs give it.
NEEDED: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
# What a default may stand in for, which is then said.
WANTED: dict[str, tuple[str, ...]] = {
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "hidden_dim"),
    "num_key_value_heads": ("num_key_value_heads", "multi_query", "num_kv_heads", "n_head_kv", "kv_lora_rank"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "n_routed_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "num_local_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size"),
}
PARTS = ("text_config", "llm_config", "language_config")
_FROM_ONE = frozenset(
    ("head_dim", "v_head_dim", "qk_nope_head_dim", "sliding_window", "num_kv_heads", "n_head_kv", "num_key_value_heads")
    + tuple(name for names in NEEDED.values() for name in names)
    + WANTED["intermediate_size"]
    + WANTED["num_experts_per_tok"]
    + WANTED["moe_intermediate_size"]
)
_FROM_ZERO = frozenset(("n_shared_experts", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", *WANTED["num_experts"]))


def clean(tree: Mapping[str, Any], prefix: str = "model") -> dict[str, Any]:
    """Return a config tree with its sizes checked.

    Raises:
        ConfigError: a size is no whole number or too small, heads do not go together, or a part is no mapping.
    """
    found = dict(tree)
    if not isinstance(found.get("model_type"), str | None):
        raise ConfigError(f"{prefix}.model_type", found["model_type"], "must be text, such as llama")
    classes = found.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ConfigError(f"{prefix}.architectures", classes, "must be a list of class names")
    for name, value in found.items():
        if name in _FROM_ONE or name in _FROM_ZERO:
            found[name] = whole(f"{prefix}.{name}", value, 1 if name in _FROM_ONE else 0)
    heads, kv_heads = found.get("num_attention_heads"), found.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ConfigError(f"{prefix}.num_key_value_heads", kv_heads, f"must divide num_attention_heads, which is {heads}")
    for part in PARTS:
        if found.get(part) is not None:
            if not isinstance(found[part], Mapping):
                raise ConfigError(f"{prefix}.{part}", found[part], "must be a mapping: the config of the text model")
            found[part] = clean(found[part], f"{prefix}.{part}")
    return found


def whole(key: str, value: Any, least: int) -> Any:
    """Return a size as an int (or a list of them, one a layer); None stays."""
    if value is None:
        return None
    if isinstance(value, list):
        return [whole(key, one, least) for one in value]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(key, value, f"must be a whole number of at least {least}")
    return value


def text_part(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's config inside one that has none of the needed sizes itself; None where there is none."""
    if any(tree.get(alias) is not None for alias in NEEDED["hidden_size"]):
        return None
    return next((dict(tree[part]) for part in PARTS if tree.get(part)), None)


def translate(tree: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree with its sizes also under the names that another architecture gives them.

    Args:
        tree: a config.
        known: fields of the other architecture's config class.
    """
    found = dict(tree)
    for field, aliases in (NEEDED | WANTED).items():
        given = next((tree[alias] for alias in aliases if isinstance(tree.get(alias), int | list)), None)
        if field in known and found.get(field) is None and given is not None and not isinstance(given, bool):
            found[field] = given
    return found
