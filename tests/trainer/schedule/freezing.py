"""A stand-in for a sampler process. s0 freezes inside a transaction on the pool, and is good when it is started again; others,
once that has happened, want to write like everybody."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from sqlalchemy import text

from trainer.config import validate
from trainer.experience.pool import Pool
from trainer.files import read_json
from trainer.metrics import RunWriter
from trainer.schedule.sampler_process import Assignment
from trainer.schedule.terms import open_database

FROZEN = "frozen"


def main(path: Path) -> None:
    assignment = Assignment(**read_json(path))
    writer = RunWriter(assignment.directory)
    writer.heartbeat("starting")
    database = open_database(validate(assignment.config).train, Path(assignment.run), waiting=writer.heartbeat)
    pool = Pool(database, assignment.identity, {}, assignment.name, 60.0)
    mark = Path(assignment.run) / FROZEN

    def freeze(session: object) -> None:
        session.execute(text("UPDATE cursor SET held_back = held_back"))  # type: ignore[attr-defined]
        writer.heartbeat("in a transaction")
        mark.touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    if assignment.name == "s0" and not mark.exists():
        database.write(freeze)
    while True:
        writer.heartbeat("waiting")
        if mark.exists():
            pool.beat("sampler", "waiting", -1)
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
