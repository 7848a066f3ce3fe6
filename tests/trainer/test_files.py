"""Files survive crashes, full disks and bad bits, or say so."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer import files
from trainer.errors import ResourceError
from trainer.files import MANIFEST, canonical_json, damage, new_directory, read_manifest, sha256_text, write_json, write_manifest


def artifact(path: Path) -> Path:
    (path / "inner").mkdir(parents=True)
    (path / "a.txt").write_text("one", encoding="utf-8")
    (path / "inner" / "b.bin").write_bytes(b"\x00\x01")
    write_manifest(path, {"stage": "toy"})
    return path


def test_canonical_json_is_one_text_per_value() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert sha256_text("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_manifest_lists_every_file_and_repeats_itself(tmp_path: Path) -> None:
    one, two = artifact(tmp_path / "one"), artifact(tmp_path / "two")
    manifest = read_manifest(one)
    assert manifest is not None
    assert list(manifest["files"]) == ["a.txt", "inner/b.bin"]
    assert manifest["stage"] == "toy"
    assert (one / MANIFEST).read_bytes() == (two / MANIFEST).read_bytes()  # equal content, equal bytes: no times in it
    assert damage(one) is None


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: (d / "a.txt").unlink(), "a.txt is missing"),
        (lambda d: (d / "a.txt").write_text("longer"), "a.txt has 6 bytes instead of 3"),
        (lambda d: (d / "a.txt").write_text("two"), "a.txt does not match its sha256"),
        (lambda d: (d / MANIFEST).unlink(), "no readable manifest.json"),
        (lambda d: (d / MANIFEST).write_text('{"files": {'), "no readable manifest.json"),
        (lambda d: (d / MANIFEST).write_bytes(b"\xff\xfe"), "no readable manifest.json"),
        (lambda d: (d / MANIFEST).write_text("[]"), "no readable manifest.json"),
    ],
)
def test_damage_is_named(tmp_path: Path, harm: Any, said: str) -> None:
    directory = artifact(tmp_path / "one")
    harm(directory)
    assert said in (damage(directory) or "")


def test_damage_of_nothing_is_named(tmp_path: Path) -> None:
    assert "no readable manifest.json" in (damage(tmp_path / "nowhere") or "")


def test_a_new_directory_replaces_the_old_one_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with new_directory(target) as out:
        (out / "x").write_text("1", encoding="utf-8")
    with pytest.raises(FileNotFoundError), new_directory(target) as out:
        (out / "x").write_bytes((out / "gone").read_bytes())
    assert (target / "x").read_text(encoding="utf-8") == "1"
    with new_directory(target) as out:
        (out / "y").write_text("3", encoding="utf-8")
    assert sorted(path.name for path in target.iterdir()) == ["y"]
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"]


def test_what_a_killed_process_left_is_swept_up(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from trainer.files import new_directory
with new_directory(Path({str(tmp_path / "out")!r})) as out:
    (out / "half").write_text("x")
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    with new_directory(tmp_path / "out") as out:
        (out / "whole").write_text("x", encoding="utf-8")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]


def test_json_is_replaced_whole_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "x.json"
    write_json(path, {"a": "é"})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 2}
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ResourceError, match="no space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_really_full_disk_is_named() -> None:
    if not (Path("/dev/full").exists() and stat.S_ISCHR(os.stat("/dev/full").st_mode)):
        pytest.skip("this system has no /dev/full")
    full = Path("/dev/full")
    with pytest.raises(ResourceError, match="run the same command again"), files.disk_full_is_named(full):
        full.write_text("x", encoding="utf-8")


def test_other_disk_errors_keep_their_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(OSError, match=r"exists|directory"):
        write_json(tmp_path / "file" / "x.json", {})
