"""The pool's database: SQLite with transactions that really are ones, or PostgreSQL by URL; and retries for both.

pysqlite begins no transaction before a SELECT, so two claimers would take the same rows; a deferred BEGIN fails at once when
it has to be raised to a writer. Here every writing transaction begins with BEGIN IMMEDIATE and waits its turn. Readers begin
deferred and are short, so that the write-ahead log can shrink.

A PostgreSQL database can serve many runs: each has a schema of its own.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session, sessionmaker

from trainer.errors import ConfigError, StalledError

T = TypeVar("T")
READ = "tithe_read"
_BUSY_MILLISECONDS = 30_000
_LOST = re.compile(r"locked|busy|closed|terminat|connect|server|broken pipe|timeout|consuming input", re.IGNORECASE)


def is_postgresql(url: str) -> bool:
    return url.partition(":")[0].partition("+")[0] in ("postgresql", "postgres")


class Database:
    """An engine and its transactions.

    Args:
        url: `sqlite:///<file>` or `postgresql://...`.
        key: of the run; PostgreSQL keeps each run's tables in a schema named after it.
        deadline_seconds: how long a lost connection or a lock is waited for.
        lost: told of every attempt that failed.

    Raises:
        ConfigError: no such database. StalledError: it cannot be reached within the deadline.
    """

    def __init__(self, url: str, key: str, deadline_seconds: float, lost: Callable[[str], None] | None = None):
        self.url, self.deadline_seconds, self.lost = url, deadline_seconds, lost or (lambda _: None)
        self.spent_seconds = 0.0  # in transactions, waiting for them included
        self.schema = "tithe_" + hashlib.sha256(key.encode()).hexdigest()[:16]
        self.engine = self._connect_postgresql() if is_postgresql(url) else self._connect_sqlite()
        self._writer = sessionmaker(self.engine, expire_on_commit=False)
        self._reader = sessionmaker(self.engine.execution_options(**{READ: True}), expire_on_commit=False)

    @property
    def where(self) -> str:
        """The database in words, without a password."""
        return make_url(self.url).render_as_string(hide_password=True)

    def _connect_sqlite(self) -> Engine:
        file = make_url(self.url).database
        if not file or file == ":memory:":
            raise ConfigError("train.pool.url", self.url, "a pool is shared by processes; name a file, or leave it empty")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(self.url)

        @event.listens_for(engine, "connect")
        def configure(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # no transaction behind our back
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = NORMAL")
            cursor.close()

        @event.listens_for(engine, "begin")
        def begin(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN" if connection.get_execution_options().get(READ) else "BEGIN IMMEDIATE")

        return engine

    def _connect_postgresql(self) -> Engine:
        try:
            url = make_url(self.url)
            if url.drivername in ("postgres", "postgresql"):
                url = url.set(drivername="postgresql+psycopg")
            engine = create_engine(
                url,
                pool_pre_ping=True,
                connect_args={"options": f"-csearch_path={self.schema}", "connect_timeout": 10},
            )
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise ConfigError(
                "train.pool.url", self.url, f"cannot be used ({error}); expected postgresql://user@host/name"
            ) from None

        def make_schema(session: Session) -> None:
            session.execute(text(f"CREATE SCHEMA IF NOT EXISTS {self.schema}"))

        self._retry(sessionmaker(engine), make_schema)
        return engine

    # -- transactions -------------------------------------------------------------------------------------------------

    def write(self, work: Callable[[Session], T]) -> T:
        """Run work in one writing transaction; all of it happens or nothing. It may run more than once."""
        return self._retry(self._writer, work)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run work that only reads, on one consistent state."""
        return self._retry(self._reader, work)

    def _retry(self, sessions: sessionmaker[Session], work: Callable[[Session], T]) -> T:
        began = time.monotonic()
        pause, end = 0.05, began + self.deadline_seconds
        while True:
            try:
                with sessions.begin() as session:
                    result = work(session)
                self.spent_seconds += time.monotonic() - began
                return result
            except DBAPIError as error:
                reason = str(error.orig).strip().splitlines()[0] if str(error.orig).strip() else type(error.orig).__name__
                if not (error.connection_invalidated or _LOST.search(str(error.orig)) or _is_race(error)):
                    raise
                if time.monotonic() + pause > end:
                    raise StalledError(
                        f"the experience pool ({self.where})",
                        f"could not be written or read for {self.deadline_seconds:.0f} s ({reason})",
                        "see that the database is up, then run the same command again: nothing that was stored is lost",
                    ) from error
                self.lost(reason)
                time.sleep(pause)
                pause = min(pause * 2, 2.0)

    def checkpoint(self) -> None:
        """Put everything on the disk (SQLite: and shrink the write-ahead log)."""
        if not is_postgresql(self.url):
            connection = self.engine.raw_connection()
            try:
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.close()

    def remove(self) -> None:
        """Forget the pool: its file, or its schema."""
        if is_postgresql(self.url):
            self.write(lambda session: session.execute(text(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")))
            self.write(lambda session: session.execute(text(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")))
            return
        self.engine.dispose()
        file = Path(make_url(self.url).database or "")
        for path in (file, file.with_name(file.name + "-wal"), file.with_name(file.name + "-shm")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.engine.dispose()


def _is_race(error: DBAPIError) -> bool:
    """Whether two transactions met in a way that one of them should simply begin again (PostgreSQL)."""
    return getattr(error.orig, "sqlstate", None) in ("40001", "40P01", "23505", "42P07")
