"""Plans for people and programs: what is asked on the command line in, a page, a JSON tree or a verdict out.

    gather(...)      recipe, plan file or flags       -> PlanRequest, on calibrated hardware
    page(...)        a plan with its advice           -> one self-contained HTML page, stacked bars by device and phase
    gate(...)        a campaign before it starts      -> refused where it cannot fit this machine
    record_...       prediction, then what was measured beside it, as metrics plan/... of the campaign's run
    calibrate(...)   a finished run                   -> how fast this machine really is, used by every later plan

The ledgers themselves are trainer/plan; nothing here computes bytes or seconds.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.charts import NUM_PARTS, Part, stacked_chart
from tasks.workspace import REPOSITORY, Workspace, state_directory
from trainer.config import CampaignConfig, load_config, read_yaml, validate
from trainer.config.load import apply_overrides, lay_over, validate_as
from trainer.errors import ConfigError, DataError, ModelError, ResourceError, first_line
from trainer.files import read_json, read_manifest, write_json, write_text
from trainer.metrics import METRICS, RunWriter, read_lines
from trainer.plan.advice import Advice, advise
from trainer.plan.flags import flags
from trainer.plan.hardware import Device, Efficiency, Hardware, load_hardware
from trainer.plan.memory import CONTEXT, TRAIN_STAGE
from trainer.plan.plan import Plan, floor, make_plan, size
from trainer.plan.probe import memory_limit_bytes, quick_local
from trainer.plan.request import Choices, PlanFile, PlanRequest, is_plan, plan_request, request_of
from trainer.plan.skeleton import load_card
from trainer.prompts import prompt_path

TEMPLATE = "plan.html.j2"
CALIBRATION = "calibration.json"
PLAN = "plan.json"
RATES = (
    "training_flops",
    "bfloat16_flops",
    "launch_seconds",
    *(key for key in Device.model_fields if key.endswith("_per_second")),
)
MORE_DEVICES = "The devices that it needs: `tithe plan RECIPE --hardware h100-80gb --search`."
PROCESS_KNOWN_BYTES = 100e6  # how well the memory of an empty process is known
LOOKED_AT = 500  # prompts whose lengths are read


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
        request = request.change(**{key.replace(".", "__"): value for key, value in _counts(asked).items()})
        validate_as(Choices, request.choices.model_dump(mode="json"), "plan")
    hardware = calibrated(request.hardware)
    if asked.price_per_hour is not None:
        device = {**hardware.device.model_dump(mode="json"), "price_per_hour": asked.price_per_hour}
        hardware = hardware.model_copy(update={"device": validate_as(Device, device, "hardware.device")})
    return replace(request, hardware=hardware)


def _counts(asked: Asked) -> dict[str, int]:
    counts = {"devices": asked.devices, "sample.devices": asked.sampling_devices}
    return {key: value for key, value in counts.items() if value is not None}


def _from_plan(tree: dict[str, Any], asked: Asked) -> PlanRequest:
    over = {"model": asked.model, "hardware": asked.hardware}
    tree = lay_over(tree, {key: value for key, value in over.items() if value is not None})
    tree.setdefault("name", asked.target.stem if asked.target else str(asked.model))
    prefixed = [text if re.split("[.=]", text)[0] in PlanFile.model_fields else f"choices.{text}" for text in asked.overrides]
    prefixed += [f"choices.{key}={value}" for key, value in _counts(asked).items()]
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


def gate(workspace: Workspace, force: bool = False) -> list[str]:
    """Plan a campaign before it starts, on this machine, and write the plan and its numbers into the run directory.

    Only what cannot be is refused: weights, state and reference alone, without any estimate, are more than the machine has. What
    is merely expected not to fit what is free now is said, and starts.

    Returns:
        Sentences for the person who starts it.

    Raises:
        ResourceError: it cannot fit, and nobody insisted.
    """
    hardware = quick_hardware(workspace.config)
    if hardware is None:
        return ["not planned: nothing says how much memory this GPU has; `tithe plan` probes it"]
    try:
        plan = check(workspace.config, calibrated(hardware), prepared_lengths(workspace))
    except (ConfigError, ModelError) as error:
        why = error.problem.partition(";")[0] if isinstance(error, ConfigError) else first_line(error)
        return [f"not planned: {why}"]
    said, trained_here = [], (workspace.run / "train" / METRICS).exists()
    over = too_small(plan, None if trained_here else memory_limit_bytes() / ranks_on(workspace.config))
    if over and not force:
        raise ResourceError(f"{over}{_way_out(plan)} `tithe plan` shows the ledger; `tithe run --force` starts it anyway")
    if over or not plan.verdict.fits:
        said.append(f"warning: {over or plan.verdict.sentence + '.'}{_way_out(plan)}")
    else:
        said.append(f"plan: {plan.verdict.sentence}")
    if odd := workspace.config.train.memory.too_many_stay(plan.request.card.num_layers):
        said.append(f"warning: {odd}")
    record_prediction(workspace, plan)
    return said


def quick_hardware(config: CampaignConfig) -> Hardware | None:
    """Return this machine as a campaign will use it, without measuring; None for a GPU that nothing describes."""
    accelerated = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd"))
    found = quick_local(state_directory(), config.machine.device == "cpu" or not accelerated)
    if found is None or not found.is_cpu:
        return found
    share = found.device.memory_bytes / ranks_on(config)
    return found.model_copy(update={"device": found.device.model_copy(update={"memory_bytes": share})})


def ranks_on(config: CampaignConfig) -> int:
    """Return the training processes that share this machine's memory."""
    return max(config.machine.ranks, 1) if config.train.memory.over_ranks else 1


