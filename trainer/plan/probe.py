"""This machine as a hardware description: cores, memory, copies, disk, matrix speed, GPUs. A few seconds.

Rates are the best of a few short tries, because other work on the machine can only make a try slower. Memory is what is free
now, inside the cgroup's limit. A GPU that the library knows keeps its library figures for what is not measured here.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from trainer.config.load import validate_as
from trainer.errors import ConfigError
from trainer.files import read_json, write_json
from trainer.plan.hardware import Hardware, library

PROBE = "hardware.json"
CPU_FACTS = {"context_bytes": 0.0, "process_bytes": 0.4e9, "reserve": 0.05}  # torch's CPU build is smaller than a GPU's
IN_A_MODEL = 5.0  # bare operations that one in a model takes: modules, views and autograd in Python around it
ROUND_FIGURES = "speeds are round figures; `tithe plan` probes this machine"


def best_rate(amount: float, work: Callable[[], object], tries: int = 4, seconds: float = 0.6) -> float:
    """Return the highest amount per second of several runs of some work, within a time budget."""
    best, begin = 0.0, time.perf_counter()
    for _ in range(tries):
        start = time.perf_counter()
        work()
        end = time.perf_counter()
        best = max(best, amount / max(end - start, 1e-9))
        if end - begin > seconds:
            break
    return best


def memory_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[tuple[float, float]]:
    """Return (limit, in use) in bytes of every control group above this process that limits memory.

    File pages that the kernel can drop do not count as used. Both versions of control groups are read.

    Args:
        root: where the groups are mounted.
        own: the file that says which groups this process is in.
    """
    found = []
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        first = controllers == ""
        if not first and "memory" not in controllers.split(","):
            continue
        top = root if first else root / "memory"
        names = ("memory.max", "memory.current") if first else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (_text(folder / name).strip() for name in names)
            if limit.isdigit():
                stat = dict(pair.split(" ", 1) for pair in _text(folder / "memory.stat").splitlines() if " " in pair)
                prefix = "" if first else "total_"
                pages = sum(float(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
                found.append((float(limit), max(0.0, float(used or 0) - pages)))
            if folder == top:
                break
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def free_memory_bytes() -> float:
    """Return the memory that a new process of this user could fill now: free of the machine and below every group's limit."""
    return max(1.0, min([float(psutil.virtual_memory().available), *(limit - used for limit, used in memory_groups())]))


def memory_limit_bytes() -> float:
    """Return the memory that no process here can exceed, whoever else ends: the machine's or a group's limit, and swap."""
    whole = min([float(psutil.virtual_memory().total), *(limit for limit, _ in memory_groups())])
    return whole + float(psutil.swap_memory().total)


def gpu_without_torch() -> tuple[str, float] | None:
    """Return (name, memory in bytes) of the smallest GPU here; None where nothing says it."""
    query = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.partition(",") for line in asked.stdout.splitlines()]
    found = [(name.strip(), float(size) * 2**20) for size, _, name in lines if size.strip().isdigit()]
    return min(found, key=lambda pair: pair[1], default=None)


def disk_rate(directory: Path, size: int = 64 * 2**20) -> float:
    """Return bytes per second of writing a file and reading it back past the page cache; the slower of the two."""
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=directory) as file:

        def write() -> None:
            file.seek(0)
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

        written = best_rate(size, write, tries=2)

        def read() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(2**22):
                pass

        return min(written, best_rate(size, read, tries=2))


def copy_rate(size: int = 64 * 2**20) -> float:
    """Return bytes per second of one memory copy."""
    source, target = bytearray(size), bytearray(size)
    view = memoryview(target)

    def copy() -> None:
        view[:] = source

    copy()
    return best_rate(size, copy)


