"""A result made again elsewhere: `dvc repro` on a fresh clone, `dvc exp run`, a remote. Real stages of a very small campaign."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.artifacts import dump_yaml
from tasks.record import read_record
from tasks.workspace import REPOSITORY
from trainer.config import read_yaml
from trainer.config.load import lay_over
from trainer.files import read_json, read_manifest, write_text
from trainer.metrics import read_lines

pytestmark = pytest.mark.smoke

SMALL: dict[str, Any] = {
    "base": {
        "scratch": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64, "steps": 60, "decay_steps": 20}
    },
    "anchors": {"num_prompts": 8},
    "train": {
        "batch": {"prompts_per_step": 4, "group_size": 4, "passes": 1, "minibatches": 1},
        "stages": [{"steps": 2}],
        "checkpoints": {"every_steps": 1},
        "heldout": {"every_steps": 1, "num_prompts": 16},
        "sampler": {"slots": 16},
    },
    "preflight": {"num_prompts": 0},
    "evaluate": {"num_prompts": 16, "samples_per_prompt": 4, "pass_at": [1, 4], "bootstrap_resamples": 50},
    "machine": {"threads": 1},
}


def run(place: Path, *words: str, **more: str) -> str:
    """Run a program in a copy of the repository, as a person there would; nothing of this checkout is used.

    Args:
        more: environment variables.
    """
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TITHE_", "MLFLOW_", "PREFECT_", "GIT_", "PYTHONPATH"))
    }
    environment = {
        **ours,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DVC_NO_ANALYTICS": "1",
        "OMP_NUM_THREADS": "1",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:9",  # nobody is there, and nothing depends on it
        **{f"GIT_{who}_{what}": "somebody@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        **more,
    }
    done = subprocess.run(list(words), cwd=place, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def dvc(place: Path, *words: str) -> str:
    return run(place, sys.executable, "-m", "dvc", *words)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository, with a small default campaign that `tithe run` has run and whose lock is committed."""
    listed = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files", "-z", "-c", "-o", "--exclude-standard"], capture_output=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not in a git checkout")
    place = tmp_path_factory.mktemp("original") / "tithe"
    for name in listed.stdout.decode().split("\0"):
        source = REPOSITORY / name
        if name and source.is_file() and not name.startswith("tests/"):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place / name)
    write_text(place / "params.yaml", dump_yaml(lay_over(read_yaml(place / "params.yaml"), SMALL)))
    run(place, "git", "init", "--quiet")
    run(place, "git", "add", "--all")
    run(place, "git", "commit", "--quiet", "-m", "small")
    run(place, sys.executable, "-m", "flows.cli", "run", "--plain", "--no-tracking")
    run(place, "git", "add", "--all")
    run(place, "git", "commit", "--quiet", "-m", "lock")
    return place


def clone(original: Path, place: Path) -> Path:
    run(original, "git", "clone", "--quiet", str(original), str(place))
    return place


def test_repro_on_a_fresh_clone_gives_the_same_metrics_and_hashes(original: Path, tmp_path: Path) -> None:
    copy = clone(original, tmp_path / "copy")
    assert not (copy / "artifacts").exists()
    assert not (copy / ".dvc" / "cache").exists()
    (copy / "dvc.lock").rename(tmp_path / "dvc.lock")  # so that nothing can be believed, everything is run
    dvc(copy, "repro", "evaluate")
    here, there = (read_yaml(place / "dvc.lock")["stages"] for place in (copy, tmp_path))
    del there["report"]  # tells when things happened, so it is never the same bytes
    assert here == there
    for name in ("prompts", "base", "anchors", "policy", "merged", "evaluation"):
        assert read_manifest(copy / "artifacts" / name) == read_manifest(original / "artifacts" / name), name
    evaluation = "artifacts/evaluation/evaluation.json"
    assert read_json(copy / evaluation) == read_json(original / evaluation)


def test_an_experiment_with_one_key_changed_runs_from_there(original: Path) -> None:
    said = dvc(original, "exp", "run", "-S", "report.num_examples=3", "--name", "fewer")
    assert "Running stage 'report'" in said
    assert "Running stage 'train'" not in said
    assert "fewer" in dvc(original, "exp", "show", "--json")
    assert read_yaml(original / "params.yaml")["report"]["num_examples"] == 3
    run(original, "git", "checkout", "--quiet", "params.yaml", "dvc.lock")
    dvc(original, "checkout")


def test_a_remote_gives_a_colleague_the_artifacts(original: Path, tmp_path: Path) -> None:
    dvc(original, "remote", "add", "--force", "--default", "shared", str(tmp_path / "remote"))
    dvc(original, "push")
    copy = clone(original, tmp_path / "copy")
    dvc(copy, "remote", "add", "--default", "shared", str(tmp_path / "remote"))
    dvc(copy, "pull")
    for name in ("prompts", "base", "anchors", "policy", "merged", "evaluation", "report"):
        assert read_manifest(copy / "artifacts" / name) == read_manifest(original / "artifacts" / name), name
    said = dvc(copy, "repro")
    assert said.count("didn't change, skipping") == 7
    assert "Running stage" not in said


def test_killed_once_in_each_stage_it_ends_at_the_same_bits(original: Path, tmp_path: Path) -> None:
    copy, wishes = clone(original, tmp_path / "copy"), tmp_path / "kill"
    (copy / "dvc.lock").unlink()
    wishes.mkdir()
    places = {"prepare": "begun", "base": "made", "anchors": "in-place", "train": "step_000001"}
    places |= {"merge": "in-place", "evaluate": "made", "report": "in-place"}
    for stage, where in places.items():
        (wishes / f"{stage}.{where}").touch()
    more = {"PYTHONPATH": str(Path(__file__).parent / "killer"), "TEST_KILL": str(wishes)}
    said = run(copy, sys.executable, "-m", "flows.cli", "run", "--plain", "--no-tracking", "--fork", **more)
    assert not list(wishes.iterdir()), said
    assert said.count("was killed by SIGKILL") == len(places), said
    (ran,) = copy.glob("runs/*")
    for stage, where in places.items():
        record = read_record(ran / stage)
        assert record is not None
        assert record.status == "FINISHED", record
        assert record.attempt == (1 if where == "in-place" else 2), f"{stage}: what was finished did not run again"
        assert read_json(ran / stage / "result.json")["key"] == record.identity
    steps = [line["step"] for line in read_lines(ran / "train" / "metrics.jsonl")]
    assert steps == [0, 1, 2]
    resumed = [line["step"] for line in read_lines(ran / "train" / "events.jsonl") if line["kind"] == "resume"]
    assert resumed == [1], "from that checkpoint"
    for name in ("prompts", "base", "anchors", "policy", "merged", "evaluation"):
        assert read_manifest(copy / "artifacts" / name) == read_manifest(original / "artifacts" / name), name
    here, there = (read_yaml(place / "dvc.lock")["stages"] for place in (copy, original))
    assert {**here, "report": None} == {**there, "report": None}
