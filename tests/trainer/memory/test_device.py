"""Device slots on a real device: right values whatever the order of visits, exact-size pinned memory."""

from __future__ import annotations

import random

import pytest
import torch

from trainer.memory.device import CudaLane, DeviceSource, pinned_copy, register
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
    assert not register(flat.view(torch.uint8)), "registered already"
