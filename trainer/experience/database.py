"""The pool's database: SQLite with transactions that really are ones, or PostgreSQL by URL; and retries for both.

pysqlite begins no transaction before a SELECT, so two claimers would take the same rows; a deferred BEGIN fails at once when
it has to be raised to a writer. Here every writing transaction begins with BEGIN IMMEDIATE and waits its turn. Readers begin
deferred and are short, so that the write-ahead log can shrink.

A process that is frozen inside a transaction keeps its lock. Waiters therefore look up once a second (`waiting`), so that the
watchdog among them can end it, and wait for longer than the watchdog's deadline. A PostgreSQL server ends such a session itself.

A file that is removed or replaced under a run would leave some processes in the old one and give others a new one: every
transaction looks first whether its file is still in place. A full disk is named.

A PostgreSQL database can serve many runs: each has a schema of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session, sessionmaker

from trainer.errors import ConfigError, ResourceError, StalledError, without_password

T = TypeVar("T")
READ = "tithe_read"
_BUSY_MILLISECONDS = 1_000  # then a waiter looks up, and waits on
_PATIENCE_SECONDS = 30.0
_WAL_WRITE_LOCK = 120  # byte of the -shm file that SQLite's writers lock
_LOST = re.compile(r"closed|terminat|connect|server|broken pipe|timeout|consuming input", re.IGNORECASE)

_NO_ENTRY = re.compile(r"no password supplied|password authentication failed", re.IGNORECASE)

_PAUSE_SECONDS = 0.05
_MET = ("40001", "40P01", "23505", "42P07", "55P03")  # PostgreSQL: transactions met, or a lock did not come in time
_FULL = "53100"  # PostgreSQL: its disk is full
_ENDED = ("25P03", "57P01", "57P02", "57P03", "53300")  # the session was ended, the server starts or has no room


def is_postgresql(url: str) -> bool:
    return url.partition(":")[0].partition("+")[0] in ("postgresql", "postgres")


class Database:
    """An engine and its transactions.

    Args:
        url: `sqlite:///<file>` or `postgresql://...`.
        key: of the run; PostgreSQL keeps each run's tables in a schema named after it.
        deadline_seconds: how long a lost connection is waited for; a lock is waited for until the watchdog, which has the same
            deadline, must have ended who holds it.
        lost: told of every attempt that lost the connection.
        waiting: told about once a second why a transaction has not happened yet; it may raise.

    Raises:
        ConfigError: no such database. StalledError: it cannot be reached within the deadline.
    """

    def __init__(
        self,
        url: str,
        key: str,
        deadline_seconds: float,
        lost: Callable[[str], None] | None = None,
        waiting: Callable[[str], None] | None = None,
    ):
        self.url, self.deadline_seconds = url, deadline_seconds
        self.lost, self.waiting = lost or (lambda _: None), waiting or (lambda _: None)
        self.patience_seconds = 2 * deadline_seconds + _PATIENCE_SECONDS  # with a lock
        self._spent: dict[int, float] = {}  # seconds by thread
        self._file = Path(make_url(url).database or "")  # SQLite's
        self._inode: int | None = None  # of an SQLite file, once it is open
        self.schema = "tithe_" + hashlib.sha256(key.encode()).hexdigest()[:16]
        self.engine = self._connect_postgresql() if is_postgresql(url) else self._connect_sqlite()
        self._writer = sessionmaker(self.engine, expire_on_commit=False)
        self._reader = sessionmaker(self.engine.execution_options(**{READ: True}), expire_on_commit=False)

    @property
    def spent_seconds(self) -> float:
        """Seconds that the calling thread has spent in transactions, waiting for them included."""
        return self._spent.get(threading.get_ident(), 0.0)

    @property
    def where(self) -> str:
        """The database in words, without a password."""
        return make_url(self.url).render_as_string(hide_password=True)

    def _connect_sqlite(self) -> Engine:
        file = make_url(self.url).database
        if not file or file == ":memory:":
            raise ConfigError("train.pool.url", self.where, "a pool is shared by processes; name a file, or leave it empty")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(self.url)

        @event.listens_for(engine, "connect")
        def configure(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # no transaction behind our back
            self._inode = self._inode or os.stat(file).st_ino
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
            idle = int(1000 * min(max(self.deadline_seconds / 2, 1.0), 60.0))
            options = f"-csearch_path={self.schema} -clock_timeout=1s -cidle_in_transaction_session_timeout={idle}"
            alive = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
            engine = create_engine(url, pool_pre_ping=True, connect_args={"options": options, "connect_timeout": 10, **alive})
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise ConfigError(
                "train.pool.url", without_password(self.url), f"cannot be used ({error}); expected postgresql://user@host/name"
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
        pause, limit = _PAUSE_SECONDS, self.deadline_seconds
        while True:
            self.check_in_place()
            try:
                with sessions.begin() as session:
                    result = work(session)
                thread = threading.get_ident()
                self._spent[thread] = self._spent.get(thread, 0.0) + time.monotonic() - began
                return result
            except DBAPIError as error:
                trouble = _trouble(error)
                if trouble == "full":
                    raise self._no_space() from error
                if trouble == "refused":
                    raise ConfigError(
                        "train.pool.url",
                        self.where,
                        "its server wants another password; give it by the environment variable PGPASSWORD or in ~/.pgpass, on "
                        "every machine that works on the run",
                    ) from None
                if trouble is None:
                    raise
                reason = str(error.orig).strip().partition("\n")[0] or type(error.orig).__name__
                if trouble == "locked":
                    reason, pause, limit = reason + self._held_by(), _PAUSE_SECONDS, self.patience_seconds
                if time.monotonic() - began + pause > limit:
                    raise StalledError(
                        f"the experience pool ({self.where})",
                        f"could not be written or read for {limit:.0f} s ({reason})",
                        "see that the database is up, then run the same command again: nothing that was stored is lost",
                    ) from error
                if trouble == "lost":
                    self.lost(reason)
            self.waiting(reason)
            time.sleep(pause)
            pause = min(pause * 2, 2.0)

    def check_in_place(self) -> None:
        """See that an SQLite file is the one that was opened.

        Raises:
            StalledError: it was removed, or another one lies there.
        """
        if self._inode is None or (self._file.exists() and self._file.stat().st_ino == self._inode):
            return
        raise StalledError(
            f"the experience pool ({self.where})",
            "was removed or replaced while the run used it",
            "put the file back and run the same command again, or remove the run directory to begin anew",
        )

    def _no_space(self) -> ResourceError:
        return ResourceError(
            f"the experience pool ({self.where}): no space left on the disk; nothing written before is lost. Free space, then "
            "run the same command again"
        )

    def _held_by(self) -> str:
        """Return who writes into an SQLite file now, as the end of a sentence; nothing where the system does not say it."""
        if is_postgresql(self.url):
            return ""
        try:
            inode = Path(f"{self._file}-shm").stat().st_ino
            lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        except FileNotFoundError:
            return ""
        for _, kind, _, mode, pid, where, first, last in (line for line in lines if len(line) == 8 and line[7].isdigit()):
            held = (kind, mode, where.rpartition(":")[2]) == ("POSIX", "WRITE", str(inode))
            if held and int(first) <= _WAL_WRITE_LOCK <= int(last):
                return f", held by process {pid}"
        return ""

    def checkpoint(self) -> None:
        """Put everything on the disk (SQLite: and shrink the write-ahead log, unless somebody holds it)."""
        if is_postgresql(self.url):
            return
        self.check_in_place()
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout = 0")
            busy = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:
                raise self._no_space() from error
            raise
        finally:
            connection.close()
        log = Path(f"{self._file}-wal")
        if busy and log.exists():
            with open(log, "rb") as file:
                os.fsync(file.fileno())

    def remove(self) -> None:
        """Forget the pool: its file, or its schema."""
        if is_postgresql(self.url):
            self.write(lambda session: session.execute(text(f"DROP SCHEMA IF EXISTS {self.schema} CASCADE")))
            self.write(lambda session: session.execute(text(f"CREATE SCHEMA IF NOT EXISTS {self.schema}")))
            return
        self.engine.dispose()
        self._inode = None
        file = self._file
        for path in (file, file.with_name(file.name + "-wal"), file.with_name(file.name + "-shm")):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self.engine.dispose()


def _trouble(error: DBAPIError) -> Literal["locked", "lost", "full", "refused"] | None:
    """Say why a transaction did not happen: where another attempt may heal it, or the disk is full."""
    code, state = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF, getattr(error.orig, "sqlstate", None) or ""
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "locked"
    if code == sqlite3.SQLITE_FULL or state == _FULL:
        return "full"
    if state in _MET:
        return "locked"
    if _NO_ENTRY.search(str(error.orig)):
        return "refused"
    return "lost" if error.connection_invalidated or state in _ENDED or _LOST.search(str(error.orig)) else None