def _block(dtype: Any, sequences: int = 8, length: int = 64, hidden: int = 512, heads: int = 8) -> Callable[[], None]:
    """Return forward and backward of one decoder block in a type: its products, norms in float32, fused attention, gated MLP."""
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention, silu

    sizes = ((3 * hidden, hidden), (hidden, hidden), (6 * hidden, hidden), (hidden, 3 * hidden))
    qkv, out, gate_up, down = (torch.full(size, 1 / hidden, dtype=dtype, requires_grad=True) for size in sizes)
    x = torch.rand(sequences, length, hidden).to(dtype)

    def norm(y: Any) -> Any:
        z = y.float()
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    def work() -> None:
        q, k, v = linear(norm(x), qkv).view(sequences, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        y = x + linear(attended, out)
        gate, up = linear(norm(y), gate_up).chunk(2, -1)
        torch.autograd.grad((y + linear(silu(gate) * up, down)).float().sum(), (qkv, out, gate_up, down))

    return work


def bfloat16_speed(seconds: float = 1.5) -> float:
    """Return how much faster a decoder block is in bfloat16 than in float32: below 1 on cores without bfloat16 units.

    Bare products would promise too much: attention, norms and sums gain nothing, or lose. Seconds of the processor are compared,
    and the two take turns, because of what else the machine does.
    """
    import torch

    works = [_block(dtype) for dtype in (torch.float32, torch.bfloat16)]
    for work in works:
        work()
    best, begin = [float("inf")] * 2, time.perf_counter()
    for _ in range(8):
        best = [min(taken, processor_seconds(work)) for taken, work in zip(best, works, strict=True)]
        if time.perf_counter() - begin > seconds:
            break
    return best[0] / max(best[1], 1e-9)


def processor_seconds(work: Callable[[], object]) -> float:
    """Return what some work takes of the processor, over all threads of this process."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _cpu() -> dict[str, Any]:
    """Measure the cores with torch: matrix products, a decoder block in both types, and one small operation in a model."""
    import torch

    size = 768
    left, right = torch.rand(size, size), torch.rand(size, size)
    rate = best_rate(2 * size**3, lambda: left @ right, tries=8)
    small, count = torch.rand(8, 8), 2000

    def operations() -> None:
        for _ in range(count):
            torch.add(small, small)

    launch = IN_A_MODEL / best_rate(count, operations)
    speeds = {"training_flops": rate, "bfloat16_flops": rate * bfloat16_speed()}
    return {**speeds, "peak_flops": None, "launch_seconds": launch}


def _gpu() -> dict[str, Any] | None:
    """Describe the first GPU that torch sees, measured where it is quick; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    size = 8192
    left = torch.rand(size, size, device="cuda", dtype=torch.bfloat16)

    def product() -> None:
        for _ in range(4):
            left @ left
        torch.cuda.synchronize()

    product()
    matrix = best_rate(4 * 2 * size**3, product)
    pinned = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(2**28, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    free, _ = torch.cuda.mem_get_info()
    measured = {"host_link_bytes_per_second": best_rate(2**28, copy), "memory_bytes": float(free)}
    return _described(properties.name, float(properties.total_memory), measured, 0.5 * matrix)


def _described(name: str, total_bytes: float, measured: dict[str, float], training_flops: float) -> dict[str, Any]:
    """Return a GPU as a tree: what is measured, what the library knows of one of this name, and round figures for the rest."""
    known = _library_device(name, total_bytes)
    known.pop("host", None)
    rates = {"hbm": 1.0e12, "link": 25.0e9, "host_link": 20.0e9, "network": 1.25e9}
    fallback: dict[str, Any] = {f"{key}_bytes_per_second": rate for key, rate in rates.items()}
    return {"kind": "cuda", "training_flops": training_flops, **fallback, **known, **measured, "name": name}


def _library_device(name: str, memory_bytes: float) -> dict[str, Any]:
    """Return the library's figures for a GPU by the words of its name and the nearest memory size."""
    words = set(re.findall(r"[a-z]*\d+[a-z]*", name.lower()))
    fits = {
        key: tree
        for key, tree in library()[0].items()
        if words & set(re.findall(r"[a-z]*\d+[a-z]*", key.split("-")[0] + "-" + key))
    }
    fits = {key: tree for key, tree in fits.items() if abs(tree["memory_bytes"] - memory_bytes) < 0.15 * memory_bytes}
    return dict(next(iter(fits.values()))) if fits else {}


def quick_local(state: Path, on_cpu: bool = True) -> Hardware | None:
    """Return this machine without measuring anything but its free memory: speeds are those of the last probe.

    Args:
        state: folder where `probe_local` left them; without any, round figures stand in, and the notes say so.
        on_cpu: whether the cores compute, or a GPU.

    Returns:
        The description; None for a GPU that nothing describes.
    """
    free, cores = free_memory_bytes(), len(os.sched_getaffinity(0))
    folder = next((place for place in (state, *state.parents) if place.is_dir()), Path("/"))
    disk = float(max(psutil.disk_usage(str(folder)).free, 1))
    known = _last_probe(state / PROBE)
    if known is not None and known.host.cores == cores and known.is_cpu == on_cpu:
        host = known.host.model_copy(update={"memory_bytes": free, "disk_bytes": disk})
        device = known.device.model_copy(update={"memory_bytes": free}) if on_cpu else known.device
        return known.model_copy(update={"host": host, "device": device})
    host_tree = {"devices": 1, "memory_bytes": free, "disk_bytes": disk, "disk_bytes_per_second": 1e9, "cores": cores}
    tree: dict[str, Any] = {"name": "local", "host": host_tree, "notes": [ROUND_FIGURES]}
    if on_cpu:
        rates = dict.fromkeys(("hbm", "link", "network"), 5e9) | {"host_link": 1e9}
        speeds = {f"{name}_bytes_per_second": rate for name, rate in rates.items()} | {"training_flops": 30e9 * cores}
        named = {"name": f"cpu-{cores}", "kind": "cpu", "memory_bytes": free, "launch_seconds": 8e-6}
        tree |= {"device": named | speeds, **CPU_FACTS}
    else:
        seen = gpu_without_torch()
        if seen is None:
            return None
        tree["device"] = _described(*seen, {"memory_bytes": seen[1]}, 100e12)
    return validate_as(Hardware, tree, "hardware")


def _last_probe(path: Path) -> Hardware | None:
    """Return what an earlier probe left; None where there is none, or one of another version."""
    try:
        return validate_as(Hardware, read_json(path), "hardware")
    except (OSError, ValueError, ConfigError):
        return None


def probe_local(directory: Path | None = None, state: Path | None = None, on_cpu: bool = False) -> Hardware:
    """Return this machine's description.

    Args:
        directory: where the disk is measured; None takes the working directory.
        state: folder to keep the result in, for `quick_local`.
        on_cpu: leave a GPU out, which the campaign will not use.
    """
    directory = directory or Path.cwd()
    disk = disk_rate(directory)
    copied = copy_rate()
    free = free_memory_bytes()
    cores = len(os.sched_getaffinity(0))
    total_disk = psutil.disk_usage(str(directory))
    gpu = None if on_cpu else _gpu()
    host = {"memory_bytes": free, "disk_bytes": float(max(total_disk.free, 1)), "disk_bytes_per_second": disk, "cores": cores}
    notes = [f"{cores} cores, {free / 1e9:.1f} GB of memory free now of {psutil.virtual_memory().total / 1e9:.1f} GB"]
    if gpu is not None:
        import torch

        tree: dict[str, Any] = {"device": gpu, "host": {"devices": torch.cuda.device_count(), **host}}
        notes.append(f"{torch.cuda.device_count()} x {gpu['name']}")
    else:
        device = {
            "name": f"cpu-{cores}",
            "kind": "cpu",
            "memory_bytes": free,
            "hbm_bytes_per_second": 2 * copied,  # a copy reads and writes
            "link_bytes_per_second": copied,
            "host_link_bytes_per_second": disk,
            "network_bytes_per_second": copied,
            **_cpu(),
        }
        tree = {"device": device, "host": {"devices": 1, **host}, **CPU_FACTS}
        notes.append("no GPU: main memory is the device, the disk is the cold tier")
    found = validate_as(Hardware, {"name": "local", "notes": notes, **tree}, "hardware")
    if state is not None:
        write_json(state / PROBE, found.model_dump(mode="json"))
    return found
