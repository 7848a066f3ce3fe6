"""The bandwidth ledger: bytes that travel in a step, over which link, for how long, and whether computation hides them.

A transfer that is prefetched (two slots or more) costs only what is longer than the computation that it runs beside; all
transfers of one link share it. Without prefetch it costs its whole time. The *threshold* is the number of tokens a device must
compute for each time that the weights travel, so that they hide: below it the link binds (LOWMEM 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.plan.memory import Sizes, sync_kind
from trainer.plan.request import BYTES, PlanRequest
from trainer.plan.work import Work

LINKS = {
    "network": "network",
    "link": "link between devices",
    "host_link": "host-device link",
    "host_link_back": "device-host link",  # the other direction of the same link, which is full duplex; a disk is not
    "disk": "disk",
    "page_cache": "page cache",  # a file that the operating system keeps in memory that nobody else wants
    "hbm": "device memory",
}


@dataclass(frozen=True)
class Flow:
    """One kind of transfer in one step, of one device."""

    name: str
    link: str
    phase: str  # sample, score, train or sync
    bytes: float
    seconds: float
    beside: str  # the computation that it may hide behind
    beside_seconds: float
    prefetched: bool
    formula: str
    threshold_tokens: float | None = None  # tokens of one visit of the weights from which it hides
    visit_tokens: float | None = None  # tokens of a visit in this plan

    @property
    def exposed_seconds(self) -> float:
        """Seconds that it costs alone."""
        return max(0.0, self.seconds - self.beside_seconds) if self.prefetched else self.seconds

    @property
    def hidden(self) -> bool:
        return self.exposed_seconds <= 0.0

    @property
    def sentence(self) -> str:
        """What a person should know of it."""
        where = LINKS[self.link]
        if self.threshold_tokens is None or self.visit_tokens is None:
            return f"{self.name}: {_seconds(self.seconds)} a step over the {where}"
        known = f"hides behind compute from about {_round(self.threshold_tokens):,} tokens per device and visit"
        if not self.prefetched:
            return (
                f"{self.name}: no prefetch (one slot), so all {_seconds(self.seconds)} over the {where} are "
                f"waited for; with two slots it {known}"
            )
        if self.hidden:
            return f"{self.name}: hidden; it {known}, here {self.visit_tokens:,.0f}"
        return (
            f"{self.name}: the {where} binds: {_seconds(self.seconds)} against "
            f"{_seconds(self.beside_seconds)} of compute; it {known}, here {self.visit_tokens:,.0f}"
        )


def _round(value: float) -> int:
    """Two significant digits."""
    size = max(1, 10 ** (len(str(int(value))) - 2))
    return int(round(value / size) * size)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


@dataclass(frozen=True)
class BandwidthLedger:
    flows: tuple[Flow, ...]

    def link_seconds(self, phase: str) -> dict[str, float]:
        """Return the seconds that each link is busy in a phase."""
        busy: dict[str, float] = {}
        for flow in self.flows:
            if flow.phase == phase:
                busy[flow.link] = busy.get(flow.link, 0.0) + flow.seconds
        return busy

    def phase_seconds(self, phase: str, compute: float) -> tuple[float, str]:
        """Return (seconds, what binds) of a phase whose computation alone takes some seconds."""
        waited = sum(flow.seconds for flow in self.flows if flow.phase == phase and not flow.prefetched)
        hidden: dict[str, float] = {}
        for flow in self.flows:
            if flow.phase == phase and flow.prefetched:
                hidden[flow.link] = hidden.get(flow.link, 0.0) + flow.seconds
        link, longest = max(hidden.items(), key=lambda pair: pair[1], default=("", 0.0))
        if waited > max(compute, longest):
            slowest = max((f for f in self.flows if f.phase == phase and not f.prefetched), key=lambda f: f.seconds)
            return max(compute, longest) + waited, LINKS[slowest.link]
        return max(compute, longest) + waited, (LINKS[link] if longest > compute else "compute")

    def find(self, name: str) -> Flow:
        """Return the flow of a name."""
        return next(flow for flow in self.flows if flow.name == name)

    @property
    def binding(self) -> list[Flow]:
        """Flows that cost time, the worst first."""
        return sorted((flow for flow in self.flows if not flow.hidden), key=lambda flow: -flow.exposed_seconds)


def visits_per_step(request: PlanRequest, sizes: Sizes) -> float:
    """Return how often the weights travel for forward and backward: once a micro-batch, or once an optimizer "
    "step (layer-major)."""
    batch = request.choices.batch
    return batch.passes * (batch.minibatches if request.choices.train.layer_major else max(sizes.num_micro, batch.minibatches))


