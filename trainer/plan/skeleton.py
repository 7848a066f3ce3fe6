"""A Hugging Face config in, an exact model card out: the model is built on the meta device, so nothing is allocated.

    load_card("qwen3-8b")               a name of models.yaml (its card is kept in cards.json, or is plain arithmetic)
    load_card("path/config.json")       a file, or the directory that holds it
    load_card("class:LlamaConfig")      a config class that transformers knows (also by model_type), with its defaults
    load_card({"model_type": ...})      a config as a mapping; {"parameters": 1e12, ...} is a stated card

Building takes tens of milliseconds for a trillion parameters, because transformers keeps a layer's experts in two tensors;
so every count is transformers' own. Roles are told from the place and the kind of each module, without model-specific
code. A config that transformers does not know is laid out like the nearest known architecture, and the card says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

from trainer.config.load import read_yaml
from trainer.errors import ConfigError, ModelError, nearest
from trainer.files import read_json, sha256_text, write_json
from trainer.plan.card import Block, Linear, ModelCard, stated
from trainer.plan.fields import NEEDED, PARTS, WANTED, clean, text_part, translate, whole
from trainer.plan.layout import card_by_arithmetic

LIBRARY = Path(__file__).parent / "models.yaml"
CARDS = Path(__file__).parent / "cards.json"
SOFTMAX_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local")
_WINDOWED = ("sliding_attention", "chunked_attention", "local")
_STATED_KEYS = (*(stated.__kwdefaults__ or ()), "parameters", "num_layers", "hidden_size", "vocab_size")


def library() -> dict[str, dict[str, Any]]:
    """Return the known model shapes by name."""
    return {name: dict(tree) for name, tree in _library().items()}


@lru_cache(maxsize=1)
def _library() -> dict[str, dict[str, Any]]:
    return {str(name): tree for name, tree in read_yaml(LIBRARY).items()}


def load_card(source: str | Path | Mapping[str, Any]) -> ModelCard:
    """Return the card of a model.

    Raises:
        ConfigError: an unknown name (with the nearest known one) or a missing field.
        ModelError: a config that cannot be read or built.
    """
    if isinstance(source, Mapping):
        return _from_tree(dict(source), str(source.get("name") or source.get("model_type") or "model"))
    text = str(source)
    path = Path(text)
    if path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        return _from_tree(_read_json(file), path.name if path.is_dir() else path.stem)
    if text.startswith("class:"):
        return _from_class(text.removeprefix("class:"))
    known = library()
    if text in known:
        return _from_tree(known[text], text)
    raise ConfigError(
        "model",
        text,
        f"no such directory or file, and no known model; {nearest(text, known)} "
        "Or name a config class of transformers, for example class:LlamaConfig",
    )


def is_quick(source: str | Path | Mapping[str, Any]) -> bool:
    """Whether the card of a model is arithmetic or kept in this package, so that neither torch nor transformers is needed."""
    if not isinstance(source, Mapping):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        source = library().get(str(source), {}) if not file.is_file() else _read_json(file)
    if "parameters" in source:
        return True
    tree = clean({key: value for key, value in source.items() if key != "name"})
    return bool(card_by_arithmetic(tree, "") or _shipped(json.dumps(tree, sort_keys=True), ""))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file}: no such file; a plan needs the model's config.json (no weights)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: is no JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{file}: is no model configuration, which is a JSON object")
    return tree


def _from_tree(tree: dict[str, Any], name: str) -> ModelCard:
    if "parameters" in tree:
        return _from_statement(tree, name)
    cleaned = clean({key: value for key, value in tree.items() if key != "name"})
    return _build(json.dumps(cleaned, sort_keys=True), name)


def _from_statement(tree: dict[str, Any], name: str) -> ModelCard:
    given = {key: value for key, value in tree.items() if key not in ("name", "notes")}
    for key in given:
        if key not in _STATED_KEYS:
            raise ConfigError(f"model.{key}", given[key], "unknown key of a stated model; " + nearest(key, _STATED_KEYS))
    for key in ("num_layers", "hidden_size", "vocab_size"):
        if key not in given:
            raise ConfigError(f"model.{key}", None, "is missing; a model stated by its parameters needs it too")
    for key, value in given.items():
        if key == "tied" or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise ConfigError(f"model.{key}", value, "must be a number, not negative")
        if key in ("num_layers", "hidden_size", "vocab_size", "head_dim"):
            given[key] = whole(f"model.{key}", value, 1)
        elif not key.endswith("parameters"):
            given[key] = whole(f"model.{key}", value, 0)
    return stated(str(tree.get("name", name)), **given)


def _from_class(name: str) -> ModelCard:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    classes = {cls: kind for kind, cls in CONFIG_MAPPING_NAMES.items()}
    kind = classes.get(name, name)
    if kind not in CONFIG_MAPPING_NAMES:
        hint = nearest(name, [*classes, *CONFIG_MAPPING_NAMES])
        hint = hint if hint.startswith("did you mean") else "for example class:LlamaConfig or class:qwen3"
        raise ConfigError("model", f"class:{name}", f"transformers knows no such config class; {hint}")
    return _build(json.dumps({"model_type": kind, "_defaults_wanted": True}), name)


# -- from a config to a skeleton ------------------------------------------------------------


def _resolve(tree: dict[str, Any], assumed: list[str]) -> Any:
    """Return a transformers config object for a config tree, saying what had to be assumed."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    kind = str(tree.get("model_type") or "")
    if kind not in CONFIG_MAPPING and (inside := text_part(tree)) is not None:
        assumed.append(f"model_type {kind!r} is unknown to this transformers; only the text model inside it is planned")
        return _resolve(inside, assumed)
    if kind not in CONFIG_MAPPING:
        instead = _nearest_layout(tree)
        said = f"model_type {kind!r} is unknown to this transformers" if kind else "the config names no model_type"
        assumed.append(f"{said}; laid out like {instead}, which its fields resemble")
        kind, tree = instead, translate(tree, CONFIG_MAPPING[instead]().to_dict())
    wanted_defaults = tree.pop("_defaults_wanted", False)
    values = {key: value for key, value in tree.items() if key not in ("model_type", "auto_map", "quantization_config")}
    if "quantization_config" in tree:
        assumed.append("quantization_config of the file is left out; the plan chooses the types itself")
    try:
        with _quietly():
            config = CONFIG_MAPPING[kind].from_dict({"model_type": kind, **values})
    except (TypeError, ValueError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ModelError(f"model config: {kind} refuses it ({' '.join(str(error).split())[:200]})") from error
    text = config.get_text_config()
    if text is not config:
        assumed.append(f"{kind} has parts beside its text model; only the text model ({text.model_type}) is planned")
        values = {key: value for part in PARTS for key, value in (tree.get(part) or {}).items()} or values
        config = text
    if not wanted_defaults:
        _say_defaults(values, config, assumed)
    return config


def _nearest_layout(tree: dict[str, Any]) -> str:
    """Return the known model_type that a config's class names or fields resemble."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    by_class = {cls: kind for kind, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(cls, str)}
    for cls in tree.get("architectures") or ():
        if cls in by_class:
            return str(by_class[cls])
    for field, aliases in NEEDED.items():
        if not any(alias in tree for alias in aliases):
            raise ConfigError(
                f"model.{field}",
                None,
                f"{field} is missing, and model_type {tree.get('model_type')!r} is unknown to transformers, so nothing stands in "
                "for it",
            )
    if "kv_lora_rank" in tree:
        return "deepseek_v3"
    if any(key in tree for key in ("num_experts", "n_routed_experts")):
        return "qwen3_moe"
    if "num_local_experts" in tree:
        return "mixtral"
    return "llama"


def _say_defaults(values: Mapping[str, Any], config: Any, assumed: list[str]) -> None:
    """Name every size that the file leaves out and the class's default stands in for."""
    for field, aliases in (NEEDED | WANTED).items():
        value = getattr(config, field, None)
        if value is not None and not any(values.get(alias) is not None for alias in aliases):
            assumed.append(f"the config does not say {field}; {type(config).__name__}'s {value} assumed")


@lru_cache(maxsize=64)
def _build(text: str, name: str) -> ModelCard:
    tree: dict[str, Any] = json.loads(text)
    known = card_by_arithmetic(tree, name) or _shipped(text, name)
    return known or build_card(tree, name)


def build_card(tree: dict[str, Any], name: str) -> ModelCard:
    """Return the card that transformers' own model gives, whatever else is known of the config."""
    assumed: list[str] = []
    config = _resolve(tree, assumed)
    model = skeleton(config)
    return read_skeleton(model, name, tuple(assumed))


def _shipped(text: str, name: str) -> ModelCard | None:
    """Return the card that this package keeps of a model of its library, so that the model need not be built."""
    tree = dict(_cards().get(sha256_text(text), {}))
    if not tree:
        return None
    blocks = tuple(Block(**block) for block in tree.pop("blocks"))
    linears = tuple(Linear(**linear) for linear in tree.pop("linears"))
    own = {"name": name, "blocks": blocks, "linears": linears, "assumptions": tuple(tree["assumptions"])}
    return ModelCard(**{**tree, **own, "source": json.loads(text)})


@lru_cache(maxsize=1)
def _cards() -> dict[str, dict[str, Any]]:
    return dict(read_json(CARDS)) if CARDS.exists() else {}


def write_cards() -> None:
    """Write the cards of the library's models that need the skeleton (`python -m trainer.plan.skeleton`)."""
    cards = {}
    for name, tree in library().items():
        if "parameters" not in tree and card_by_arithmetic(tree, name) is None:
            card = asdict(build_card(dict(tree), name))
            cards[sha256_text(json.dumps(tree, sort_keys=True))] = {**card, "source": {}}
    write_json(CARDS, cards)


def skeleton(config: Any) -> Any:
    """Return a model of a config on the meta device: shapes without storage.

    Raises:
        ModelError: transformers cannot build a causal language model of it.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    try:
        with torch.device("meta"), _quietly():
            if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type.endswith("_text"):
                return _with_head(config)
            return AutoModelForCausalLM.from_config(config)
    except (
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
        AssertionError,
        RuntimeError,
        ImportError,
        ZeroDivisionError,
    ) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"model config: no causal language model can be built of {type(config).__name__} ({said})") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep transformers' remarks on a config (token ids, deprecated names) from a person who only wants sizes."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _with_head(config: Any) -> Any:
    """Return the text model of a model with more senses, which transformers knows only inside it, with the head of the whole."""
    import torch
    from transformers import AutoModel

    class TextModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.model = config, AutoModel.from_config(config)
            tied = getattr(config, "tie_word_embeddings", False)
            self.lm_head = None if tied else torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def get_input_embeddings(self) -> Any:
            return self.model.get_input_embeddings()

        def get_output_embeddings(self) -> Any:
            return self.lm_head or self.get_input_embeddings()

    model = TextModel()
    type(model).__name__ = f"{type(model.model).__name__} and its head"
    return model


# -- from a skeleton to a card ------------------------------------------------------------


def read_skeleton(model: Any, name: str, assumed: tuple[str, ...] = ()) -> ModelCard:
    """Return the card of a model on the meta device (or any other)."""
    config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = _decoder_blocks(model, config)
    counted = {id(p) for p in embedding.parameters()}
    head_count = sum(p.numel() for p in head.parameters() if id(p) not in counted) if head is not None else 0
    said = list(assumed)
    blocks: dict[Block, int] = {}
    linears: dict[tuple[str, int, int], int] = {}
    for index, layer in enumerate(layers):
        block = _read_block(layer, config, index, said)
        blocks[block] = blocks.get(block, 0) + 1
        for path, module in layer.named_modules():
            if (widths := _linear(module)) is not None:
                linears[path, *widths] = linears.get((path, *widths), 0) + 1
    inside = sum(block.parameters * count for block, count in blocks.items())
    embedded = sum(p.numel() for p in embedding.parameters())
    total = sum(p.numel() for p in model.parameters())
    hidden = int(embedding.weight.shape[1])
    return ModelCard(
        name=name,
        architecture=type(model).__name__,
        hidden_size=int(getattr(config, "hidden_size", hidden)),
        vocab_size=int(embedding.weight.shape[0]),
        embedding=embedded,
        head=head_count,
        final=total - inside - embedded - head_count,
        blocks=tuple(replace(block, count=count) for block, count in blocks.items()),
        linears=tuple(Linear(path, d_in, d_out, count) for (path, d_in, d_out), count in linears.items()),
        assumptions=tuple(dict.fromkeys(said)),
        max_positions=getattr(config, "max_position_embeddings", None),
        source=config.to_dict(),
    )


def _linear(module: Any) -> tuple[int, int] | None:
    """Return (d_in, d_out) of a layer that an adapter can be put on; None for any other."""
    import torch
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return (module.in_features, module.out_features) if isinstance(module, torch.nn.Linear) else None


def _decoder_blocks(model: Any, config: Any) -> list[Any]:
    import torch

    depth = config.num_hidden_layers
    lists: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth]
    if not lists:
        raise ModelError(f"{type(model).__name__}: found no list of {depth} decoder blocks; it cannot be planned")
    largest: Any = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    return list(largest)


def _role(path: str, kinds: Mapping[str, str], is_moe: bool) -> str:
    """Return the role of a parameter from where it sits in its block and what holds it."""
    parts = path.lower().split(".")
    holder = kinds.get(path.rpartition(".")[0], "").lower()
    if any("norm" in part or part.startswith("ln_") for part in parts[:-1]) or "norm" in holder:
        return "norms"
    if any("shared" in part and "gate" not in part for part in parts) and any("expert" in part for part in parts):
        return "shared_experts"
    if any(part in ("experts", "local_experts") for part in parts):
        return "experts"
    if is_moe and any(part in ("gate", "router", "shared_expert_gate", "moe_statics") for part in parts):
        return "router"
    if any(
        "attn" in part or "attention" in part or part in ("mamba", "mixer", "conv", "ssm", "temporal_block") for part in parts
    ):
        return "attention"
    if any(part in ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "fc1", "fc2") for part in parts):
        return "dense_mlp"
    return "other"


def _read_block(layer: Any, config: Any, index: int, said: list[str]) -> Block:
    kinds = {path: type(module).__name__ for path, module in layer.named_modules()}
    shapes = {path: tuple(p.shape) for path, p in layer.named_parameters()}
    is_moe = any("experts" in path.split(".") for path in kinds)
    roles: dict[str, int] = {}
    for path, shape in shapes.items():
        role = _role(path, kinds, is_moe)
        roles[role] = roles.get(role, 0) + _numel(shape)
    facts: dict[str, Any] = dict.fromkeys(("attention", "norms"), 0) | roles
    facts |= _attention(layer, config, index, said)
    facts |= _mlp(layer, config, shapes, kinds)
    norms = [path for path, kind in kinds.items() if "norm" in kind.lower()]
    inside = [path for path in norms if any(word in path.lower().rpartition(".")[0] for word in ("attn", "attention"))]
    head_norms = [path for path in inside if not path.endswith(("a_layernorm",))]
    facts["hidden_norms"] = len(norms) - len(inside) or 2
    facts["head_norms"] = bool(head_norms)
    facts["largest_tensor"] = max(_numel(shape) for shape in shapes.values())
    return Block(count=1, **facts)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _attention(layer: Any, config: Any, index: int, said: list[str]) -> dict[str, Any]:
    """Read widths, cached elements and the window of one block's attention."""
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kind = types[index] if types and index < len(types) else None
    if kind is not None and kind not in SOFTMAX_KINDS:
        said.append(f"blocks of kind {kind!r} keep a state of fixed size, which is small and left out of the KV cache")
        width = config.hidden_size
        return {"query_width": width, "key_width": width, "value_width": width, "output_width": width, "softmax": False}
    window = (
        getattr(config, "sliding_window", None) if kind != "chunked_attention" else getattr(config, "attention_chunk_size", None)
    )
    if not (kind in _WINDOWED or (types is None and window)):
        window = None
    heads = config.num_attention_heads
    kept = {"heads": heads, "eager": getattr(config, "_attn_implementation", None) == "eager"}
    if getattr(config, "kv_lora_rank", None):
        rope, nope = config.qk_rope_head_dim, config.qk_nope_head_dim
        query, output = heads * (rope + nope), heads * config.v_head_dim
        latents = (config.q_lora_rank or 0) + config.kv_lora_rank + rope
        widths = {
            "query_width": query,
            "key_width": query,
            "value_width": output,
            "output_width": output,
            "latent_width": latents,
        }
        return {**widths, "kv_elements": config.kv_lora_rank + rope, "window": window}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = _kv_heads(layer, config, heads)
    query, kv = heads * head_dim, kv_heads * head_dim
    widths = {"query_width": query, "key_width": kv, "value_width": kv, "output_width": query}
    return {**widths, **kept, "kv_elements": 2 * kv, "window": window}


def _kv_heads(layer: Any, config: Any, heads: int) -> int:
    for module in layer.modules():
        for attribute in ("num_key_value_heads", "num_kv_heads"):
            value = getattr(module, attribute, None)
            if isinstance(value, int) and value > 0:
                return value
        groups = getattr(module, "num_key_value_groups", None)
        if isinstance(groups, int) and groups > 0:
            return heads // groups
    return getattr(config, "num_key_value_heads", None) or heads


def _mlp(layer: Any, config: Any, shapes: Mapping[str, tuple[int, ...]], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Read intermediate widths and the experts' numbers of one block."""
    hidden = config.hidden_size
    facts: dict[str, Any] = {}
    if num := _num_experts(layer):
        routed = {path: shape for path, shape in shapes.items() if "experts" in path.split(".") and "shared" not in path}
        matrices = [_numel(shape) for shape in routed.values() if shape[0] != num or len(shape) == 3]
        if len(matrices) >= num:  # a list of experts, each with matrices of its own
            matrices = [size * num for size in matrices[: len(matrices) // num]]
        width = max(1, min(matrices) // (num * hidden))
        facts |= {"num_experts": num, "experts_per_token": _experts_per_token(config, num), "expert_width": width}
        facts["gated"] = sum(matrices) >= 3 * width * num * hidden
    downs = [
        (path, module)
        for path, module in layer.named_modules()
        if hasattr(module, "weight")
        and getattr(module.weight, "ndim", 0) == 2
        and not any("attn" in part or "attention" in part for part in path.lower().split("."))
        and "experts" not in path.split(".")
    ]
    widths = [
        m.weight.numel() // hidden
        for path, m in downs
        if path.split(".")[-1] in ("down_proj", "fc2", "dense_4h_to_h", "c_proj", "w2", "wo", "fc_out")
    ]
    if widths:
        facts["mlp_width"] = widths[0]
        total = sum(
            _numel(tuple(m.weight.shape))
            for path, m in downs
            if path.split(".")[-1] not in ("gate", "router", "shared_expert_gate")
        )
        facts.setdefault("gated", total >= 2.5 * widths[0] * hidden)
    return facts


def _num_experts(layer: Any) -> int:
    """Return the routed experts of a block: entries of a list, or the first size of a stacked tensor."""
    for path, module in layer.named_modules():
        if path.split(".")[-1] == "experts":
            if hasattr(module, "__len__"):
                return len(module)
            return next((int(p.shape[0]) for p in module.parameters() if p.ndim == 3), 0)
    return 0


def _experts_per_token(config: Any, num_experts: int) -> int:
    for attribute in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "num_selected_experts"):
        value = getattr(config, attribute, None)
        if isinstance(value, int) and 0 < value <= num_experts:
            return value
        if isinstance(value, int) and value > num_experts:
            raise ConfigError(f"model.{attribute}", value, f"is more than the {num_experts} experts that there are")
    raise ConfigError(
        "model.num_experts_per_tok", None, f"is missing; of its {num_experts} experts it must be known how many a token takes"
    )


# -- adapters on experts ------------------------------------------------------------


def on_stacked_experts(card: ModelCard, targets: tuple[str, ...]) -> bool:
    """Whether an adapter's targets may be experts, whose stacked tensors only peft itself can count."""
    inside = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj")
    return card.is_moe and bool(card.source) and any(t.rpartition(".")[2] in inside for t in targets)


def lora_parameters(card: ModelCard, rank: int, targets: tuple[str, ...]) -> int:
    """Return the exact parameters of a LoRA adapter, by formula, or by peft itself where experts' stacked tensors are meant.

    Raises:
        ConfigError: no layer of the model has a targeted name.
    """
    if on_stacked_experts(card, targets):
        return _peft_parameters(json.dumps(dict(card.source), sort_keys=True, default=str), rank, targets)
    count = card.lora_parameters(rank, targets)
    if not count:
        there = {one.name.rpartition(".")[2] for one in card.linears}
        raise ConfigError(
            "lora.target_modules", list(targets), f"{card.architecture} has none of them; it has {', '.join(sorted(there))}"
        )
    return count


@lru_cache(maxsize=64)
def _peft_parameters(config_text: str, rank: int, targets: tuple[str, ...]) -> int:
    """Put the adapter into a skeleton, so that fused and stacked experts count as peft would make them."""
    import warnings

    from peft import LoraConfig, get_peft_model

    tree = json.loads(config_text)
    model = skeleton(_resolve(tree, []))
    lora: Any = LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted: Any = get_peft_model(model, lora)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(
                "lora.target_modules", list(targets), f"peft refuses it for {type(model).__name__}: {str(error).splitlines()[0]}"
            ) from error
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


if __name__ == "__main__":
    write_cards()
