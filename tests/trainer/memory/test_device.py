"""Device slots on a real device: right values whatever the order of visits, exact-size pinned memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from trainer.memory.device import CudaLane, DeviceSource, _Pages, _pin, pinned_copy
from trainer.memory.rules import Movement, Step, apply_update, direction, split
from trainer.memory.source import MemorySource

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_no_visit_sees_anothers_or_an_old_weight() -> None:
    """Products keep the computing stream behind while slots are handed on; a race would show as a wrong checksum."""
    draw, names, device = random.Random(0), [f"layers.{index}" for index in range(8)], torch.device("cuda")
    flats = {name: pinned_copy(torch.zeros(2**22)) for name in names}
    source = DeviceSource(MemorySource(flats, None), CudaLane(device), 2**24, prefetch=2)
    held = dict.fromkeys(names, 0.0)
    busy = torch.randn(2048, 2048, device=device)
    for _ in range(20):
        source.begin()
        order = [draw.choice(names) for _ in range(12)]
        source.expect(order)
        seen, expected = [], []
        for name in order:
            flat = source.open(name)
            for _ in range(4):
                busy = torch.nn.functional.normalize(busy @ busy)
            seen.append(flat.double().mean())
            expected.append(held[name])
            changed = draw.random() < 0.5
            if changed:
                held[name] += 1
                flat.add_(1)
            source.close(name, changed)
        assert torch.stack(seen).tolist() == expected
        source.commit()
        assert {name: float(flat.double().mean()) for name, flat in source.peek()} == held


def test_pinned_memory_has_its_exact_size() -> None:
    flat = pinned_copy(torch.arange(1000.0))
    assert flat.untyped_storage().nbytes() == 4000
    assert torch.equal(flat.to("cuda", non_blocking=True).cpu(), torch.arange(1000.0))
    assert flat.is_pinned()


def test_what_the_driver_will_not_pin_breaks_nothing() -> None:
    flat, pages = pinned_copy(torch.arange(1000.0)), _Pages(-1, 1)
    _pin(pages, flat.view(torch.uint8))
    assert not pages.address, "pinned already, so refused"
    assert float(torch.ones(3, device="cuda").sum()) == 3.0, "the refusal is not remembered"
    del flat
    fresh = [pinned_copy(torch.full((1000,), float(index))) for index in range(50)]
    assert all(one.is_pinned() for one in fresh)
    assert all(torch.equal(one.to("cuda").cpu(), torch.full((1000,), float(index))) for index, one in enumerate(fresh))


@pytest.mark.parametrize("rule", ["sgd", "sign", "rms"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "split"])
def test_an_update_has_the_bits_of_a_cpu(rule: Any, kind: str) -> None:
    """Counter-based rounding draws the same on every device; so do chunks of other sizes."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2**18 + 1001, generator=generator) * 0.02
    gradient = torch.randn(len(weight), generator=generator)
    found = []
    for on in ("cpu", "cuda"):
        stored, low = (weight, None) if kind == "float32" else split(weight)
        stored = stored.to(on, copy=True)
        low = low.to(on, copy=True) if kind == "split" and low is not None else None
        moved = direction(rule, gradient.to(on, copy=True), torch.ones((), device=on))
        movement = Movement()
        apply_update(stored, moved, Step(rule, 1e-4), 12345, decays=False, low_N=low, start=7, movement=movement)
        found.append((stored.cpu(), None if low is None else low.cpu(), Movement.metrics(movement.sums())))
    (one, one_low, one_sums), (other, other_low, other_sums) = found
    assert torch.equal(one, other)
    assert one_low is None or torch.equal(one_low, other_low)
    assert one_sums == pytest.approx(other_sums, rel=1e-3)
