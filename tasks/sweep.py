"""A sweep in files: what it is, which trials it has, how each of them ended. Runs nothing.

    campaigns/<sweep>/sweep.json        the campaign, the axes, the trials so far
    campaigns/<sweep>/record.json       how the sweep itself goes: MLflow's parent run
    campaigns/<sweep>/<number>/         a trial: a workspace of its own, as any campaign's, with
        trial.json                      whose trial it is and its values (read by whatever runs there)
        outcome.json                    how it ended and its result; absent while it must still run

Everything else is a trial's own run directory. Trials share prompts, base and anchors through the cache of artifacts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tasks.record import begin, config_hash, flatten
from tasks.search import Axis, Kind, Known, Values, draw, grid, parse_axis
from tasks.workspace import Workspace
from trainer.config import CampaignConfig, as_tree, validate
from trainer.config.load import apply_overrides
from trainer.errors import ConfigError, ConfigErrors, DataError, first_line
from trainer.files import canonical_json, read_json, sha256_text, write_json
from trainer.metrics import METRICS, read_sound_lines

SWEEP, TRIAL, OUTCOME = "sweep.json", "trial.json", "outcome.json"
OBJECTIVE = "heldout/reward_mean"
_NO_AXES = {
    "campaign.name": "names no result",
    "machine": "changes no result; use --workers",
    "limits": "changes no result",
}
State = Literal["done", "pruned", "failed"]


@dataclass(frozen=True)
class Spec:
    """What a sweep tries. `num_trials` may grow from one command to the next; everything else makes it another sweep."""

    kind: Kind
    axes: tuple[str, ...]
    num_trials: int = 0  # of random and optuna; a grid has what it has
    seed: int = 0
    objective: str = OBJECTIVE
    prune: bool = True  # of optuna

    @property
    def parsed(self) -> tuple[Axis, ...]:
        return tuple(parse_axis(text) for text in self.axes)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: State
    result: float | None = None  # the objective's last value
    step: int | None = None  # its step
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    number: int
    values: Values

    @property
    def name(self) -> str:
        """Its values, by the last words of their keys that tell them apart."""
        return " ".join(
            f"{short}={value}" for short, value in zip(short_keys(list(self.values)), self.values.values(), strict=True)
        )


def short_keys(keys: Sequence[str]) -> list[str]:
    """Return for each dotted key its shortest ending that no other key has."""
    shorts = []
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        shorts.append(next((e for e in endings if not any(o == e or o.endswith(f".{e}") for o in others)), key))
    return shorts


@dataclass(frozen=True)
class Sweep:
    root: Path
    config: CampaignConfig  # of the campaign that the trials differ from
    spec: Spec
    trials: tuple[Trial, ...]
    threads: int = 0  # of each trial
    stages_name: str = ""
    stages: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return self.root.name

    def config_of(self, trial: Trial | None = None) -> CampaignConfig:
        """Return a trial's configuration; of no trial: what all of them have in common, their share of the cores included.

        Raises:
            ConfigError: its values do not go together.
        """
        overrides = [f"{key}={value}" for key, value in trial.values.items()] if trial is not None else []
        if self.threads and not self.config.machine.threads:
            overrides.append(f"machine.threads={self.threads}")
        return validate(apply_overrides(as_tree(self.config), overrides))

    def place(self, trial: Trial) -> Path:
        return self.root / f"{trial.number:03d}"

    def workspace(self, trial: Trial) -> Workspace:
        more = {"stages": self.stages, "stages_name": self.stages_name} if self.stages_name else {}
        return Workspace(self.place(trial), self.config_of(trial), **more)  # type: ignore[arg-type]

    def run_of(self, trial: Trial) -> Path | None:
        """Return a trial's run directory; None for one of Optuna's whose values do not go together, which never has any."""
        try:
            return self.workspace(trial).run
        except ConfigError:
            return None

    def outcome(self, trial: Trial) -> Outcome | None:
        """Return how a trial ended, or None while it must still run: never begun, stopped or killed."""
        try:
            return Outcome(**read_json(self.place(trial) / OUTCOME))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None

    def is_done(self, trial: Trial) -> bool:
        """Whether nothing is left to do: pruned, or finished with artifacts that are whole and of today's code."""
        outcome = self.outcome(trial)
        if outcome is None or outcome.state == "failed":
            return False
        workspace = self.workspace(trial)
        return outcome.state == "pruned" or all(workspace.is_current(stage) for stage in workspace.stages)

    def curve(self, trial: Trial) -> dict[int, float]:
        """Return a trial's objective by step, as far as it has come."""
        run = self.run_of(trial)
        return objective_curve(run, self.spec.objective) if run is not None else {}

    def known(self) -> list[Known]:
        """Return what is known of every trial that has a place, for Optuna."""
        found = []
        for trial in self.trials:
            outcome = self.outcome(trial)
            state, result = (outcome.state, outcome.result) if outcome else (None, None)
            found.append(Known(trial.values, state, result, self.curve(trial)))
        return found

    def with_trial(self, values: Values) -> tuple[Sweep, Trial]:
        """Return the sweep with one more trial, written down, and that trial."""
        trial = Trial(len(self.trials), values)
        sweep = replace(self, trials=(*self.trials, trial))
        sweep.write()
        return sweep, trial

    def write(self) -> None:
        tree = {
            "campaign": as_tree(self.config),
            "spec": asdict(self.spec),
            "stages": self.stages_name,
            "trials": [asdict(trial) for trial in self.trials],
        }
        write_json(self.root / SWEEP, tree)

    def write_trial(self, trial: Trial) -> None:
        """Say in a trial's workspace whose trial it is."""
        tree = {"sweep": self.name, "number": trial.number, "name": trial.name, "values": trial.values}
        write_json(self.place(trial) / TRIAL, tree)

    def begin(self) -> None:
        """Write that the sweep runs."""
        spec = {key: value for key, value in asdict(self.spec).items() if key != "axes"}
        params = {
            **flatten(as_tree(self.config)),
            **{f"sweep.{k}": v for k, v in spec.items()},
            "sweep.axes": list(self.spec.axes),
        }
        tags = {"sweep": self.name, "workspace": str(self.root), "campaign": self.config.campaign.name}
        begin(self.root, "sweep", self.name, self.config, identity(self.config, self.spec), params, tags)

    def ranking(self) -> list[tuple[Trial, Outcome]]:
        """Return the trials that ended, best result first; those without a result last."""
        ended = [(trial, outcome) for trial in self.trials if (outcome := self.outcome(trial)) is not None]
        return sorted(
            ended, key=lambda pair: (pair[1].state != "done", -(pair[1].result if pair[1].result is not None else -1e300))
        )


