"""What SQLite and PostgreSQL do differently."""

from __future__ import annotations

import contextlib
import enum
import socket
from typing import Protocol

from sqlalchemy import Connection, Engine


class Verdict(enum.Enum):
    """What an error inside a transaction means.

    AGAIN: nothing is stored, and the same transaction may well succeed at once. FAILED: nothing is stored, call again
    later. UNKNOWN: it happened in the commit, and nobody here can tell. RAISE: the caller's own error.
    """

    AGAIN = enum.auto()
    FAILED = enum.auto()
    UNKNOWN = enum.auto()
    RAISE = enum.auto()


class Wire:
    """A second descriptor of a connection's socket, so that another thread never meets a number given anew.

    Args:
        fileno: the socket's descriptor, which stays the connection's.
    """

    def __init__(self, fileno: int) -> None:
        self._socket = socket.fromfd(fileno, socket.AF_UNIX, socket.SOCK_STREAM)

    def cut(self) -> None:
        """Make whatever waits on the connection fail now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        self._socket.close()


class Backend(Protocol):
    """One kind of database.

    Attributes:
        shared: whether several processes may write to it at once.
        durable: whether what was committed survives a power cut.
        num_writers: threads that write, with one connection each.
        num_readers: threads that read, with one connection each.
        deadline_s: seconds that one call may take from being asked for, waiting for a thread and attempts included.
    """

    shared: bool
    durable: bool
    num_writers: int
    num_readers: int
    deadline_s: float

    def make_engine(self, *, reads: bool) -> Engine:
        """An engine with a connection for each of its threads; `reads` gives transactions of one snapshot."""
        ...

    def judge(self, error: Exception, *, committing: bool) -> Verdict:
        """What to make of an error; `committing` where the commit had been asked for."""
        ...

    def clock_s(self, connection: Connection) -> float:
        """Seconds since the epoch, UTC, on the clock that all processes on this database share."""
        ...

    def lock(self, connection: Connection, name: str) -> None:
        """Wait until this transaction alone holds the lock of that name, to its end."""
        ...

    def wire(self, connection: Connection) -> Wire | None:
        """What cuts the connection's waits short, None where nothing does."""
        ...
