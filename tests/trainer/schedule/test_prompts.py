"""NUMERICS 19: prompts and seeds of a step come from the campaign's seed and the step alone."""

from __future__ import annotations

import random

import pytest

from trainer.config.schema import RLStage
from trainer.errors import DataError
from trainer.schedule.prompts import PromptCursor, locate, make_requests
from trainer.types import Prompt

PROMPTS = [Prompt(f"p{i}", "even" if i % 2 == 0 else "odd", "train", "", (1, 2 + i), "") for i in range(10)]
STAGES = (RLStage(name="a", steps=2), RLStage(name="b", steps=3, sources=("odd",)))


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_an_epoch_holds_every_prompt_once_and_the_next_is_shuffled_anew() -> None:
    cursor = PromptCursor(PROMPTS, STAGES[0], 5, seed=0)
    epochs = [ids(cursor.take(2 * e + 1) + cursor.take(2 * e + 2)) for e in range(3)]
    assert all(sorted(epoch) == sorted(ids(PROMPTS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_row_19_a_step_has_the_same_prompts_when_asked_for_alone() -> None:
    walked = PromptCursor(PROMPTS, STAGES[0], 3, seed=4)
    taken = {step: ids(walked.take(step)) for step in range(1, 9)}
    random.seed(5)
    for step in (8, 2, 5):
        assert ids(PromptCursor(PROMPTS, STAGES[0], 3, seed=4).take(step)) == taken[step]
    assert ids(PromptCursor(PROMPTS, STAGES[0], 3, seed=5).take(1)) != taken[1]


def test_row_19_requests_do_not_depend_on_their_company() -> None:
    whole = {(r.prompt_id, r.sample_index): r for r in make_requests(PROMPTS, 4, step=7, seed=1)}
    for worker in (PROMPTS[:3], PROMPTS[3:][::-1]):
        for request in make_requests(worker, 4, step=7, seed=1):
            assert request == whole[request.prompt_id, request.sample_index]
    assert len({r.seed for r in whole.values()}) == 40
    for others in (make_requests(PROMPTS, 4, step=8, seed=1), make_requests(PROMPTS, 4, step=7, seed=2)):
        assert not {r.seed for r in whole.values()} & {r.seed for r in others}


def test_a_prompt_that_comes_twice_in_a_step_draws_other_completions() -> None:
    cursor = PromptCursor(PROMPTS[:2], STAGES[0], 3, seed=0)
    requests = make_requests(cursor.take(1), 2, step=1, seed=0)
    assert len(requests) == 6
    assert len({r.seed for r in requests}) == 6
    assert len({(r.prompt_id, r.sample_index) for r in requests}) == 6


def test_a_stage_takes_its_own_sources() -> None:
    assert {p.source for p in PromptCursor(PROMPTS, STAGES[1], 20, seed=0).take(1)} == {"odd"}
    with pytest.raises(DataError, match=r"'c'.*no training prompt of even; run prepare again"):
        PromptCursor(PROMPTS[1:2], RLStage(name="c", steps=1, sources=("even",)), 1, seed=0)


def test_steps_are_counted_over_all_stages() -> None:
    assert [(locate(STAGES, step).index, locate(STAGES, step).step) for step in range(1, 6)] == [
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
