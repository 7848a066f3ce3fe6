"""The INT8 reference: NUMERICS 16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.trainer.memory.kit import make_model, make_works
from trainer.learn.logprobs import TokenScorer
from trainer.memory.anatomy import Anatomy
from trainer.memory.build import Loaded, buffers
from trainer.memory.disk import DiskSource
from trainer.memory.int8 import Int8Reference, logprob_error, pack, prompt_works, quantise, unpack


def test_each_output_row_has_its_own_scale_and_the_error_is_half_a_step() -> None:
    matrix = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 10, 0, 1, 1])[:, None]
    values, scale = quantise(matrix)
    assert values.dtype == torch.int8
    back = values.float() * scale[:, None]
    assert ((back - matrix).abs() <= scale[:, None] / 2 * 1.0001).all()
    assert not back[3].any(), "a row of zeros stays one"


def test_a_unit_goes_through_bytes_and_back() -> None:
    anatomy = Anatomy(make_model("qwen3_moe"))
    for unit, flat in buffers(anatomy, Loaded(anatomy), torch.device("cpu")):
        packed = pack(unit, flat)
        back = unpack(unit, packed, torch.zeros_like(flat))
        for part in unit.parts:
            one, other = part.view(flat), part.view(back)
            if len(part.shape) >= 2:
                assert ((one - other).abs() <= one.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
            else:
                assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_row_16_log_probs_are_near_those_of_the_base(kind: str, on_disk: bool, tmp_path: Path) -> None:
    model, works = make_model(kind), make_works()
    scorer = TokenScorer(make_model(kind), 0.8)
    with torch.no_grad():
        whole = [scorer.score(work.input_ids_BS, work.where_T, work.ids_TK) for work in works]
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    keep = (lambda packed: DiskSource(tmp_path / "reference", packed, prefetch=2)) if on_disk else None
    reference = Int8Reference(model, 0.8, keep)
    error = logprob_error(reference.score(works), whole)
    assert 0 < error < 0.02
    assert reference.num_bytes < 0.45 * num_bytes, "rows of these tiny matrices are short, and each has a scale"
    reference.residency.source.shutdown()


def test_prompts_score_themselves() -> None:
    model = make_model("llama")
    prompts = [[3, 4, 5, 6], [7], [8, 9]]
    (work,) = prompt_works(prompts, torch.device("cpu"))
    scorer = TokenScorer(model, 1.0)
    with torch.no_grad():
        found = scorer.score(work.input_ids_BS, work.where_T, work.ids_TK).logprobs_TK.squeeze(1)
        alone = torch.log_softmax(model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0], -1)
    torch.testing.assert_close(found[:3], alone[[0, 1, 2], [4, 5, 6]])
    assert len(found) == 4
