"""What to change: every change that could help, tried one by one on the planner itself, the cheapest way first.

A change costs nothing in quality (a setting), some precision, another method, or more devices: its *price* orders the ways. The
way that makes a plan fit is found greedily and then thinned: a change without which it still fits is taken out again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd
from typing import Any

from trainer.plan.plan import Plan, make_plan, size
from trainer.plan.request import PlanRequest

Apply = Callable[[PlanRequest], PlanRequest | None]
MAX_CHANGES = 14
SETTING, PRECISION, METHOD, DEVICES = 2.5, 5.0, 6.0, 10.0  # highest price of each kind of change
_PLACEHOLDER = re.compile(r"\{([a-z_.]+)\}")


def _value(request: PlanRequest, dotted: str) -> Any:
    node: Any = request.choices
    for part in dotted.split("."):
        node = getattr(node, part)
    return node


@dataclass(frozen=True)
class Change:
    """One thing to set differently. `{key}` in the sentence stands for what the key became."""

    name: str
    sentence: str
    price: float  # 1 a setting that costs time, 3 precision or quality, 6 another method, 10 more devices
    apply: Apply

    def says(self, request: PlanRequest) -> str:
        """Return the sentence, with the values that a request then has."""
        return _PLACEHOLDER.sub(lambda match: f"{_value(request, match[1]):,}", self.sentence)


@dataclass(frozen=True)
class Step:
    """A change with its effect on what stood before it."""

    change: Change
    before: Plan
    after: Plan

    @property
    def effect(self) -> str:
        """Return the effect in words: bytes of the fullest place, seconds of a step."""
        parts = []
        rooms = {room.place: room for room in self.before.verdict.rooms}
        for room in self.after.verdict.rooms:
            was, now = rooms[room.place].peak_bytes, room.peak_bytes
            if abs(was - now) > 0.01 * room.capacity_bytes:
                parts.append(f"{room.place} {size(was)} -> {size(now)}")
        slow, fast = self.before.schedule.step_seconds, self.after.schedule.step_seconds
        if abs(slow - fast) > 0.01 * slow:
            parts.append(f"step {slow:,.3g} s -> {fast:,.3g} s")
        return ", ".join(parts) or "no effect by itself"


@dataclass(frozen=True)
class Advice:
    fit: tuple[Step, ...]  # in order, each on top of the ones before; empty where the plan fits
    fits_then: bool
    alternatives: tuple[tuple[Step, ...], ...]  # other ways, each by another kind of change
    faster: tuple[Step, ...]  # single changes that make a step shorter, and it still fits


# -- the changes ------------------------------------------------------------


def _setting(name: str, sentence: str, price: float, when: Callable[[PlanRequest], bool], **values: object) -> Change:
    return Change(name, sentence, price, lambda request: request.change(**values) if when(request) else None)


def _halve_micro_batch(request: PlanRequest) -> PlanRequest | None:
    batch = request.choices.batch
    smallest = max(64, batch.longest if request.hardware.is_cpu else 512)
    half = batch.micro_batch_tokens // 2
    return request.change(batch__micro_batch_tokens=half) if half >= smallest // 2 else None


def _double_micro_batch(request: PlanRequest) -> PlanRequest | None:
    batch = request.choices.batch
    return request.change(batch__micro_batch_tokens=2 * batch.micro_batch_tokens) if batch.micro_batch_tokens < 65536 else None


def _halve_sequences(request: PlanRequest) -> PlanRequest | None:
    used = min(request.choices.sample.sequences, request.choices.batch.samples)
    return request.change(sample__sequences=max(1, used // 2)) if used > 1 else None


def _double_sequences(request: PlanRequest) -> PlanRequest | None:
    sample, samples = request.choices.sample, request.choices.batch.samples
    return request.change(sample__sequences=min(2 * sample.sequences, samples)) if sample.sequences < samples else None


def _half_in_slots(request: PlanRequest) -> PlanRequest | None:
    train = request.choices.train
    if train.residency != "tiered" or train.resident_layers >= request.card.num_layers:
        return None
    return request.change(train__resident_layers=min(request.card.num_layers, max(1, 2 * train.resident_layers)))


def _tier(cold: str) -> Apply:
    def apply(request: PlanRequest) -> PlanRequest | None:
        train = request.choices.train
        if train.residency == "tiered" and train.cold == cold:
            return None
        values: dict[str, object] = {"train__residency": "tiered", "train__cold": cold}
        if train.method == "full" and train.rule == "stateless":
            values["train__layer_major"] = True
        return request.change(**values)

    return apply


def _spread_experts(request: PlanRequest) -> PlanRequest | None:
    train, count = request.choices.train, request.choices.devices
    experts = max(block.num_experts for block in request.card.blocks)
    spread = gcd(experts, count) if experts else 1
    if train.residency not in ("sharded", "zero3") or spread <= train.expert_parallel:
        return None
    return request.change(train__expert_parallel=spread)


def _devices(request: PlanRequest) -> PlanRequest | None:
    choices = request.choices
    return None if request.hardware.is_cpu else request.change(devices=_next_count(choices.devices, request))


def _sampling_devices(request: PlanRequest) -> PlanRequest | None:
    count = request.choices.sample.devices
    return request.change(sample__devices=_next_count(count, request)) if count else None


def _next_count(count: int, request: PlanRequest) -> int:
    """Return the next number of devices that people rent: powers of two inside a host, whole hosts after that."""
    per_host = request.hardware.host.devices
    return count * 2 if count < per_host else (count // per_host + max(1, count // per_host // 4)) * per_host


def changes() -> tuple[Change, ...]:
    """Return every change that the planner knows, cheapest first."""
    full = {"adapter": lambda r: r.choices.train.method == "lora", "all": lambda r: r.choices.train.method == "full"}
    return (
        _setting(
            "recompute",
            "recompute activations layer by layer (train.recompute: true)",
            1,
            lambda r: not r.choices.train.recompute,
            train__recompute=True,
        ),
        _setting(
            "chunked head",
            "make logits 256 tokens at a time (train.head_chunk_tokens: 256)",
            0.5,
            lambda r: (r.choices.train.head_chunk_tokens or 1 << 30) > 256,
            train__head_chunk_tokens=256,
        ),
        Change("micro-batch", "lower batch.micro_batch_tokens to {batch.micro_batch_tokens}", 1, _halve_micro_batch),
        Change("sequences", "decode fewer completions at once (sample.sequences: {sample.sequences})", 1, _halve_sequences),
        _setting(
            "reference off the adapter",
            "score the reference with the adapter switched off (reference: adapter_off)",
            0.5,
            lambda r: full["adapter"](r) and r.choices.reference.kind in ("resident", "int8_streamed", "engine"),
            reference__kind="adapter_off",
        ),
        _setting(
            "anchors",
            "use cached anchors instead of a reference in memory (reference: anchors)",
            1.5,
            lambda r: r.choices.reference.kind in ("resident", "engine", "int8_streamed"),
            reference__kind="anchors",
        ),
        _setting(
            "streamed reference",
            "stream an INT8 reference from host memory (reference: int8_streamed)",
            1.5,
            lambda r: r.choices.reference.kind in ("resident", "engine"),
            reference__kind="int8_streamed",
        ),
        _setting(
            "boundaries to the host",
            "keep activations between layers in host memory (train.boundary: host)",
            1.5,
            lambda r: (
                r.choices.train.boundary == "device"
                and (r.choices.train.recompute or r.choices.train.layer_major)
                and not r.hardware.is_cpu
            ),
            train__boundary="host",
        ),
        _setting(
            "engine sleeps",
            "let the engine free its memory while the learner works (sample.sleeps: true)",
            1,
            lambda r: (
                r.choices.sample.engine == "vllm"
                and not r.choices.sample.devices
                and not r.choices.sample.sleeps
                and r.choices.schedule.kind == "sync"
            ),
            sample__sleeps=True,
        ),
        _setting(
            "shard",
            "share the weights among the devices, gathered layer by layer (train.residency: sharded)",
            1.5,
            lambda r: r.choices.train.residency == "resident" and r.choices.devices > 1,
            train__residency="sharded",
        ),
        _setting(
            "FP8 cache",
            "keep the KV cache in 8 bits (sample.kv_bits: 8)",
            2,
            lambda r: r.choices.sample.engine == "vllm" and r.choices.sample.kv_bits != 8,
            sample__kv_bits=8,
        ),
        _setting(
            "offload optimizer",
            "keep the optimizer state in host memory (train.optimizer_offload: host)",
            2.5,
            lambda r: (
                r.choices.train.rule != "stateless"
                and r.choices.train.optimizer_offload == "none"
                and not r.hardware.is_cpu
                and (full["all"](r) or r.adapter_parameters >= 0.5e9)
            ),
            train__optimizer_offload="host",
        ),
        _setting(
            "INT8 backbone",
            "keep the frozen backbone in INT8 for training (train.dtype: int8)",
            3,
            lambda r: (
                full["adapter"](r) and r.choices.train.dtype in ("bfloat16", "float32") and r.choices.sample.engine == "vllm"
            ),
            train__dtype="int8",
        ),
        _setting(
            "INT8 engine",
            "let the engine sample in INT8 (sample.dtype: int8)",
            3,
            lambda r: r.choices.sample.engine == "vllm" and r.choices.sample.dtype in (None, "bfloat16", "float32"),
            sample__dtype="int8",
        ),
        _setting(
            "4-bit engine",
            "let the engine sample in 4 bits (sample.dtype: int4)",
            4,
            lambda r: r.choices.sample.engine == "vllm" and r.choices.sample.dtype in (None, "bfloat16", "int8", "fp8"),
            sample__dtype="int4",
        ),
        Change(
            "expert parallel",
            "spread each layer's experts over devices instead of gathering them (train.expert_parallel: {train.expert_parallel})",
            2,
            _spread_experts,
        ),
        Change(
            "tiered",
            "stream the weights from host memory (train.residency: tiered)",
            3.5,
            lambda r: None if r.hardware.is_cpu else _tier("host")(r),
        ),
        Change(
            "tiered from disk", "stream the weights from the disk (train.residency: tiered, train.cold: disk)", 5, _tier("disk")
        ),
        _setting(
            "one slot",
            "gather one layer at a time, without prefetch (train.slots: 1)",
            4,
            lambda r: r.choices.train.slots > 1 and r.choices.train.residency != "resident",
            train__slots=1,
        ),
        _setting(
            "stateless",
            "train without optimizer state and gradient buffer (train.rule: stateless; its learning rate is a "
            "tenth to a twentieth)",
            6,
            lambda r: full["all"](r) and r.choices.train.rule != "stateless",
            train__rule="stateless",
            train__master=None,
            train__optimizer_offload="none",
        ),
        Change("LoRA", "train an adapter instead of every weight (train.method: lora)", 6, _to_lora),
        Change("devices", "take {devices} training devices", 10, _devices),
        Change("sampling devices", "take {sample.devices} sampling devices", 10, _sampling_devices),
    )


def _to_lora(request: PlanRequest) -> PlanRequest | None:
    if request.choices.train.method == "lora" or not request.card.linears:
        return None
    changed = request.change(train__method="lora", train__rule="adamw", train__master=None, train__layer_major=False)
    train = changed.choices.train
    count = changed.card.lora_parameters(train.lora.rank, train.lora.target_modules)
    return replace(changed, adapter_parameters=count) if count else None


def speed_ups() -> tuple[Change, ...]:
    """Return changes that cost memory or quality and may make a step shorter."""
    return (
        Change("micro-batch", "raise batch.micro_batch_tokens to {batch.micro_batch_tokens}", 1, _double_micro_batch),
        Change("sequences", "decode more completions at once (sample.sequences: {sample.sequences})", 1, _double_sequences),
        _setting(
            "no recompute",
            "keep activations instead of recomputing them (train.recompute: false)",
            1,
            lambda r: r.choices.train.recompute and not r.choices.train.layer_major,
            train__recompute=False,
        ),
        _setting(
            "layer-major",
            "run all micro-batches of a layer, then the next layer (train.layer_major: true): weights travel twice a step",
            1,
            lambda r: r.choices.train.residency in ("sharded", "tiered") and not r.choices.train.layer_major,
            train__layer_major=True,
        ),
        _setting(
            "own engine instead of zero3",
            "gather layer by layer, layer-major (train.residency: sharded, train.layer_major: true)",
            1,
            lambda r: r.choices.train.residency == "zero3",
            train__residency="sharded",
            train__layer_major=True,
        ),
        _setting(
            "prefetch",
            "prefetch the next layer (train.slots: 2)",
            1,
            lambda r: r.choices.train.slots < 2 and r.choices.train.residency != "resident",
            train__slots=2,
        ),
        Change(
            "resident layers",
            "keep more layers on the device (train.resident_layers: {train.resident_layers})",
            1,
            _half_in_slots,
        ),
        _setting(
            "colocated",
            "sample between the learner's micro-batches (schedule.kind: colocated)",
            2,
            lambda r: r.choices.schedule.kind == "sync" and not r.choices.sample.devices,
            schedule__kind="colocated",
        ),
        _setting(
            "async",
            "sample and learn at the same time (schedule.kind: async)",
            2,
            lambda r: r.choices.schedule.kind == "sync" and r.choices.sample.devices > 0,
            schedule__kind="async",
        ),
        _setting(
            "anchors",
            "use cached anchors instead of scoring every sample (reference: anchors)",
            2,
            lambda r: r.choices.reference.kind in ("resident", "engine", "int8_streamed", "adapter_off"),
            reference__kind="anchors",
        ),
        _setting(
            "whole weights on a device",
            "keep the weights whole on every device (train.residency: resident)",
            1,
            lambda r: r.choices.train.residency in ("sharded", "zero3", "tiered"),
            train__residency="resident",
        ),
    )


# -- finding a way ------------------------------------------------------------


def _tried(plan: Plan, options: Iterable[Change]) -> list[Step]:
    steps = []
    for change in options:
        request = change.apply(plan.request)
        if request is not None and request.valid():
            steps.append(Step(change, plan, make_plan(request)))
    return steps


def _need(plan: Plan) -> float:
    """Return how far a plan is from fitting: missing bytes, each place against its size."""
    return sum(max(0.0, -room.margin_bytes / room.capacity_bytes) for room in plan.verdict.rooms)


def _cost(step: Step) -> float:
    """Return a change's price, dearer when it makes a step longer."""
    slower = step.after.schedule.step_seconds / max(step.before.schedule.step_seconds, 1e-12)
    return step.change.price * (1 + 2 * max(0.0, slower - 1))


