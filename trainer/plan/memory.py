"""The memory ledger: every byte that a campaign holds, by phase and place, each with its name, formula and number.

    device   one training device           host   one host of the training devices
    sampler  one device of a sampling pool of its own           disk   one host's disk

On a machine without a GPU the device is the main memory, so what other machines keep on the host counts there too. Terms that
one phase holds are not added to another's: the peak of a place is its fullest phase.

Legend in formulas: P parameters, T parameters that train, N devices, L layers, h hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trainer.plan.activations import backward_per_token, logits_per_token, saved_per_token
from trainer.plan.card import ModelCard
from trainer.plan.request import BYTES, PlanRequest

PHASES = ("load", "sample", "score", "train", "sync", "merge", "evaluate")
PLACES = ("device", "sampler", "host", "disk")
ALWAYS = PHASES
TRAIN_STAGE = ("load", "sample", "score", "train", "sync")  # phases of the train stage's own processes
_WORKING = ("sample", "score", "train", "sync")
COLLECTIVE_BUFFER = 1.0e9  # bytes of flat buffers of a sharded engine, as in its defaults (5e8 elements)
OFFLOAD_BUCKET = 1.0e9  # bytes of pinned staging for an offloaded optimizer
ENGINE_WORKSPACE = 1.0e9  # an engine's activations and captured graphs
EMBEDDED_PREFILL_TOKENS = 8192  # the embedded sampler's own limit
# A CPU compiles every bfloat16 product of a new shape (oneDNN), and keeps it: measured by the growth of a process.
COMPILED_PRODUCT = 0.6e6
PRODUCTS_PER_SHAPE = 5  # prefill, one token, and training's three
BFLOAT16_LIBRARY = 8.0e6
CONTEXT = "driver and libraries"
SAMPLERS = "samplers' "  # begins the terms of processes beside the one that trains
CHUNK_ELEMENTS = 2**25  # logits that the learner makes at a time
LAYERWISE_CHUNK_ELEMENTS = 2**22  # the same, layer by layer; 2**25 on a device, as the learner's
DEVICE_SLOT = 1  # beside those of the host: one that is written back while the next is filled
DEVICE_UPDATE_BYTES = 20.0  # of an element, while a device rounds and sums up what moved


@dataclass(frozen=True)
class Term:
    """One line of the ledger."""

    place: str
    name: str
    bytes: float
    formula: str
    phases: tuple[str, ...]


@dataclass(frozen=True)
class MemoryLedger:
    terms: tuple[Term, ...]

    def total(self, place: str, phase: str) -> float:
        return sum(term.bytes for term in self.terms if term.place == place and phase in term.phases)

    def phases(self, place: str) -> dict[str, float]:
        """Return the bytes that each phase holds in a place."""
        return {phase: self.total(place, phase) for phase in PHASES}

    def peak(self, place: str, phases: tuple[str, ...] = PHASES) -> tuple[float, str]:
        """Return (bytes, phase) of the fullest of some phases."""
        return max(((self.total(place, phase), phase) for phase in phases), key=lambda pair: pair[0])

    def at(self, place: str, phase: str) -> list[Term]:
        """Return a phase's terms in a place, largest first; nothing and zero are left out."""
        held = [term for term in self.terms if term.place == place and phase in term.phases and term.bytes > 0]
        return sorted(held, key=lambda term: -term.bytes)

    def of_trainer(self) -> MemoryLedger:
        """Return the ledger without what samplers in processes of their own hold: what the train stage measures of itself."""
        return MemoryLedger(tuple(term for term in self.terms if not term.name.startswith(SAMPLERS)))

    def find(self, place: str, name: str) -> float:
        """Return the bytes of the terms of a name in a place."""
        return sum(term.bytes for term in self.terms if term.place == place and term.name == name)


