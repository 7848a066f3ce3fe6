"""The pre-flight's verdict and advice, from verdicts."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.reward.preflight import PreflightReport, analyse, expected_signal
from trainer.types import Verdict


def verdict(score: float, status: str = "") -> Verdict:
    return Verdict(status or ("ok" if score >= 1 else "wrong"), score, {}, 0.0, "why")  # type: ignore[arg-type]


def report(groups: list[list[Verdict]], again: list[Verdict] | None = None, texts: Any = None) -> PreflightReport:
    flat = [v for group in groups for v in group]
    texts = texts or [[f"{i}" for i in range(len(group))] for group in groups]
    return analyse(groups, again or flat, texts, 0.0, seconds=2.0, samples_per_step=100)


def rewards(*groups: list[float]) -> list[list[Verdict]]:
    return [[verdict(score) for score in group] for group in groups]


def test_a_reward_with_signal_is_good() -> None:
    found = report(rewards([0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 1]))
    assert (found.verdict, found.advice) == ("good", ())
    assert found.zero_signal_fraction == 0
    assert found.reward_mean == pytest.approx(0.5)
    assert found.seconds_per_sample == pytest.approx(2 / 12)
    assert found.seconds_per_step == pytest.approx(100 * 2 / 12)


def test_nothing_to_learn_stops_and_says_in_which_direction() -> None:
    hard, easy = report(rewards([0, 0], [0, 0])), report(rewards([1, 1], [1, 1]))
    assert hard.verdict == easy.verdict == "stop"
    assert "easier prompts" in hard.advice[0]
    assert "harder prompts" in easy.advice[0]
    assert (hard.unsolved_fraction, easy.solved_fraction) == (1, 1)


def test_much_waste_is_a_caution_with_a_group_size() -> None:
    found = report(rewards([0, 0], [0, 0], [0, 0], [0, 1]))
    assert found.verdict == "caution"
    assert "easier prompts" in found.advice[0]
    assert found.suggested_group_size > 2
    assert any("group_size" in sentence for sentence in found.advice)


def test_saturation_asks_for_harder_prompts() -> None:
    found = report(rewards([1, 1], [1, 1], [1, 1], [0, 1]))
    assert "harder prompts" in found.advice[0]


def test_another_verdict_the_second_time_stops() -> None:
    groups = rewards([0, 1], [1, 0])
    found = report(groups, again=[verdict(1), verdict(1), verdict(1), verdict(0)])
    assert found.verdict == "stop"
    assert found.disagreement_fraction == 0.25
    assert "deterministic" in found.advice[0]


def test_failures_and_sameness_are_named() -> None:
    groups = [[verdict(0, "timeout"), verdict(1)], [verdict(0, "error"), verdict(1)], [verdict(0, "unparsable"), verdict(1)]]
    found = report(groups, texts=[["a", "a"], ["a", "a"], ["a", "a"]])
    assert any("timeout, for example: why" in sentence for sentence in found.advice)
    assert any("error, for example: why" in sentence for sentence in found.advice)
    broken = report([[verdict(0, "error"), verdict(0, "timeout")]])
    assert broken.verdict == "stop"
    assert "mend the verifier" in broken.advice[0]
    many = report([[verdict(0, "unparsable")] * 4 + [verdict(1)]], texts=[["a"] * 5])
    assert any("unparsable" in sentence for sentence in many.advice)


def test_equal_answers_matter_only_where_groups_teach_nothing() -> None:
    mostly_flat = report(rewards([0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]), texts=[["a"] * 4] * 3)
    assert any("temperature" in sentence for sentence in mostly_flat.advice)
    teaching = report(rewards([0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 1, 1]), texts=[["a", "b", "a", "a"]] * 3)
    assert not any("temperature" in sentence for sentence in teaching.advice)


def test_expected_signal_grows_with_the_group() -> None:
    assert expected_signal([1, 0], 8, 4) > expected_signal([1, 0], 4, 4)
    assert expected_signal([2], 2, 4) == pytest.approx(0.5, abs=0.01)


def test_the_report_reads_well() -> None:
    lines = report(rewards([0, 1], [0, 0])).lines()
    assert lines[0].startswith("reward on the base: ")
    assert "judged twice alike 100.0%" in lines[3]
