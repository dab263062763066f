"""The gateway's one source of time: handed in at construction, so that tests run on a manual clock."""

from __future__ import annotations

import time
from typing import Protocol


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
