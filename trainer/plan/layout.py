"""Cards of the plainest decoders by arithmetic, without torch: Llama, Mistral, Qwen2 and Qwen3, and what is shaped like them.

Importing transformers takes seconds; these four need none of it. The tests hold every card against the one that the skeleton
gives, field by field. A config with anything unusual (biases, a missing size) goes the long way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.plan.card import Block, Linear, ModelCard

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_UNUSUAL = (
    "attention_bias",
    "mlp_bias",
    "layer_types",
    "text_config",
    "use_sliding_window",
    "_attn_implementation",
    "quantization_config",
)


def card_by_arithmetic(tree: Mapping[str, Any], name: str) -> ModelCard | None:
    """Return the card of a plain decoder's config, or None where the skeleton is needed."""
    kind = tree.get("model_type")
    if kind not in ARCHITECTURES or any(tree.get(key) for key in _UNUSUAL):
        return None
    if any(not isinstance(tree.get(key), int) for key in _SIZES) or "tie_word_embeddings" not in tree:
        return None
    if kind == "mistral" and "sliding_window" not in tree:
        return None
    hidden, width, layers, heads, kv_heads, vocab = (tree[key] for key in _SIZES)
    if hidden % heads and not tree.get("head_dim"):
        return None
    head_dim = tree.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    query, kv = heads * head_dim, kv_heads * head_dim
    biases = query + 2 * kv if kind == "qwen2" else 0
    head_norms = 2 * head_dim if kind == "qwen3" else 0
    tied = bool(tree["tie_word_embeddings"])
    block = Block(
        count=layers,
        attention=hidden * (2 * query + 2 * kv) + biases,
        norms=2 * hidden + head_norms,
        dense_mlp=3 * hidden * width,
        largest_tensor=hidden * max(width, query),
        heads=heads,
        query_width=query,
        key_width=kv,
        value_width=kv,
        output_width=query,
        mlp_width=width,
        head_norms=kind == "qwen3",
        kv_elements=2 * kv,
        window=tree.get("sliding_window") if kind == "mistral" else None,
    )
    shapes = (
        ("self_attn.q_proj", hidden, query),
        ("self_attn.k_proj", hidden, kv),
        ("self_attn.v_proj", hidden, kv),
        ("self_attn.o_proj", query, hidden),
        ("mlp.gate_proj", hidden, width),
        ("mlp.up_proj", hidden, width),
        ("mlp.down_proj", width, hidden),
    )
    return ModelCard(
        name=name,
        architecture=ARCHITECTURES[kind],
        hidden_size=hidden,
        vocab_size=vocab,
        embedding=vocab * hidden,
        head=0 if tied else vocab * hidden,
        final=hidden,
        blocks=(block,),
        linears=tuple(Linear(path, d_in, d_out, layers) for path, d_in, d_out in shapes),
        max_positions=tree.get("max_position_embeddings"),
        source=dict(tree),
    )
