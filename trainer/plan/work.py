"""What a step computes: floating-point operations and the seconds they take alone, before any transfer.

A forward pass costs 2 operations per multiplied parameter and token. Training every weight costs three forwards (forward,
gradient of activations, gradient of weights), a frozen backbone two; recomputation adds one. Kernels and Python cost
`launch_seconds` each, which is what binds tiny models.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.plan.memory import Sizes, kv_sequences
from trainer.plan.request import PlanRequest

FORWARD_OPERATIONS = 45  # small operations of one decoder block's forward in transformers
DECODE_OPERATIONS = 60  # with the cache
ADAPTER_OPERATIONS = 5  # of one adapter: down, up, scaled, added, cast
CONTINUOUS_BATCHING = 0.9  # share of slots that work while requests wait
# Float32 values that an update reads and writes for every parameter. AdamW (fused): gradient, weight and two moments read, the
# last three written. Stateless: the gradient's norms and scaling, decay, the new value, what moved (four sums), what changed, and
# the journal.
UPDATE_ACCESSES = {"adamw": 7, "sgd": 3, "stateless": 32}
# Of a weight, beside those: launches of a stateless update on a GPU and the journal on its way to the host; of weights that are
# split nearly all lower halves change. Measured on one H200 with 1.3 G parameters in bfloat16.
UPDATE_SECONDS = {False: 0.45e-9, True: 1.4e-9}
# With float32 masters also: a micro-batch's 2-byte gradient is made float32 (0.5 + 1), from the second one on added
# (2 + 1), and the weight is written from its master (1 + 0.5).
MASTER_FIRST, MASTER_ADDED, MASTER_WRITTEN = 1.5, 4.5, 1.5


@dataclass(frozen=True)
class Work:
    """Seconds of computation alone, per step, and what they are made of."""

    train_flops: float  # of one device
    train_seconds: float
    update_seconds: float  # of them, what the update takes however many tokens there are
    score_flops: float
    score_seconds: float
    score_on_sampler: bool
    prefill_seconds: float
    decode_seconds: float
    decode_steps: float
    decode_step_seconds: float  # one token for every active sequence
    decode_bytes: float  # read from device memory in one decode step, per device
    active_sequences: float  # on one copy of the engine
    sample_flops: float  # of one device
    multiplier: int  # forward passes that training amounts to


def train_multiplier(request: PlanRequest) -> int:
    """Return how many forward passes a forward with backward amounts to."""
    train = request.choices.train
    passes = 3 if train.method == "full" else 2
    return passes + (1 if train.recompute or train.layer_major else 0)


def touched_experts(num_experts: int, per_token: int, tokens: float) -> float:
    """Return the expected number of experts that some tokens choose, if they choose evenly."""
    return num_experts * (1 - (1 - per_token / num_experts) ** max(tokens, 1.0))


def read_parameters(request: PlanRequest, tokens: float) -> float:
    """Return the parameters that one decode step of some sequences reads."""
    card = request.card
    total = float(card.parameters - (card.embedding if card.head else 0))
    for block in card.blocks:
        if block.num_experts:
            idle = 1 - touched_experts(block.num_experts, block.experts_per_token, tokens) / block.num_experts
            total -= block.count * block.experts * idle
    return total


def work_of(request: PlanRequest, sizes: Sizes) -> Work:
    """Return a step's work."""
    card, choices, device = request.card, request.choices, request.hardware.device
    efficiency, batch = request.hardware.efficiency, choices.batch
    context = (batch.prompt_tokens + batch.completion_tokens) / 2
    forward = card.forward_flops(sizes.rank_tokens, context)
    multiplier = train_multiplier(request)
    elements, adapted = adapter_traffic(request)
    launches = (card.num_layers * FORWARD_OPERATIONS + adapted * ADAPTER_OPERATIONS) * device.launch_seconds
    visits = sizes.num_micro * batch.passes
    adapters = 4 * sizes.trained * sizes.rank_tokens if choices.train.method == "lora" else 0.0
    scores = choices.reference.kind in ("resident", "int8_streamed", "adapter_off", "engine")
    share = 1.0 if scores else efficiency.trained_share
    train_flops = (forward * multiplier + adapters) * batch.passes * share
    flops_per_second = rate_of(request, sizes)
    updates = batch.passes * batch.minibatches
    values = UPDATE_ACCESSES[choices.train.rule] * updates + master_accesses(sizes, visits, updates)
    update = 4 * values * sizes.trained / sizes.shards / device.hbm_bytes_per_second
    update = update if choices.train.optimizer_offload == "none" else 0.0
    if choices.train.layer_major and choices.train.rule == "stateless" and not request.hardware.is_cpu:
        each = UPDATE_SECONDS[choices.train.split]
        update += each * sizes.trained / sizes.shards * updates
    train_seconds = train_flops / flops_per_second + visits * share * launches * (multiplier + 1)
    traffic = elements * sizes.activation_bytes * sizes.rank_tokens * batch.passes * share
    train_seconds += traffic / device.hbm_bytes_per_second + update
    on_sampler = choices.reference.kind == "engine"
    score_devices = sizes.sample_devices if on_sampler else choices.devices
    score_flops = forward * choices.devices / score_devices if scores else 0.0
    score_seconds = score_flops / flops_per_second + (sizes.num_micro * launches if scores else 0.0)
    decode = _decode(request, sizes)
    return Work(
        train_flops=train_flops,
        train_seconds=train_seconds / efficiency.train,
        update_seconds=update / efficiency.train,
        score_flops=score_flops,
        score_seconds=score_seconds / efficiency.score,
        score_on_sampler=on_sampler,
        multiplier=multiplier,
        **decode,
    )


