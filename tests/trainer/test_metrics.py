"""A run directory reads the same after a crash, a resume and a bad number."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from trainer.metrics import EVENTS, HEARTBEAT, METRICS, RESULT, RunWriter, read_lines


def steps(directory: Path) -> list[int]:
    return [line["step"] for line in read_lines(directory / METRICS)]


def test_a_step_is_one_line(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.metrics(1, {"reward/mean": 0.5})
    writer.metrics(2, {"reward/mean": 0.75, "kl/mean": 0.0})
    lines = read_lines(tmp_path / "run" / METRICS)
    assert [line["metrics"]["reward/mean"] for line in lines] == [0.5, 0.75]
    assert lines[0]["time"] <= lines[1]["time"]


def test_a_number_that_is_not_finite_stays_json(tmp_path: Path) -> None:
    RunWriter(tmp_path).metrics(1, {"loss": math.nan, "kl/mean": math.inf})
    text = (tmp_path / METRICS).read_text(encoding="utf-8")

    def refuse(constant: str) -> float:
        raise ValueError(constant)

    assert json.loads(text, parse_constant=refuse)["metrics"] == {"loss": "nan", "kl/mean": "inf"}


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    RunWriter(tmp_path).metrics(1, {"a": 1.0})
    with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "metr')
    assert steps(tmp_path) == [1]
    assert read_lines(tmp_path / "nowhere") == []


def test_a_resumed_run_has_one_line_a_step(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for step in (1, 2, 3):
        writer.metrics(step, {"a": float(step)})
        writer.event("skip", "not finite", step)
    writer.event("warning", "has no step")
    with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 4, "metr')  # the crash
    resumed = RunWriter(tmp_path, resume_step=2)
    resumed.metrics(3, {"a": 30.0})
    assert steps(tmp_path) == [1, 2, 3]
    assert read_lines(tmp_path / METRICS)[-1]["metrics"] == {"a": 30.0}
    assert [event["step"] for event in read_lines(tmp_path / EVENTS)] == [1, 2, None]


def test_without_a_resume_step_the_files_go_on_and_zero_begins_anew(tmp_path: Path) -> None:
    RunWriter(tmp_path).metrics(1, {"a": 1.0})
    with open(tmp_path / METRICS, "a", encoding="utf-8") as file:
        file.write('{"step": 2, "metr')  # the crash
    RunWriter(tmp_path).metrics(2, {"a": 1.0})
    assert steps(tmp_path) == [1, 2]
    RunWriter(tmp_path, resume_step=0)
    assert steps(tmp_path) == []


def test_an_event_says_what_and_why(tmp_path: Path) -> None:
    RunWriter(tmp_path).event("rollback", "gradient was nan", 7, layer="model.layers.3")
    (event,) = read_lines(tmp_path / EVENTS)
    assert (event["kind"], event["step"], event["reason"], event["layer"]) == (
        "rollback",
        7,
        "gradient was nan",
        "model.layers.3",
    )


def test_the_heartbeat_is_one_whole_json(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.heartbeat("sampling", 3, 60)
    writer.heartbeat("learning", 4, 60)
    beat = json.loads((tmp_path / HEARTBEAT).read_text(encoding="utf-8"))
    assert (beat["pid"], beat["step"], beat["total"], beat["doing"]) == (os.getpid(), 4, 60, "learning")
    writer.result({"steps": 60})
    assert json.loads((tmp_path / RESULT).read_text(encoding="utf-8")) == {"steps": 60}
    assert sorted(path.name for path in tmp_path.iterdir()) == [HEARTBEAT, RESULT]
