"""The schedule ledger: seconds of every phase and of a step, throughput, utilisation, lag, device-hours, money, energy.

sync       phases one after the other; a pool of its own for sampling stands still while the learner works, and back
colocated  two loops on one pool of devices: training goes first, sampling keeps the published 80 % of its speed
async      sampling and learning beside each other on two pools: the slower one sets the pace
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.plan.bandwidth import BandwidthLedger
from trainer.plan.memory import Sizes
from trainer.plan.request import PlanRequest
from trainer.plan.work import Work


@dataclass(frozen=True)
class ScheduleLedger:
    """Seconds are of one step; tokens are completion tokens."""

    sample_seconds: float
    score_seconds: float
    train_seconds: float
    sync_seconds: float
    fixed_seconds: float
    step_seconds: float
    binds: str  # the resource that sets the pace
    tokens_per_second: float
    samples_per_second: float
    utilisation: float  # of all devices' training_flops
    lag_mean: float  # optimizer steps between a sample's policy and the learner's
    lag_max: float
    devices: int
    steps: int
    wall_seconds: float
    device_hours: float
    price: float | None
    energy_kwh: float | None
    micro_step_seconds: float  # one micro-batch, forward and backward, with its transfers

    @property
    def wall_hours(self) -> float:
        return self.wall_seconds / 3600


def schedule_ledger(request: PlanRequest, sizes: Sizes, work: Work, bandwidth: BandwidthLedger) -> ScheduleLedger:
    """Return the schedule ledger of a request."""
    choices, hardware = request.choices, request.hardware
    batch, kind = choices.batch, choices.schedule.kind
    train, train_binds = bandwidth.phase_seconds("train", work.train_seconds)
    score, score_binds = bandwidth.phase_seconds("score", work.score_seconds)
    sync, _ = bandwidth.phase_seconds("sync", 0.0)
    decode, sample_binds = bandwidth.phase_seconds("sample", work.decode_seconds)
    sample = work.prefill_seconds + decode
    learn = train + (0.0 if work.score_on_sampler else score)
    produce = sample + (score if work.score_on_sampler else 0.0)
    fixed = hardware.efficiency.fixed_seconds
    learn_binds = train_binds if train >= score else score_binds
    if kind == "sync":
        step = produce + learn + sync + fixed
        pace = max((produce, _sampling(sample_binds)), (learn, f"training ({learn_binds})"), (sync, "the hand-over"))[1]
    elif kind == "colocated":
        slowed = produce / hardware.efficiency.colocated_sampling
        # Decoding waits for memory most of the time; its arithmetic is what it takes from training.
        learn += work.sample_flops / hardware.device.training_flops
        step = max(learn, slowed) + sync + fixed
        pace = (
            f"training ({learn_binds})"
            if learn >= slowed
            else f"{_sampling(sample_binds)}, slowed by training on the same devices"
        )
    else:
        step = max(learn, produce) + sync + fixed
        pace = f"training ({learn_binds})" if learn >= produce else _sampling(sample_binds)
    devices = choices.devices + choices.sample.devices
    flops = (work.train_flops + (0 if work.score_on_sampler else work.score_flops)) * choices.devices
    flops += work.sample_flops * sizes.sample_devices + (work.score_flops * sizes.sample_devices if work.score_on_sampler else 0)
    wall = step * choices.schedule.steps
    hours = wall * devices / 3600
    price, watts = hardware.device.price_per_hour, hardware.device.watts
    mean, highest = expected_lag(request, produce, step)
    return ScheduleLedger(
        sample_seconds=sample,
        score_seconds=score,
        train_seconds=train,
        sync_seconds=sync,
        fixed_seconds=fixed,
        step_seconds=step,
        binds=pace,
        tokens_per_second=batch.samples * batch.completion_tokens / step,
        samples_per_second=batch.samples / step,
        utilisation=flops / (step * devices * hardware.device.training_flops),
        lag_mean=mean,
        lag_max=highest,
        devices=devices,
        steps=choices.schedule.steps,
        wall_seconds=wall,
        device_hours=hours,
        price=None if price is None else price * hours,
        energy_kwh=None if watts is None else watts * hours / 1000,
        micro_step_seconds=train / max(sizes.num_micro * batch.passes, 1.0),
    )


def _sampling(binds: str) -> str:
    return "sampling" if binds in ("compute", "device memory") else f"sampling ({binds})"


def expected_lag(request: PlanRequest, produce_seconds: float, step_seconds: float) -> tuple[float, float]:
    """Return (mean, highest) optimizer steps that a sample is behind when it is learned from.

    Within a step the policy moves passes x minibatches times: half of that on average. Async adds half the hand-over interval
    and the time that a completion takes to be made; the bound cuts what would be older.
    """
    batch, schedule, sample = request.choices.batch, request.choices.schedule, request.choices.sample
    updates = batch.passes * batch.minibatches
    within = (updates - 1) / 2
    if schedule.kind == "sync":
        return within, float(updates - 1)
    made = updates * min(produce_seconds / max(step_seconds, 1e-12), float(schedule.max_lag))
    mean = within + made + sample.sync_every / 2
    highest = updates - 1 + made + sample.sync_every
    return min(mean, float(schedule.max_lag)), min(highest, float(schedule.max_lag))
