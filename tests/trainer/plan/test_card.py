"""Cards against transformers, LoRA counts against peft, cached bytes against a real cache, saved bytes against autograd."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from trainer.errors import ConfigError, ModelError
from trainer.plan.activations import saved_per_token
from trainer.plan.card import stated
from trainer.plan.skeleton import library, load_card, lora_parameters, read_skeleton

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 160}
EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ARCHITECTURES = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **LATENT,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": {},
    "olmo2": {"num_key_value_heads": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def config_of(kind: str, **more: object):
    return CONFIG_MAPPING[kind](**{**SMALL, **ARCHITECTURES[kind], **more})


def meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_counts_are_those_of_transformers(kind: str) -> None:
    config = config_of(kind)
    model = AutoModelForCausalLM.from_config(config)
    card = read_skeleton(model, kind)
    assert card.parameters == model.num_parameters()
    assert sum(card.by_role().values()) == card.parameters
    assert card.num_layers == config.num_hidden_layers
    assert card.role("other") == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox"])
def test_a_config_file_gives_the_same_card(kind: str, tmp_path) -> None:
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    card = load_card(tmp_path)
    assert card.parameters == meta(config).num_parameters()
    assert card.assumptions == ()


@pytest.mark.parametrize("name", library())
def test_full_size_cards_are_those_of_transformers(name: str) -> None:
    shape = library()[name]
    card = load_card(name)
    if "parameters" in shape:
        assert card.parameters == shape["parameters"]
        assert card.active_parameters == pytest.approx(shape.get("active_parameters", shape["parameters"]), rel=1e-6)
        return
    kind = shape.pop("model_type")
    assert card.parameters == meta(CONFIG_MAPPING[kind](**shape)).num_parameters()


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("llama-7b", 6.738e9, 6.738e9),
        ("llama-3-70b", 70.55e9, 70.55e9),
        ("mixtral-8x7b", 46.70e9, 12.88e9),
        ("qwen3-30b-a3b", 30.53e9, 3.35e9),
        ("deepseek-v3", 671.0e9, 37.55e9),
        ("kimi-k2", 1026e9, 32.9e9),
    ],
)
def test_published_totals(name: str, total: float, active: float) -> None:
    card = load_card(name)
    assert card.parameters == pytest.approx(total, rel=1e-3)
    assert card.active_parameters == pytest.approx(active, rel=2e-3)


def test_roles_of_a_mixture_of_experts() -> None:
    card = load_card("deepseek-v3")
    moe = next(block for block in card.blocks if block.num_experts)
    assert (moe.count, moe.num_experts, moe.experts_per_token) == (58, 256, 8)
    assert moe.experts == 256 * 3 * 7168 * 2048
    assert moe.shared_experts == 3 * 7168 * 2048
    assert moe.router == 256 * 7168  # the correction bias is a buffer
    assert (moe.expert_width, moe.mlp_width) == (2048, 2048)


# -- adapters --------------------------------------------------------------------------------------------------------------

ADAPTED = [
    ("llama", ("q_proj", "v_proj", "o_proj", "gate_proj")),
    ("qwen3", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ("gemma2", ("q_proj", "gate_proj")),
    ("phi3", ("qkv_proj", "down_proj")),
    ("gpt_neox", ("query_key_value", "dense_4h_to_h")),
    ("qwen3_moe", ("q_proj", "v_proj", "o_proj")),
    ("qwen3_moe", ("q_proj", "gate_proj", "up_proj", "down_proj")),
    ("mixtral", ("q_proj", "o_proj")),
    ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")),
    ("deepseek_v3", ("o_proj", "gate_proj", "up_proj", "down_proj")),
]


@pytest.mark.parametrize(("kind", "targets"), ADAPTED)
def test_lora_counts_are_those_of_peft(kind: str, targets: tuple[str, ...], tmp_path) -> None:
    config = config_of(kind)
    config.save_pretrained(tmp_path)
    assert lora_parameters(load_card(tmp_path), 8, targets) == by_peft(config, 8, targets)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama-3-8b", ("q_proj", "v_proj", "o_proj", "gate_proj")),
        ("qwen3-8b", ("q_proj", "v_proj", "o_proj", "gate_proj")),
        ("qwen3-30b-a3b", ("q_proj", "v_proj", "o_proj")),
        ("deepseek-v3", ("q_b_proj", "kv_b_proj", "o_proj")),
        ("kimi-k2", ("q_b_proj", "kv_b_proj", "o_proj")),
    ],
)
def test_lora_counts_of_full_size_models(name: str, targets: tuple[str, ...]) -> None:
    shape = library()[name]
    config = CONFIG_MAPPING[shape.pop("model_type")](**shape)
    assert lora_parameters(load_card(name), 32, targets) == by_peft(config, 32, targets)


def by_peft(config, rank: int, targets: tuple[str, ...]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(meta(config), LoraConfig(r=rank, target_modules=list(targets), task_type="CAUSAL_LM"))
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_lora_on_layers_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match=r"none of them; it has .*q_proj"):
        lora_parameters(load_card("llama-7b"), 8, ("c_attn",))


def test_lora_that_peft_refuses_says_so() -> None:
    with pytest.raises(ConfigError, match="without also targeting up_proj"):
        lora_parameters(load_card("qwen3-30b-a3b"), 32, ("q_proj", "v_proj", "o_proj", "gate_proj"))


# -- keys and values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "deepseek_v3", "gpt_neox", "qwen3_moe"])
def test_cached_elements_are_those_of_a_real_cache(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(config_of(kind)).eval()
    tokens = 6  # below every window
    cache = model(torch.zeros(1, tokens, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert read_skeleton(model, kind).kv_bytes(tokens, bits=8) == held


def test_cache_windows_pages_and_bits() -> None:
    """PLAN_CASES 15: 2 x layers x kv heads x head size x bytes; a latent instead for MLA; FP8 halves; pages round up."""
    llama = load_card("llama-3-8b")
    assert llama.kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2
    assert llama.kv_bytes(1000, bits=8) == llama.kv_bytes(1000) / 2
    assert llama.kv_bytes(1000, page=16) == llama.kv_bytes(1008)
    assert load_card("deepseek-v3").kv_bytes_per_token() == (512 + 64) * 61 * 2
    gemma = load_card("gemma-2-9b")
    assert gemma.kv_bytes(8192) == 21 * (8192 + 4096) * 2 * 8 * 256 * 2
    assert gemma.kv_bytes(8192, windows=False) == 42 * 8192 * 2 * 8 * 256 * 2


# -- work and activations ---------------------------------------------------------------------------------------------------


def test_forward_flops_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = config_of("llama")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # torch counts no fused attention
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(2, 32, dtype=torch.int64), use_cache=False)
    counted = counter.get_total_flops()
    assert read_skeleton(model, "llama").forward_flops(64, context=32) == pytest.approx(counted, rel=0.02)


def saved_bytes(model, tokens: int, layers: int) -> float:
    """Return bytes a token and layer that autograd saves, parameters left out, by the difference of two depths."""
    found: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.get_decoder()(torch.zeros(1, tokens, dtype=torch.int64), use_cache=False).last_hidden_state
    assert output.requires_grad
    return sum(found.values()) / tokens / layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mistral", "olmo2", "qwen3_moe"])
def test_saved_activations_are_those_of_autograd(kind: str, dtype: torch.dtype) -> None:
    more = {"qwen3_moe": {"mlp_only_layers": []}, "mistral": {"sliding_window": None}}.get(kind, {})
    measured = []
    for layers in (2, 6):
        model = AutoModelForCausalLM.from_config(config_of(kind, num_hidden_layers=layers, **more), dtype=dtype).train()
        measured.append(saved_bytes(model, 256, 1))
    per_layer = (measured[1] - measured[0]) / 4
    card = read_skeleton(model, kind)
    predicted = saved_per_token(card.blocks[-1], card.hidden_size, 4 if dtype == torch.float32 else 2, sequence=256)
    assert predicted == pytest.approx(per_layer, rel=0.15)


def test_saved_activations_of_an_adapter() -> None:
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj")
    measured = []
    for layers in (2, 6):
        model = AutoModelForCausalLM.from_config(config_of("llama", num_hidden_layers=layers), dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            get_peft_model(model, LoraConfig(r=2, target_modules=list(targets), task_type="CAUSAL_LM"))
        measured.append(saved_bytes(model.train(), 256, 1))
    per_layer = (measured[1] - measured[0]) / 4
    card = read_skeleton(model, "llama")
    predicted = saved_per_token(card.blocks[-1], card.hidden_size, 4, targets)
    assert predicted == pytest.approx(per_layer, rel=0.1)


# -- what is wrong or missing --------------------------------------------------------------------------------------------------


def write(tmp_path, **tree: object):
    (tmp_path / "config.json").write_text(json.dumps(tree))
    return tmp_path


def test_an_unknown_model_type_is_laid_out_like_its_nearest_and_says_so(tmp_path) -> None:
    latent = {**LATENT, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
    card = load_card(write(tmp_path, model_type="kimi_k2", architectures=["KimiK2ForCausalLM"], **SMALL, **latent))
    assert card.architecture == "DeepseekV3ForCausalLM"
    assert "'kimi_k2' is unknown" in card.assumptions[0]
    assert "deepseek_v3" in card.assumptions[0]


def test_an_unknown_model_type_with_a_known_class(tmp_path) -> None:
    tree = write(tmp_path, model_type="brandnew", architectures=["Qwen3ForCausalLM"], num_key_value_heads=2, **SMALL)
    assert load_card(tree).architecture == "Qwen3ForCausalLM"


def test_a_missing_size_of_an_unknown_model(tmp_path) -> None:
    tree = {key: value for key, value in SMALL.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match=r"model\.hidden_size.*missing"):
        load_card(write(tmp_path, model_type="brandnew", **tree))


def test_a_missing_size_of_a_known_model_is_assumed_in_words(tmp_path) -> None:
    tree = {key: value for key, value in SMALL.items() if key != "num_hidden_layers"}
    card = load_card(write(tmp_path, model_type="llama", **tree))
    assert any("does not say num_hidden_layers; LlamaConfig's 32 assumed" in said for said in card.assumptions)


def test_a_multimodal_config_plans_its_text_model(tmp_path) -> None:
    text = {**SMALL, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16}
    card = load_card(write(tmp_path, model_type="gemma3", text_config=text))
    assert card.vocab_size == SMALL["vocab_size"]
    assert any("only the text model" in said for said in card.assumptions)


def test_unknown_names_have_a_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3-8b'"):
        load_card("qwen3-8B")
    with pytest.raises(ConfigError, match="no such config class"):
        load_card("class:LamaConfig")
    with pytest.raises(ConfigError, match="did you mean 'num_layers'"):
        load_card({"parameters": 1e9, "num_layer": 2, "hidden_size": 64, "vocab_size": 10})


def test_a_directory_without_config(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"no such file; a plan needs the model's config\.json"):
        load_card(tmp_path)


def test_class_of_transformers_with_its_defaults() -> None:
    assert load_card("class:LlamaConfig").parameters == 6_738_415_616
    assert load_card("class:LlamaConfig").assumptions == ()


def test_stated_card_adds_up() -> None:
    card = stated(
        "x",
        parameters=1e12,
        active_parameters=3e11,
        num_experts=32,
        experts_per_token=4,
        num_layers=128,
        hidden_size=14336,
        vocab_size=128000,
    )
    assert card.parameters == 1e12
    assert card.active_parameters == pytest.approx(3e11, rel=1e-6)
    with pytest.raises(ConfigError, match="need at least"):
        stated("x", parameters=1e9, num_layers=128, hidden_size=14336, vocab_size=128000)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": "64"}, r"model\.hidden_size = '64': must be a whole number of at least 1"),
        ({"hidden_size": True}, r"model\.hidden_size = True"),
        ({"hidden_size": float("nan")}, r"model\.hidden_size = nan"),
        ({"num_hidden_layers": -2}, r"model\.num_hidden_layers = -2"),
        ({"num_attention_heads": 0}, r"model\.num_attention_heads = 0"),
        ({"vocab_size": 0}, r"model\.vocab_size = 0"),
        ({"num_key_value_heads": 3}, r"model\.num_key_value_heads = 3: must divide num_attention_heads, which is 4"),
        ({"head_dim": 0}, r"model\.head_dim = 0"),
        ({"model_type": "mistral", "sliding_window": "16"}, r"model\.sliding_window = '16'"),
        ({"model_type": ["llama"]}, r"model\.model_type = \['llama'\]: must be text"),
        ({"model_type": "new", "architectures": "LlamaForCausalLM"}, r"model\.architectures = 'LlamaForCausalLM'"),
        ({"text_config": [1]}, r"model\.text_config = \[1\]: must be a mapping"),
        ({"text_config": {"hidden_size": "x"}}, r"model\.text_config\.hidden_size = 'x'"),
        ({"intermediate_size": [1, 2], "attention_bias": True}, "llama refuses it"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "qwen3 refuses it"),
        ({"model_type": "t5"}, "no causal language model can be built"),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts": 4, "num_experts_per_tok": 5}, "is more than the 4 experts"),
    ],
)
def test_what_no_model_can_have_is_named(change: dict[str, object], problem: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=problem):
        load_card({"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 2, **SMALL, **change})


@pytest.mark.parametrize("key", ["parameters", "num_layers", "hidden_size", "vocab_size", "num_experts"])
@pytest.mark.parametrize("value", [-1, "7B", True])
def test_a_stated_card_has_numbers(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{key} = {value!r}"):
        load_card({"parameters": 1e9, "num_layers": 2, "hidden_size": 64, "vocab_size": 10, key: value})


def test_whole_floats_are_sizes() -> None:
    tree = {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 2, **SMALL}
    assert load_card({**tree, "hidden_size": float(SMALL["hidden_size"])}).parameters == load_card(tree).parameters


def test_experts_of_an_unknown_model_keep_their_number() -> None:
    """Laid out like another architecture, which calls its experts otherwise."""
    tree = {"model_type": "brandnew", "num_key_value_heads": 2, **SMALL, "n_routed_experts": 6, "moe_topk": 3}
    card = load_card({**tree, "moe_intermediate_size": 32})
    assert card.architecture == "Qwen3MoeForCausalLM"
    assert {(block.num_experts, block.experts_per_token) for block in card.blocks} == {(6, 3)}


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_text_model_that_only_exists_inside_another(kind: str) -> None:
    plain = {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 16}
    alone = load_card({"model_type": kind.removesuffix("_vl").removesuffix("_5"), **plain})
    inside = load_card({"model_type": kind, "text_config": plain})
    assert inside.by_role() == alone.by_role()
    assert inside.kv_bytes_per_token(16) == alone.kv_bytes_per_token(16)


def test_an_unknown_model_with_more_senses() -> None:
    text = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "tie_word_embeddings": False}
    card = load_card({"model_type": "brandnew_vl", "text_config": text, "vision_config": {"hidden_size": 5}})
    assert card.parameters == load_card(text).parameters
    assert "only the text model inside it" in card.assumptions[0]


def test_layers_of_other_classes_than_linear_take_adapters() -> None:
    """GPT-2's are transposed, Falcon's a class of their own."""
    gpt2 = load_card({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100})
    assert gpt2.lora_parameters(4, ("c_attn",)) == 2 * 4 * (64 + 3 * 64)
    falcon = load_card(
        {"model_type": "falcon", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    )
    assert falcon.lora_parameters(4, ("dense_h_to_4h",)) == 2 * 4 * (64 + 256)
