"""What processes share: the collector that rests while modules are imported, and memory that goes back when it is freed."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.processes import importing, return_freed_memory


def failing_import() -> None:
    with importing():
        assert gc.get_threshold()[0] > 10_000
        raise ImportError


def test_the_collector_works_again_after_imports_also_after_failed_ones() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError):
        failing_import()
    assert gc.get_threshold() == before


HOLES = """
import sys
from pathlib import Path
from trainer.processes import return_freed_memory

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))

print(return_freed_memory())
bytearray(32 * 2**20)  # freed: from now on glibc keeps blocks up to this size
before = resident()
blocks = [bytearray(b"1" * 2**21) for _ in range(40)]
del blocks[::2]
print((resident() - before) // 1024)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
@pytest.mark.parametrize(("wish", "returned", "most"), [({}, "True", 50), ({"MALLOC_MMAP_THRESHOLD_": "33554432"}, "False", 200)])
def test_freed_blocks_go_back_unless_a_person_wants_them_kept(wish: dict[str, str], returned: str, most: int) -> None:
    names = {"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"}
    environment = {key: value for key, value in os.environ.items() if key not in names} | wish
    place = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", HOLES], env=environment, cwd=place, capture_output=True, text=True, timeout=300, check=True
    )
    said, megabytes = ran.stdout.split()
    assert said == returned
    assert int(megabytes) < most
    assert wish == {} or int(megabytes) > 60, "every second block is a hole that stays"


def test_a_wish_in_the_tunables_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")
    assert not return_freed_memory()
