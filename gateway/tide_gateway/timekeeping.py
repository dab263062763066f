"""The gateway's one source of time: handed in at construction, so that tests run on a manual clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

NUM_SAMPLES = 4
# How much slower than real time goes while it is ahead of the database: half as fast, so that clocks still run.
SLEW = 0.5


class Timekeeper(Protocol):
    """Tells the time in which all clocks of all tasks are stored."""

    def now_s(self) -> float:
        """Seconds since the epoch, UTC."""
        ...


class WallTime:
    """The machine's time, which is the embedded database's time too. A step backwards counts as no time passed."""

    def now_s(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()


class ClockSource(Protocol):
    """What `DatabaseTime` needs of a database; `tide_gateway.database.Database` is one."""

    @property
    def shared(self) -> bool:
        """Whether other processes use it too, so that its clock rules."""
        ...

    async def read(self, fn: Callable[[Connection], T]) -> T:
        """Run `fn` on a connection."""
        ...

    def clock_s(self, connection: Connection) -> float:
        """The database's time."""
        ...


class DatabaseTime:
    """The database's time, known without asking it each time.

    The machine's monotonic clock carries time on from the last reading, so that a step of its wall clock moves
    nothing. A reading corrects: forwards at once, backwards by going slower, so that time never runs back. Where one
    process owns the database, its wall clock is read once, at the start; a machine that sleeps charges nobody.

    Args:
        wall: seconds since the epoch.
        monotonic: seconds since whenever, never backwards.
    """

    def __init__(
        self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._monotonic = monotonic
        self._since = monotonic()
        self._base_s = wall()
        self._ahead_s = 0.0
        self._told_s = 0.0
        self._synced = False

    def now_s(self) -> float:
        """Seconds since the epoch, UTC. Never less than before."""
        passed_s = self._monotonic() - self._since
        now_s = self._base_s + passed_s
        if self._ahead_s:
            now_s -= min(self._ahead_s, passed_s * SLEW)
        if now_s > self._told_s:
            self._told_s = now_s
        return self._told_s

    def not_before(self, seconds: float) -> None:
        """Let time be at least `seconds` from now on: the newest moment that is stored. Safe to repeat.

        Call it after the first `sync`. Where the database's clock is behind that moment, time goes slower until the
        two meet.
        """
        if seconds > self.now_s():
            self._set(seconds, 0.0)

    async def sync(self, database: ClockSource) -> float:
        """Correct time by the database's clock; call it before the first use and every few seconds.

        What it may be wrong by is half the round trip of the quickest of a few readings. A difference within that is
        left alone, a larger one is corrected as far as it is certain. Cancelled, it corrects nothing.

        Returns:
            The correction in seconds, below 0 where time now goes slower.

        Raises:
            StorageFailed: the database does not answer; time goes on as before.
        """
        if not database.shared:
            self._synced = True
            return 0.0

        def sample(connection: Connection) -> tuple[float, float, float]:
            before = self._monotonic()
            clock_s = database.clock_s(connection)
            after = self._monotonic()
            return after - before, clock_s, after

        samples = await database.read(lambda connection: [sample(connection) for _ in range(NUM_SAMPLES)])
        trip_s, clock_s, at = min(samples)
        margin_s = trip_s / 2
        true_s = clock_s + margin_s + (self._monotonic() - at)
        if not self._synced:
            # Nobody was told a time yet, or hardly: take the database's even where this machine's clock is ahead.
            self._synced = True
            off_s = true_s - self._base_s - (self._monotonic() - self._since)
            self._set(max(self._told_s, true_s), max(0.0, self._told_s - true_s))
            return off_s
        now_s = self.now_s()
        off_s = true_s - now_s
        off_s = max(0.0, off_s - margin_s) + min(0.0, off_s + margin_s)
        self._set(max(now_s, now_s + off_s), max(0.0, -off_s))
        return off_s

    def _set(self, now_s: float, ahead_s: float) -> None:
        self._since = self._monotonic()
        self._base_s = now_s
        self._ahead_s = ahead_s


class ManualTime:
    """Time that stands still until it is moved."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds as last set."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the time by `seconds`, backwards where negative."""
        self._now_s += seconds