def objective_curve(run: Path, objective: str) -> dict[int, float]:
    """Return a run's objective by step."""
    lines, _ = read_sound_lines(run / "train" / METRICS)
    curve: dict[int, float] = {}
    for line in lines:
        value = line.get("metrics", {}).get(objective)
        if isinstance(value, int | float) and isinstance(line.get("step"), int):
            curve[line["step"]] = float(value)
    return curve


def identity(config: CampaignConfig, spec: Spec) -> str:
    """Return the sha256 of what makes a sweep this one: the campaign and what is tried, but not how often."""
    tried = {key: value for key, value in asdict(spec).items() if key not in ("num_trials", "prune")}
    return sha256_text(canonical_json({"campaign": config_hash(config), "tried": tried}))


def sweep_name(config: CampaignConfig, spec: Spec) -> str:
    """Return the name of a sweep that was given none: the same command finds the same sweep."""
    return f"{config.campaign.name[:40]}-{spec.kind}-{identity(config, spec)[:6]}"


def check(config: CampaignConfig, spec: Spec) -> None:
    """Refuse what cannot be swept, before anything starts.

    Raises:
        ConfigError, ConfigErrors: by key.
    """
    axes = spec.parsed
    if not axes:
        raise ConfigError(
            "sweep", "", "names no key; write key=a,b,c or key=low..high, e.g. train.optimizer.learning_rate=1e-4,3e-4"
        )
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(key, spec.axes[keys.index(key)], "is named twice; put all its values in one list")
        for refused, why in _NO_AXES.items():
            if key == refused or key.startswith(f"{refused}."):
                raise ConfigError(key, "", f"{why}, so there is nothing to compare; take it out of the sweep")
    if spec.kind != "grid" and spec.num_trials < 1:
        raise ConfigError(f"--{spec.kind}", spec.num_trials, "needs at least one trial")
    if spec.objective.startswith("heldout/") and config.train.heldout.every_steps == 0:
        raise ConfigError("train.heldout.every_steps", 0, f"the objective {spec.objective} is never measured; set it above 0")
    tree, problems = as_tree(config), dict[tuple[str, str], ConfigError]()
    for axis in [axis for axis in axes if not axis.choices or spec.kind == "optuna"]:  # choices are tried trial by trial
        for value in axis.ends:
            try:
                validate(apply_overrides(tree, [f"{axis.key}={value}"]))
            except ConfigError as error:
                if len(axes) == 1 or error.key == axis.key:  # else another axis may make it right
                    problems.setdefault((error.key, error.problem), error)
    if problems:
        found = list(problems.values())
        raise found[0] if len(found) == 1 else ConfigErrors(found)


