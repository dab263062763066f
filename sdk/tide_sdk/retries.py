"""When a call may be made again: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

from tide_sdk.errors import TideError
from tide_sdk.http_connection import ConnectFailed, QueueFull, TransportError
from tide_sdk.http_parse import Response

_WAITABLE = frozenset({"unavailable", "capacity", "paused"})
"""Codes by which a server says that it did not act and that a later call can succeed."""
_WAITABLE_STATUS = frozenset({429, 502, 503})
"""The same for answers without a code of ours, as a proxy in between gives them."""
_BUSY_REASONS = frozenset({"calls", "memory"})
"""Reasons of `capacity` that say nothing about places: too much is in flight at the server."""
_MIN_TOLD_S, _MAX_TOLD_S = 0.01, 100_000.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Growing, jittered waits.

    Attributes:
        first_s: the first wait.
        factor: how much longer each next one is.
        max_s: the longest; a server's Retry-After may ask for more.
    """

    first_s: float = 0.1
    factor: float = 2.0
    max_s: float = 5.0

    def wait_s(self, num_failures: int, jitter: float, asked_s: float | None = None) -> float:
        """Seconds to wait after `num_failures` (from 1), with `jitter` from 0 to 1.

        Half of the wait is fixed and half drawn, so that many callers spread out and none comes back at once.
        """
        wait_s = min(self.max_s, self.first_s * self.factor ** min(num_failures - 1, 30))
        return max(wait_s * (0.5 + 0.5 * jitter), asked_s or 0.0)


def asked_s(response: Response | None) -> float | None:
    """Seconds that an answer's Retry-After asks for, None where it asks for none."""
    value = "" if response is None else response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() and len(value) < 6 else None


def needs_place(error: Exception) -> bool:
    """True if a start was refused because no place is free for it, by a limit or by the start rate."""
    return isinstance(error, TideError) and error.code == "capacity" and error.extra.get("reason") not in _BUSY_REASONS


def place_wait_s(error: Exception, jitter: float) -> float | None:
    """Seconds to wait for a start that has a place in the server's queue, None where the error speaks of no place.

    The place is lost to who comes late, so these waits do not grow; `jitter` from 0 to 1 adds a tenth at most.
    """
    if not isinstance(error, TideError) or error.code != "capacity":
        return None
    told_s = error.extra.get("retry_after_s")
    if isinstance(told_s, bool) or not isinstance(told_s, (int, float)) or not 0 < told_s <= _MAX_TOLD_S:
        return None
    return max(_MIN_TOLD_S, float(told_s)) * (1.0 + 0.1 * jitter)


def may_retry(error: Exception, *, idempotent: bool, waits_for_place: bool = True) -> bool:
    """True if the call can be made again without acting twice.

    Args:
        error: how the call failed.
        idempotent: the server answers a repeated call as it answered the first.
        waits_for_place: False: a start without a place is the caller's to make again.
    """
    if not waits_for_place and needs_place(error):
        return False
    if isinstance(error, TransportError):
        return idempotent or isinstance(error, (ConnectFailed, QueueFull))
    if isinstance(error, TideError):
        if error.code == "internal":
            return idempotent and error.extra.get("http_status") in _WAITABLE_STATUS
        return error.code in _WAITABLE
    return False
