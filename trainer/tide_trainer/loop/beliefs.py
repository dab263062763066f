"""What the scheduler's shell believes to be at each engine, for `engine_watch` to compare with what is there.

    grant -> (call at the engine) -> turn, failed, cancelled -> (passing, for a few seconds) -> forgotten
                                      +-> its context is believed to be cached there until its task's next turn

The router names a call's request at the engine `c<call>`, so that each request belongs to one task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tide_trainer.scheduling.reconcile import BelievedCall
from tide_trainer.types import RankId

MAX_ENDED = 65_536
"""Calls that ended lately and are remembered."""


@dataclass(frozen=True, slots=True)
class _Resident:
    rank: RankId
    version: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Cached:
    """Context tokens that were believed to be cached when their task's next turn came, and those that were."""

    expected_tokens: int = 0
    found_tokens: int = 0


class Beliefs:
    """The calls at the engines, and the contexts that their caches should hold.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._calls: dict[str, tuple[RankId, BelievedCall]] = {}
        self._ended: deque[tuple[float, RankId, str]] = deque(maxlen=MAX_ENDED)
        self._resident: dict[str, _Resident] = {}
        self._cached: dict[RankId, Cached] = {}
        self._blocks: dict[RankId, int] = {}

    def add_rank(self, rank: RankId, block_tokens: int) -> None:
        """A rank's KV block size is known."""
        self._blocks[rank] = block_tokens

    def drop_rank(self, rank: RankId) -> None:
        """A rank is gone."""
        self._blocks.pop(rank, None)
        self._cached.pop(rank, None)

    def granted(self, call: str, task: str, rank: RankId, need_tokens: int) -> None:
        """A call goes to a rank."""
        self._calls[call] = (rank, BelievedCall(request_of(call), task, need_tokens, self._now()))

    def ended(self, call: str) -> None:
        """A call is over, in whatever way; one that was never granted is ignored."""
        found = self._calls.pop(call, None)
        if found is not None:
            self._ended.append((self._now(), found[0], found[1].request))

    def answered(self, task: str, call: str, event: Mapping[str, Any]) -> None:
        """A call's turn is over; before `ended`. `event` is the router's: footprint, version."""
        found = self._calls.get(call)
        if found is None:
            return
        rank, footprint, version = found[0], event["footprint"], int(event.get("version", -1))
        before = self._resident.get(task)
        block = self._blocks.get(rank, 1)
        if before is not None and (before.rank, before.version) == (rank, version):
            # The last token has no KV yet, and only whole blocks are found again.
            expected = min(before.context_tokens - 1, footprint["prompt_tokens"] - 1) // block * block
            seen = self._cached.get(rank, Cached())
            self._cached[rank] = Cached(
                seen.expected_tokens + expected, seen.found_tokens + min(expected, footprint["cached_tokens"])
            )
        self._resident[task] = _Resident(rank, version, footprint["context_tokens"])

    def released(self, task: str) -> None:
        """The task was paused or is over: nobody counts on its context any more."""
        self._resident.pop(task, None)

    def calls(self, rank: RankId) -> tuple[BelievedCall, ...]:
        """The calls at a rank now."""
        return tuple(call for where, call in self._calls.values() if where == rank)

    def passing(self, rank: RankId, since_s: float) -> frozenset[str]:
        """Requests of calls at a rank that ended after `since_s`."""
        while self._ended and self._ended[0][0] < since_s:
            self._ended.popleft()
        return frozenset(request for _, where, request in self._ended if where == rank)

    def take_cached(self, rank: RankId) -> Cached:
        """What was expected and found since the last call of this."""
        return self._cached.pop(rank, Cached())


def request_of(call: str) -> str:
    """A call's id at its engine; see `router.calls`."""
    return f"c{call}"


def both(before: tuple[BelievedCall, ...], after: tuple[BelievedCall, ...]) -> tuple[BelievedCall, ...]:
    """The calls that were there before a look and are still there after it."""
    still = {call.request for call in after}
    return tuple(call for call in before if call.request in still)