def way_to_fit(plan: Plan, options: tuple[Change, ...] | None = None, max_changes: int = MAX_CHANGES) -> tuple[list[Step], bool]:
    """Return (changes in order, whether it fits after them): greedily the most relief for the cost, then thinned."""
    options = options if options is not None else changes()
    current, way = plan, list[Change]()
    while not current.verdict.fits and len(way) < max_changes:
        steps = [step for step in _tried(current, options) if _need(step.after) < _need(current) - 1e-6]
        if not steps:
            break
        fitting = [step for step in steps if step.after.verdict.fits]
        relief = max(steps, key=lambda s: (_need(s.before) - _need(s.after)) / _cost(s))
        best = min(fitting, key=_cost) if fitting else relief
        way.append(best.change)
        current = best.after
    fits = current.verdict.fits
    return _replayed(plan, _thinned(plan, way) if fits else way), fits


def _apply_all(plan: Plan, way: Iterable[Change]) -> Plan | None:
    request: PlanRequest | None = plan.request
    for change in way:
        request = change.apply(request) if request is not None else None
    return make_plan(request) if request is not None and request.valid() else None


def _thinned(plan: Plan, way: list[Change]) -> list[Change]:
    """Take out what is not needed, the dearest first; then put the cheap ones first."""
    for change in sorted(way, key=lambda c: -c.price):
        rest = list(way)
        rest.remove(change)
        without = _apply_all(plan, rest)
        if without is not None and without.verdict.fits:
            way = rest
    ordered = sorted(way, key=lambda c: (c.price, c.name))  # the same change several times stands together
    result = _apply_all(plan, ordered)
    return ordered if result is not None and result.verdict.fits else way


