"""The choice between a hot adapter and a merged copy: the shorter period wins, and what fails is out."""

from __future__ import annotations

import math

import pytest

from trainer.errors import MismatchError
from trainer.rollout.sync_choice import Trial, choose, table

ADAPTER = Trial("adapter", 0.1, 100.0, 1e-6)
MERGE = Trial("merge", 5.1, 200.0, 2e-6)


def test_many_tokens_a_sync_pay_for_the_merge_and_few_do_not() -> None:
    assert choose([ADAPTER, MERGE], 500.0).mode == "adapter"
    assert choose([ADAPTER, MERGE], 2000.0).mode == "merge"
    assert ADAPTER.period_seconds(1000.0) == pytest.approx(10.1)


def test_a_way_that_fails_is_not_taken_however_fast() -> None:
    broken = Trial("adapter", math.inf, 0.0, math.inf, "the probe is off")
    assert choose([broken, MERGE], 1.0).mode == "merge"
    assert "the probe is off" in table([broken, MERGE], 1000.0)
    with pytest.raises(MismatchError, match="adapter: the probe is off"):
        choose([broken], 1.0)
