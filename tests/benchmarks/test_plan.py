"""What `tithe plan` says of a real train stage's memory, where malloc's habits would spoil it most: long sequences with LoRA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.plan import Case, compare, error, plan_of
from trainer.files import read_json
from trainer.plan.probe import quick_local

REPOSITORY = Path(__file__).parents[2]
STAGE = "from pathlib import Path; from benchmarks.plan import Case, measure; measure(Case('25M', 'long', 'lora'), Path('.'), 2)"


@pytest.mark.smoke
def test_a_stage_peaks_where_the_plan_says(tmp_path: Path) -> None:
    """Nothing but the stage itself tells malloc what to do."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", STAGE], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr
    seen = read_json(tmp_path / "measured.json")
    hardware = quick_local(tmp_path)
    assert hardware is not None
    case = Case("25M", "long", "lora")
    row = compare(case, seen, plan_of(case, 2, hardware, seen["completion_tokens"]))
    for what in ("peak_bytes", "learn_bytes"):
        assert abs(error(row[what])) < 0.1, (what, row[what], row["terms"])