def too_small(plan: Plan, memory_bytes: float | None) -> str:
    """Return why a campaign cannot fit a machine, or nothing.

    Args:
        plan: on that machine.
        memory_bytes: main memory that nothing can exceed; None asks nothing, since it has run there before.
    """
    device = plan.request.hardware.device
    limits = {"device": memory_bytes if device.kind == "cpu" else device.memory_bytes, "host": memory_bytes}
    for place, limit in limits.items() if memory_bytes is not None else ():
        needed, terms = floor(plan.request, place)
        if limit is not None and needed > limit:
            parts = ", ".join(f"{term.name} {size(term.bytes)} ({term.formula})" for term in terms[:3])
            where = "main memory" if place == "host" or device.kind == "cpu" else f"the memory of {device.name}"
            where += f" for each of {plan.request.choices.devices} ranks" if plan.request.choices.devices > 1 else ""
            return f"cannot fit: {where} is {size(limit)}, and what the run holds all the time is {size(needed)}: {parts}."
    return ""


def _way_out(plan: Plan) -> str:
    """Return the cheapest way to fit as a sentence, or what helps most and what then still lacks."""
    found = advise(plan)
    steps = {step.change.name: step for step in found.fit}  # of the same change several times, the last
    if found.fits_then:
        return f" Cheapest way to fit: {'; '.join(step.change.says(step.after.request) for step in steps.values())}."
    if not steps:
        return f" No setting makes it fit this machine. {MORE_DEVICES}"
    most = sorted(found.fit, key=lambda step: step.after.verdict.missing_bytes - step.before.verdict.missing_bytes)[:2]
    helps = "; ".join(dict.fromkeys(step.change.says(step.after.request) for step in most))
    lacking = [room for room in found.fit[-1].after.verdict.rooms if not room.fits]
    places = {"device": "memory", "host": "host memory", "disk": "disk", "sampler": "memory of the sampling devices"}
    still = " and ".join(f"{size(-room.margin_bytes)} of {places[room.place]}" for room in lacking)
    return f" What helps most: {helps}; even then {still} are missing. {MORE_DEVICES}"


def prepared_lengths(workspace: Workspace) -> dict[str, float | None]:
    """Return the lengths that are known where prompts are prepared: the longest, and the mean of the first prompts."""
    folder = workspace.artifact("prompts")
    manifest, path = read_manifest(folder), prompt_path(folder, "train")
    if manifest is None or not path.exists():
        return {}
    with open(path, encoding="utf-8") as lines:
        sizes = [len(json.loads(line)["token_ids"]) for line in islice(lines, LOOKED_AT)]
    return {"prompt_tokens": statistics.mean(sizes), "longest_prompt": manifest.get("longest_prompt_tokens")} if sizes else {}


def predicted(plan: Plan) -> dict[str, float]:
    """Return a plan's main numbers as metrics: of the process (or device) that trains, whole and by phase."""
    schedule, ledger = plan.schedule, plan.memory.of_trainer()
    context = ledger.find("device", CONTEXT)  # which torch, that measures a GPU's memory, does not count
    learn = max(ledger.total("device", phase) for phase in ("score", "train"))
    return {
        "plan/predicted_peak_bytes": ledger.peak("device", TRAIN_STAGE)[0] - context,
        "plan/predicted_sample_bytes": ledger.total("device", "sample") - context,
        "plan/predicted_learn_bytes": learn - context,
        "plan/predicted_step_seconds": schedule.step_seconds,
        "plan/predicted_sample_seconds": schedule.sample_seconds,
        "plan/predicted_learn_seconds": schedule.train_seconds + schedule.score_seconds,
        "plan/predicted_tokens_per_second": schedule.tokens_per_second,
        "plan/margin_bytes": plan.verdict.tightest.margin_bytes,
    }


