"""The smallest number of devices for a model, and conventional RL, method S and method L side by side.

search(request)   device counts that people rent, from one up; at each the cheapest settings that fit; then faster ones
compare(card)     the three starting points, each searched: the one-tenth table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.plan.advice import Change, changes, speed_ups, way_to_fit
from trainer.plan.card import ModelCard
from trainer.plan.hardware import Hardware
from trainer.plan.plan import Plan, make_plan
from trainer.plan.request import (
    BatchChoice,
    Choices,
    PlanRequest,
    ReferenceChoice,
    SampleChoice,
    ScheduleChoice,
    TrainChoice,
    make_request,
)

MAX_DEVICES = 2048
SETTINGS = (
    "recompute",
    "chunked head",
    "micro-batch",
    "sequences",
    "boundaries to the host",
    "engine sleeps",
    "shard",
    "FP8 cache",
    "expert parallel",
)
OWN_MEANS = ("offload optimizer", "INT8 backbone", "INT8 engine", "4-bit engine", "tiered", "tiered from disk", "one slot")


@dataclass(frozen=True)
class Found:
    """The smallest plan that fits, with what was changed to get there; plan is None where nothing fits."""

    name: str
    plan: Plan | None
    changed: tuple[str, ...]


def counts(request: PlanRequest) -> Iterator[int]:
    """Yield device counts: powers of two inside a host, then whole hosts in growing strides."""
    per_host = request.hardware.host.devices
    if request.hardware.is_cpu:
        yield 1
        return
    count = 1
    while count < per_host:
        yield count
        count *= 2
    hosts = 1
    while hosts * per_host <= MAX_DEVICES:
        yield hosts * per_host
        hosts += max(1, hosts // 8)


def _allowed(names: tuple[str, ...]) -> tuple[Change, ...]:
    return tuple(change for change in changes() if change.name in names)


def _with_devices(request: PlanRequest, devices: int, sampling: int) -> PlanRequest:
    changed = request.change(devices=devices, sample__devices=sampling)
    if devices == 1 and changed.choices.train.residency in ("sharded", "zero3"):
        changed = changed.change(train__residency="resident")
    if devices > 1 and changed.choices.train.residency == "tiered":  # several devices hold it together
        changed = changed.change(train__residency="sharded")
    return changed


def search(request: PlanRequest, may_quantise: bool = True, tune: bool = True, tokens_per_second: float = 0.0) -> Found:
    """Return the smallest device count on which a request fits and is fast enough, with its settings.

    Method, update rule, schedule and reference stay as asked; settings that cost time may change, and precision where
    `may_quantise`. A sampling pool of its own grows apart from the training devices.

    Args:
        request: where to start.
        may_quantise: whether INT8 or 4-bit backbones, offload and streaming from host or disk are allowed.
        tune: whether memory that is left is spent on speed.
        tokens_per_second: least sampled tokens per second; 0 takes whatever fits.
    """
    options = _allowed(SETTINGS + OWN_MEANS if may_quantise else SETTINGS)
    has_pool = request.choices.sample.devices > 0
    if not has_pool:
        for count in counts(request):
            found = _finished(request, _fits_at(request, count, options), tune)
            if found.plan is not None and _fast(found, tokens_per_second):
                return found
        return Found(request.name, None, ())
    training = next((c for c in counts(request) if _fits_part(request, c, options, "device")), None)
    sampling = next((c for c in counts(request) if _fits_part(request, c, options, "sampler")), None)
    if training is None or sampling is None:
        return Found(request.name, None, ())
    while True:
        found = _finished(request, _fits_at(request, training, options, sampling), tune)
        if found.plan is None or _fast(found, tokens_per_second):
            return found
        schedule = found.plan.schedule
        if schedule.binds.startswith("sampling") or 2 * schedule.sample_seconds > schedule.step_seconds:
            larger = next((c for c in counts(request) if c > sampling), None)
            sampling = larger or sampling
        else:
            larger = next((c for c in counts(request) if c > training), None)
            training = larger or training
        if larger is None:
            return Found(request.name, None, ())


def _fast(found: Found, tokens_per_second: float) -> bool:
    return found.plan is not None and found.plan.schedule.tokens_per_second >= tokens_per_second


def _fits_at(
    request: PlanRequest, devices: int, options: tuple[Change, ...], sampling: int = 0
) -> tuple[Plan, dict[str, str]] | None:
    plan = make_plan(_with_devices(request, devices, sampling))
    way, fits = way_to_fit(plan, options, max_changes=10)
    if not fits:
        return None
    return (way[-1].after if way else plan), {step.change.name: step.change.says(step.after.request) for step in way}


def _fits_part(request: PlanRequest, count: int, options: tuple[Change, ...], place: str) -> bool:
    """Whether one pool of so many devices can be made to fit, the other being as large as it likes."""
    big = MAX_DEVICES
    plan = make_plan(_with_devices(request, count if place == "device" else big, count if place == "sampler" else big))
    if _room_fits(plan, place):
        return True
    way, _ = way_to_fit(plan, options, max_changes=10)
    return any(_room_fits(step.after, place) for step in way)


def _room_fits(plan: Plan, place: str) -> bool:
    return all(room.fits for room in plan.verdict.rooms if room.place == place)


def _finished(request: PlanRequest, fitting: tuple[Plan, dict[str, str]] | None, tune: bool) -> Found:
    if fitting is None:
        return Found(request.name, None, ())
    plan, said = fitting
    if tune:
        plan, said = _tuned(plan, said)
    return Found(request.name, plan, tuple(said.values()))


def _tuned(plan: Plan, said: dict[str, str]) -> tuple[Plan, dict[str, str]]:
    """Take settings that make a step shorter while it still fits, until none does."""
    free = tuple(
        c for c in speed_ups() if c.name in ("micro-batch", "sequences", "no recompute", "layer-major", "resident layers")
    )
    for _ in range(6):
        best = None
        for change in free:
            request = change.apply(plan.request)
            if request is None or not request.valid():
                continue
            tried = make_plan(request)
            if tried.verdict.fits and tried.schedule.step_seconds < 0.97 * (best or plan).schedule.step_seconds:
                best, words = tried, {change.name: change.says(request)}
        if best is None:
            break
        plan, said = best, {**said, **words}
    return plan, said


# -- the one-tenth table ------------------------------------------------------------


def conventional(card: ModelCard, hardware: Hardware, batch: BatchChoice, steps: int = 200) -> PlanRequest:
    """Return conventional RL: AdamW on every weight by ZeRO-3, a frozen reference, an engine on a pool of its own, in turns."""
    choices = Choices(
        devices=8,
        train=TrainChoice(method="full", rule="adamw", residency="zero3", gradient_dtype="bfloat16"),
        sample=SampleChoice(engine="vllm", devices=8),
        reference=ReferenceChoice(kind="resident"),
        batch=batch,
        schedule=ScheduleChoice(kind="sync", steps=steps),
    )
    return make_request("conventional", card, hardware, choices)


def method_s(card: ModelCard, hardware: Hardware, batch: BatchChoice, steps: int = 200) -> PlanRequest:
    """Return method S: no optimizer state, no gradient buffer, one pool for both loops, an INT8 reference on the host."""
    choices = Choices(
        devices=8,
        train=TrainChoice(method="full", rule="stateless", residency="sharded", layer_major=True, boundary="host"),
        sample=SampleChoice(engine="embedded"),
        reference=ReferenceChoice(kind="int8_streamed"),
        batch=batch,
        schedule=ScheduleChoice(kind="colocated", steps=steps),
    )
    return make_request("method S", card, hardware, choices)


def method_l(card: ModelCard, hardware: Hardware, batch: BatchChoice, steps: int = 200) -> PlanRequest:
    """Return method L: an adapter on a frozen backbone, sampling beside learning, the reference by switching the adapter off."""
    train = TrainChoice(method="lora", rule="adamw", residency="sharded")
    present = {one.name.rpartition(".")[2] for one in card.linears}
    wanted = [name for name in train.lora.target_modules if name in present] or sorted(
        present & {"q_proj", "o_proj", "q_b_proj", "kv_b_proj", "query_key_value", "dense"}
    )
    if card.is_moe:
        wanted = [name for name in wanted if name not in ("gate_proj", "up_proj", "down_proj")]
    if "q_b_proj" in present:
        wanted = sorted({*wanted, "q_b_proj", "kv_b_proj"})
    lora = train.lora.model_copy(update={"target_modules": tuple(wanted or sorted(present))})
    choices = Choices(
        devices=8,
        train=train.model_copy(update={"lora": lora}),
        sample=SampleChoice(engine="vllm", devices=8, sync="merge", sync_every=20),
        reference=ReferenceChoice(kind="adapter_off"),
        batch=batch,
        schedule=ScheduleChoice(kind="async", steps=steps),
    )
    return make_request("method L", card, hardware, choices)


def compare(
    card: ModelCard, hardware: Hardware, batch: BatchChoice | None = None, steps: int = 200, pace: float = 0.1
) -> list[Found]:
    """Return conventional RL, method S and method L for a model, each on the fewest devices that do.

    Conventional RL keeps full precision and its optimizer on the devices; the methods' own means (streaming, INT8, 4 bits)
    are theirs to use. A method must reach a share of conventional RL's throughput, or its few devices would mean nothing.

    Args:
        card: the model.
        hardware: the kind of device.
        batch: sizes of a step, the same for all three.
        steps: of the campaign.
        pace: least throughput, as a share of conventional RL's.
    """
    batch = batch or BatchChoice()
    usual = search(conventional(card, hardware, batch, steps), may_quantise=False)
    least = pace * usual.plan.schedule.tokens_per_second if usual.plan is not None else 0.0
    return [usual] + [search(make(card, hardware, batch, steps), tokens_per_second=least) for make in (method_s, method_l)]