@dataclass(frozen=True)
class Sizes:
    """What the request implies, worked out once and shared by the three ledgers. Bytes a parameter or counts."""

    weight_bytes: float  # of one stored weight of the model that trains (LoRA: of the backbone)
    engine_bytes: float  # of one weight of the engine's copy
    activation_bytes: int
    gradient_bytes: float
    master: bool
    trained: float  # parameters that train
    shards: int  # devices that share one copy of weights, gradients and state
    state_bytes: float  # optimizer state, master included, of the whole model
    rank_tokens: float  # tokens of a pass on one rank
    micro_tokens: float  # tokens of one micro-batch
    num_micro: float  # micro-batches of a pass on one rank
    sample_devices: int  # devices that sample, shared or own
    engine_spread: int  # devices that share one copy of the engine's weights
    kv_bits: int


def sizes_of(request: PlanRequest) -> Sizes:
    """Return the sizes that follow from a request."""
    card, choices = request.card, request.choices
    train, sample, batch = choices.train, choices.sample, choices.batch
    weight = BYTES[train.dtype]
    is_lora = train.method == "lora"
    activation = 4 if (train.compute_dtype or ("float32" if train.dtype == "float32" else "bfloat16")) == "float32" else 2
    if request.hardware.is_cpu and train.layer_major:
        activation = 4  # a CPU computes in float32 whatever is stored
    own = float(activation) if is_lora and weight < 2 else weight  # an adapter on a quantised backbone is not quantised
    gradient = BYTES[train.gradient_dtype] if train.gradient_dtype else own
    master = train.master if train.master is not None else (train.rule in ("adamw", "sgd") and own < 4)
    trained = float(request.adapter_parameters if is_lora else card.parameters)
    moments = 8.0 if train.rule == "adamw" else 0.0
    state = trained * (moments + (4.0 if master else 0.0))
    engine = BYTES[sample.dtype] if sample.dtype else max(weight, 1.0)
    sample_devices = sample.devices or choices.devices
    rank_tokens = batch.trained_tokens / choices.devices
    micro = float(batch.micro_batch_tokens)
    return Sizes(
        weight_bytes=weight,
        engine_bytes=engine,
        activation_bytes=activation,
        gradient_bytes=gradient,
        master=master,
        trained=trained,
        shards=choices.devices if train.residency in ("sharded", "zero3") else 1,
        state_bytes=state,
        rank_tokens=rank_tokens,
        micro_tokens=min(micro, max(rank_tokens / batch.minibatches, batch.prompt_tokens + batch.completion_tokens)),
        num_micro=max(float(batch.minibatches), rank_tokens / micro),
        sample_devices=sample_devices,
        engine_spread=_engine_spread(request, engine, sample_devices),
        kv_bits=sample.kv_bits or 8 * activation,
    )


def _engine_spread(request: PlanRequest, engine_bytes: float, devices: int) -> int:
    """Return how many devices share one copy of the sampler's weights."""
    choices = request.choices
    if choices.sample.tensor_parallel is not None:
        return min(choices.sample.tensor_parallel, devices)
    if choices.sample.engine == "embedded":
        return choices.devices if choices.train.residency in ("sharded", "zero3") else 1
    share = 0.6 if choices.sample.devices or choices.sample.sleeps else 0.3
    spread = 1
    while spread < devices and request.card.parameters * engine_bytes / spread > share * request.hardware.device.memory_bytes:
        spread *= 2
    return min(spread, devices)


class Bill:
    """Collects terms; places that a machine does not have fold into those it has."""

    def __init__(self, request: PlanRequest):
        self.terms: list[Term] = []
        self.on_cpu = request.hardware.is_cpu
        self.has_pool = request.choices.sample.devices > 0

    def add(self, place: str, name: str, size: float, formula: str, phases: Iterable[str] = ALWAYS) -> None:
        if place == "sampler" and not self.has_pool:
            place = "device"
        if place == "host" and self.on_cpu:
            place = "device"
        if size > 0:
            self.terms.append(Term(place, name, float(size), formula, tuple(phases)))


