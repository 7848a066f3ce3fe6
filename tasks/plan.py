"""Plans for people and programs: what is asked on the command line in, a page, a JSON tree or a verdict out.

    gather(...)      recipe, plan file or flags       -> PlanRequest, on calibrated hardware
    page(...)        a plan with its advice           -> one self-contained HTML page, stacked bars by device and phase
    check(...)       a campaign before it starts      -> Verdict; the gate of `tithe run`
    record_...       prediction, then what was measured beside it, as metrics plan/... of the campaign's run
    calibrate(...)   a finished run                   -> how fast this machine really is, used by every later plan

The ledgers themselves are trainer/plan; nothing here computes bytes or seconds.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.charts import NUM_PARTS, Part, stacked_chart
from tasks.workspace import REPOSITORY, Workspace, state_directory
from trainer.config import CampaignConfig, load_config, read_yaml, validate
from trainer.config.load import apply_overrides, lay_over, validate_as
from trainer.errors import ConfigError, DataError, ResourceError
from trainer.files import read_json, write_json, write_text
from trainer.metrics import METRICS, RunWriter, read_lines
from trainer.plan.advice import Advice, advise
from trainer.plan.flags import flags
from trainer.plan.hardware import Efficiency, Hardware, load_hardware
from trainer.plan.memory import TRAIN_STAGE
from trainer.plan.plan import Plan, make_plan, size
from trainer.plan.request import Choices, PlanFile, PlanRequest, is_plan, plan_request, request_of
from trainer.plan.skeleton import load_card

TEMPLATE = "plan.html.j2"
CALIBRATION = "calibration.json"
PLAN = "plan.json"


# -- what is asked --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What a person asked for; None leaves it to the file."""

    target: Path | None = None
    model: str | None = None
    hardware: str | None = None
    devices: int | None = None
    sampling_devices: int | None = None
    price_per_hour: float | None = None
    overrides: tuple[str, ...] = ()


def gather(asked: Asked, params: Path | None = None) -> PlanRequest:
    """Return the request that was asked for.

    A plan file stands by itself; a recipe is a difference from `params`; neither, but a model, is a plan with defaults.

    Raises:
        ConfigError, ModelError: what is wrong or missing, by name.
    """
    tree = read_yaml(asked.target) if asked.target is not None else {}
    if is_plan(tree) or (asked.target is None and asked.model is not None):
        request = _from_plan(tree, asked)
    else:
        request = _from_campaign(asked, params)
    changes = {"devices": asked.devices, "sample__devices": asked.sampling_devices}
    request = request.change(**{key: value for key, value in changes.items() if value is not None})
    validate_as(Choices, request.choices.model_dump(mode="json"), "plan")
    hardware = calibrated(request.hardware)
    if asked.price_per_hour is not None:
        device = hardware.device.model_copy(update={"price_per_hour": asked.price_per_hour})
        hardware = hardware.model_copy(update={"device": device})
    return replace(request, hardware=hardware)


def _from_plan(tree: dict[str, Any], asked: Asked) -> PlanRequest:
    over = {"model": asked.model, "hardware": asked.hardware}
    tree = lay_over(tree, {key: value for key, value in over.items() if value is not None})
    tree.setdefault("name", asked.target.stem if asked.target else str(asked.model))
    prefixed = [text if re.split("[.=]", text)[0] in PlanFile.model_fields else f"choices.{text}" for text in asked.overrides]
    return request_of(validate_as(PlanFile, apply_overrides(tree, prefixed), "plan"))


def _from_campaign(asked: Asked, params: Path | None) -> PlanRequest:
    params = params or REPOSITORY / "params.yaml"
    config = load_config(asked.target or params, asked.overrides, params)
    card = load_card(asked.model) if asked.model is not None else None
    return plan_request(config, hardware_of(asked.hardware or "local"), card)


def hardware_of(name: str) -> Hardware:
    """Return a hardware description; this machine's is kept, so that the gate need not probe it again."""
    if name != "local":
        return load_hardware(name)
    from trainer.plan.probe import probe_local

    return probe_local(state=state_directory())


# -- the gate -----------------------------------------------------------------------------------------------------------------


def check(config: CampaignConfig, hardware: Hardware, lengths: Mapping[str, float | None] | None = None) -> Plan:
    """Return the plan of a campaign on some hardware; its verdict says whether it may start."""
    return make_plan(plan_request(config, hardware, lengths=lengths))


