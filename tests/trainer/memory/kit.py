"""Tiny models of many kinds, and works for them."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from trainer.engine.port import TokenScores, Work

V = 53
_COMMON = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "llama_tied": lambda: LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=8, tie_word_embeddings=True),
    "gemma2": lambda: Gemma2Config(**_COMMON, head_dim=8, sliding_window=4, final_logit_softcapping=5.0),
    "gemma3": lambda: Gemma3TextConfig(
        **_COMMON, head_dim=8, sliding_window=4, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=V,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_MOE, head_dim=8, num_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        **_MOE,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}
TIED = {"llama_tied", "qwen3", "gemma2", "gemma3", "gpt2"}


def make_model(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    attention = "eager" if kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def make_works(count: int = 3, seed: int = 1, entropy: bool = False, device: torch.device | str = "cpu") -> list[Work]:
    """Works of different sizes with some positions each."""
    generator = torch.Generator().manual_seed(seed)
    works = []
    for index in range(count):
        rows, columns = 2 + index, 6 + index
        ids_BS = torch.randint(0, V, (rows, columns), generator=generator)
        where_T = torch.randperm(rows * columns, generator=generator)[: 5 + index].sort().values
        ids_TK = torch.randint(0, V, (len(where_T), 1), generator=generator)
        works.append(Work(ids_BS.to(device), where_T.to(device), ids_TK.to(device), entropy))
    return works


def loss_of(index: int, scores: TokenScores) -> torch.Tensor:
    """A loss whose gradient differs from token to token."""
    weight_T = torch.linspace(0.5, 1.5, len(scores.logprobs_TK), device=scores.logprobs_TK.device) * (index + 1)
    loss = -(weight_T.unsqueeze(1) * scores.logprobs_TK.exp()).sum()
    return loss if scores.entropy_T is None else loss - 0.1 * (weight_T * scores.entropy_T).sum()
