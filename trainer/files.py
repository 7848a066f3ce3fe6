"""Files that survive a crash: written beside, fsynced, renamed; named by their sha256 in a manifest.

A *manifest* (`manifest.json`) lists every file of a directory with its size and sha256, and carries a few facts about it.
A directory without a manifest, or whose files differ from it, is damaged and is never read. Importable without torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import ResourceError

MANIFEST = "manifest.json"
REPOSITORY = Path(__file__).resolve().parents[1]


def place_of(locator: str) -> Path:
    """Return the absolute path that a path of the configuration means: a relative one begins at the repository's root."""
    return REPOSITORY / Path(locator).expanduser()


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces. The input of every hash."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def disk_full_is_named(path: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into a ResourceError that says where and what is safe."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"{path}: no space left on the disk; nothing written before is lost. Free space, then run the same command again"
            ) from error
        raise


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{threading.get_native_id()}.tmp")
    with disk_full_is_named(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def list_files(directory: Path) -> list[Path]:
    """Every regular file below a directory but its manifest, in sorted order."""
    return sorted(p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)


def write_manifest(directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write `manifest.json`: the facts, and size and sha256 of every file. No times: equal content, equal bytes."""
    files = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in list_files(directory)
    }
    manifest = {**facts, "files": files, "content_sha256": sha256_text(canonical_json(files))}
    write_json(directory / MANIFEST, manifest)
    return manifest


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest, or None where there is none that can be read."""
    try:
        manifest = read_json(directory / MANIFEST)
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and "files" in manifest else None


def damage(directory: Path) -> str | None:
    """Return what is wrong with a directory against its manifest in one sentence, or None when it is whole."""
    manifest = read_manifest(directory)
    if manifest is None:
        return f"{directory} has no readable {MANIFEST}"
    for name, fact in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != fact["bytes"]:
            return f"{path} has {path.stat().st_size} bytes instead of {fact['bytes']}"
        if sha256_file(path) != fact["sha256"]:
            return f"{path} does not match its sha256"
    return None


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Build a directory beside its target and rename it into place when the block ends well.

    The old directory, if any, stays until the new one is complete; a crash leaves only `.<name>.partial`, which the next
    attempt removes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(partial, ignore_errors=True)
    with disk_full_is_named(target):
        try:
            partial.mkdir()
            yield partial
            for path in [*partial.rglob("*"), partial]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            shutil.rmtree(old, ignore_errors=True)
            if target.exists():
                os.rename(target, old)
            os.rename(partial, target)
            fsync_directory(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