def memory_ledger(request: PlanRequest, sizes: Sizes | None = None) -> MemoryLedger:
    """Return the memory ledger of a request."""
    sizes = sizes or sizes_of(request)
    bill = Bill(request)
    _fixed(bill, request, sizes)
    _weights(bill, request, sizes)
    _update(bill, request, sizes)
    _activations(bill, request, sizes)
    _reference(bill, request, sizes)
    _reward(bill, request)
    _sampling(bill, request, sizes)
    _handover(bill, request, sizes)
    _disk(bill, request, sizes)
    factor = request.hardware.efficiency.memory
    if factor != 1.0:
        fixed = ("worker process", CONTEXT)
        bill.terms = [
            t
            if t.place == "disk" or t.name in fixed
            else Term(t.place, t.name, t.bytes * factor, f"{t.formula} x {factor:.2f} as calibrated", t.phases)
            for t in bill.terms
        ]
    return MemoryLedger(tuple(bill.terms))


# -- what is always there ------------------------------------------------------------


def _fixed(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    hardware, choices = request.hardware, request.choices
    if hardware.is_cpu:
        bill.add("device", "worker process", hardware.process_bytes, "Python, torch and transformers before any model")
        if sizes.activation_bytes == 2:
            shapes = 1 + len({(one.d_in, one.d_out) for one in request.card.linears})
            kept = shapes * PRODUCTS_PER_SHAPE * COMPILED_PRODUCT
            said = f"{shapes} shapes x {PRODUCTS_PER_SHAPE} products x {COMPILED_PRODUCT / 1e6:g} MB"
            bill.add("device", "compiled products", BFLOAT16_LIBRARY + kept, f"{said}, and the library that compiles them")
    else:
        per_host = min(hardware.host.devices, choices.devices)
        bill.add("device", CONTEXT, hardware.context_bytes, "context, kernels and collective buffers of one device")
        bill.add(
            "host",
            "worker processes",
            hardware.process_bytes * per_host,
            f"{per_host} workers x {hardware.process_bytes / 1e9:.1f} GB",
        )
        if bill.has_pool:
            bill.add("sampler", CONTEXT, hardware.context_bytes, "context, kernels and collective buffers of one device")


def _weights(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    card, train, devices = request.card, request.choices.train, request.choices.devices
    total, w = card.parameters * sizes.weight_bytes, sizes.weight_bytes
    hosts = request.hardware.hosts(devices)
    if train.residency == "resident":
        bill.add("device", "weights", total, f"P {card.parameters:,} x {w:g} B")
        if train.split:
            bill.add("device", "lower halves of weights", card.parameters * 2.0, "P x 2 B, read by the update only")
    elif train.residency == "tiered":
        unit = max(block.parameters for block in card.blocks) * w
        slots = min(train.slots, card.num_layers) + (0 if bill.on_cpu or not train.layer_major else DEVICE_SLOT)
        bill.add("device", "layer slots", slots * unit, f"{slots} slots x largest layer {unit / 1e6:,.0f} MB")
        hot = min(train.resident_layers, card.num_layers)
        bill.add("device", "resident layers", hot * unit, f"{hot} layers x {unit / 1e6:,.0f} MB")
        if train.cold == "host":
            bill.add("host", "cold weights", total / hosts, f"P x {w:g} B / {hosts} hosts")
            if train.method == "full":
                bill.add(
                    "host",
                    "second slot of changed layers",
                    total / hosts,
                    "a step is atomic: new weights stand beside the old until it ends",
                    ("train",),
                )
        else:
            if not bill.on_cpu:  # there, the slots that compute are the only ones
                bill.add("host", "read-ahead slots", 3 * unit, "3 host slots x largest layer")
            copies = 2 if train.method == "full" else 1
            bill.add(
                "disk",
                "cold weights",
                copies * total / hosts,
                f"{copies} x P x {w:g} B / {hosts} hosts (old and new beside each other)"
                if copies > 1
                else f"P x {w:g} B / {hosts} hosts",
            )
    else:
        n = sizes.shards
        bill.add("device", "weights", total / n, f"P {card.parameters:,} x {w:g} B / {n} devices")
        unit = card.gathered_unit(train.expert_parallel) * w
        bill.add(
            "device",
            "gathered layers",
            train.slots * unit,
            f"{train.slots} x largest layer {unit / 1e9:,.2f} GB",
            ("score", "train") if request.choices.reference.kind in ("resident", "adapter_off") else ("train",),
        )
        bill.add(
            "device", "collective buffers", min(COLLECTIVE_BUFFER, total), "flat buffers of gather and reduce", ("score", "train")
        )
    if bill.on_cpu and train.layer_major and w < 4:
        desk = card.largest_block * 4.0
        bill.add("device", "one layer in float32", desk, f"largest layer {card.largest_block:,} x 4 B: what a CPU computes with")
    if train.method == "lora":
        own = max(sizes.activation_bytes, 2.0) if w < 2 else w
        bill.add(
            "device", "adapter", sizes.trained * own / sizes.shards, f"T {int(sizes.trained):,} x {own:g} B" + _over(sizes.shards)
        )


def _over(shards: int) -> str:
    return f" / {shards} devices" if shards > 1 else ""


# -- gradients, optimizer ------------------------------------------------------------


def _update(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    card, train = request.card, request.choices.train
    g, shards = sizes.gradient_bytes, sizes.shards
    if train.rule == "stateless":
        if train.layer_major:
            layer = card.gathered_block(train.expert_parallel) * 4
            rows = max(card.head, card.embedding)
            if rows <= card.largest_block:
                bill.add(
                    "device",
                    "gradient of the head",
                    rows * 4 / shards,
                    f"{rows:,} x 4 B: the head fits one block and waits to the end",
                    ("train",),
                )
            bill.add("device", "gradient of one layer", layer, "largest layer x 4 B: exact accumulation in float32", ("train",))
        else:
            tensor = card.gathered_tensor(train.expert_parallel)
            bill.add("device", "gradient of one tensor", tensor * g, f"largest tensor {tensor:,} x {g:g} B", ("train",))
            bill.add("device", "update workspace", _update_workspace(card), UPDATE_FORMULA, ("train",))
        return
    bill.add("device", "gradients", sizes.trained * g / shards, f"T {int(sizes.trained):,} x {g:g} B" + _over(shards), ("train",))
    if train.method == "full" and shards > 1:
        bill.add(
            "device",
            "gradients before reduction",
            card.gathered_unit(train.expert_parallel) * g,
            "one layer's, whole",
            ("train",),
        )
    if train.optimizer_offload != "none":
        bill.add(
            "device", "offload buckets", min(OFFLOAD_BUCKET, sizes.state_bytes), "staging for the offloaded optimizer", ("train",)
        )
    parts = ["float32 master"] if sizes.master else []
    for name in parts + (["first moments", "second moments"] if train.rule == "adamw" else []):
        _state(bill, request, sizes, name)


UPDATE_FORMULA = "float32 copies of weight and gradient, 16M elements at a time"


def _update_workspace(card: ModelCard, element_bytes: float = 8.0) -> float:
    return element_bytes * min(card.largest_tensor, 2**24)


def _state(bill: Bill, request: PlanRequest, sizes: Sizes, name: str) -> None:
    """One float32 copy of what trains, on the device or offloaded."""
    place, shards = request.choices.train.optimizer_offload, sizes.shards
    whole, formula = sizes.trained * 4.0, f"T {int(sizes.trained):,} x 4 B"
    if place == "none":
        bill.add("device", name, whole / shards, formula + _over(shards))
        return
    hosts = request.hardware.hosts(request.choices.devices)
    copies = 1 if shards > 1 else min(request.hardware.host.devices, request.choices.devices)
    bill.add(
        place,
        name,
        whole / hosts if shards > 1 else whole * copies,
        f"{formula}, offloaded" + (f" over {hosts} hosts" if shards > 1 and hosts > 1 else ""),
    )


# -- activations ------------------------------------------------------------


def _saved(card: ModelCard, request: PlanRequest, b: int) -> tuple[float, float]:
    """Return (sum over layers, largest layer) of saved bytes per token."""
    train = request.choices.train
    targets = train.lora.target_modules if train.method == "lora" else None
    sequence = request.choices.batch.prompt_tokens + request.choices.batch.completion_tokens
    each = [(block.count, saved_per_token(block, card.hidden_size, b, targets, sequence)) for block in card.blocks]
    return sum(count * size for count, size in each), max(size for _, size in each)


def _activations(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    """What one forward and backward keeps: between layers, inside them, and logits."""
    card, train = request.card, request.choices.train
    b, tokens, h = sizes.activation_bytes, sizes.micro_tokens, card.hidden_size
    every, largest = _saved(card, request, b)
    working = max(backward_per_token(block, h, b) for block in card.blocks)
    chunk = LAYERWISE_CHUNK_ELEMENTS if train.layer_major else CHUNK_ELEMENTS
    logit_tokens = min(tokens, train.head_chunk_tokens or tokens, max(1.0, chunk // card.vocab_size) if bill.on_cpu else tokens)
    per_logit = logits_per_token(card.vocab_size, b)
    logits, said = (
        logit_tokens * per_logit,
        f"{logit_tokens:,.0f} tokens x V {card.vocab_size:,} x {per_logit / card.vocab_size:g} B",
    )
    terms: list[tuple[str, float, str]] = []
    if train.recompute or train.layer_major:
        _boundaries(bill, request, sizes, terms)
        update_bytes = 8.0 if bill.on_cpu else DEVICE_UPDATE_BYTES
        if train.layer_major and not bill.on_cpu:
            slopes = 0.0 if train.boundary == "host" else sizes.rank_tokens / request.choices.batch.minibatches * h * 4
            head = max(card.head, card.embedding)
            rows = head if sizes.shards > 1 else min(head, card.largest_block)
            kept = sizes.shards == 1 and head <= card.largest_block  # then its gradient has a term of its own
            beside = slopes + rows * (b if kept else b + 4) - (0 if kept else card.gathered_block(train.expert_parallel) * 4)
            logits = max(logits + beside, 0.0)
            said = f"{said}, {beside / 1e9:+,.2f} GB: gradients by rows and hidden states instead of a layer's"
        inside, how = (
            tokens * (largest + working),
            f"{tokens:,.0f} tokens x {largest + working:,.0f} B kept and worked on in one layer",
        )
        # Logits are gone when the last layer is worked on; layer by layer, its activations are when it is updated.
        ways = [
            (inside, how),
            (logits, said),
            *([(_update_workspace(card, update_bytes), UPDATE_FORMULA)] if train.layer_major else []),
        ]
        terms.append(("activations of one layer, or logits", *max(ways)))
    else:
        how = f"{tokens:,.0f} tokens x ({every:,.0f} B kept over all layers + {working:,.0f} B worked on in one)"
        terms += [("activations", tokens * (every + working), how), ("logits", logits, said)]
    spared = _spared(request, sizes, sum(size for _, size, _ in terms), tokens * (largest + working))
    for name, size, formula in terms:
        less = min(size, spared)
        spared -= less
        taken = f", less {less / 1e6:,.0f} MB of gradients that do not exist yet" if less else ""
        bill.add("device", name, size - less, formula + taken, ("train",))


def _boundaries(bill: Bill, request: PlanRequest, sizes: Sizes, terms: list[tuple[str, float, str]]) -> None:
    """Hidden states between layers: of one micro-batch, or of all of a step where layers are the outer loop."""
    card, train = request.card, request.choices.train
    b, h, updates = sizes.activation_bytes, card.hidden_size, request.choices.batch.minibatches
    held = sizes.rank_tokens / updates if train.layer_major else sizes.micro_tokens
    of = "all micro-batches of a step" if train.layer_major else "one micro-batch"
    size, formula = (card.num_layers + 1) * held * h * b, f"(L + 1) x {held:,.0f} tokens x h x {b} B, of {of}"
    if train.boundary == "host" and not bill.on_cpu:
        copies = min(request.hardware.host.devices, request.choices.devices)
        bill.add("host", "activations between layers", size * copies, f"{formula}, x {copies} devices", ("train",))
        terms.append(("activations in flight", 2 * sizes.micro_tokens * h * b, "two boundaries of one micro-batch"))
    else:
        terms.append(("activations between layers", size, formula))
        if train.layer_major and not bill.on_cpu:
            terms.append(("hidden states scored, and their gradient", 2 * held * h * b, f"2 x {held:,.0f} tokens x h x {b} B"))


def _spared(request: PlanRequest, sizes: Sizes, activations: float, one_layer: float) -> float:
    """Return the bytes of activations that are gone before as many bytes of gradients exist.

    With one micro-batch an optimizer step, gradients grow layer by layer while backward frees activations. The peak is at its
    begin (all activations, and the head's gradient) or at its end (all gradients but the first layer's and the embedding's, and
    what that layer works on), and not the sum. Accumulation over several micro-batches has both.
    """
    card, train, batch = request.card, request.choices.train, request.choices.batch
    one = sizes.rank_tokens / batch.minibatches <= batch.micro_batch_tokens
    if train.rule == "stateless" or sizes.shards > 1 or not one:
        return 0.0
    g = sizes.gradient_bytes
    gradients = sizes.trained * g
    full = train.method == "full"
    head = (card.head or card.embedding) * g if full else 0.0
    first = (card.largest_block + card.embedding) * g if full else gradients / card.num_layers
    peak = max(activations + head, gradients + max(0.0, one_layer - first))
    return max(0.0, activations + gradients - peak)


# -- reference, reward ------------------------------------------------------------


def _reference(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    card, reference = request.card, request.choices.reference
    hosts, devices = request.hardware.hosts(request.choices.devices), request.choices.devices
    if reference.kind == "resident":
        size = BYTES[reference.dtype] if reference.dtype else sizes.weight_bytes
        bill.add(
            "device", "reference model", card.parameters * size / sizes.shards, f"P x {size:g} B, frozen" + _over(sizes.shards)
        )
    elif reference.kind == "int8_streamed":
        size = BYTES[reference.dtype or "int8"]
        bill.add(
            "host", "reference model", card.parameters * size / hosts, f"P x {size:g} B / {hosts} hosts, streamed layer by layer"
        )
        slots = 2
        wide = card.gathered_block(request.choices.train.expert_parallel) * (slots * size + sizes.activation_bytes)
        bill.add("device", "reference slots", wide, f"{slots} x largest layer as stored, one as computed", ("score",))
    elif reference.kind == "engine":
        size = BYTES[reference.dtype] if reference.dtype else sizes.engine_bytes
        bill.add(
            "sampler",
            "reference model",
            card.parameters * size / sizes.engine_spread,
            f"P x {size:g} B / {sizes.engine_spread} devices",
        )
    elif reference.kind == "anchors":
        top = 65
        bill.add(
            "host",
            "anchors of a batch",
            64 * request.choices.batch.longest * top * 8,
            "64 completions x tokens x 65 entries x 8 B",
            ("train",),
        )
    if reference.kind in ("resident", "int8_streamed", "adapter_off"):
        h, b = card.hidden_size, sizes.activation_bytes
        widest = max(backward_per_token(block, h, b) for block in card.blocks)
        tokens = sizes.micro_tokens
        logit_tokens = min(tokens, request.choices.train.head_chunk_tokens or tokens)
        size = tokens * (h * b + widest) + logit_tokens * card.vocab_size * (b + 4)
        bill.add(
            "device",
            "activations while scoring",
            size,
            f"{tokens:,.0f} tokens of one layer, logits of {logit_tokens:,.0f}",
            ("score",),
        )
    assert devices >= 1


def _reward(bill: Bill, request: PlanRequest) -> None:
    reward, hardware = request.choices.reward, request.hardware
    if not reward.parameters or reward.place == "elsewhere":
        return
    size = reward.parameters * BYTES[reward.dtype]
    if reward.place == "host":
        bill.add(
            "host",
            "reward model",
            size / hardware.hosts(request.choices.devices),
            f"{reward.parameters:,.0f} x {BYTES[reward.dtype]:g} B",
            ("score",),
        )
    else:
        pool = request.choices.sample.devices or request.choices.devices
        bill.add("sampler", "reward model", size / pool, f"{reward.parameters:,.0f} x {BYTES[reward.dtype]:g} B / {pool} devices")


# -- sampling ------------------------------------------------------------


def kv_sequences(request: PlanRequest, sizes: Sizes) -> float:
    """Return the sequences whose cache one device (or group of devices) holds: the pool's, over its copies of the weights."""
    copies = max(1, sizes.sample_devices // sizes.engine_spread)
    return max(1.0, min(request.choices.sample.sequences, request.choices.batch.samples) / copies)


def kv_pool_bytes(request: PlanRequest, sizes: Sizes) -> float:
    """Return the bytes of the cache on one device."""
    sample, batch = request.choices.sample, request.choices.batch
    paged = sample.engine == "vllm"
    # A paged cache holds sequences as long as they are, not as long as they may get: mean prompt, half-grown to cap.
    length = math.ceil(batch.prompt_tokens + batch.completion_tokens) if paged else batch.longest
    page = sample.page_tokens if paged else 1
    one = request.card.kv_bytes(length, sizes.kv_bits, page, windows=paged)
    return kv_sequences(request, sizes) * one / sizes.engine_spread * (1 - sample.kv_host_share)


def _sampling(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    card, choices, sample = request.card, request.choices, request.choices.sample
    spread, batch = sizes.engine_spread, choices.batch
    own = sample.devices > 0
    asleep = sample.sleeps and not own
    together = choices.schedule.kind == "colocated"
    while_sampling: tuple[str, ...] = ("sample", "evaluate") + (("train", "score", "sync") if own or together else ())
    if sample.engine == "vllm":
        held = ("sample", "evaluate", "sync") if asleep else ALWAYS
        weights = card.parameters * sizes.engine_bytes / spread
        bill.add("sampler", "engine's weights", weights, f"P x {sizes.engine_bytes:g} B / {spread} devices", held)
        bill.add("sampler", "engine's workspace", ENGINE_WORKSPACE, "activations of prefill, captured graphs", held)
        kv_phases = held if not (asleep or own or together) else (while_sampling if asleep or together else ALWAYS)
    else:
        kv_phases = ALWAYS if sample.processes else while_sampling
    beside = max(1, sample.processes)
    if sample.processes:
        copies = f"{sample.processes} samplers x "
        bill.add(
            "sampler",
            f"{SAMPLERS}weights",
            sample.processes * card.parameters * sizes.weight_bytes,
            f"{copies}P x {sizes.weight_bytes:g} B",
        )
        bill.add(
            "host",
            f"{SAMPLERS}processes",
            sample.processes * request.hardware.process_bytes,
            f"{copies}Python, torch and transformers",
        )
    length = batch.longest if sample.engine == "embedded" else math.ceil(batch.prompt_tokens + batch.completion_tokens)
    sequences = kv_sequences(request, sizes)
    kind = f"pages of {sample.page_tokens}" if sample.engine == "vllm" else "static slots"
    per_token = card.kv_bytes_per_token(sizes.kv_bits)
    formula = f"{sequences:,.0f} sequences x {length:,} tokens x {per_token:,.0f} B, {kind}" + _over(spread)
    kv = kv_pool_bytes(request, sizes) * beside
    whose = SAMPLERS if sample.processes else ""
    bill.add("sampler", f"{whose}KV cache", kv, formula, kv_phases)
    if sample.kv_host_share:
        bill.add(
            "host",
            "cold KV pages",
            kv / (1 - sample.kv_host_share) * sample.kv_host_share,
            f"{sample.kv_host_share:.0%} of the cache",
            kv_phases,
        )
    if sample.engine == "embedded":
        prefill = min(EMBEDDED_PREFILL_TOKENS, max(sequences * batch.prompt_tokens, batch.prompt_tokens))
        b, h = sizes.activation_bytes, card.hidden_size
        widest = max(backward_per_token(block, h, b) for block in card.blocks)
        bill.add(
            "device",
            f"{whose}prefill activations",
            prefill * (2 * h * b + widest),
            f"{prefill:,.0f} tokens of one layer",
            ("sample", "evaluate"),
        )
        bill.add(
            "device",
            f"{whose}distributions of one token",
            sequences * card.vocab_size * 12,
            "sequences x V x 3 x 4 B",
            while_sampling,
        )
        if choices.train.residency in ("sharded", "zero3"):
            unit = card.gathered_unit(choices.train.expert_parallel) * sizes.weight_bytes
            bill.add(
                "device",
                "gathered layers while sampling",
                choices.train.slots * unit,
                f"{choices.train.slots} x largest layer",
                ("sample", "evaluate"),
            )


# -- hand-over, merge, disk ------------------------------------------------------------


def sync_kind(request: PlanRequest) -> str:
    """Return what the sampler is given: nothing (embedded), the adapter, a merged model or the weights."""
    sample, train = request.choices.sample, request.choices.train
    if sample.engine == "embedded":
        return "none"
    return sample.sync or ("adapter" if train.method == "lora" else "weights")


def _handover(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    card, train = request.card, request.choices.train
    kind = sync_kind(request)
    shard = min(5.0e9, card.parameters * 2.0)
    if kind == "weights":
        bucket = max(card.gathered_unit(train.expert_parallel) * sizes.weight_bytes, 1.0e9)
        bill.add("device", "hand-over bucket", bucket, "one layer, gathered to be sent", ("sync",))
        bill.add(
            "sampler",
            "hand-over bucket",
            card.gathered_unit(train.expert_parallel) * sizes.engine_bytes / sizes.engine_spread,
            "one layer, received",
            ("sync",),
        )
    if kind == "merge":
        bill.add("host", "merge workspace", 3 * shard, "one file shard as stored, in float32 and rounded", ("sync", "merge"))
    elif train.method == "lora":
        bill.add("host", "merge workspace", 3 * shard, "one file shard as stored, in float32 and rounded", ("merge",))
    if train.layer_major and train.residency == "resident":
        copied = card.parameters * sizes.weight_bytes
        bill.add(
            "device",
            "weights as loaded",
            copied,
            f"P x {sizes.weight_bytes:g} B, until all are in their layers' buffers",
            ("load",),
        )
    streamed = train.residency == "tiered" or (train.layer_major and request.hardware.is_cpu and sizes.weight_bytes < 4)
    if streamed and train.method == "full":
        written = 2 * card.parameters * sizes.weight_bytes
        bill.add(
            "host",
            "whole policy while it is written",
            written,
            f"2 x P x {sizes.weight_bytes:g} B: gathered, then as files",
            ("sync",),
        )
    if not request.hardware.is_cpu:  # there, loaded weights are the file's own pages
        bill.add("host", "file pages while loading", min(5.0e9, card.parameters * 2.0) * 2, "two file shards, staged", ("load",))


def checkpoint_bytes(request: PlanRequest, sizes: Sizes) -> float:
    """Return the bytes of one checkpoint: weights that train (float32 masters where there are any) and optimizer state."""
    own = sizes.weight_bytes if request.choices.train.method == "full" else max(sizes.weight_bytes, 2.0)
    weights = 0.0 if sizes.master else sizes.trained * own
    return weights + sizes.state_bytes


def _disk(bill: Bill, request: PlanRequest, sizes: Sizes) -> None:
    card, hosts = request.card, request.hardware.hosts(request.choices.devices)
    shared = f" / {hosts} hosts" if hosts > 1 else ""
    bill.add(
        "disk",
        "base model",
        card.parameters * max(sizes.weight_bytes, 2.0) / hosts,
        f"P x {max(sizes.weight_bytes, 2.0):g} B{shared}",
    )
    bill.add(
        "disk",
        "checkpoints",
        3 * checkpoint_bytes(request, sizes) / hosts,
        f"(2 kept + 1 being written) x weights and state{shared}",
        ("train", "sync", "merge", "evaluate"),
    )
    own = (
        card.parameters * 2.0 if request.choices.train.method == "full" or sync_kind(request) == "merge" else sizes.trained * 2.0
    )
    bill.add("disk", "policies handed on", 2 * own / hosts, f"2 x {own / 1e9:,.1f} GB{shared}", ("sync", "merge", "evaluate"))
    if request.choices.train.method == "lora":
        bill.add("disk", "merged model", card.parameters * 2.0 / hosts, f"P x 2 B{shared}", ("merge", "evaluate"))
    if request.choices.schedule.kind == "async":
        pool = request.choices.schedule.pool_samples * request.choices.batch.longest * 16
        bill.add("disk", "experience pool", pool, f"{request.choices.schedule.pool_samples:,} samples x tokens x 16 B", _WORKING)
