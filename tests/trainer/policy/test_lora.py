"""Adapters: put in by name, off for the reference, equal bytes from process to process, loadable by plain peft."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config.schema import Lora
from trainer.errors import ConfigError
from trainer.files import sha256_file
from trainer.policy.lora import adapter_off, add_lora, save_adapter

IDS = torch.tensor([[3, 4, 5, 6]])


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.4, pad_token_id=1, bos_token_id=None, eos_token_id=1)).eval()


def disturb(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))


def test_the_adapter_starts_as_nothing_and_only_it_trains() -> None:
    plain, model = base(), base()
    add_lora(model, Lora(rank=4, alpha=8), seed=0)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(trained) == 2 * 2 * 4, "A and B of four layers in each of two blocks"
    assert all("lora_" in name for name in trained)
    assert all(weight.dtype == torch.float32 for name, weight in model.named_parameters() if name in trained)


def test_off_it_is_the_base_and_on_again_afterwards() -> None:
    plain, model = base(), base()
    add_lora(model, Lora(rank=4, alpha=8), seed=0)
    disturb(model)
    adapted = model(IDS).logits
    with adapter_off(model):
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert torch.equal(model(IDS).logits, adapted)
    assert not torch.allclose(adapted, plain(IDS).logits, atol=1e-2)


def test_an_unknown_layer_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'q_prj'.*did you mean 'q_proj'\?.*down_proj.*v_proj") as error:
        add_lora(base(), Lora(target_modules=("v_proj", "q_prj")), seed=0)
    assert error.value.key == "train.lora.target_modules"


def test_the_seed_decides_the_adapter_whatever_the_global_generator() -> None:
    adapters = []
    for seed, noise in ((7, 1), (7, 2), (8, 2)):
        model = base()
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        add_lora(model, Lora(rank=4), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        adapters.append(torch.cat([w.flatten() for n, w in model.named_parameters() if "lora_A" in n]))
    assert torch.equal(adapters[0], adapters[1])
    assert not torch.equal(adapters[1], adapters[2])


def test_plain_peft_loads_what_was_saved(tmp_path: Path) -> None:
    model = base()
    adapted = add_lora(model, Lora(rank=4, alpha=8, dropout=0.1), seed=0)
    disturb(model)
    save_adapter(adapted, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)


SAVE = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_lora import base, disturb
from trainer.config.schema import Lora
from trainer.policy.lora import add_lora, save_adapter
model = base()
adapted = add_lora(model, Lora(rank=4), seed=0)
disturb(model)
save_adapter(adapted, Path(sys.argv[1]))
"""


@pytest.mark.smoke
def test_equal_adapters_are_equal_bytes_in_every_process(tmp_path: Path) -> None:
    digests = []
    for hash_seed in ("1", "2"):
        target = tmp_path / hash_seed / "somewhere else"
        target.mkdir(parents=True)
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[3])}
        code = SAVE.format(here=str(Path(__file__).parent))
        subprocess.run([sys.executable, "-c", code, str(target)], env=environment, check=True)
        digests.append([sha256_file(path) for path in sorted(target.iterdir())])
    assert digests[0] == digests[1]
