"""What a plan is made for: one kind of device, the host it sits in, and how well both are used.

    load_hardware("h100-80gb")      a device of hardware.yaml, in the host it usually comes in
    load_hardware("box.yaml")       a file: `device:` names one of the library, the other keys override it
    load_hardware("local")          this machine, probed in a few seconds (probe.py)

Devices are counted in the plan, not here. On a machine without a GPU the device is the main memory and the cores.
Importable without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.load import lay_over, read_yaml, validate_as
from trainer.config.schema import Section
from trainer.errors import ConfigError, nearest

LIBRARY = Path(__file__).parent / "hardware.yaml"
Amount = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=2)]


class Device(Section):
    """One device. Rates are those that work reaches, unless the name says peak."""

    name: str = "device"
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bytes: Amount
    training_flops: Amount
    """FLOP/s of a training step of a large model, in the type that it computes in."""
    bfloat16_flops: Amount | None = None
    """The same in bfloat16, where that differs (a CPU's); None: training_flops."""
    peak_flops: Amount | None = None
    hbm_bytes_per_second: Amount
    link_bytes_per_second: Amount
    host_link_bytes_per_second: Amount
    network_bytes_per_second: Amount
    launch_seconds: Annotated[float, Field(ge=0)] = 4e-6
    """Seconds that one small operation costs whatever its size."""
    watts: Annotated[float, Field(ge=0)] | None = None
    price_per_hour: Annotated[float, Field(ge=0)] | None = None


class Host(Section):
    devices: Annotated[int, Field(ge=1)]
    """Devices in one host."""
    memory_bytes: Amount
    disk_bytes: Amount
    disk_bytes_per_second: Amount
    cores: Annotated[int, Field(ge=1)] | None = None


class Efficiency(Section):
    """How much of a rate is reached. Start values are round; `tithe plan --calibrate RUN` replaces them by measured ones."""

    train: Annotated[float, Field(gt=0)] = 1.0
    """Predicted over real seconds of forward and backward."""
    score: Annotated[float, Field(gt=0)] = 1.0
    """Predicted over real seconds of a forward pass without gradient (reference, audits)."""
    sample: Annotated[float, Field(gt=0)] = 1.0
    """Predicted over real seconds of sampling, prefill included."""
    decode: Annotated[float, Field(gt=0)] = 0.6
    """Of hbm_bytes_per_second, while one token a sequence is decoded."""
    colocated_sampling: Share = 0.8
    """Sampling throughput left under full training load: published as a loss of about 20 %."""
    trained_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of samples whose group's rewards differ: where no reference is scored, only they are learned from."""
    memory: Annotated[float, Field(gt=0)] = 1.0
    """Measured peak over the ledger's peak."""
    fixed_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds a step that no ledger explains."""


class Hardware(Section):
    name: str
    device: Device
    host: Host
    efficiency: Efficiency = Efficiency()
    context_bytes: Annotated[float, Field(ge=0)] = 0.8e9
    """Held by the driver, its libraries and collective buffers on every device."""
    process_bytes: Annotated[float, Field(ge=0)] = 0.5e9
    """Resident memory of one worker process before it holds a model: Python, torch, transformers."""
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of a device's memory that fragmentation makes unusable."""
    notes: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def usable_bytes(self) -> float:
        """What a plan may fill of one device."""
        return self.device.memory_bytes * (1 - self.reserve)

    def hosts(self, devices: int) -> int:
        return max(1, -(-devices // self.host.devices))


@lru_cache(maxsize=1)
def library() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (devices, hosts) of hardware.yaml as trees."""
    tree = read_yaml(LIBRARY)
    return dict(tree["devices"]), dict(tree["hosts"])


def device_names() -> list[str]:
    return sorted(library()[0])


def load_hardware(source: str | Path | Mapping[str, Any]) -> Hardware:
    """Return a hardware description.

    Raises:
        ConfigError: an unknown device (with the nearest known one), a missing or unknown key.
    """
    if isinstance(source, Mapping):
        return _from_tree(dict(source))
    text = str(source)
    if text == "local":
        from trainer.plan.probe import probe_local

        return probe_local()
    if Path(text).suffix in (".yaml", ".yml"):
        tree = read_yaml(Path(text), "hardware")
        return _from_tree(dict(tree.get("hardware", tree)))
    return _from_tree({"device": text})


def _from_tree(tree: dict[str, Any]) -> Hardware:
    """Lay a hardware tree over its library device and host."""
    devices, hosts = library()
    given = tree.pop("device", None)
    own = dict(given) if isinstance(given, Mapping) else {}
    base = own.pop("like", tree.pop("like", None)) if given is None or isinstance(given, Mapping) else given
    if base is not None and (not isinstance(base, str) or base not in devices):
        raise ConfigError("hardware.device", base, "unknown device; " + nearest(str(base), devices))
    merged = dict(devices[base]) if base is not None else {}
    host_name = merged.pop("host", None)
    flat = {key: tree.pop(key) for key in list(tree) if key in Device.model_fields and key != "name"}
    device = {"name": base or str(tree.get("name", "device")), **merged, **flat, **own}
    missing = [name for name, field in Device.model_fields.items() if field.is_required() and name not in device]
    if missing:
        known = f"or begin with a device of the library (like: {device_names()[0]})"
        raise ConfigError("hardware.device", given, f"lacks {', '.join(missing)}; give them, {known}")
    host: Any = tree.pop("host", host_name)
    if isinstance(host, str):
        if host not in hosts:
            raise ConfigError("hardware.host", host, "unknown host; " + nearest(host, hosts))
        host = hosts[host]
    elif isinstance(host, Mapping) and host_name is not None:
        host = lay_over(hosts[host_name], dict(host))
    elif not isinstance(host, Mapping):
        raise ConfigError("hardware.host", host, f"must be a known host ({', '.join(hosts)}) or a mapping of what it has")
    whole = {"name": base or device["name"], **tree, "device": device, "host": host}
    if device.get("kind") == "cpu":
        whole.setdefault("context_bytes", 0.0)
        whole.setdefault("reserve", 0.05)
    return validate_as(Hardware, _counts(whole), "hardware")


def _counts(tree: Any) -> Any:
    """Return a tree with counts that YAML wrote as floats (8e0) whole."""
    if not isinstance(tree, Mapping):
        return tree
    found = {key: _counts(value) for key, value in tree.items()}
    for key in ("devices", "cores"):
        if isinstance(found.get(key), float) and found[key].is_integer():
            found[key] = int(found[key])
    return found
