"""A private PostgreSQL server for tests."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.processes import free_port


def postgresql_programs() -> Path | None:
    """Return the folder with initdb and postgres, or None where PostgreSQL is not installed."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    found = versions[-1:] or [Path(p) for p in [shutil.which("initdb")] if p]
    return found[0].parent if found else None


PASSWORD = "s3cret-of-the-pool"


@pytest.fixture(scope="session")
def guarded_url(postgresql_url: str) -> str:
    """The same for the role whose password is PASSWORD."""
    import psycopg

    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE guarded LOGIN PASSWORD '{PASSWORD}'")
        connection.execute("GRANT CREATE ON DATABASE postgres TO guarded")
    return postgresql_url.replace("tithe@", "guarded@")


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """The address of a private server; it runs without root's rights, which PostgreSQL refuses to have. Only `guarded`, a role
    that a test may make, needs a password."""
    programs = postgresql_programs()
    if programs is None:
        if os.environ.get("CI"):
            pytest.fail("PostgreSQL is not installed; .ci/run should have done that")
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    as_user: dict[str, Any] = {}
    directory = Path(tempfile.mkdtemp(prefix="tithe-pg-"))
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        as_user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        os.chown(directory, nobody.pw_uid, nobody.pw_gid)
    data = directory / "data"
    run: dict[str, Any] = {**as_user, "cwd": directory, "capture_output": True, "text": True}
    made = subprocess.run([programs / "initdb", "-D", data, "-U", "tithe", "-A", "trust", "-E", "UTF8", "--no-sync"], **run)
    assert made.returncode == 0, made.stderr
    access = data / "pg_hba.conf"
    access.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + access.read_text())
    port = free_port()
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
    with open(directory / "log", "wb") as log:
        arguments = [programs / "pg_ctl", "-D", data, "-w", "-t", "300", "-o", settings, "start"]
        started = subprocess.run(arguments, **as_user, cwd=directory, stdout=log, stderr=log)
    assert started.returncode == 0, (directory / "log").read_text()
    try:
        yield f"postgresql://tithe@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([programs / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **run)
        shutil.rmtree(directory, ignore_errors=True)
