"""How the launches of an environment's servers went, and when the next one may be tried."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

MAX_BACKOFF_S = 30.0


class Launches:
    """Paces launches: after a failed one the next is tried later and later.

    Attributes:
        failure: how the last failed one failed.
        not_before_s: the event loop's time from which the next may be tried.
    """

    def __init__(self) -> None:
        self.failure = ""
        self.not_before_s = 0.0
        self._num_failures = 0
        self._tried: set[str] = set()

    @property
    def wait_s(self) -> float:
        """Seconds until the next may be tried, not above 0 where it may be now."""
        return self.not_before_s - asyncio.get_running_loop().time()

    def note(self, failure: str) -> None:
        """Note how a launch ended, "" where the server is ready."""
        if not failure:
            self._num_failures = 0
            return
        self._num_failures += 1
        self.failure = failure
        self.not_before_s = asyncio.get_running_loop().time() + min(MAX_BACKOFF_S, 0.5 * 2**self._num_failures)

    def first(self, name: str) -> bool:
        """True once for each instance: of a launch that was broken off something may be left under the name."""
        tried, self._tried = name in self._tried, self._tried | {name}
        return not tried

    def keep(self, names: Collection[str]) -> None:
        """Forget the instances that are not among these."""
        self._tried.intersection_update(names)
