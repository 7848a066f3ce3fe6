"""Can this reward teach this model? A verdict on base-model completions, before training spends anything. Pure.

    groups of verdicts, the same judged again, texts, seconds -> PreflightReport: figures, a verdict, advice

A group teaches only when its rewards differ. `stop` is said when nothing can be learnt (no group differs, every judgement
failed) or nothing can be trusted (the same answer, judged twice, got two verdicts); `caution` when much is wasted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

from trainer.types import Verdict

ENOUGH_SIGNAL = 0.5
MUCH_SATURATED = 0.8
MANY_FAILURES = 0.05
MANY_UNPARSABLE = 0.5
FEW_DISTINCT = 0.3
SAME_SCORE = 1e-6


@dataclass(frozen=True)
class PreflightReport:
    """What a look at the reward found. Fractions are in [0, 1]; seconds are wall time."""

    num_prompts: int
    group_size: int
    reward_mean: float
    reward_std: float
    zero_signal_fraction: float  # groups whose rewards are all equal
    solved_fraction: float  # groups that are all right
    unsolved_fraction: float  # groups that are all equal and not right
    distinct_fraction: float  # distinct answers / answers, mean over groups
    truncated_fraction: float
    disagreement_fraction: float  # answers that got another verdict the second time
    status_fractions: dict[str, float]
    seconds_per_sample: float
    seconds_per_step: float  # to judge one training step
    suggested_group_size: int
    verdict: Literal["good", "caution", "stop"]
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        statuses = ", ".join(f"{name} {share:.0%}" for name, share in self.status_fractions.items() if share)
        return [
            f"reward on the base: {self.verdict}",
            f"  {self.num_prompts} prompts x {self.group_size} answers: mean {self.reward_mean:.3f}, std {self.reward_std:.3f}",
            f"  groups without signal {self.zero_signal_fraction:.0%} (solved {self.solved_fraction:.0%}, "
            f"unsolved {self.unsolved_fraction:.0%}); distinct answers {self.distinct_fraction:.0%}",
            f"  verdicts: {statuses}; judged twice alike {1 - self.disagreement_fraction:.1%}",
            f"  cost: {self.seconds_per_sample * 1000:.1f} ms a sample, {self.seconds_per_step:.1f} s a step",
            *(f"  - {sentence}" for sentence in self.advice),
        ]


def expected_signal(right: Sequence[int], group_size: int, sampled: int) -> float:
    """Return the share of groups of another size that would have both right and wrong answers.

    Args:
        right: right answers of each prompt among `sampled`; its rate is estimated as (right + 1/4) / (sampled + 1/2).
    """
    rates = [(count + 0.25) / (sampled + 0.5) for count in right]
    return fmean(1 - rate**group_size - (1 - rate) ** group_size for rate in rates)


def suggest_group_size(right: Sequence[int], group_size: int) -> int:
    """Return the smallest of the group size, its double and fourfold at which half of the groups would teach."""
    sizes = (group_size, 2 * group_size, 4 * group_size)
    return next((size for size in sizes if expected_signal(right, size, group_size) >= ENOUGH_SIGNAL), sizes[-1])


def analyse(
    groups: Sequence[Sequence[Verdict]],
    again: Sequence[Verdict],
    texts: Sequence[Sequence[str]],
    truncated_fraction: float,
    seconds: float,
    samples_per_step: int,
) -> PreflightReport:
    """Return the report.

    Args:
        groups: verdicts by prompt, groups of equal size.
        again: the verdicts of the same answers, in order, judged a second time.
        texts: the answers, as groups.
        seconds: wall time of judging all groups once.
    """
    flat = [verdict for group in groups for verdict in group]
    assert flat
    assert len(flat) == len(again)
    size = len(groups[0])
    flat_groups = [group for group in groups if max(v.score for v in group) - min(v.score for v in group) <= SAME_SCORE]
    solved = [group for group in flat_groups if group[0].score >= 1]
    counts = Counter(verdict.status for verdict in flat)
    right = [sum(verdict.score >= 1 for verdict in group) for group in groups]
    disagree = [a.status != b.status or abs(a.score - b.score) > SAME_SCORE for a, b in zip(flat, again, strict=True)]
    figures: dict[str, Any] = {
        "num_prompts": len(groups),
        "group_size": size,
        "reward_mean": fmean(verdict.score for verdict in flat),
        "reward_std": pstdev(verdict.score for verdict in flat),
        "zero_signal_fraction": len(flat_groups) / len(groups),
        "solved_fraction": len(solved) / len(groups),
        "unsolved_fraction": (len(flat_groups) - len(solved)) / len(groups),
        "distinct_fraction": fmean(len(set(group)) / len(group) for group in texts),
        "truncated_fraction": truncated_fraction,
        "disagreement_fraction": fmean(disagree),
        "status_fractions": {name: counts[name] / len(flat) for name in ("ok", "wrong", "unparsable", "timeout", "error")},
        "seconds_per_sample": seconds / len(flat),
        "seconds_per_step": seconds / len(flat) * samples_per_step,
        "suggested_group_size": suggest_group_size(right, size),
    }
    stops, cautions = _reasons_to_stop(figures), _reasons_for_caution(figures, flat)
    verdict: Literal["good", "caution", "stop"] = "stop" if stops else "caution" if cautions else "good"
    return PreflightReport(**figures, verdict=verdict, advice=(*stops, *cautions))


def _reasons_to_stop(figures: dict[str, Any]) -> list[str]:
    said = []
    statuses = figures["status_fractions"]
    if statuses["error"] + statuses["timeout"] == 1:
        said.append("no answer could be judged: every verdict is an error or a timeout; mend the verifier first")
    elif figures["zero_signal_fraction"] == 1:
        which = "solves every prompt: take harder prompts" if figures["solved_fraction"] == 1 else (
            "gets no reward that differs within a group: take easier prompts, allow partial credit, or a stronger base"
        )  # fmt: skip
        said.append(f"no group teaches anything; the base {which}")
    if figures["disagreement_fraction"] > 0.01:
        said.append(
            f"{figures['disagreement_fraction']:.1%} of the answers got another verdict the second time; make the verifier "
            "deterministic, or raise reward.timeout_seconds if they time out"
        )
    return said


def _reasons_for_caution(figures: dict[str, Any], verdicts: Sequence[Verdict]) -> list[str]:
    said = []
    statuses = figures["status_fractions"]
    if ENOUGH_SIGNAL < figures["zero_signal_fraction"] < 1:
        if figures["solved_fraction"] >= MUCH_SATURATED * figures["zero_signal_fraction"]:
            said.append(f"{figures['solved_fraction']:.0%} of the groups are solved already: take harder prompts")
        elif figures["unsolved_fraction"] >= MUCH_SATURATED * figures["zero_signal_fraction"]:
            said.append(
                f"{figures['unsolved_fraction']:.0%} of the groups get nothing: take easier prompts or give partial credit"
            )
        if figures["suggested_group_size"] > figures["group_size"]:
            said.append(f"train.batch.group_size: {figures['suggested_group_size']} would make more groups teach")
    if figures["distinct_fraction"] < FEW_DISTINCT and figures["zero_signal_fraction"] > ENOUGH_SIGNAL:
        said.append(
            f"only {figures['distinct_fraction']:.0%} of a group's answers are distinct: raise train.sampling.temperature"
        )
    if statuses["unparsable"] > MANY_UNPARSABLE:
        said.append(
            f"{statuses['unparsable']:.0%} of the answers are unparsable: ask for the answer's format in the prompt, or raise "
            "train.sampling.max_completion_tokens if they are cut"
        )
    for status in ("timeout", "error"):
        if statuses[status] > MANY_FAILURES:
            detail = next(v.detail for v in verdicts if v.status == status)
            said.append(f"{statuses[status]:.0%} of the judgements end in a {status}, for example: {detail}")
    if figures["truncated_fraction"] > ENOUGH_SIGNAL:
        said.append(f"{figures['truncated_fraction']:.0%} of the answers are cut by the length cap: raise it")
    return said