def record_prediction(workspace: Workspace, plan: Plan) -> None:
    """Write the plan into the run directory, and its main numbers as the campaign's metrics, once while they stay the same."""
    write_json(workspace.run / PLAN, plan.as_tree())
    values, before = predicted(plan), prediction(workspace.run)
    if any(before.get(key) != value for key, value in values.items() if key != "plan/margin_bytes"):  # which is of the moment
        RunWriter(workspace.run).metrics(0, values)


def prediction(run: Path) -> dict[str, float]:
    """Return what was predicted of a run last, as metrics plan/...; nothing where nothing was."""
    return _last(run, "plan/predicted_peak_bytes")


def _last(run: Path, key: str) -> dict[str, float]:
    """Return the last line of a run's metrics that has some key."""
    lines = [line["metrics"] for line in read_lines(run / METRICS) if key in line["metrics"]]
    return dict(lines[-1]) if lines else {}


def record_measurement(workspace: Workspace) -> dict[str, float]:
    """Write what the train stage took beside what was predicted, and return both; nothing where one is missing."""
    lines = [line["metrics"] for line in read_lines(workspace.run / "train" / METRICS)]
    steps = [line for line in lines if "time/step_seconds" in line]
    forecast = prediction(workspace.run)
    if not steps or not forecast:
        return {}
    seen = measured(steps)
    values = {f"plan/measured_{key}": value for key, value in seen.items()}
    for key, value in seen.items():
        if forecast.get(f"plan/predicted_{key}"):
            values[f"plan/ratio_{key}"] = forecast[f"plan/predicted_{key}"] / value
    if _last(workspace.run, "plan/measured_step_seconds") != values:
        RunWriter(workspace.run).metrics(len(steps), values)
    return {**forecast, **values}


PLANNED = {
    "peak_bytes": "memory, highest",
    "sample_bytes": "memory while sampling, highest",
    "learn_bytes": "memory while learning, highest",
    "step_seconds": "a step",
    "sample_seconds": "sampling in a step",
    "learn_seconds": "learning in a step",
    "tokens_per_second": "tokens a second",
}


def beside(run: Path) -> list[tuple[str, str, str, str]]:
    """Return rows (what, planned, measured, difference) of a campaign's run directory, as far as there is both."""
    forecast = prediction(run)
    steps = [line["metrics"] for line in read_lines(run / "train" / METRICS) if "time/step_seconds" in line["metrics"]]
    seen = measured(steps) if steps else {}
    rows = []
    for key, what in PLANNED.items():
        planned, real = forecast.get(f"plan/predicted_{key}"), seen.get(key)
        if planned and real:
            rows.append((what, _shown(key, planned), _shown(key, real), f"{planned / real - 1:+.0%}"))
    return rows


def _shown(key: str, value: float) -> str:
    if key.endswith("_bytes"):
        return size(value)
    return f"{value:.3g} s" if key.endswith("_seconds") else f"{value:,.0f}"