def _replayed(plan: Plan, way: list[Change]) -> list[Step]:
    """Return the steps of a way; the same change several times in a row is one step."""
    steps, current = [], plan
    for _, same in groupby(way, key=lambda change: change.name):
        run = list(same)
        after = _apply_all(current, run)
        assert after is not None
        steps.append(Step(run[-1], current, after))
        current = after
    return steps


def cheapest_way(plan: Plan) -> tuple[list[Step], bool]:
    """Return the way to fit that uses the mildest kind of change: settings, then precision, then method, then devices."""
    every = changes()
    way: list[Step] = []
    for limit in (SETTING, PRECISION, METHOD, DEVICES):
        way, fits = way_to_fit(plan, tuple(change for change in every if change.price <= limit))
        if fits:
            return way, True
    return way, False


def advise(plan: Plan) -> Advice:
    """Return what to change in a plan."""
    if plan.verdict.fits:
        gains = [s for s in _tried(plan, speed_ups()) if s.after.verdict.fits]
        gains = [s for s in gains if s.after.schedule.step_seconds < 0.98 * plan.schedule.step_seconds]
        gains.sort(key=lambda s: s.after.schedule.step_seconds)
        return Advice((), True, (), tuple(gains[:5]))
    way, fits = cheapest_way(plan)
    others = []
    used = {step.change.name for step in way}
    families = (("tiered", "tiered from disk"), ("stateless",), ("LoRA",), ("devices", "sampling devices"))
    for family in families:
        if used & set(family):
            continue
        first = tuple(change for change in changes() if change.name in family)
        other, other_fits = way_to_fit(plan, (*first, *(c for c in changes() if c.price <= SETTING)))
        if other_fits and {step.change.name for step in other} & set(family):
            others.append(tuple(other))
    return Advice(tuple(way), fits, tuple(others), ())
