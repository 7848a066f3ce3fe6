"""What a sweep tries: axes out of text, and the values of each trial out of axes.

    train.optimizer.learning_rate=1e-4,3e-4         choices, as YAML
    train.lora.rank=4..64                           whole numbers
    train.optimizer.learning_rate=1e-5..1e-3:log    real numbers, even on a log scale

    grid      every combination of choices, in the order in which they were written
    random    draws, each decided by seed and number alone
    optuna    proposals from what earlier trials gave, and a word on whether a running one is worth its time

A trial's values are texts, as a person would write them after -S. Nothing here touches a file, and Optuna keeps nothing: its
study is made anew, from what the sweep's files know, whenever it is asked.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import optuna

Kind = Literal["grid", "random", "optuna"]
Values = dict[str, str]  # dotted key -> YAML text
MAX_TRIALS = 1000
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\.\.({_NUMBER})\s*(?::\s*(\S*)\s*)?")
_OPEN, _CLOSE = "[{(", "]})"


@dataclass(frozen=True)
class Axis:
    """One key and what it may be: choices, or a range."""

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that a mistake would show at: every choice, or both ends of the range."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: float) -> str:
        """Return a value of the range as text: six digits are enough for a person, and inside the range."""
        if self.whole:
            return str(round(value))
        short = f"{value:.6g}"
        return short if self.low <= float(short) <= self.high else repr(value)

    def draw(self, random_numbers: random.Random) -> str:
        """Return a value drawn evenly, on a log scale where the range says so."""
        if self.choices:
            return random_numbers.choice(self.choices)
        if self.whole and not self.log:
            return str(random_numbers.randint(round(self.low), round(self.high)))
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = random_numbers.uniform(low, high)
        return self.text(min(max(math.exp(value) if self.log else value, self.low), self.high))


def parse_axis(text: str) -> Axis:
    """Return the axis that `key=a,b,c`, `key=low..high` or `key=low..high:log` means.

    Raises:
        ConfigError: it means none; names the key and what to write.
    """
    key, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(
            "sweep", text, "expected key=a,b,c or key=low..high[:log], e.g. train.optimizer.learning_rate=1e-4,3e-4"
        )
    found = _RANGE.fullmatch(raw)
    if found:
        return _range(key, raw, *found.groups())
    choices = tuple(piece.strip() for piece in _pieces(raw))
    if not all(choices):
        raise ConfigError(key, raw, "names no value" if not raw else "has an empty value; take the extra comma out")
    return Axis(key, choices)


def _range(key: str, raw: str, low_text: str, high_text: str, scale: str | None) -> Axis:
    low, high, log = float(low_text), float(high_text), scale == "log"
    if scale not in (None, "log", "linear"):
        raise ConfigError(key, raw, f"{scale!r} is no scale; write low..high or low..high:log")
    if not (math.isfinite(low) and math.isfinite(high)) or low >= high:
        raise ConfigError(key, raw, "a range goes from the lower number to the higher one")
    if log and low <= 0:
        raise ConfigError(key, raw, "a log scale has no zero and nothing below; begin above 0, or leave :log out")
    whole = all(re.fullmatch(r"[-+]?\d+", text) for text in (low_text, high_text))
    return Axis(key, (), low, high, whole, log)


def _pieces(raw: str) -> list[str]:
    """Split at the commas that stand in no bracket and no quote."""
    pieces, depth, quote, begin = [], 0, "", 0
    for place, letter in enumerate(raw):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
        elif letter == "," and depth == 0:
            pieces.append(raw[begin:place])
            begin = place + 1
    return [*pieces, raw[begin:]]


def grid(axes: Sequence[Axis]) -> list[Values]:
    """Return every combination; the last axis changes fastest.

    Raises:
        ConfigError: an axis is a range, or there are too many combinations.
    """
    for axis in axes:
        if not axis.choices:
            text = f"{axis.text(axis.low)}..{axis.text(axis.high)}"
            raise ConfigError(
                axis.key, text, "a grid needs a list of values, e.g. 1e-4,3e-4; ranges are for --random and --optuna"
            )
    count = math.prod(len(axis.choices) for axis in axes)
    if count > MAX_TRIALS:
        raise ConfigError("--grid", count, f"combinations are too many (at most {MAX_TRIALS}); use --random or --optuna")
    return [
        dict(zip((axis.key for axis in axes), values, strict=True)) for values in itertools.product(*(a.choices for a in axes))
    ]


def draw(axes: Sequence[Axis], num_trials: int, seed: int) -> list[Values]:
    """Return so many different draws; the same number is the same draw, however many are asked for.

    Raises:
        ConfigError: there are not so many.
    """
    found: list[Values] = []
    for number in itertools.count():
        if len(found) == num_trials:
            return found
        if number > 100 * num_trials:
            raise ConfigError(
                "--random", num_trials, f"there are only {len(found)} different trials; use --grid, or ask for fewer"
            )
        values = {axis.key: axis.draw(random.Random(f"{seed}/{number}/{axis.key}")) for axis in axes}
        if values not in found:
            found.append(values)
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Known:
    """What is known of a trial: its values, how it ended (None: it runs), its result and its curve by step."""

    values: Values
    state: Literal["done", "pruned", "failed"] | None = None
    result: float | None = None
    curve: Mapping[int, float] = field(default_factory=dict)


def propose(axes: Sequence[Axis], known: Sequence[Known], seed: int) -> Values:
    """Return the values that Optuna's tree-structured Parzen estimator would try next; running trials count as bad ones.

    Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization".
    """
    from optuna.samplers import TPESampler

    study = _study(
        axes, known, TPESampler(seed=seed + len(known), constant_liar=True, n_startup_trials=min(10, 2 + 2 * len(axes)))
    )
    trial = study.ask(_distributions(axes))
    return {axis.key: axis.text(value) if not axis.choices else str(value) for axis in axes for value in [trial.params[axis.key]]}


def is_hopeless(axes: Sequence[Axis], known: Sequence[Known], curve: Mapping[int, float], num_steps: int) -> bool:
    """Whether a running trial's best so far is below the median of the finished ones at the same step.

    Nothing is hopeless before a fifth of the steps, nor before three others have finished. Optuna's median rule, after Golovin
    et al. 2017, "Google Vizier".

    Args:
        curve: the running trial's objective by step.
        num_steps: of a whole trial.
    """
    from optuna.pruners import MedianPruner
    from optuna.samplers import RandomSampler
    from optuna.trial import TrialState, create_trial

    study = _study(axes, known, RandomSampler(seed=0))
    running = create_trial(state=TrialState.RUNNING, intermediate_values=dict(curve))
    rule = MedianPruner(n_startup_trials=3, n_warmup_steps=math.ceil(num_steps / 5))
    return bool(curve) and rule.prune(study, running)


def _distributions(axes: Sequence[Axis]) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for axis in axes:
        if axis.choices:
            found[axis.key] = CategoricalDistribution(axis.choices)
        elif axis.whole:
            found[axis.key] = IntDistribution(round(axis.low), round(axis.high), log=axis.log)
        else:
            found[axis.key] = FloatDistribution(axis.low, axis.high, log=axis.log)
    return found


def _study(axes: Sequence[Axis], known: Sequence[Known], sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = _distributions(axes)
    states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL, None: TrialState.RUNNING}
    for one in known:
        state = states["failed" if one.state == "done" and one.result is None else one.state]
        params = {axis.key: one.values[axis.key] if axis.choices else _number(axis, one.values[axis.key]) for axis in axes}
        value = one.result if state == TrialState.COMPLETE else None
        curve = {step: height for step, height in one.curve.items() if math.isfinite(height)}
        study.add_trial(
            create_trial(state=state, params=params, distributions=distributions, value=value, intermediate_values=curve)
        )
    return study


def _number(axis: Axis, text: str) -> float:
    return int(text) if axis.whole else float(text)