def measured(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what some steps took: the highest memory, the median seconds. The first step, which warms up, is no step's time.

    Args:
        steps: metrics of a train stage, one mapping a step.
    """
    later = steps[1:] or steps
    on_device = any("memory/device_peak_bytes" in line for line in steps)
    whole = "memory/device_peak_bytes" if on_device else "memory/rss_peak_bytes"
    highest = {"peak_bytes": whole, "sample_bytes": "memory/sample_peak_bytes", "learn_bytes": "memory/learn_peak_bytes"}
    if on_device:  # phases are measured of the process
        highest = {"peak_bytes": whole}
    medians = {f"{key}_seconds": f"time/{key}_seconds" for key in ("step", "sample", "learn")}
    medians["tokens_per_second"] = "throughput/tokens_per_second"
    seen = {name: max((float(line[key]) for line in steps if key in line), default=0.0) for name, key in highest.items()}
    for name, key in medians.items():
        values = [float(line[key]) for line in later if key in line]
        seen[name] = statistics.median(values) if values else 0.0
    alike = [float(line["reward/zero_variance_fraction"]) for line in later if "reward/zero_variance_fraction" in line]
    if alike:
        seen["trained_share"] = max(0.05, 1 - statistics.mean(alike))
    return {key: value for key, value in seen.items() if value > 0}


# -- calibration ----------------------------------------------------------------------------------------------------------------


def calibration_file() -> Path:
    return state_directory() / CALIBRATION


def calibrated(hardware: Hardware) -> Hardware:
    """Return a hardware description with what a finished run taught, if one did: efficiencies, and the rates that they are of.

    A probe gives other rates every time; an efficiency means something beside its own only.
    """
    path = calibration_file()
    known = read_json(path) if path.exists() else {}
    learned = known.get(key_of(hardware))
    if learned is None or "rates" not in learned:
        return hardware
    known_of = dict(learned["efficiency"])
    process = known_of.pop("process_bytes", hardware.process_bytes)
    efficiency = validate_as(Efficiency, {**hardware.efficiency.model_dump(), **known_of}, "calibration")
    device = hardware.device.model_copy(update={key: learned["rates"][key] for key in RATES})
    notes = (*hardware.notes, f"calibrated on {learned['run']}")
    changes = {"device": device, "efficiency": efficiency, "process_bytes": process, "notes": notes}
    return hardware.model_copy(update=changes)


def key_of(hardware: Hardware) -> str:
    """Return what a calibration belongs to: the hardware's name and its device's."""
    return f"{hardware.name}/{hardware.device.name}"


def learn(request: PlanRequest, seen: Mapping[str, float]) -> dict[str, float]:
    """Return the efficiencies under which a plan would have taken what was measured.

    Args:
        request: of the finished run, on uncalibrated hardware.
        seen: measured peak_bytes and seconds, see `measured`.

    Returns:
        Fields of Efficiency, and `process_bytes` of Hardware.
    """
    learned = {"trained_share": seen["trained_share"]} if "trained_share" in seen else dict[str, float]()
    plain = replace(request, hardware=request.hardware.model_copy(update={"efficiency": Efficiency(**learned)}))
    plan = make_plan(plain)
    schedule = plan.schedule
    learn_predicted = schedule.train_seconds + schedule.score_seconds
    if seen.get("learn_seconds") and learn_predicted:
        learned["train"] = learned["score"] = learn_predicted / seen["learn_seconds"]
    if seen.get("sample_seconds") and schedule.sample_seconds:
        learned["sample"] = schedule.sample_seconds / seen["sample_seconds"]
    known = seen.get("learn_seconds", 0.0) + seen.get("sample_seconds", 0.0)
    if seen.get("step_seconds"):
        learned["fixed_seconds"] = max(0.0, seen["step_seconds"] - known)
    return learned | learn_memory(plan, seen.get("peak_bytes", 0.0))


def learn_memory(plan: Plan, peak_bytes: float) -> dict[str, float]:
    """Return what a measured peak says of the ledger (`memory`, a factor) and of an empty process (`process_bytes`).

    A process's own memory is known to about 100 MB, the ledger to about a tenth of itself. The difference is shared between both
    by these variances, so that a run of a tiny model teaches nothing wrong about a large one.
    """
    hardware, ledger = plan.request.hardware, plan.memory.of_trainer()
    base = ledger.find("device", "worker process") if hardware.is_cpu else 0.0  # a GPU's allocator counts no context
    mine = ledger.peak("device", TRAIN_STAGE)[0] - ledger.find("device", "worker process") - ledger.find("device", CONTEXT)
    if peak_bytes <= 0 or mine <= 0:
        return {}
    off, own, of_process = peak_bytes - base - mine, (0.1 * mine) ** 2, PROCESS_KNOWN_BYTES**2 if base else 0.0
    share = own / (own + of_process)
    found = {"memory": max(0.1, 1 + share * off / mine)}
    return found | ({"process_bytes": max(0.0, base + (1 - share) * off)} if base else {})


def finished_steps(run: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's steps, those that tell times.

    Raises:
        DataError: no such run, or too few steps to learn from.
    """
    if not (run / "config.json").exists():
        raise DataError(str(run), "is no run directory: it has no config.json; give one below runs/")
    steps = [line["metrics"] for line in read_lines(run / "train" / METRICS) if "time/step_seconds" in line["metrics"]]
    if len(steps) < 2:
        raise DataError(str(run / "train" / METRICS), f"has {len(steps)} steps with times; at least 2 are needed to calibrate")
    return steps


def calibrate(run: Path, hardware: Hardware) -> dict[str, float]:
    """Learn from a finished run how fast this hardware is, and keep it for later plans.

    Args:
        run: a campaign's run directory (config.json and train/metrics.jsonl).
        hardware: what it ran on.

    Raises:
        DataError: no such run, or too few steps.
    """
    steps = finished_steps(run)
    config = validate(read_json(run / "config.json"))
    lengths = [line["completion/length_mean"] for line in steps if "completion/length_mean" in line]
    prompts = prepared_lengths(Workspace(run.parent.parent, config))
    known_lengths = {**prompts, "completion_tokens": statistics.mean(lengths) if lengths else None}
    request = plan_request(config, hardware, lengths=known_lengths)
    learned = learn(request, measured(steps))
    path = calibration_file()
    known = read_json(path) if path.exists() else {}
    rates = {key: getattr(hardware.device, key) for key in RATES}
    write_json(path, {**known, key_of(hardware): {"run": run.name, "efficiency": learned, "rates": rates}})
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
