"""SQLite: one file of one process, with a write-ahead log, one writer and two readers."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError

from tide_gateway.database.backend import Backend, Verdict, Wire
from tide_gateway.database.errors import DatabaseError
from tide_gateway.database.statements import driver_of

BUSY_TIMEOUT_S = 10.0
SYNCHRONOUS = ("normal", "full")


def check_sqlite(url: URL) -> URL:
    """The URL of a SQLite file, as the synchronous driver takes it.

    Raises:
        DatabaseError: it does not name a file, or has another option than `synchronous`, or another value of it.
    """
    if not url.database or url.database == ":memory:":
        raise DatabaseError("database: name a file, sqlite:///path/to/file.db; it must outlive the gateway")
    for name, value in url.query.items():
        if name != "synchronous" or value not in SYNCHRONOUS:
            raise DatabaseError(
                "database: the only option of a SQLite file is synchronous, normal (by default) or full; "
                "write sqlite:///path/to/file.db?synchronous=full"
            )
    return url.set(drivername="sqlite")


class SQLite(Backend):
    """One process owns the file; its single writer is the lock of everything.

    A write-ahead log with synchronous=NORMAL survives the death of the process with every commit; after a power cut
    the last commits may be missing, and so are the environment servers of the same machine. With FULL, which waits
    for the disk at each commit, none is missing: for environments that do not die with the machine.

    Args:
        url: as `check_sqlite` gives it.
    """

    shared = False
    num_writers = 1
    num_readers = 2
    deadline_s = 60.0

    def __init__(self, url: URL) -> None:
        self._url = url.set(query={})
        self._synchronous = str(url.query.get("synchronous", SYNCHRONOUS[0])).upper()
        self.durable = self._synchronous == "FULL"

    def make_engine(self, *, reads: bool) -> Engine:
        """An engine on the file, in WAL, with explicit transactions."""
        engine = create_engine(
            self._url,
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
            pool_size=self.num_readers if reads else self.num_writers,
            max_overflow=0,
            query_cache_size=256,
            hide_parameters=True,  # bodies do not belong in logs
        )

        @event.listens_for(engine, "connect")
        def _prepare(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
            # None: the driver begins no transaction by itself; `_begin` does.
            connection.isolation_level = None
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={self._synchronous}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
            # Readers see one snapshot, the writer takes the lock before it reads.
            with driver_of(connection) as driver:
                driver.execute("BEGIN" if reads else "BEGIN IMMEDIATE")

        return engine

    def judge(self, error: Exception, *, committing: bool) -> Verdict:
        """A full disk or an unreadable file is a failure; nothing is worth a second attempt."""
        return Verdict.FAILED if isinstance(error, OperationalError | OSError) else Verdict.RAISE

    def clock_s(self, connection: Connection) -> float:
        """The machine's time."""
        return time.time()

    def lock(self, connection: Connection, name: str) -> None:
        """Nothing: who has begun to write is alone."""

    def wire(self, connection: Connection) -> Wire | None:
        """Nothing: a file's waits cannot be cut short."""
        return None


class FileLock:
    """Keeps a second gateway off the same SQLite file; freed by the kernel when the process dies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def take(self) -> None:
        """Take the lock.

        Raises:
            DatabaseError: another process holds it, or the folder cannot be written.
        """
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DatabaseError(f"database: cannot write {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.free()
            raise DatabaseError(
                f"database: another gateway uses {self._path.with_suffix('')}; stop it first"
            ) from error

    def free(self) -> None:
        """Free the lock. Safe to repeat."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