class _Flows:
    def __init__(self, request: PlanRequest, sizes: Sizes, work: Work):
        self.request, self.sizes, self.work = request, sizes, work
        self.flows: list[Flow] = []
        device, host = request.hardware.device, request.hardware.host
        devices = request.choices.devices
        inside = devices <= host.devices
        self.between = "link" if inside else "network"
        per_host = min(devices, host.devices)
        self.rates = {
            "link": device.link_bytes_per_second,
            "network": device.network_bytes_per_second,
            "host_link": device.host_link_bytes_per_second,
            "host_link_back": device.host_link_bytes_per_second,
            "disk": host.disk_bytes_per_second / per_host,
            "page_cache": device.link_bytes_per_second if request.hardware.is_cpu else device.host_link_bytes_per_second,
            "hbm": device.hbm_bytes_per_second * request.hardware.efficiency.decode,
        }

    def add(
        self, name: str, link: str, phase: str, size: float, formula: str, prefetched: bool = True, visits: float | None = None
    ) -> None:
        if size <= 0:
            return
        seconds = size / self.rates[link]
        beside, compute = {
            "train": ("training", self.work.train_seconds),
            "score": ("scoring", self.work.score_seconds),
            "sample": ("decoding", self.work.decode_seconds),
            "sync": ("nothing", 0.0),
        }[phase]
        threshold = tokens = None
        if visits and compute > 0:
            total = self.sizes.rank_tokens * (self.request.choices.batch.passes if phase == "train" else 1)
            tokens = total / visits
            threshold = tokens * seconds / (compute - (self.work.update_seconds if phase == "train" else 0.0))
        self.flows.append(Flow(name, link, phase, size, seconds, beside, compute, prefetched, formula, threshold, tokens))


def bandwidth_ledger(request: PlanRequest, sizes: Sizes, work: Work) -> BandwidthLedger:
    """Return the bandwidth ledger of a request."""
    flows = _Flows(request, sizes, work)
    _train_flows(flows)
    _tier_flows(flows)
    _other_flows(flows)
    return BandwidthLedger(tuple(flows.flows))


def _train_flows(flows: _Flows) -> None:
    """Weights gathered and gradients reduced between training devices."""
    request, sizes = flows.request, flows.sizes
    train, n = request.choices.train, request.choices.devices
    batch = request.choices.batch
    if n == 1:
        return
    prefetched = train.slots >= 2
    part = 1 - 1 / n
    updates = batch.passes * batch.minibatches
    if train.residency in ("sharded", "zero3"):
        visits = visits_per_step(request, sizes)
        gathers = 3 if train.residency == "zero3" and train.recompute else 2
        each = received_parameters(request) * sizes.weight_bytes
        said = (
            f"{visits:,.1f} visits x {gathers} gathers x (1 - 1/{n}) x P x {sizes.weight_bytes:g} B = "
            f"{each / 1e12:,.3g} TB a gather"
        )
        flows.add("weights gathered", flows.between, "train", visits * gathers * each, said, prefetched, visits)
        times = visits if train.rule == "stateless" or train.method == "full" else updates
        reduced = received_parameters(request) if train.method == "full" else part * sizes.trained
        size = times * reduced * sizes.gradient_bytes
        _expert_flow(flows, visits)
        flows.add(
            "gradients reduced",
            flows.between,
            "train",
            size,
            f"{times:,.1f} x (1 - 1/{n}) x T x {sizes.gradient_bytes:g} B",
            True,
            visits,
        )
    else:
        size = updates * 2 * part * sizes.trained * sizes.gradient_bytes
        flows.add(
            "gradients all-reduced",
            flows.between,
            "train",
            size,
            f"{updates} updates x 2 x (1 - 1/{n}) x T x {sizes.gradient_bytes:g} B",
            True,
            float(updates),
        )


def received_parameters(request: PlanRequest) -> float:
    """Return the parameters that one device receives to see every layer whole: (1 - 1/N) P, experts only within their group."""
    card, n, spread = request.card, request.choices.devices, request.choices.train.expert_parallel
    experts = card.role("experts")
    return (1 - 1 / n) * (card.parameters - experts) + (1 - spread / n) * experts / spread


def _expert_flow(flows: _Flows, visits: float) -> None:
    """Tokens that travel to experts on other devices and back, in forward, recomputation and backward."""
    request, sizes = flows.request, flows.sizes
    spread = request.choices.train.expert_parallel
    if spread == 1:
        return
    chosen = sum(block.count * block.experts_per_token for block in request.card.blocks if block.experts)
    rounds = 3 if request.choices.train.recompute else 2
    tokens = sizes.rank_tokens * request.choices.batch.passes
    size = rounds * 2 * chosen * tokens * request.card.hidden_size * sizes.activation_bytes * (1 - 1 / spread)
    formula = f"{rounds} passes x there and back x tokens x chosen experts x h x {sizes.activation_bytes} B x (1 - 1/{spread})"
    flows.add("tokens to experts", flows.between, "train", size, formula, True)


