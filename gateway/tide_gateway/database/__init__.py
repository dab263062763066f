"""The database: whole transactions in threads of our own, on SQLite or on PostgreSQL.

    callers -> write(fn) -> [writer threads: one transaction per call] -> SQLite: 1, PostgreSQL: 4
    callers -> read(fn)  -> [reader threads: one snapshot per call]    -> SQLite: 2, PostgreSQL: 4

`fn` is plain SQLAlchemy Core code on a `Connection`. A whole transaction is one hop to a thread; through an async
driver each statement would be one (docs/decisions/0005, docs/decisions/0009). A call waits for a free thread and for
the database, both together at most the backend's `deadline_s`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tide_gateway.database.backend import Backend
from tide_gateway.database.errors import DatabaseError, OutcomeUnknown, StorageFailed
from tide_gateway.database.postgres import PostgreSQL, Timeouts, check_postgres
from tide_gateway.database.side import Side
from tide_gateway.database.sqlite import FileLock, SQLite, check_sqlite
from tide_gateway.database.statements import Statement, driver_of, pipelined, write_rows

__all__ = [
    "Database",
    "DatabaseError",
    "FileLock",
    "OutcomeUnknown",
    "Statement",
    "StorageFailed",
    "Timeouts",
    "database_url",
    "open_database",
    "sqlite_url",
    "write_rows",
]

T = TypeVar("T")

_EXAMPLES = "write sqlite:///path/to/file.db or postgresql://user@host/name"


def database_url(text: str) -> URL:
    """The URL of a database, with the synchronous driver that we use.

    Args:
        text: `sqlite:///relative.db`, `sqlite:////absolute.db`, a file with `?synchronous=full`,
            `postgresql://user@host/name`, `postgresql://user@/name?host=/folder/of/the/socket`, or these with
            `+aiosqlite` or `+psycopg`.

    Raises:
        DatabaseError: it cannot be used; the message names the fix and never holds a password.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise DatabaseError(f"database: not a URL; {_EXAMPLES}") from None
    match url.drivername.partition("+")[0]:
        case "sqlite":
            return check_sqlite(url)
        case "postgresql" | "postgres":
            return check_postgres(url)
        case name:
            raise DatabaseError(f"database: {name} is not supported; {_EXAMPLES}")


def sqlite_url(text: str) -> URL:
    """As `database_url`, of a SQLite file only."""
    url = database_url(text)
    if url.get_backend_name() != "sqlite":
        raise DatabaseError("database: here it must be a file; write sqlite:///path/to/file.db")
    return url


def open_database(text: str) -> Database:
    """The database of that URL; connects at the first call.

    Raises:
        DatabaseError: as `database_url`.
    """
    return Database(database_url(text))


class Database:
    """Runs functions on connections in threads of its own.

    Args:
        url: as `database_url` gives it.
        timeouts: of PostgreSQL.
    """

    def __init__(self, url: URL, *, timeouts: Timeouts | None = None) -> None:
        self.url = url
        self._backend: Backend = (
            SQLite(url) if url.get_backend_name() == "sqlite" else PostgreSQL(url, timeouts=timeouts)
        )
        self._writes = Side(self._backend, reads=False)
        self._reads = Side(self._backend, reads=True)
        self._gates: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        # A thread and a connection that nobody else waits for.
        self._urgent = Side(self._backend, reads=False, num_threads=1) if self._backend.shared else self._writes

    @property
    def shared(self) -> bool:
        """Whether other processes may write to it too; False where this one owns the file."""
        return self._backend.shared

    @property
    def durable(self) -> bool:
        """Whether what was committed survives a power cut."""
        return self._backend.durable

    async def write(self, fn: Callable[[Connection], T], *, urgent: bool = False) -> T:
        """Run `fn` in one transaction, committed when it returns and rolled back when it raises.

        After a deadlock, or a connection that died before the commit, all is rolled back and `fn` runs again: it may
        run several times and must leave no trace but in the database. Cancellation does not stop a transaction that
        has begun. `urgent` is for heartbeats: they wait for no other call of this process.

        Raises:
            StorageFailed: the disk is full, the server is away, or the call took too long; nothing is stored.
            OutcomeUnknown: a StorageFailed of which all may be stored.
        """
        return await (self._urgent if urgent else self._writes).run(fn)

    async def find(self, statement: Statement, **values: Any) -> list[tuple[Any, ...]]:
        """All rows of one select, which is one round trip.

        Raises:
            StorageFailed: as `write`.
        """
        return await self._reads.run(lambda connection: statement.rows(connection, **values), begin=False)

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` on one snapshot. It may run several times.

        Raises:
            StorageFailed: as `write`.
        """
        return await self._reads.run(fn)

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncGenerator[None, None]:
        """Wait for the calls of this process that take the lock of that name: in the database they would only wait for
        each other, and with it hold the threads that all share.

        Raises:
            StorageFailed: they did not end within the deadline of a call.
        """
        gate = self._gates[name]
        try:
            async with asyncio.timeout(self._backend.deadline_s):
                await gate.acquire()
        except TimeoutError as error:
            raise StorageFailed(f"other calls did not end in {self._backend.deadline_s:g} s") from error
        try:
            yield
        finally:
            gate.release()

    def lock(self, connection: Connection, name: str) -> None:
        """Inside `write`: wait until this transaction alone holds the lock of that name, which it keeps to its end.

        In SQLite a transaction that writes is alone anyway. Take several locks in the order of their names.
        """
        self._backend.lock(connection, name)

    def locked(
        self, connection: Connection, name: str, asked: Sequence[tuple[Statement, dict[str, Any]]]
    ) -> list[list[tuple[Any, ...]]]:
        """As `lock`, and what selects with these values find under it: on PostgreSQL one round trip for all."""
        with driver_of(connection):
            with pipelined(connection):
                self._backend.lock(connection, name)
                cursors = [statement.ask(connection, **values) for statement, values in asked]
            return [cursor.fetchall() for cursor in cursors]

    def clock_s(self, connection: Connection) -> float:
        """Seconds since the epoch on the clock that all processes on this database share, one statement each time."""
        return self._backend.clock_s(connection)

    async def close(self) -> None:
        """Wait for what runs, at most the deadline of a call, then close the connections. Safe to repeat."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._reads.close()
        self._writes.close()
        self._urgent.close()
