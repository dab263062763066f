"""The database: whole transactions in threads of our own, on SQLite or on PostgreSQL.

    callers -> write(fn) -> [writer threads: one transaction per call] -> SQLite: 1, PostgreSQL: 4
    callers -> read(fn)  -> [reader threads: one snapshot per call]    -> SQLite: 2, PostgreSQL: 4

`fn` is plain SQLAlchemy Core code on a `Connection`. A whole transaction is one hop to a thread; through an async
driver each statement would be one (docs/decisions/0005, docs/decisions/0009). A call waits for a free thread and for
the database, both together at most the backend's `deadline_s`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from tide_gateway.database.backend import Backend, Verdict, Wire
from tide_gateway.database.errors import DatabaseError, OutcomeUnknown, StorageFailed
from tide_gateway.database.postgres import PostgreSQL, Timeouts, check_postgres
from tide_gateway.database.sqlite import FileLock, SQLite, check_sqlite

__all__ = [
    "Database",
    "DatabaseError",
    "FileLock",
    "OutcomeUnknown",
    "StorageFailed",
    "Timeouts",
    "database_url",
    "open_database",
    "sqlite_url",
]

T = TypeVar("T")

MAX_ATTEMPTS = 3
MAX_BACKOFF_S = 0.05
WATCH_INTERVAL_S = 0.5
MAX_WAITING = 16_384
"""Calls at once of one kind, most of which wait for a thread; one more fails."""
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
        self._writes = _Side(self._backend, reads=False)
        self._reads = _Side(self._backend, reads=True)
        # A thread and a connection that nobody else waits for.
        self._urgent = _Side(self._backend, reads=False, num_threads=1) if self._backend.shared else self._writes

    @property
    def shared(self) -> bool:
        """Whether other processes may write to it too; False where this one owns the file."""
        return self._backend.shared

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

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` on one snapshot. It may run several times.

        Raises:
            StorageFailed: as `write`.
        """
        return await self._reads.run(fn)

    @asynccontextmanager
    async def alone(self, gate: asyncio.Lock) -> AsyncGenerator[None, None]:
        """Hold the gate, so that calls which would only wait for the same lock do not hold the threads that all share.

        Raises:
            StorageFailed: the gate was not free within the deadline of a call.
        """
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


class _Call:
    """One call in its thread."""

    __slots__ = ("deadline", "wire")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.wire: Wire | None = None


class _Side:
    """The threads and connections of either reads or writes."""

    def __init__(self, backend: Backend, *, reads: bool, num_threads: int | None = None) -> None:
        self._backend = backend
        self._engine: Engine = backend.make_engine(reads=reads)
        name = "tide-sql-read" if reads else "tide-sql-write"
        threads = num_threads or (backend.num_readers if reads else backend.num_writers)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._guard = threading.Lock()
        self._calls: set[_Call] = set()
        self._num_calls = 0
        self._thread = threading.local()
        self._held: set[Connection] = set()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._cut_overdue, name=f"{name}-watch", daemon=True)
        if backend.shared:
            self._watch.start()

    async def run(self, fn: Callable[[Connection], T]) -> T:
        if self._num_calls >= MAX_WAITING:
            raise StorageFailed("too many calls wait for the database")
        self._num_calls += 1
        try:
            call = _Call(time.monotonic() + self._backend.deadline_s)
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, call, fn)
        finally:
            self._num_calls -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._closed.set()
        for connection in self._held:
            connection.close()
        self._held.clear()
        self._engine.dispose()

    def _run(self, call: _Call, fn: Callable[[Connection], T]) -> T:
        num_attempts = 0
        while time.monotonic() < call.deadline:
            num_attempts += 1
            committing = False
            try:
                connection = self._connection()
                self._enter(call, self._backend.wire(connection))
                try:
                    with connection.begin() as transaction:
                        value = fn(connection)
                        committing = True
                        transaction.commit()
                        return value
                finally:
                    self._leave(call)
            except Exception as error:
                verdict = self._backend.judge(error, committing=committing)
                if verdict is Verdict.RAISE:
                    raise
                self._let_go()
                if verdict is Verdict.UNKNOWN:
                    raise OutcomeUnknown(f"lost in the commit: {_words(error)}") from error
                if verdict is Verdict.FAILED or num_attempts == MAX_ATTEMPTS:
                    raise StorageFailed(_words(error)) from error
            # Two that met in a deadlock should not meet again.
            time.sleep(random.uniform(0, MAX_BACKOFF_S))  # noqa: S311
        raise StorageFailed(f"the database did not answer in {self._backend.deadline_s:g} s")

    def _connection(self) -> Connection:
        # One for the thread's whole life: to take it from the pool each time costs as much as a small transaction.
        held: Connection | None = getattr(self._thread, "connection", None)
        if held is None:
            held = self._thread.connection = self._engine.connect()
            with self._guard:
                self._held.add(held)
        return held

    def _let_go(self) -> None:
        held: Connection | None = getattr(self._thread, "connection", None)
        if held is not None:
            self._thread.connection = None
            with self._guard:
                self._held.discard(held)
            # Not back to the pool: it is broken, or leads to a server that takes no writes.
            held.invalidate()
            held.close()

    def _enter(self, call: _Call, wire: Wire | None) -> None:
        if wire is None:
            return
        with self._guard:
            call.wire = wire
            self._calls.add(call)

    def _leave(self, call: _Call) -> None:
        if call.wire is None:
            return
        with self._guard:
            call.wire = None
            self._calls.discard(call)

    def _cut_overdue(self) -> None:
        while not self._closed.wait(WATCH_INTERVAL_S):
            now = time.monotonic()
            with self._guard:
                for call in self._calls:
                    if call.wire is not None and call.deadline < now:
                        call.wire.cut()


def _words(error: Exception) -> str:
    """The first line: further ones may quote a row."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]
