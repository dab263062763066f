"""Watches the event loop: while something blocks it, no call is answered and no clock is looked at."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
WARN_S = 1.0
QUIET_S = 10.0
"""Seconds after a warning in which no other one follows."""


async def watch_lag(
    observe: Callable[[float], None], *, interval_s: float = INTERVAL_S, warn_s: float = WARN_S
) -> None:
    """Measure for ever how late the event loop wakes what sleeps.

    Args:
        observe: gets the seconds, each time.
        interval_s: seconds between two looks.
        warn_s: a lag from this on is logged.
    """
    quiet_until_s = float("-inf")
    while True:
        # Not the loop's own time, which stands still while a callback runs.
        due_s = time.monotonic() + interval_s
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        lag_s = max(0.0, now_s - due_s)
        observe(lag_s)
        if lag_s >= warn_s and now_s >= quiet_until_s:
            quiet_until_s = now_s + QUIET_S
            words = "the event loop stood still for %.1f s: something blocked it, or the machine gave it no time"
            log.warning(words, lag_s)