def master_accesses(sizes: Sizes, visits: float, updates: float) -> float:
    """Return the float32 values that a step reads and writes for every parameter because weights have float32 masters.

    Args:
        visits: micro-batches of a step.
        updates: optimizer steps of a step.
    """
    if not sizes.master:
        return 0.0
    return MASTER_FIRST * updates + MASTER_ADDED * max(visits - updates, 0.0) + MASTER_WRITTEN * updates


def rate_of(request: PlanRequest, sizes: Sizes) -> float:
    """Return the FLOP/s of matrix products in the type that a request computes in; a CPU's differ much between types."""
    device = request.hardware.device
    return (device.bfloat16_flops or device.training_flops) if sizes.activation_bytes == 2 else device.training_flops


def adapter_traffic(request: PlanRequest) -> tuple[float, float]:
    """Return (values that adapters read and write for one token's forward and backward, adapters).

    The products are small, so what they pass on counts: the output is written, scaled and added (10 d_out with the backward), the
    input read, and its gradient added to that of the frozen weight (5 d_in).
    """
    if request.choices.train.method != "lora":
        return 0.0, 0.0
    targets = {name.rpartition(".")[2] for name in request.choices.train.lora.target_modules}
    adapted = [one for one in request.card.linears if one.name.rpartition(".")[2] in targets]
    return (
        float(sum(one.count * (10 * one.d_out + 5 * one.d_in) for one in adapted)),
        float(sum(one.count for one in adapted)),
    )


def _decode(request: PlanRequest, sizes: Sizes) -> dict[str, float]:
    """Return the sampler's part: prefill once a prompt, then one token a step for every active sequence."""
    card, choices, device = request.card, request.choices, request.hardware.device
    efficiency, batch = request.hardware.efficiency, choices.batch
    spread = sizes.engine_spread
    copies = max(1, sizes.sample_devices // spread)
    slots = kv_sequences(request, sizes)
    tokens = batch.samples * batch.completion_tokens / copies  # of one copy
    longest = batch.longest - batch.prompt_tokens if batch.max_completion_tokens else 2 * batch.completion_tokens
    steps = max(tokens / slots / CONTINUOUS_BATCHING, min(longest, 2 * batch.completion_tokens))
    active = tokens / steps
    context = batch.prompt_tokens + batch.completion_tokens / 2
    each = sizes.engine_bytes if choices.sample.engine == "vllm" else sizes.weight_bytes
    if request.hardware.is_cpu and choices.train.layer_major and each < 4:
        each += 4.0  # made float32, a layer at a time, and read again from the cache
    weights = read_parameters(request, active) * each
    read = (weights + active * card.kv_bytes(int(context), sizes.kv_bits)) / spread
    flops = card.forward_flops(active, context) / spread
    seconds = max(read / (device.hbm_bytes_per_second * efficiency.decode), flops / rate_of(request, sizes))
    embedded = choices.sample.engine == "embedded"
    operations = float(card.num_layers * (DECODE_OPERATIONS if embedded else 4))  # an engine replays a captured graph
    operations += adapter_traffic(request)[1] * ADAPTER_OPERATIONS if embedded else 0.0
    step = (seconds + operations * device.launch_seconds) / efficiency.sample
    prompts = batch.prompts_per_step * batch.prompt_tokens / copies
    prefill = card.forward_flops(prompts, batch.prompt_tokens / 2) / spread
    return {
        "prefill_seconds": prefill / device.training_flops / efficiency.sample,
        "decode_seconds": steps * step,
        "decode_steps": steps,
        "decode_step_seconds": step,
        "decode_bytes": read,
        "active_sequences": active,
        "sample_flops": prefill + flops * steps,
    }