def gate(workspace: Workspace, force: bool = False) -> tuple[Plan | None, list[str]]:
    """Plan a campaign before it starts, on this machine as it is now.

    Returns:
        The plan, or None where the model is not on this machine yet, and sentences for the person who starts it.

    Raises:
        ResourceError: it cannot fit, and nobody insisted.
    """
    from trainer.plan.probe import quick_local

    try:
        plan = check(workspace.config, calibrated(quick_local(state_directory())), prepared_lengths(workspace))
    except ConfigError as error:
        if error.key != "base.source":
            raise
        return None, [f"not planned: {error.problem.partition(';')[0]}"]
    verdict = plan.verdict
    said = [f"plan: {verdict.sentence}"]
    if not verdict.fits:
        way = [step.change.says(step.after.request) for step in advise(plan).fit]
        advice = f" What would help: {'; '.join(way)}." if way else ""
        if not force:
            raise ResourceError(
                f"{verdict.sentence}.{advice} `tithe plan` shows the ledger; `tithe run --force` starts it anyway"
            )
        said.append(f"warning: started although it does not fit, as asked.{advice}")
    return plan, said


def prepared_lengths(workspace: Workspace) -> dict[str, float | None]:
    """Return the lengths that are known before a run: the longest and the mean prompt, where prompts are prepared."""
    folder = workspace.artifact("prompts")
    if not (folder / "manifest.json").exists():
        return {}
    from trainer.prompts import read_prompts

    sizes = [len(prompt.token_ids) for prompt in read_prompts(folder, "train")]
    return {"prompt_tokens": statistics.mean(sizes), "longest_prompt": float(max(sizes))} if sizes else {}


def predicted(plan: Plan) -> dict[str, float]:
    """Return a plan's main numbers as metrics."""
    schedule, (peak, _) = plan.schedule, plan.memory.peak("device", TRAIN_STAGE)
    return {
        "plan/predicted_peak_bytes": peak,
        "plan/predicted_step_seconds": schedule.step_seconds,
        "plan/predicted_sample_seconds": schedule.sample_seconds,
        "plan/predicted_learn_seconds": schedule.train_seconds + schedule.score_seconds,
        "plan/predicted_tokens_per_second": schedule.tokens_per_second,
        "plan/margin_bytes": plan.verdict.tightest.margin_bytes,
    }


def record_prediction(workspace: Workspace, plan: Plan) -> None:
    """Write the plan into the run directory, and its main numbers as the campaign's metrics."""
    write_json(workspace.run / PLAN, plan.as_tree())
    (workspace.run / METRICS).unlink(missing_ok=True)
    RunWriter(workspace.run).metrics(0, predicted(plan))


def record_measurement(workspace: Workspace) -> dict[str, float]:
    """Write what the train stage took beside what was predicted; nothing where it left no metrics."""
    lines = [line["metrics"] for line in read_lines(workspace.run / "train" / METRICS)]
    steps = [line for line in lines if "time/step_seconds" in line]
    if not steps or not (workspace.run / PLAN).exists():
        return {}
    seen = measured(steps)
    forecast: dict[str, float] = next((line["metrics"] for line in read_lines(workspace.run / METRICS)), {})
    values = {f"plan/measured_{key}": value for key, value in seen.items()}
    for key, value in seen.items():
        if forecast.get(f"plan/predicted_{key}"):
            values[f"plan/ratio_{key}"] = forecast[f"plan/predicted_{key}"] / value
    lines_now = read_lines(workspace.run / METRICS)
    if not any("plan/measured_step_seconds" in line["metrics"] for line in lines_now):
        RunWriter(workspace.run).metrics(len(steps), values)
    return values