def _disk_or_cache(request: PlanRequest, sizes: Sizes) -> str:
    """Return where cold files are read from: two copies of what trains stay in the page cache when half the memory holds them."""
    hosts, copies = request.hardware.hosts(request.choices.devices), 2 if request.choices.train.method == "full" else 1
    files = copies * request.card.parameters * sizes.weight_bytes / hosts
    return "page_cache" if files < 0.5 * request.hardware.host.memory_bytes else "disk"


def _tier_flows(flows: _Flows) -> None:
    """Weights, reference, boundaries and optimizer state between device, host and disk."""
    request, sizes = flows.request, flows.sizes
    card, train, batch = request.card, request.choices.train, request.choices.batch
    prefetched = train.slots >= 2
    if train.residency == "tiered":
        link = "host_link" if train.cold == "host" else _disk_or_cache(request, sizes)
        visits = visits_per_step(request, sizes)
        cold = 1 - min(train.resident_layers, card.num_layers) / card.num_layers
        size = card.parameters * sizes.weight_bytes * cold
        said = f"{visits:,.1f} visits x 2 loads x P x {sizes.weight_bytes:g} B"
        flows.add("layers loaded", link, "train", 2 * size * visits, said, prefetched, visits)
        if train.method == "full":
            said = f"{visits:,.1f} visits x P x {sizes.weight_bytes:g} B"
            flows.add(
                "layers written back",
                "host_link_back" if link == "host_link" else link,
                "train",
                size * visits,
                said,
                prefetched,
                visits,
            )
        if request.choices.sample.engine == "embedded" and not request.choices.sample.processes:
            steps = flows.work.decode_steps
            flows.add(
                "layers loaded while sampling",
                link,
                "sample",
                steps * size,
                f"{steps:,.0f} tokens x P x {sizes.weight_bytes:g} B",
                prefetched,
            )
    if request.choices.reference.kind == "int8_streamed":
        experts, spread = card.role("experts"), train.expert_parallel
        size = (card.parameters - experts + experts / spread) * BYTES[request.choices.reference.dtype or "int8"]
        visits = 1.0 if train.layer_major else sizes.num_micro
        flows.add(
            "reference streamed", "host_link", "score", size * visits, f"{visits:,.1f} visits x P x 1 B", prefetched, visits
        )
    if train.boundary == "host":
        size = 2 * (card.num_layers + 1) * sizes.rank_tokens * card.hidden_size * sizes.activation_bytes * batch.passes
        flows.add("activations to the host and back", "host_link", "train", size, "2 x (L + 1) x tokens x h x bytes")
    updates = batch.passes * batch.minibatches
    if train.optimizer_offload != "none":
        size = sizes.trained * (sizes.gradient_bytes + max(sizes.weight_bytes, 2.0)) / sizes.shards * updates
        flows.add(
            "gradients down, weights up",
            "host_link",
            "train",
            size,
            f"{updates} updates x T x (gradient + weight)",
            prefetched=False,
        )
        if train.optimizer_offload == "disk":
            size = 2 * sizes.state_bytes / sizes.shards * updates
            flows.add(
                "optimizer state read and written", "disk", "train", size, f"{updates} updates x 2 x state", prefetched=False
            )


def _other_flows(flows: _Flows) -> None:
    """Decoding's reads, and the hand-over of a policy."""
    request, sizes, work = flows.request, flows.sizes, flows.work
    card, sample, batch = request.card, request.choices.sample, request.choices.batch
    flows.add(
        "weights and cache read while decoding",
        "hbm",
        "sample",
        work.decode_bytes * work.decode_steps,
        f"{work.decode_steps:,.0f} steps x {work.decode_bytes / 1e9:,.3g} GB",
    )
    kind = sync_kind(request)
    updates = batch.passes * batch.minibatches
    share = min(1.0, updates / sample.sync_every)
    every = f", every {sample.sync_every} optimizer steps" if sample.sync_every > 1 else ""
    own = flows.request.choices.sample.devices > 0
    if kind == "weights" and request.choices.sample.engine == "vllm":
        size = card.parameters * max(sizes.engine_bytes, 1.0) / sizes.engine_spread * share
        flows.add(
            "policy handed over",
            "network" if own else flows.between,
            "sync",
            size,
            f"P x {max(sizes.engine_bytes, 1.0):g} B / {sizes.engine_spread} devices{every}",
            prefetched=False,
        )
    elif kind == "adapter":
        flows.add("adapter handed over", "network", "sync", sizes.trained * 2 * share, f"T x 2 B{every}", prefetched=False)
    elif kind == "merge":
        hosts = request.hardware.hosts(max(1, sizes.sample_devices))
        size = 3 * card.parameters * 2.0 / hosts * share * min(request.choices.devices, request.hardware.host.devices)
        flows.add(
            "adapter merged into a copy",
            "disk",
            "sync",
            size,
            f"read, written and loaded: 3 x P x 2 B / {hosts} hosts{every}",
            prefetched=False,
        )
