"""Which gateway processes of the deployment are alive, as this one last read it.

A process of the same machine is known to be dead at once, by its process id and start; any process is taken for dead
when its heartbeat is older than the lease. That may be wrong (a process that hung, a database that it could not reach):
row versions keep a process that was taken for dead from writing over what others have done since.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tide_gateway.host import start_ticks
from tide_gateway.repository import Replica

LEASE_S = 5.0
"""A heartbeat older than this, and others take over. Heartbeats are written ten times as often."""


class Members:
    """The replicas.

    Args:
        me: this process's row.
        lease_s: seconds after which a silent replica is taken for dead.
    """

    def __init__(self, me: Replica, lease_s: float = LEASE_S) -> None:
        self.me = me
        self.lease_s = lease_s
        self.alive = frozenset({me.name})
        self.dead: frozenset[str] = frozenset()
        self._written_at: float | None = None

    def now(self, now_s: float) -> Replica:
        """This process's row with a heartbeat of now."""
        self.me = replace(self.me, seen_s=now_s)
        return self.me

    def wrote(self, sent_at: float) -> None:
        """Take note that a heartbeat was stored, which was sent at `sent_at` of the monotonic clock."""
        self._written_at = sent_at

    def lapsed(self, at: float) -> bool:
        """True at `at` of the monotonic clock while this replica's newest heartbeat is older than the lease: it was cut
        off or hung, and must end nothing for time that may be nobody's. False before the first one."""
        return self._written_at is not None and at - self._written_at > self.lease_s

    def see(self, rows: Iterable[Replica], now_s: float) -> None:
        """Judge the rows as they were just read."""
        known = list(rows)
        living = frozenset(row.name for row in known if self.is_alive(row, now_s)) | {self.me.name}
        self.alive, self.dead = living, frozenset(row.name for row in known) - living

    def is_alive(self, row: Replica, now_s: float) -> bool:
        """Whether a replica may still be at work."""
        if now_s - row.seen_s > self.lease_s:
            return False
        return row.host != self.me.host or start_ticks(row.pid) == row.ticks

    @property
    def leads(self) -> bool:
        """True on one living replica: it does what one is enough for."""
        return self.me.name == min(self.alive)


def this_replica(name: str, now_s: float) -> Replica:
    """The row of this process."""
    pid = os.getpid()
    return Replica(name, this_host(), pid, start_ticks(pid) or 0, now_s, now_s)


def this_host() -> str:
    """This machine since its boot, and the namespace in which its process ids mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown/{os.getpid()}"  # nobody else's: only the lease tells then