def measured(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what some steps took: the highest memory, the median seconds. The first step, which warms up, is left out."""
    later = steps[1:] or steps

    def median(key: str) -> float:
        values = [float(line[key]) for line in later if key in line]
        return statistics.median(values) if values else 0.0

    memory = "memory/device_peak_bytes" if "memory/device_peak_bytes" in later[0] else "memory/rss_peak_bytes"
    memory = memory if memory in later[0] else "memory/rss_bytes"
    seen = {
        "peak_bytes": max((float(line[memory]) for line in steps if memory in line), default=0.0),
        "step_seconds": median("time/step_seconds"),
        "sample_seconds": median("time/sample_seconds"),
        "learn_seconds": median("time/learn_seconds"),
    }
    return {key: value for key, value in seen.items() if value > 0}


# -- calibration ----------------------------------------------------------------------------------------------------------------


def calibration_file() -> Path:
    return state_directory() / CALIBRATION


def calibrated(hardware: Hardware) -> Hardware:
    """Return a hardware description with the efficiencies that a finished run taught, if one did."""
    path = calibration_file()
    known = read_json(path) if path.exists() else {}
    learned = known.get(key_of(hardware))
    if learned is None:
        return hardware
    efficiency = validate_as(Efficiency, {**hardware.efficiency.model_dump(), **learned["efficiency"]}, "calibration")
    return hardware.model_copy(update={"efficiency": efficiency, "notes": (*hardware.notes, f"calibrated on {learned['run']}")})


def key_of(hardware: Hardware) -> str:
    """Return what a calibration belongs to: the hardware's name and its device's."""
    return f"{hardware.name}/{hardware.device.name}"


def learn(request: PlanRequest, seen: Mapping[str, float]) -> dict[str, float]:
    """Return the efficiencies under which a plan would have taken what was measured.

    Args:
        request: of the finished run, on uncalibrated hardware.
        seen: measured peak_bytes and seconds, see `measured`.
    """
    plain = replace(request, hardware=request.hardware.model_copy(update={"efficiency": Efficiency()}))
    plan = make_plan(plain)
    schedule = plan.schedule
    learned: dict[str, float] = {}
    learn_predicted = schedule.train_seconds + schedule.score_seconds
    if seen.get("learn_seconds") and learn_predicted:
        learned["train"] = learned["score"] = learn_predicted / seen["learn_seconds"]
    if seen.get("sample_seconds") and schedule.sample_seconds:
        learned["sample"] = schedule.sample_seconds / seen["sample_seconds"]
    known = seen.get("learn_seconds", 0.0) + seen.get("sample_seconds", 0.0)
    if seen.get("step_seconds"):
        learned["fixed_seconds"] = max(0.0, seen["step_seconds"] - known)
    if seen.get("peak_bytes"):
        fixed = plan.memory.find("device", "worker process") + plan.memory.find("device", "driver and libraries")
        mine = plan.memory.peak("device", TRAIN_STAGE)[0] - fixed
        if seen["peak_bytes"] > fixed:
            learned["memory"] = (seen["peak_bytes"] - fixed) / mine
    return learned


def calibrate(run: Path, hardware: Hardware) -> dict[str, float]:
    """Learn from a finished run how fast this hardware is, and keep it for later plans.

    Args:
        run: a campaign's run directory (config.json and train/metrics.jsonl).
        hardware: what it ran on.

    Raises:
        DataError: no such run, or too few steps.
    """
    if not (run / "config.json").exists():
        raise DataError(str(run), "is no run directory: it has no config.json; give one below runs/")
    steps = [line["metrics"] for line in read_lines(run / "train" / METRICS)]
    steps = [line for line in steps if "time/step_seconds" in line]
    if len(steps) < 2:
        raise DataError(str(run / "train" / METRICS), f"has {len(steps)} steps with times; at least 2 are needed to calibrate")
    config = validate(read_json(run / "config.json"))
    lengths = [line["completion/length_mean"] for line in steps if "completion/length_mean" in line]
    prompts = prepared_lengths(Workspace(run.parent.parent, config))
    known_lengths = {**prompts, "completion_tokens": statistics.mean(lengths) if lengths else None}
    request = plan_request(config, hardware, lengths=known_lengths)
    learned = learn(request, measured(steps))
    path = calibration_file()
    known = read_json(path) if path.exists() else {}
    write_json(path, {**known, key_of(hardware): {"run": run.name, "efficiency": learned}})
    return learned


# -- the page --------------------------------------------------------------------------------------------------------------------


def page(plan: Plan, advice: Advice | None = None, said: Sequence[str] | None = None) -> str:
    """Return a plan as one self-contained HTML page."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters |= {"size": size, "markup": lambda text: jinja2.utils.markupsafe.Markup(text)}
    template = environment.get_template(TEMPLATE)
    advice = advice if advice is not None else advise(plan)
    rooms = [_room(plan, room.place) for room in plan.verdict.rooms]
    return template.render(
        plan=plan,
        request=plan.request,
        card=plan.request.card,
        schedule=plan.schedule,
        verdict=plan.verdict,
        rooms=rooms,
        advice=advice,
        flags=flags(plan) if said is None else said,
        num_parts=NUM_PARTS,
    )


def _room(plan: Plan, place: str) -> dict[str, Any]:
    """Return one place's chart: a bar for every phase, the same term in the same colour."""
    room = next(room for room in plan.verdict.rooms if room.place == place)
    totals: dict[str, float] = {}
    for phase in plan.memory.phases(place):
        for term in plan.memory.at(place, phase):
            totals[term.name] = max(totals.get(term.name, 0.0), term.bytes)
    order = sorted(totals, key=lambda name: -totals[name])
    colours = {name: min(index, NUM_PARTS - 1) for index, name in enumerate(order)}
    rows = []
    for phase in plan.memory.phases(place):
        terms = sorted(plan.memory.at(place, phase), key=lambda term: order.index(term.name))
        rows.append((phase, [Part(term.name, term.bytes, colours[term.name]) for term in terms]))
    chart = stacked_chart(f"memory of {place} by phase", rows, room.capacity_bytes, size)
    legend = [(name, colours[name], totals[name]) for name in order]
    return {"room": room, "chart": chart, "legend": legend, "terms": plan.memory.at(place, room.phase)}


def write_page(plan: Plan, path: Path, advice: Advice | None = None) -> None:
    write_text(path, page(plan, advice))
