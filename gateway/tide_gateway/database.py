"""The embedded SQLite database: one writer thread, two reader threads, WAL.

    callers -> write(fn) -> [writer thread: one transaction per call] -> SQLite (WAL)
    callers -> read(fn)  -> [two reader threads]                      -> SQLite (WAL)

`fn` is plain SQLAlchemy Core code on a `Connection`. A whole transaction is one hop to a thread; through aiosqlite each
statement would be one (docs/decisions/0005). An `AsyncConnection.run_sync` takes the very same functions, which is how
PostgreSQL will join.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError

T = TypeVar("T")

BUSY_TIMEOUT_S = 10.0


class DatabaseError(Exception):
    """The database cannot be used as configured; the message names the fix."""


class StorageFailed(Exception):
    """The disk or the database does not take writes now; nothing of the transaction is stored."""


def sqlite_url(text: str) -> URL:
    """The URL of a SQLite file, as the synchronous driver takes it.

    Args:
        text: `sqlite:///relative.db`, `sqlite:////absolute.db`, or the same with `sqlite+aiosqlite`.

    Raises:
        DatabaseError: it is not the URL of a SQLite file.
    """
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise DatabaseError(f"database: not a URL; write sqlite:///path/to/file.db ({error})") from error
    if url.get_backend_name() != "sqlite":
        raise DatabaseError(f"database: {url.get_backend_name()} is not supported yet; write sqlite:///path/to/file.db")
    if not url.database or url.database == ":memory:" or url.query:
        raise DatabaseError("database: name a file, sqlite:///path/to/file.db; it must outlive the gateway")
    return url.set(drivername="sqlite")


def make_engine(url: URL) -> Engine:
    """A synchronous engine on the file, in WAL, with explicit transactions.

    A write-ahead log with synchronous=NORMAL survives the death of the process with every commit; after a power cut
    the last commits may be missing, and so are the environment servers of the same machine.
    """
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        query_cache_size=256,
        hide_parameters=True,  # bodies do not belong in logs
    )

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:  # pyright: ignore[reportUnusedFunction]
        # None: the driver begins no transaction by itself; `_begin` does.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # Readers see one snapshot, the writer takes the lock before it reads.
        kind = "BEGIN" if connection.get_execution_options().get("tide_read") else "BEGIN IMMEDIATE"
        connection.exec_driver_sql(kind)

    return engine


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


class Database:
    """Runs functions on connections in threads of its own.

    Args:
        url: as `sqlite_url` gives it.
    """

    shared = False

    def __init__(self, url: URL) -> None:
        self.url = url
        self._engine = make_engine(url)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tide-sql-write")
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="tide-sql-read")
        self._write_connection: Connection | None = None

    async def write(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` in one transaction, committed when it returns and rolled back when it raises.

        Cancellation does not stop a transaction that has begun.

        Raises:
            StorageFailed: the disk is full, or the file cannot be written for another reason.
        """
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._in_transaction, fn)

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` on one snapshot."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._in_snapshot, fn)

    def lock(self, connection: Connection, name: str) -> None:
        """Nothing: there is one writer."""

    async def close(self) -> None:
        """Wait for what runs, then close the file. Safe to repeat."""
        await asyncio.to_thread(self._close)

    def _in_transaction(self, fn: Callable[[Connection], T]) -> T:
        # One connection for the writer's whole life: its statement caches stay warm.
        try:
            if self._write_connection is None:
                self._write_connection = self._engine.connect()
            with self._write_connection.begin():
                return fn(self._write_connection)
        except (OperationalError, OSError) as error:
            raise StorageFailed(str(getattr(error, "orig", None) or error)) from error

    def _in_snapshot(self, fn: Callable[[Connection], T]) -> T:
        with self._engine.connect().execution_options(tide_read=True) as connection, connection.begin():
            return fn(connection)

    def _close(self) -> None:
        self._readers.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        if self._write_connection is not None:
            self._write_connection.close()
            self._write_connection = None
        self._engine.dispose()
