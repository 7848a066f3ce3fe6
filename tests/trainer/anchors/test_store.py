"""Anchors: right numbers, equal bytes, read back in any order, and refused when they are not this campaign's."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.anchors.scorer import Voice, top_and_tail
from trainer.anchors.store import (
    Origin,
    Settings,
    build_anchors,
    choose_prompts,
    damaged_files,
    manifest_facts,
    open_anchors,
    rebuild_files,
)
from trainer.errors import DataError, ModelError
from trainer.files import sha256_file, write_manifest
from trainer.rollout.embedded import EmbeddedSampler
from trainer.rollout.scripted import ScriptedSampler
from trainer.types import Prompt

VOCABULARY = 24
ORIGIN = Origin(model_sha256="a" * 64, tokenizer_hash="b" * 64)
SETTINGS = Settings(completions_per_prompt=2, top_k=5, temperature=0.7, max_completion_tokens=9, seed=3)


def build_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def make_prompts(num: int = 7) -> list[Prompt]:
    return [
        Prompt(f"id{i}", "main", "train", text="", token_ids=tuple(range(2 + i % 3, 5 + 2 * i)), answer="") for i in range(num)
    ]


def build(directory: Path, model: Any, settings: Settings = SETTINGS, **options: Any) -> dict[str, Any]:
    directory.mkdir()
    sampler = EmbeddedSampler(model, slots=4, pad_token_id=0)
    facts = build_anchors(directory, Voice(model), sampler, make_prompts(), settings, ORIGIN, (1, 2), **options)
    return write_manifest(directory, facts)


def plain(model: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


@pytest.mark.parametrize("shard_bytes", [1, 2000, 2**28])
def test_cached_numbers_are_the_references(tmp_path: Path, shard_bytes: int) -> None:
    model = build_model()
    progress: list[tuple[int, int]] = []
    facts = build(tmp_path / "anchors", model, shard_bytes=shard_bytes, progress=lambda *done: progress.append(done))
    store = open_anchors(tmp_path / "anchors", ORIGIN)
    assert len(store) == 14 == facts["num_completions"]
    assert len(facts["shards"]) == {1: 14, 2000: 5, 2**28: 1}[shard_bytes] == len(progress)
    assert progress[-1] == (14, 14)
    batch = store.take(range(14))
    assert [batch.prompts[i] for i in range(14)] == [list(make_prompts()[i // 2].token_ids) for i in range(14)]
    assert batch.prompt_ids == [f"id{i // 2}" for i in range(14)]
    assert sum(map(len, batch.completions)) == facts["num_tokens"] == len(batch.tail_T)
    assert len({tuple(c) for c in batch.completions}) > 10
    done = 0
    for prompt, completion in zip(batch.prompts, batch.completions, strict=True):
        assert len(completion) == 9 or completion[-1] in (1, 2)
        logprobs_TV = plain(model, prompt, completion, 0.7)
        here = slice(done, done + len(completion))
        done += len(completion)
        expected_TK, expected_ids_TK = logprobs_TV.topk(5)
        assert torch.equal(batch.top_ids_TK[here], expected_ids_TK)
        assert torch.allclose(batch.top_logprobs_TK[here].double(), expected_TK, atol=1e-5)
        own_T = logprobs_TV.gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(batch.logprobs_T[here].double(), own_T, atol=1e-5)
        log1mexp_T = torch.log(-torch.expm1(expected_TK.logsumexp(-1)))
        assert torch.allclose(batch.tail_T[here].double(), log1mexp_T, atol=1e-4)


def test_any_order_can_be_taken(tmp_path: Path) -> None:
    build(tmp_path / "anchors", build_model(), shard_bytes=2000)
    store = open_anchors(tmp_path / "anchors", ORIGIN)
    batch = store.take([13, 2, 2, 7])
    alone = [store.take([index]) for index in (13, 2, 2, 7)]
    assert batch.completions == [one.completions[0] for one in alone]
    assert batch.prompts == [one.prompts[0] for one in alone]
    assert torch.equal(batch.top_logprobs_TK, torch.cat([one.top_logprobs_TK for one in alone]))
    assert batch.top_ids_TK.dtype == torch.int64


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(tmp_path / name, build_model(), shard_bytes=2000)
    for path in sorted((tmp_path / "one").iterdir()):
        assert sha256_file(path) == sha256_file(tmp_path / "two" / path.name), path.name


def test_top_k_is_capped_at_the_vocabulary_and_leaves_no_tail(tmp_path: Path) -> None:
    facts = build(tmp_path / "anchors", build_model(), Settings(1, 1000, 1.0, 4, 0))
    assert facts["top_k"] == VOCABULARY
    batch = open_anchors(tmp_path / "anchors", ORIGIN).take([0, 1])
    assert batch.top_ids_TK.shape[1] == VOCABULARY
    assert (batch.tail_T == -torch.inf).all()
    assert torch.allclose(batch.top_logprobs_TK.logsumexp(-1), torch.zeros(len(batch.tail_T)), atol=1e-5)


def test_a_tiny_tail_keeps_its_digits() -> None:
    """1 - sum would be 0 in float32, and log of that no number."""
    logits = torch.tensor([[50.0, 40.0, 0.0, -1.0]])
    exact = torch.logsumexp(logits.double()[:, 2:], -1) - torch.logsumexp(logits.double(), -1)
    _, _, tail = top_and_tail(logits.clone(), 2, 1.0)
    assert tail.double() == pytest.approx(exact, abs=1e-5)


def test_a_bfloat16_reference_is_cached_in_float32(tmp_path: Path) -> None:
    build(tmp_path / "anchors", build_model(torch.bfloat16))
    batch = open_anchors(tmp_path / "anchors", ORIGIN).take([3])
    assert batch.top_logprobs_TK.dtype == batch.tail_T.dtype == torch.float32
    mass = torch.cat([batch.top_logprobs_TK, batch.tail_T[:, None]], 1).logsumexp(-1)
    assert torch.allclose(mass, torch.zeros_like(mass), atol=1e-5)


def test_an_empty_store_is_valid(tmp_path: Path) -> None:
    (tmp_path / "anchors").mkdir()
    write_manifest(tmp_path / "anchors", manifest_facts(SETTINGS, ORIGIN, []))
    assert len(open_anchors(tmp_path / "anchors", ORIGIN)) == 0


def test_another_model_or_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    build(tmp_path / "anchors", build_model())
    with pytest.raises(ModelError, match=f"come from model {'a' * 64}, this campaign has model {'c' * 64}"):
        open_anchors(tmp_path / "anchors", Origin("c" * 64, ORIGIN.tokenizer_hash))
    with pytest.raises(ModelError, match=f"come from tokenizer {'b' * 64}, this campaign has tokenizer {'d' * 64}"):
        open_anchors(tmp_path / "anchors", Origin(ORIGIN.model_sha256, "d" * 64))


def test_another_temperature_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "anchors", build_model())
    assert len(open_anchors(tmp_path / "anchors", ORIGIN, 0.7)) == 14
    with pytest.raises(DataError, match=r"at temperature 0\.7, training samples at 1"):
        open_anchors(tmp_path / "anchors", ORIGIN, 1.0)


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
def test_a_damaged_shard_is_found(tmp_path: Path, harm: str) -> None:
    build(tmp_path / "anchors", build_model(), shard_bytes=2000)
    path = tmp_path / "anchors" / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    if harm == "truncate":
        path.write_bytes(data[:-7])
    elif harm == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()
    with pytest.raises(DataError, match=r"shard-00001\.safetensors .*python -m tasks anchors"):
        open_anchors(tmp_path / "anchors", ORIGIN)


def test_damaged_files_are_made_again_to_the_same_bytes_or_not_at_all(tmp_path: Path) -> None:
    place, model = tmp_path / "anchors", build_model()
    build(place, model, shard_bytes=2000)
    shard, completions = "shard-00001.safetensors", "completions.safetensors"
    (place / shard).write_bytes(b"no anchors")
    (place / completions).unlink()
    assert damaged_files(place) == [completions, shard]
    assert not rebuild_files(place, [completions, shard], Voice(model)), "what was to be scored is lost"
    build(tmp_path / "same", model, shard_bytes=2000)
    shutil.copy(tmp_path / "same" / completions, place / completions)
    other = build_model()
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    assert not rebuild_files(place, [shard], Voice(other)), "another model's numbers"
    assert damaged_files(place) == [shard]
    assert rebuild_files(place, [shard], Voice(model))
    (place / completions).unlink()
    assert rebuild_files(place, [completions], None)
    assert damaged_files(place) == []


def test_a_directory_that_holds_no_anchors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no readable"):
        open_anchors(tmp_path / "nowhere", ORIGIN)
    write_manifest(tmp_path, {"stage": "prompts"})
    with pytest.raises(DataError, match="holds no anchors of format 2"):
        open_anchors(tmp_path, ORIGIN)


def test_any_sampler_will_do(tmp_path: Path) -> None:
    script = ScriptedSampler(lambda prompt, index, version: [5 + index, 6, 1])
    facts = build_anchors(tmp_path, Voice(build_model()), script, make_prompts(2), SETTINGS, ORIGIN, (1,))
    write_manifest(tmp_path, facts)
    assert open_anchors(tmp_path, ORIGIN).take(range(4)).completions == [[5, 6, 1], [6, 6, 1]] * 2


def test_chosen_prompts_depend_on_seed_and_id_alone() -> None:
    prompts = make_prompts(30)
    chosen = [p.id for p in choose_prompts(prompts, 10, seed=1)]
    assert [p.id for p in choose_prompts(prompts[::-1], 10, seed=1)] == chosen
    assert [p.id for p in choose_prompts(prompts, 20, seed=1)][:10] == chosen
    assert [p.id for p in choose_prompts(prompts, 10, seed=2)] != chosen
    assert len(choose_prompts(prompts, 99, seed=1)) == 30
