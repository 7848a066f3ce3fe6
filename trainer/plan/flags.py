"""What a plan's reader must be told in words: figures that contradict each other, and choices that seldom pay.

Where published figures and arithmetic disagree, the plan sides with arithmetic and says so in one sentence.
"""

from __future__ import annotations

from math import ceil

from trainer.plan.memory import sync_kind
from trainer.plan.plan import Plan, size
from trainer.processes import malloc_choice

INT4_GROUP_BYTES = 2 / 128  # bytes a weight that group-wise 16-bit scales would add
SMALL_ADAPTER = 0.5e9  # parameters below which offloading an adapter's optimizer state does not pay
CALM_LAG = 50  # optimizer steps from which async runs were seen to oscillate


def flags(plan: Plan) -> list[str]:
    """Return the sentences that belong to a plan, the gravest first."""
    said = [
        *_batch(plan),
        *_backbone(plan),
        *_state(plan),
        *_network(plan),
        *_offload(plan),
        *_lag(plan),
        *_engine(plan),
        *_malloc(plan),
    ]
    return said + [f"assumed: {sentence}" for sentence in plan.request.card.assumptions]


def tokens(value: float) -> str:
    """Return a number of tokens as people say it."""
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if value >= scale / 10:
            return f"{value / scale:,.3g}{unit}"
    return f"{value:,.0f}"


def _malloc(plan: Plan) -> list[str]:
    """Main memory is planned as that of live tensors, which a stage tells malloc to hold to unless a person told it otherwise."""
    request, chosen = plan.request, malloc_choice()
    if not (request.hardware.is_cpu and request.hardware.name == "local" and chosen):
        return []
    return [f"{chosen} is set: malloc may keep freed memory, with long sequences half as much again as planned; unset it"]


def _batch(plan: Plan) -> list[str]:
    """A published batch: tokens a step, micro-batch and accumulation must agree with the number of ranks."""
    batch, ranks = plan.request.choices.batch, plan.request.choices.devices
    if batch.accumulation is None or batch.tokens_per_step is None:
        return []
    one_rank = batch.micro_batch_tokens * batch.accumulation
    literal, micro_step = one_rank * ranks, batch.micro_batch_tokens * ranks
    if abs(literal - batch.tokens_per_step) <= 0.02 * batch.tokens_per_step:
        return []
    needed = batch.tokens_per_step / micro_step
    return [
        f"{batch.micro_batch_tokens:,} x {batch.accumulation} = {tokens(one_rank)} tokens is one data-parallel "
        f"rank. With {ranks} ranks one "
        f"micro-step is {tokens(micro_step)} tokens and a step of {tokens(batch.tokens_per_step)} takes an "
        f"accumulation of {needed:.3g}; taken "
        f"literally on {ranks} ranks a step would be {tokens(literal)} tokens. Planned with {needed:.3g}"
    ]


def _backbone(plan: Plan) -> list[str]:
    """Weights alone against a whole pool: no setting but their type, place or number of devices can help."""
    request, sizes = plan.request, plan.sizes
    card, choices, each = request.card, request.choices, request.hardware.device.memory_bytes
    said = []
    total, pool = card.parameters * sizes.weight_bytes, choices.devices * each
    if choices.train.residency in ("sharded", "zero3") and total > pool:
        said.append(
            f"the weights are {size(total)} in {choices.train.dtype}, against {size(pool)} of all "
            f"{choices.devices} training devices: they do not fit as written"
        )
    engine_devices = choices.sample.devices or choices.devices
    if choices.sample.engine == "vllm":
        engine, room = card.parameters * sizes.engine_bytes, engine_devices * each
        if engine > room:
            said.append(
                f"the engine's weights are {size(engine)}, against {size(room)} of all {engine_devices} sampling "
                f"devices: they do not fit as written"
            )
        elif sizes.engine_spread == engine_devices and (room - engine) / room < 0.1:
            said.append(
                f"the engine's weights leave {size(room - engine)} for the KV cache and everything else over "
                f"{engine_devices} devices: tight"
                + (f"; group-wise scales would add {size(card.parameters * INT4_GROUP_BYTES)}" if sizes.engine_bytes < 1 else "")
            )
    return said


