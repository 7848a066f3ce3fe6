"""Layers on a disk: the same results as in memory, few slots, whole steps."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.memory.kit import loss_of, make_model, make_works
from trainer.config.schema import Optimizer
from trainer.engine.heartbeat import Heartbeat
from trainer.engine.port import Term
from trainer.engine.stateless import StatelessEngine
from trainer.errors import ResourceError
from trainer.memory.anatomy import Anatomy
from trainer.memory.build import resident, streamed
from trainer.memory.device import DeviceSource, HostLane
from trainer.memory.disk import CURRENT, DiskSource
from trainer.memory.source import LayerSource, MemorySource


def on_a_device(inner: LayerSource, prefetch: int, resident: Collection[str] = ()) -> DeviceSource:
    """Put device slots in front of a source, with host copies that are done at once."""
    return DeviceSource(inner, HostLane(), 2**17, prefetch, resident)


def make_engine(
    kind: str,
    dtype: torch.dtype,
    directory: Path | None,
    prefetch: int = 2,
    resident_layers: int = 0,
    split: bool = False,
    device: str = "",
) -> StatelessEngine:
    if directory is None:
        residency = resident(make_model(kind, dtype), split=split, block_elements=640)
    else:
        stay = {f"layers.{index}{half}" for index in range(resident_layers) for half in ("", ".low")}

        def make(anatomy: Anatomy, units: Iterator[tuple[str, Tensor]]) -> LayerSource:
            if device == "memory":
                return on_a_device(MemorySource({name: flat.clone() for name, flat in units}, None), prefetch, stay)
            more = prefetch + 3 if device else 0
            hot = () if device else stay
            disk = DiskSource(directory, units, prefetch=prefetch, resident=hot, split=split, more_slots=more)
            return on_a_device(disk, prefetch, stay) if device else disk

        residency = streamed(make_model(kind, dtype), make, split=split, block_elements=640)
    config = Optimizer(kind="stateless", rule="rms", learning_rate=1e-3)
    return StatelessEngine(residency, config, Heartbeat(0.0, warmup=3), temperature=1.0, seed=7, chunk_elements=200)


def make_terms() -> list[Term]:
    return [Term(work, partial(loss_of, index)) for index, work in enumerate(make_works())]


def weights(engine: StatelessEngine) -> dict[str, Tensor]:
    return {name: flat.clone() for name, flat in engine.weights().items()}


CASES: list[dict[str, Any]] = [
    {"kind": "llama", "dtype": torch.float32},
    {"kind": "llama", "dtype": torch.float32, "prefetch": 0},
    {"kind": "llama_tied", "dtype": torch.bfloat16, "prefetch": 1},
    {"kind": "qwen3_moe", "dtype": torch.bfloat16, "split": True},
    {"kind": "gemma3", "dtype": torch.bfloat16, "split": True, "prefetch": 0},
    {"kind": "llama", "dtype": torch.bfloat16, "resident_layers": 2},
    {"kind": "llama", "dtype": torch.bfloat16, "resident_layers": 1, "split": True, "prefetch": 4},
    {"kind": "llama", "dtype": torch.bfloat16, "device": "disk"},
    {"kind": "llama_tied", "dtype": torch.bfloat16, "split": True, "prefetch": 0, "device": "disk"},
    {"kind": "llama", "dtype": torch.bfloat16, "split": True, "prefetch": 1, "device": "memory"},
    {"kind": "llama", "dtype": torch.bfloat16, "split": True, "resident_layers": 2, "device": "memory"},
    {"kind": "llama", "dtype": torch.bfloat16, "resident_layers": 1, "device": "disk"},
]


@pytest.mark.parametrize("case", CASES)
def test_tiered_equals_resident_bit_for_bit(case: dict[str, Any], tmp_path: Path) -> None:
    tiered = make_engine(directory=tmp_path / "tiers", **case)
    memory = make_engine(case["kind"], case["dtype"], None, split=case.get("split", False))
    works = make_works()
    for number in range(3):
        for one, other in zip(tiered.score(works), memory.score(works), strict=True):
            assert torch.equal(one.logprobs_TK, other.logprobs_TK)
        outcome = tiered.step(make_terms(), 1e-3, number)
        assert outcome.applied
        assert memory.step(make_terms(), 1e-3, number).loss == outcome.loss
    held, expected = weights(tiered), weights(memory)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    ids = works[0].input_ids_BS
    with torch.no_grad():
        model, other_model = tiered.residency.anatomy.model, memory.residency.anatomy.model
        assert torch.equal(model(input_ids=ids).logits, other_model(input_ids=ids).logits)
    tiered.residency.source.shutdown()


@pytest.mark.parametrize("layer", ["head", "layers.2", "layers.0", "embedding"])
@pytest.mark.parametrize(("resident_layers", "device"), [(0, ""), (2, ""), (0, "disk"), (1, "disk")])
def test_a_nan_leaves_every_file_as_it_was(
    layer: str, resident_layers: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.engine import stateless

    engine = make_engine("llama", torch.bfloat16, tmp_path / "tiers", resident_layers=resident_layers, device=device)
    engine.step(make_terms(), 1e-3, 0)
    before, manifest = weights(engine), (tmp_path / "tiers" / CURRENT).read_text()
    real = stateless.Watch.passes
    monkeypatch.setattr(
        stateless.Watch, "passes", lambda self, group, squares: real(self, group, squares * (math.nan if group == layer else 1.0))
    )
    assert not engine.step(make_terms(), 1e-3, 1).applied
    monkeypatch.undo()
    after = weights(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (tmp_path / "tiers" / CURRENT).read_text() == manifest
    twin = make_engine("llama", torch.bfloat16, None)
    for name, flat in before.items():
        twin.residency.source.put(name, flat)
    twin.residency.refresh_outer()
    assert engine.step(make_terms(), 1e-3, 1).loss == twin.step(make_terms(), 1e-3, 1).loss
    after, expected = weights(engine), weights(twin)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


# -- a disk that fails, a process that dies ---------------------------------------------------------------------------------


def test_killed_inside_a_write_back_the_next_start_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    whole, first = make_engine("llama", torch.bfloat16, None), make_engine("llama", torch.bfloat16, tmp_path / "tiers")
    for engine in (whole, first):
        engine.step(make_terms(), 1e-3, 0)
    saved, facts = weights(first), first.facts()
    first.residency.source.shutdown()
    child = os.fork()
    if child == 0:  # one that dies half-way through the second unit that it writes
        try:
            engine = make_engine("llama", torch.bfloat16, tmp_path / "tiers")
            engine.load(saved, {}, facts)
            real, calls = os.pwritev, []

            def dying(descriptor: int, buffers: Any, offset: int) -> int:
                calls.append(offset)
                if len(calls) == 2:
                    real(descriptor, [buffers[0][: len(buffers[0]) // 2]], offset)
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(descriptor, buffers, offset)

            os.pwritev = dying
            engine.step(make_terms(), 1e-3, 1)
        finally:  # whatever happens, there is one test runner
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert any((tmp_path / "tiers").glob("*.1")), "half-written files are there"
    again = make_engine("llama", torch.bfloat16, tmp_path / "tiers")
    again.load(saved, {}, facts)
    for engine in (whole, again):
        assert engine.step(make_terms(), 1e-3, 1).applied
    held, expected = weights(again), weights(whole)
    assert all(torch.equal(held[name], expected[name]) for name in expected)
    again.residency.source.shutdown()


@pytest.mark.parametrize("number", [1, 3])
def test_a_full_disk_in_a_write_back_is_named_and_changes_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("llama", torch.bfloat16, tmp_path / "tiers")
    engine.step(make_terms(), 1e-3, 0)
    before, manifest = weights(engine), (tmp_path / "tiers" / CURRENT).read_text()
    real, calls = os.pwritev, []

    def full(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(ResourceError, match=r"tiers/\S+: no space left on the disk; nothing written before is lost"):
            engine.step(make_terms(), 1e-3, 1)
    assert (tmp_path / "tiers" / CURRENT).read_text() == manifest
    after = weights(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: os.truncate(path, 1000), "layers.1.0: has 1000 bytes instead of the"),
        (lambda path: path.unlink(), "layers.1.0: no such file or directory"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_damaged_layer_file_is_named(damage: Any, said: str, prefetch: int, tmp_path: Path) -> None:
    engine = make_engine("llama", torch.bfloat16, tmp_path / "tiers", prefetch=prefetch)
    damage(tmp_path / "tiers" / "layers.1.0")
    with pytest.raises(ResourceError, match=f"{said}.*run the same command again") as error:
        engine.step(make_terms(), 1e-3, 0)
    assert error.value.exit_code == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_write_that_failed_ends_the_step_although_its_slot_is_used_again(prefetch: int, tmp_path: Path) -> None:
    names = [f"layers.{index}" for index in range(8)]
    source = DiskSource(tmp_path / "t", ((name, torch.zeros(10)) for name in names), prefetch=prefetch)
    (tmp_path / "t" / "layers.0.1").mkdir()  # where the first changed layer goes
    source.begin()

    def step() -> None:
        source.expect(names)
        for name in names:
            source.open(name).add_(1)
            source.close(name, changed=True)
            source._writer.submit(int).result()  # what was submitted before has ended, well or not
        source.commit()

    with pytest.raises(ResourceError, match=r"layers\.0\.1: is a directory"):
        step()
    source.shutdown()


def test_files_have_stable_names_and_the_manifest_says_which_counts(tmp_path: Path) -> None:
    engine = make_engine("llama", torch.float32, tmp_path / "tiers")
    engine.step(make_terms(), 1e-3, 0)
    manifest = json.loads((tmp_path / "tiers" / CURRENT).read_text())
    assert manifest["layers.1"]["version"] == 1
    flat = engine.weights()["layers.1"]
    assert (tmp_path / "tiers" / "layers.1.1").stat().st_size == manifest["layers.1"]["bytes"] == flat.nbytes
    assert {path.name.rsplit(".", 1)[0] for path in (tmp_path / "tiers").glob("layers.*")} == {f"layers.{i}" for i in range(3)}


def test_memory_is_a_few_slots_whatever_the_depth(tmp_path: Path) -> None:
    units = [(f"layers.{index}", torch.full((1000,), float(index))) for index in range(50)]
    source = DiskSource(tmp_path / "t", iter(units), prefetch=2)
    assert source.slot_bytes == 4 * 4000
    source.shutdown()


def test_reading_ahead_finds_every_unit_there(tmp_path: Path) -> None:
    names = [f"layers.{index}" for index in range(8)]
    source = DiskSource(tmp_path / "t", ((n, torch.full((2**20,), float(i))) for i, n in enumerate(names)), prefetch=2)
    source.begin()
    order = [*names, *reversed(names)]
    source.expect(order)
    for name in order:
        flat = source.open(name)
        assert flat[0] == flat[-1] == float(name.split(".")[1])
        torch.linalg.vector_norm(flat.view(1024, 1024) @ flat.view(1024, 1024))  # work to hide the reading behind
        source.close(name)
    source.commit()
    metrics = source.metrics()
    assert metrics["tiers/hit_fraction"] > 0.5
    assert metrics["tiers/read_bytes"] < 2 * 8 * 2**22, "layers at the turn are not read twice"
    source.shutdown()


def test_reading_ahead_goes_on_behind_visits_that_the_device_answered(tmp_path: Path) -> None:
    names = [f"layers.{index}" for index in range(8)]
    units = ((name, torch.full((10,), float(index))) for index, name in enumerate(names))
    inner = DiskSource(tmp_path / "t", units, prefetch=2, more_slots=5)
    source, order = on_a_device(inner, 2), [*names, *reversed(names)]
    source.expect(order)
    for name in order:  # the layers around the turn are on the device still, and are not asked of the disk again
        assert source.open(name)[0] == float(name.split(".")[1])
        source.close(name)
    assert not inner._plan, "the disk waits for a visit that never comes, and reads nothing ahead"
    source.shutdown()


@pytest.mark.parametrize("device", [False, True])
def test_any_order_of_visits_and_writes_is_right(device: bool, tmp_path: Path) -> None:
    """A random walk over units, with plans that come true and plans that do not, steps that end well and steps that do not."""
    draw = random.Random(0)
    names = [f"layers.{index}" for index in range(6)]
    units = ((name, torch.zeros(10 + i)) for i, name in enumerate(names))
    source: LayerSource = DiskSource(tmp_path / "t", units, prefetch=2, more_slots=5 if device else 0)
    if device:
        source = on_a_device(source, 2)
    held = dict.fromkeys(names, 0.0)
    for _ in range(60):
        source.begin()
        step, order = dict(held), [draw.choice(names) for _ in range(8)]
        source.expect(order if draw.random() < 0.7 else [draw.choice(names) for _ in range(8)])
        for name in order:
            flat = source.open(name)
            assert flat.unique().tolist() == [step[name]]
            changed = draw.random() < 0.5
            if changed:
                step[name] += 1
                flat.fill_(step[name])
            source.close(name, changed)
        if draw.random() < 0.5:
            source.commit()
            held = step
        else:
            source.rollback()
        assert {name: flat.unique().item() for name, flat in source.peek()} == held
    source.shutdown()
    assert not (tmp_path / "t").exists()


class _Late:
    """A point on a stream that works late."""

    def __init__(self, lane: LateLane):
        self.lane, self.passed = lane, False

    def query(self) -> bool:
        self.lane.advance()
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            self.lane.advance()


class _Queued(TorchDispatchMode):
    """Puts copies on a stream instead of doing them."""

    def __init__(self, stream: deque[Any]):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.stream.append(partial(func, *args, **(kwargs or {})))
        return args[0]


class LateLane:
    """A device as late as its events allow: two copy streams and a computing one, which go on by chance when somebody looks."""

    device = torch.device("cpu")

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.streams: dict[str, deque[Any]] = {"in": deque(), "out": deque(), "compute": deque()}

    def compute(self, work: Callable[[], Any]) -> None:
        """Issue a computation."""
        self.streams["compute"].append(work)

    def copying(self, way: str) -> AbstractContextManager[Any]:
        return _Queued(self.streams[way])

    def mark_copy(self, way: str) -> _Late:
        mark = _Late(self)
        self.streams[way].append(mark)
        return mark

    def mark_compute(self) -> _Late:
        return self.mark_copy("compute")

    def copy_waits(self, way: str, mark: _Late) -> None:
        self.streams[way].append((mark,))

    def compute_waits(self, mark: _Late) -> None:
        self.copy_waits("compute", mark)

    def advance(self) -> None:
        """Let one of the streams that can do something do the next thing."""
        able = [s for s in self.streams.values() if s and not (isinstance(s[0], tuple) and not s[0][0].passed)]
        assert able, "streams wait for each other"
        stream = self.draw.choice(able)
        thing = stream.popleft()
        if isinstance(thing, _Late):
            thing.passed = True
        elif not isinstance(thing, tuple):
            thing()


class _Lent(MemorySource):
    """Lends a buffer from open to close, and ruins it then, as a host slot that goes to another unit does."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lent: dict[str, Tensor] = {}

    def open(self, unit: str) -> Tensor:
        return self.lent.setdefault(unit, super().open(unit).clone())

    def close(self, unit: str, changed: bool = False) -> None:
        flat = self.lent.pop(unit)
        if changed:
            super().open(unit).copy_(flat)
        flat.fill_(math.nan)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stay", [(), ("layers.1",)])
def test_nothing_is_overwritten_or_read_before_its_event(seed: int, stay: Collection[str]) -> None:
    """Slots change hands while copies and computation lag behind at random; a wait that is missing shows as a wrong weight."""
    draw, lane, names = random.Random(seed), LateLane(seed), [f"layers.{index}" for index in range(7)]
    inner = _Lent({name: torch.zeros(10) for name in names}, None)
    source = DeviceSource(inner, lane, 2**12, prefetch=seed % 3, resident=stay)
    held, seen, expected = dict.fromkeys(names, 0.0), [], []

    def look(flat: Tensor, add: float) -> None:
        seen.append(flat.unique().tolist())
        flat.add_(add)

    for _ in range(30):
        source.begin()
        order = [draw.choice(names) for _ in range(10)]
        source.expect(order if draw.random() < 0.8 else list(reversed(order)))
        for name in order:
            changed = draw.random() < 0.5
            expected.append([held[name]])
            lane.compute(partial(look, source.open(name), float(changed)))
            held[name] += changed
            source.close(name, changed)
        source.commit()
        assert {name: float(flat.unique()) for name, flat in source.peek()} == held
    lane.mark_compute().synchronize()
    source.shutdown()
    assert seen == expected
