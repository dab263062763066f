"""The threads and connections of either reads or writes: one whole call in one thread, again where that may help."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine

from tide_gateway.database.backend import Backend, Verdict, Wire
from tide_gateway.database.errors import OutcomeUnknown, StorageFailed
from tide_gateway.database.threads import Threads

T = TypeVar("T")

MAX_ATTEMPTS = 3
MAX_BACKOFF_S = 0.05
WATCH_INTERVAL_S = 0.5
MAX_WAITING = 16_384
"""Calls at once of one kind, most of which wait for a thread; one more fails."""


class _Call:
    """One call in its thread."""

    __slots__ = ("deadline", "wire")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.wire: Wire | None = None


class Side:
    """Runs calls.

    Args:
        backend: connects, and judges what fails.
        reads: which kind of calls.
        num_threads: calls at once; the backend's number where it is left out.
    """

    def __init__(self, backend: Backend, *, reads: bool, num_threads: int | None = None) -> None:
        self._backend = backend
        self._engine: Engine = backend.make_engine(reads=reads)
        name = "tide-sql-read" if reads else "tide-sql-write"
        threads = num_threads or (backend.num_readers if reads else backend.num_writers)
        self._threads = Threads(threads, name)
        self._guard = threading.Lock()
        self._calls: set[_Call] = set()
        self._num_calls = 0
        self._thread = threading.local()
        self._held: set[Connection] = set()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._cut_overdue, name=f"{name}-watch", daemon=True)
        if backend.shared:
            self._watch.start()

    async def run(self, fn: Callable[[Connection], T], *, begin: bool = True) -> T:
        """Run `fn`, in one transaction where it shall `begin` one.

        Raises:
            StorageFailed: as `Database.write`, or too many calls wait.
        """
        if self._num_calls >= MAX_WAITING:
            raise StorageFailed("too many calls wait for the database")
        self._num_calls += 1
        try:
            call = _Call(time.monotonic() + self._backend.deadline_s)
            return await self._threads.run(lambda: self._run(call, fn, begin))
        finally:
            self._num_calls -= 1

    def close(self) -> None:
        """Wait for what runs, then close the connections."""
        self._threads.close()
        self._closed.set()
        for connection in self._held:
            connection.close()
        self._held.clear()
        self._engine.dispose()

    def _run(self, call: _Call, fn: Callable[[Connection], T], begin: bool) -> T:
        num_attempts = 0
        while time.monotonic() < call.deadline:
            num_attempts += 1
            committing = False
            try:
                connection = self._connection()
                self._enter(call, self._backend.wire(connection))
                try:
                    if not begin:
                        return fn(connection)
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