STATE = ("weights", "adapter", "gradients", "float32 master", "first moments", "second moments")


def model_state(plan: Plan) -> dict[str, float]:
    """Return the bytes of what one copy of the model that trains consists of, over all devices, by name."""
    shards, places = plan.sizes.shards, ("device", "host", "disk")
    hosts = plan.request.hardware.hosts(plan.request.choices.devices)
    state = {name: sum(plan.memory.find(p, name) * (shards if p == "device" else hosts) for p in places) for name in STATE}
    return {name: value for name, value in state.items() if value}


def _state(plan: Plan) -> list[str]:
    """The published way to count: bytes a parameter, and the devices that the model's state alone fills."""
    state, train = model_state(plan), plan.request.choices.train
    total, trained = sum(state.values()), plan.sizes.trained
    if train.rule != "adamw" or not trained:
        return []
    parts = ", ".join(f"{name} {size(value)}" for name, value in state.items() if train.method == "full" or name != "weights")
    own = total - (state.get("weights", 0.0) if train.method == "lora" else 0.0)
    alone = ceil(own / plan.request.hardware.device.memory_bytes - 1e-6)
    said = f"model state: {own / trained:.3g} B a parameter that trains, {size(own)} ({parts})"
    if train.method == "full" and alone > 1:
        said += f"; it alone fills {alone:,.0f} devices of {size(plan.request.hardware.device.memory_bytes)}"
    return [said]


def _network(plan: Plan) -> list[str]:
    """Transfers that bind, with the tokens from which they would not."""
    return [flow.sentence for flow in plan.bandwidth.binding if flow.phase in ("train", "score") and flow.threshold_tokens]


def _offload(plan: Plan) -> list[str]:
    train = plan.request.choices.train
    if train.method == "lora" and train.optimizer_offload != "none" and plan.request.adapter_parameters < SMALL_ADAPTER:
        return [
            f"optimizer offload is advised against: the adapter has {plan.request.adapter_parameters / 1e9:.2g}B "
            f"parameters, its state is only "
            f"{size(plan.sizes.state_bytes)}; below 0.5B keep it on the device (train.optimizer_offload: none)"
        ]
    return []


def _lag(plan: Plan) -> list[str]:
    choices, schedule = plan.request.choices, plan.schedule
    if choices.schedule.kind != "async":
        return []
    said = []
    if choices.schedule.max_lag > CALM_LAG:
        said.append(
            f"schedule.max_lag = {choices.schedule.max_lag}: runs whose lag passed {CALM_LAG} were seen to oscillate; 32 is usual"
        )
    if choices.sample.sync_every > choices.schedule.max_lag:
        said.append(
            f"sample.sync_every = {choices.sample.sync_every} is above schedule.max_lag = "
            f"{choices.schedule.max_lag}: the learner would wait at every hand-over"
        )
    elif schedule.lag_max >= choices.schedule.max_lag:
        said.append(
            f"expected lag reaches the bound of {choices.schedule.max_lag}: the learner will wait; hand over "
            f"more often or sample faster"
        )
    return said


def _engine(plan: Plan) -> list[str]:
    """Sampling with weights that are not whole on a device, and quantised engines."""
    choices = plan.request.choices
    said = []
    if choices.sample.dtype in ("int8", "int4", "fp8") and sync_kind(plan.request) != "none":
        said.append(
            f"the engine samples in {choices.sample.dtype}: its log-probs differ from the learner's; watch "
            f"mismatch/... and correct off-policy"
        )
    if plan.schedule.utilisation < 0.1 and not plan.request.hardware.is_cpu:
        said.append(
            f"only {plan.schedule.utilisation:.0%} of the devices' arithmetic is used; {plan.schedule.binds} sets the pace"
        )
    return said
