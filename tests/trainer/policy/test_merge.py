"""Merging: equal to peft in float32, honest about rounding, and the base stays as it is."""

from __future__ import annotations

import json
import math
import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen2Config

from trainer.errors import ModelError, ResourceError
from trainer.files import list_files, sha256_file
from trainer.policy.load import load_model
from trainer.policy.merge import Change, MergeReport, combine, merge
from trainer.policy.weights import INDEX, PlannedTensor, plan_shards, write_shards

IDS = torch.arange(2, 18).view(2, 8)
_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES, num_key_value_heads=1, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**_SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16),
}


def build(kind: str, directory: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).to(dtype).save_pretrained(directory)
    return directory


def train_adapter(base: Path, directory: Path, size: float = 0.05, seed: int = 1, **settings: Any) -> Path:
    """Save an adapter whose two halves are both random, as after training."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})
    with warnings.catch_warnings():  # peft warns of tied weights and saved embeddings
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, config)
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, size)
            assert parameter.requires_grad == (
                "lora_" in name or "modules_to_save" in name or (settings.get("bias") == "all" and name.endswith(".bias"))
            )
        adapted.save_pretrained(str(directory))
    return directory


def by_peft(base: Path, adapter: Path) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        merged: PreTrainedModel = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return merged.eval()


def adapted_logits(base: Path, adapter: Path) -> torch.Tensor:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, str(adapter)).eval()(IDS).logits


def merged(base: Path, policy: Path, out: Path, **settings: Any) -> MergeReport:
    out.mkdir()
    return merge(base, policy, out, **settings)


ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"use_rslora": True}),
    ("llama", {"r": 3, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"]}),
    ("llama", {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 32}}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    ("llama", {"modules_to_save": ["lm_head"]}),
    ("qwen2", {}),
    ("qwen2", {"bias": "all"}),
    ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("kind", "settings"), ADAPTERS, ids=lambda value: str(value))
def test_equals_peft_in_float32(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    base = build(kind, tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter", **settings)
    report = merged(base, adapter, tmp_path / "out")
    ours, theirs = load_model(tmp_path / "out"), by_peft(base, adapter)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
    facts = report.facts()
    assert facts["cosine"] == pytest.approx(1, abs=1e-5)
    assert facts["norm_ratio"] == pytest.approx(1, abs=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(base)
    moved = [name for name, tensor in expected.items() if not torch.equal(tensor, plain.state_dict()[name])]
    tied = {"lm_head.weight"} if CONFIGS[kind].tie_word_embeddings else set()
    assert {entry["name"] for entry in facts["tensors"]} == set(moved) - tied


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_weights_part_when_the_adapter_moves_one_of_them(target: str, tmp_path: Path) -> None:
    base = build("llama-tied", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=[target, "v_proj"])
    report = merged(base, adapter, tmp_path / "out")
    assert report.untied
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.tie_word_embeddings is False
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, adapted_logits(base, adapter), rtol=1e-5, atol=1e-5)


def test_tied_weights_stay_tied_when_the_adapter_leaves_them_alone(tmp_path: Path) -> None:
    base = build("llama-tied", tmp_path / "base")
    report = merged(base, train_adapter(base, tmp_path / "adapter"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not report.untied
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_base_keeps_its_bytes(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter")
    before = {path: sha256_file(path) for path in list_files(base)}
    for turn in range(3):
        merged(base, adapter, tmp_path / f"out{turn}", dtype="bfloat16")
    assert {path: sha256_file(path) for path in list_files(base)} == before
    assert len({sha256_file(tmp_path / f"out{turn}" / "model.safetensors") for turn in range(3)}) == 1


def test_shards_hold_the_same_model_and_no_more_than_asked(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter")
    merged(base, adapter, tmp_path / "one")
    merged(base, adapter, tmp_path / "many", max_shard_bytes=3000)
    again = tmp_path / "again"  # a base that is itself in shards
    merged(tmp_path / "many", train_adapter(tmp_path / "many", tmp_path / "zero", size=0.0), again, max_shard_bytes=10**9)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    for shard in shards:
        tensors = load_file(shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 3000
    for directory in (tmp_path / "many", again):
        for name, tensor in load_model(directory).state_dict().items():
            assert torch.equal(tensor, whole[name])


def test_plan_shards() -> None:
    def sizes(*values: int) -> list[list[int]]:
        plan = [PlannedTensor(str(i), value, lambda: torch.zeros(1)) for i, value in enumerate(values)]
        return [[tensor.size_bytes for tensor in shard] for shard in plan_shards(plan, 10)]

    assert sizes(4, 6, 1, 9, 11, 2) == [[4, 6], [1, 9], [11], [2]]


@pytest.mark.parametrize(("size", "low", "high"), [(1e-3, 0.2, 0.9), (1e-1, 0.99, 1.0)])
def test_bfloat16_reports_what_rounding_keeps(size: float, low: float, high: float, tmp_path: Path) -> None:
    """NUMERICS 12: at norm(dW)/norm(W) of about 1e-3 most of the update is lost in bfloat16, at 1e-1 little is."""
    torch.manual_seed(0)
    weight = torch.randn(256, 256).to(torch.bfloat16)
    target = torch.randn(256, 256) * size
    new, change = combine(weight, (weight.float() + target), None, torch.bfloat16)
    facts = change.facts()
    assert facts["relative_change"] == pytest.approx(size, rel=0.1)
    assert low < facts["cosine"] < high
    realised = new.double() - weight.double()
    meant = target.double()
    expected = float((realised * meant).sum() / (realised.norm() * meant.norm()))
    assert facts["cosine"] == pytest.approx(expected, abs=1e-3)
    assert facts["norm_ratio"] == pytest.approx(float(realised.norm() / meant.norm()), rel=1e-3)


def test_row_12_a_change_that_went_the_wrong_way_has_a_negative_cosine() -> None:
    assert Change(4.0, 1.0, -2.0, 16.0).facts() == {"cosine": -1.0, "norm_ratio": 0.5, "relative_change": 0.5}


def test_sum_is_made_in_float32_and_rounded_once(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base", torch.bfloat16)
    adapter = train_adapter(base, tmp_path / "adapter")
    report = merged(base, adapter, tmp_path / "out")
    theirs, ours = by_peft(base, adapter).state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert ours[name].dtype == torch.bfloat16
    assert torch.equal(ours[name], theirs[name].to(torch.bfloat16))
    assert 0.9 < report.facts()["cosine"] < 1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["base", "float32", "bfloat16"])
def test_output_type(dtype: str, stored: torch.dtype, tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base", stored)
    merged(base, train_adapter(base, tmp_path / "adapter"), tmp_path / "out", dtype=dtype)
    expected = {"base": stored, "float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {expected}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == expected


def test_untrained_adapter_changes_nothing(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    report = merged(base, train_adapter(base, tmp_path / "adapter", size=0.0), tmp_path / "out")
    assert load_file(base / "model.safetensors").keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    for name, tensor in load_file(base / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "out" / "model.safetensors")[name])
    assert report.facts()["cosine"] == 1.0


def test_rows_are_summed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    whole = merged(base, adapter, tmp_path / "whole").facts()
    monkeypatch.setattr("trainer.policy.merge._CHUNK_ELEMENTS", 48)
    pieces = merged(base, adapter, tmp_path / "pieces").facts()
    for name, tensor in load_model(tmp_path / "whole").state_dict().items():
        torch.testing.assert_close(load_model(tmp_path / "pieces").state_dict()[name], tensor, rtol=0, atol=1e-7)
    assert pieces["relative_change"] == pytest.approx(whole["relative_change"], rel=1e-4)


def test_full_policy_is_its_own_weights(tmp_path: Path) -> None:
    base, policy = build("llama", tmp_path / "base"), build("llama", tmp_path / "policy", seed=5)
    facts = merged(base, policy, tmp_path / "out").facts()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    for name, tensor in load_file(policy / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], tensor)
    assert (facts["method"], facts["cosine"], facts["norm_ratio"]) == ("full", 1.0, 1.0)
    rounded = merged(base, policy, tmp_path / "rounded", dtype="bfloat16").facts()
    assert 0.99 < rounded["cosine"] < 1
    assert load_model(tmp_path / "rounded", "bfloat16").dtype == torch.bfloat16


def change_adapter(adapter: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


def change_config(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


Q = "base_model.model.model.layers.0.self_attn.q_proj"


def drop_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q}.lora_B.weight"]


def add_infinity(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"][0, 0] = math.inf


def rename(tensors: dict[str, torch.Tensor]) -> None:
    for side in "AB":
        tensors[f"{Q.replace('0', '7')}.lora_{side}.weight"] = tensors.pop(f"{Q}.lora_{side}.weight")


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q}.lora_A.weight"] = torch.zeros(4, 12)


def cut_rank(tensors: dict[str, torch.Tensor]) -> None:
    for side, shape in (("A", (2, 16)), ("B", (16, 2))):
        tensors[f"{Q}.lora_{side}.weight"] = torch.zeros(shape)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (drop_half, "q_proj has only one of its two factors (A); copy the adapter again"),
        (add_infinity, "q_proj.lora_A.weight holds values that are not finite; take an earlier policy"),
        (rename, "changes model.layers.7.self_attn.q_proj.weight, which"),
        (reshape, "changes model.layers.0.self_attn.q_proj.weight with shape [16, 12], in"),
        (cut_rank, "q_proj has rank 2, adapter_config.json says 4; the two files are of different adapters"),
    ],
)
def test_adapter_that_does_not_fit(edit: Callable[[Any], None], problem: str, tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter")
    change_adapter(adapter, edit)
    with pytest.raises(ModelError, match=re.escape(problem)) as caught:
        merged(base, adapter, tmp_path / "out")
    assert str(caught.value).startswith(str(adapter))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA adapters can be merged"),
        ({"use_dora": True}, "use_dora is set; DoRA cannot be merged here"),
    ],
)
def test_adapter_of_another_kind(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter")
    change_config(adapter, **values)
    with pytest.raises(ModelError, match=re.escape(problem)):
        merged(base, adapter, tmp_path / "out")


def test_adapter_of_another_base_by_its_embedding(tmp_path: Path) -> None:
    base, other = build("llama", tmp_path / "base"), build("llama", tmp_path / "other", seed=3)
    adapter = train_adapter(other, tmp_path / "adapter", target_modules=["embed_tokens"])
    with pytest.raises(ModelError, match=r"carries another model\.embed_tokens\.weight than .*trained from another base"):
        merged(base, adapter, tmp_path / "out")


def test_damaged_files(tmp_path: Path) -> None:
    base = build("llama", tmp_path / "base")
    adapter = train_adapter(base, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: is damaged"):
        merged(base, adapter, tmp_path / "one")
    weights.unlink()
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: no such file; the directory is not complete"):
        merged(base, adapter, tmp_path / "two")
    (base / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"base: has no weights \(model\.safetensors, or shards"):
        merged(base, adapter, tmp_path / "three")


def test_full_policy_of_another_model(tmp_path: Path) -> None:
    base, policy = build("llama", tmp_path / "base"), build("gpt2", tmp_path / "policy")
    with pytest.raises(ModelError, match=r"policy: has transformer\..*trained from another base"):
        merged(base, policy, tmp_path / "out")


def test_full_disk_is_named(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        with pytest.raises(
            ResourceError, match=r"small/model\.safetensors: no space left on the disk; nothing written before is lost"
        ):
            write_shards(small, [PlannedTensor("a", 40000, lambda: torch.zeros(10000))], 10**9)
    finally:
        subprocess.run(["umount", str(small)], check=True)