def planned(spec: Spec) -> list[Values]:
    """Return the values of all trials that are decided beforehand; Optuna decides its own as it goes.

    Raises:
        ConfigError: there are none, too many, or not enough different ones.
    """
    if spec.kind == "grid":
        return grid(spec.parsed)
    return draw(spec.parsed, spec.num_trials, spec.seed) if spec.kind == "random" else []


def make_sweep(
    config: CampaignConfig, spec: Spec, root: Path, threads: int = 0, stages: Sequence[Any] = (), stages_name: str = ""
) -> Sweep:
    """Return a sweep with all the trials that are known beforehand, those of an earlier command included; writes nothing.

    Raises:
        ConfigError, ConfigErrors: a trial's values do not go together, or the folder is another sweep's.
    """
    check(config, spec)
    trials = [Trial(number, values) for number, values in enumerate(planned(spec))]
    sweep = Sweep(root, config, spec, tuple(trials), threads, stages_name, tuple(stages))
    refused: dict[str, list[tuple[Trial, ConfigError]]] = {}
    seen: dict[str, Trial] = {}
    for trial in trials:
        try:
            twin = seen.setdefault(config_hash(sweep.config_of(trial)), trial)
        except ConfigError as error:
            refused.setdefault(f"{error.key}: {error.problem}", []).append((trial, error))
            continue
        if twin is not trial:
            problem = f"trial {trial.number} is trial {twin.number} again; name each value once"
            refused[trial.name] = [(trial, ConfigError("sweep", trial.name, problem))]
    problems = [_of_the_value(sweep, group) for group in refused.values()]
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigErrors(problems)
    return _go_on(sweep)


def _of_the_value(sweep: Sweep, refused: Sequence[tuple[Trial, ConfigError]]) -> ConfigError:
    """Return why some trials are refused: by the key where a value suits no trial, else by the first trial."""
    trial, error = refused[0]
    value = trial.values.get(error.key)
    alike = [other for other in sweep.trials if value is not None and other.values[error.key] == value]
    if len(alike) <= len(refused) or len(refused) == len(sweep.trials):
        return error
    return ConfigError("sweep", trial.name, f"trial {trial.number} cannot run: {first_line(error)}")


def _go_on(sweep: Sweep) -> Sweep:
    """Return the sweep with the trials that its folder already has."""
    if not (sweep.root / SWEEP).exists():
        if any((sweep.root / name).exists() for name in ("params.yaml", "runs", "artifacts")):
            raise ConfigError("--name", sweep.name, f"{sweep.root} holds something else; choose another name")
        return sweep
    old = read_sweep(sweep.root)
    if identity(old.config, old.spec) != identity(sweep.config, sweep.spec):
        raise ConfigError("--name", sweep.name, f"{sweep.root} holds another sweep; choose another name, or leave it out")
    known = old.trials if sweep.spec.kind == "optuna" else ()
    return replace(sweep, trials=tuple(sweep.trials) or known)


def is_sweep(path: Path) -> bool:
    return (path / SWEEP).is_file()


def read_sweep(root: Path) -> Sweep:
    """Return the sweep of a folder.

    Raises:
        DataError: it holds none that can be read.
    """
    from tasks.command import load_stages

    try:
        tree: Mapping[str, Any] = read_json(root / SWEEP)
        spec = Spec(**{**tree["spec"], "axes": tuple(tree["spec"]["axes"])})
        trials = tuple(Trial(int(entry["number"]), dict(entry["values"])) for entry in tree["trials"])
        stages_name = str(tree["stages"])
        return Sweep(root, validate(tree["campaign"]), spec, trials, 0, stages_name, load_stages(stages_name))
    except FileNotFoundError:
        raise DataError(str(root), f"is no sweep: it has no {SWEEP}") from None
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(str(root / SWEEP), f"cannot be read ({first_line(error)}); move {root} away to begin anew") from None


def read_trial(workspace: Path) -> dict[str, Any] | None:
    """Return what trial.json in a workspace says, or None where the workspace is no sweep's."""
    try:
        tree = read_json(workspace / TRIAL)
        return {
            "sweep": str(tree["sweep"]),
            "number": int(tree["number"]),
            "name": str(tree["name"]),
            "values": dict(tree["values"]),
        }
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
