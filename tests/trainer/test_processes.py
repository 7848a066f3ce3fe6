"""What processes share: the collector that rests while modules are imported, and memory that goes back when it is freed."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.processes import fit_malloc, importing


def failing_import() -> None:
    with importing():
        assert gc.get_threshold()[0] > 10_000
        raise ImportError


def test_the_collector_works_again_after_imports_also_after_failed_ones() -> None:
    before = gc.get_threshold()
    with pytest.raises(ImportError):
        failing_import()
    assert gc.get_threshold() == before


REPOSITORY = Path(__file__).parents[2]
HOLES = """
import sys
from pathlib import Path
from trainer.processes import fit_malloc

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))

print(fit_malloc(Path(sys.argv[1])))
bytearray(32 * 2**20)  # freed: from now on glibc keeps blocks up to this size
before = resident()
blocks = [bytearray(b"1" * 2**21) for _ in range(40)]
del blocks[::2]
print((resident() - before) // 1024)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
@pytest.mark.parametrize(
    ("weights_bytes", "wish", "done", "holes_stay"),
    [(2**26, {}, "True", False), (2**20, {}, "True", True), (2**26, {"MALLOC_MMAP_THRESHOLD_": "33554432"}, "False", True)],
)
def test_freed_blocks_go_back_beside_a_model_unless_a_person_wants_them_kept(
    tmp_path: Path, weights_bytes: int, wish: dict[str, str], done: str, holes_stay: bool
) -> None:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(weights_bytes)
    names = {"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_"}
    environment = {key: value for key, value in os.environ.items() if key not in names} | wish
    command, place = [sys.executable, "-c", HOLES, str(tmp_path)], Path(__file__).parents[2]
    ran = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=300, check=True)
    said, megabytes = ran.stdout.split()
    assert said == done
    assert (int(megabytes) > 60) == holes_stay, "of 80, of which 40 are live"


def test_a_wish_in_the_tunables_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")
    assert not fit_malloc(tmp_path)


def test_the_peak_is_this_process_own_and_not_its_parents() -> None:
    held = bytearray(os.urandom(1) * 200_000_000)
    code = "from trainer.processes import peak_memory_bytes; print(peak_memory_bytes())"
    said = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert 1e6 < float(said) < 1e8 < len(held)


def test_a_module_loads_when_it_is_used(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("print('loaded')\nvalue = 3\n", encoding="utf-8")
    code = "from trainer.processes import import_late as late; late('slow'); late('slow')\n"
    code += "import slow\nprint('imported')\nprint(slow.value, __import__('slow').value)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == ["imported", "loaded", "3", "3"]
