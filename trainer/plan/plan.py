"""The three accounts together, and the verdict: does it fit, what binds, what is it worth to change.

make_plan(request) -> Plan          memory, bandwidth, schedule; about a tenth of a millisecond's arithmetic a term
plan.verdict                        fits or not, by how much, where and in which phase
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trainer.plan.bandwidth import BandwidthLedger, bandwidth_ledger
from trainer.plan.memory import PHASES, PLACES, MemoryLedger, Sizes, Term, memory_ledger, sizes_of
from trainer.plan.request import PlanRequest, as_tree
from trainer.plan.schedule import ScheduleLedger, schedule_ledger
from trainer.plan.work import Work, work_of


@dataclass(frozen=True)
class Room:
    """One place against its capacity."""

    place: str
    capacity_bytes: float  # what may be filled
    peak_bytes: float
    phase: str

    @property
    def margin_bytes(self) -> float:
        return self.capacity_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.margin_bytes >= 0


@dataclass(frozen=True)
class Verdict:
    fits: bool
    rooms: tuple[Room, ...]
    sentence: str

    @property
    def tightest(self) -> Room:
        """The place that is fullest for its size."""
        return max(self.rooms, key=lambda room: room.peak_bytes / room.capacity_bytes)

    @property
    def missing_bytes(self) -> float:
        """Bytes that do not fit, over all places; 0 where all fits."""
        return sum(max(0.0, -room.margin_bytes) for room in self.rooms)


@dataclass(frozen=True)
class Plan:
    request: PlanRequest
    sizes: Sizes
    work: Work
    memory: MemoryLedger
    bandwidth: BandwidthLedger
    schedule: ScheduleLedger

    @cached_property
    def verdict(self) -> Verdict:
        rooms = tuple(room for room in (_room(self, place) for place in PLACES) if room is not None)
        fits = all(room.fits for room in rooms)
        return Verdict(fits, rooms, _sentence(self, rooms, fits))

    def as_tree(self) -> dict[str, Any]:
        """Return the whole plan as JSON types."""
        request, verdict = self.request, self.verdict
        return {
            "name": request.name,
            "model": {
                "name": request.card.name,
                "architecture": request.card.architecture,
                "parameters": request.card.parameters,
                "active_parameters": request.card.active_parameters,
                "adapter_parameters": request.adapter_parameters,
                "by_role": request.card.by_role(),
                "layers": request.card.num_layers,
                "kv_bytes_per_token": request.card.kv_bytes_per_token(self.sizes.kv_bits),
                "assumptions": list(request.card.assumptions),
            },
            "hardware": as_tree(request.hardware),
            "choices": as_tree(request.choices),
            "verdict": {
                "fits": verdict.fits,
                "sentence": verdict.sentence,
                "rooms": [{**vars(room), "margin_bytes": room.margin_bytes, "fits": room.fits} for room in verdict.rooms],
            },
            "memory": [vars(term) for term in self.memory.terms],
            "bandwidth": [
                {**vars(flow), "exposed_seconds": flow.exposed_seconds, "hidden": flow.hidden, "sentence": flow.sentence}
                for flow in self.bandwidth.flows
            ],
            "schedule": vars(self.schedule),
        }


def make_plan(request: PlanRequest) -> Plan:
    """Return the plan of a request."""
    sizes = sizes_of(request)
    work = work_of(request, sizes)
    bandwidth = bandwidth_ledger(request, sizes, work)
    return Plan(request, sizes, work, memory_ledger(request, sizes), bandwidth, schedule_ledger(request, sizes, work, bandwidth))


def capacity(request: PlanRequest, place: str) -> float | None:
    """Return the bytes that a plan may fill of a place; None where the place does not exist apart."""
    hardware = request.hardware
    if place == "device":
        return hardware.usable_bytes
    if place == "sampler":
        return hardware.usable_bytes if request.choices.sample.devices else None
    if place == "host":
        return None if hardware.is_cpu else hardware.host.memory_bytes * (1 - hardware.reserve)
    return hardware.host.disk_bytes


# What a run holds whatever its lengths, kernels and allocator: nothing of it is an estimate. An engine may run elsewhere.
FLOOR_TERMS = (
    "weights",
    "lower halves of weights",
    "resident layers",
    "cold weights",
    "adapter",
    "gradients",
    "float32 master",
    "first moments",
    "second moments",
    "reference model",
    "samplers' weights",
)


def floor(request: PlanRequest, place: str) -> tuple[float, list[Term]]:
    """Return the bytes below which a place cannot stay in its fullest phase, and the terms that they are, largest first."""
    hardware = request.hardware
    plain = hardware.model_copy(update={"efficiency": hardware.efficiency.model_copy(update={"memory": 1.0})})
    ledger = memory_ledger(replace(request, hardware=plain))
    found = [[term for term in ledger.at(place, phase) if term.name in FLOOR_TERMS] for phase in PHASES]
    terms = max(found, key=lambda terms: sum(term.bytes for term in terms))
    return sum(term.bytes for term in terms), terms


def _room(plan: Plan, place: str) -> Room | None:
    limit = capacity(plan.request, place)
    if limit is None:
        return None
    peak, phase = plan.memory.peak(place)
    return Room(place, limit, peak, phase)


def size(value: float) -> str:
    """Return bytes as people say them: 14.6 GB, 2.40 TB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if abs(value) < 1000 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.0f} B"


def _of(place: str, request: PlanRequest) -> str:
    choices = request.choices
    if request.hardware.is_cpu and place == "device":
        return "main memory"
    return {
        "device": f"each of {choices.devices} {request.hardware.device.name}"
        if choices.devices > 1
        else f"the {request.hardware.device.name}",
        "sampler": f"each of {choices.sample.devices} sampling devices",
        "host": "each host's memory",
        "disk": "each host's disk",
    }[place]


def _sentence(plan: Plan, rooms: tuple[Room, ...], fits: bool) -> str:
    request = plan.request
    if fits:
        tight = max(rooms, key=lambda room: room.peak_bytes / room.capacity_bytes)
        return (
            f"fits: {_of(tight.place, request)} is filled to {size(tight.peak_bytes)} of "
            f"{size(tight.capacity_bytes)} while in phase "
            f"{tight.phase}; {size(tight.margin_bytes)} are left"
        )
    parts = []
    for room in rooms:
        if not room.fits:
            largest = plan.memory.at(room.place, room.phase)[0]
            parts.append(
                f"{_of(room.place, request)} would need {size(room.peak_bytes)} of {size(room.capacity_bytes)} "
                f"in phase {room.phase}, "
                f"{size(-room.margin_bytes)} too much (largest: {largest.name}, {size(largest.bytes)})"
            )
    return "does not fit: " + "; ".join(parts)
