"""Bytes that a forward pass keeps for backward, per token: what autograd saves in transformers' decoder blocks.

The counts are checked against autograd's own saved tensors in the tests. Attention is fused (sdpa), so no score matrix is kept.
"""

from __future__ import annotations

from trainer.plan.card import Block


def saved_per_token(
    block: Block, hidden: int, activation_bytes: int, lora_targets: tuple[str, ...] | None = None, sequence: float = 0
) -> float:
    """Return bytes that one block's forward keeps for backward, per token.

    Counted from what autograd saves in transformers' blocks with fused attention: a norm keeps its float32 input and its
    normalised value, attention its queries, keys, values and output, a gated MLP four times its width. A frozen backbone
    keeps no input of a linear layer that has no adapter.

    Args:
        block: the block.
        hidden: hidden size.
        activation_bytes: 4 or 2.
        lora_targets: adapter targets; None where every weight trains.
        sequence: positions of a sequence, for attention that keeps its scores.
    """
    b = activation_bytes
    in_float32 = 4
    frozen = lora_targets is not None
    last = {t.rpartition(".")[2] for t in lora_targets or ()}
    reads_attention = not frozen or bool(
        last & {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "c_attn"}
    )
    reads_mlp = not frozen or bool(last & {"gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h"})
    reads_down = not frozen or bool(last & {"down_proj", "fc2", "dense_4h_to_h"})
    normed = 0 if frozen else b
    total = float(block.hidden_norms * hidden * (in_float32 + normed))
    total += hidden * b * (reads_attention + reads_mlp)
    if block.head_norms:
        total += (block.query_width + block.key_width) * (in_float32 + normed)
    if block.eager:  # keys and values repeated for every query head; scores before and after the softmax, which is in float32
        cast = b if b < in_float32 else 0
        total += b * 4 * block.output_width + block.heads * sequence * (in_float32 + b + cast)
    else:
        spread = block.window is not None and block.key_width < block.query_width  # a window's mask needs repeated keys
        keys = 2 * block.query_width if spread else block.key_width + block.value_width
        total += b * (block.query_width + keys + block.output_width)
    total += b * block.latent_width * 2
    width = block.mlp_width
    total += b * width * ((3 if block.gated else 1) + reads_down)
    if block.num_experts:
        each = 2 * hidden + block.expert_width * (4 if block.gated else 2)
        total += b * block.experts_per_token * each
    return total


def backward_per_token(block: Block, hidden: int, activation_bytes: int) -> float:
    """Return bytes of gradients of activations that exist at once inside one block's backward, per token."""
    width = max(block.mlp_width, block.expert_width * block.experts_per_token, block.query_width)
    return float(activation_bytes * (2 * hidden + 3 * width))


def logits_per_token(vocab_size: int, activation_bytes: int) -> float:
    """Return bytes of one token's logits with their gradient: as computed, in float32, and two float32 gradients."""
    return float(vocab_size * (12 if activation_bytes == 4 else activation_bytes + 12))
