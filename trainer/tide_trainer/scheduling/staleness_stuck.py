"""How long the entries of a Stuck buffer may be waited for, and who is overdue.

Source: StaleFlow section 4.3 (a buffer that is Stuck for 60 s aborts what it waits for).
Deviation: time runs only while the trainer waits for the buffer, so that a long train step aborts nothing that nobody
waits for. It runs for each entry from when it was first waited for, not while the scheduler has the entry's tasks
paused, and the limit grows with how long an episode of the environment takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Awaited:
    """An entry that a Stuck buffer waits for.

    Attributes:
        paused_s: seconds for which its tasks have been paused so far; only its growth counts.
        limit_s: unpaused seconds after which it is overdue.
    """

    paused_s: float
    limit_s: float


def stuck_limit_s(stuck_s: float, factor: float, episode_s: float | None) -> float:
    """The limit of an entry: `stuck_s`, or `factor` episodes where that is longer and an episode was measured."""
    return stuck_s if episode_s is None else max(stuck_s, factor * episode_s)


class StuckClock:
    """Measures for each entry how long it has been waited for."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, float]] = {}

    def overdue(self, awaited: Mapping[str, Awaited], now_s: float) -> tuple[str, ...]:
        """The entries past their limits, in order; the caller aborts them and samples their prompts again later.

        Call it with what `StalenessBuffers.stuck` names, only while the trainer waits. An entry's time begins with the
        first call that names it, and is forgotten with the first that does not.

        Args:
            awaited: by entry.
            now_s: a monotonic clock's present.
        """
        self._since = {entry: self._since.get(entry, (now_s, facts.paused_s)) for entry, facts in awaited.items()}
        return tuple(entry for entry, facts in awaited.items() if self._waited_s(entry, facts, now_s) >= facts.limit_s)

    def clear(self) -> None:
        """Nobody waits any more: the times begin anew."""
        self._since.clear()

    def _waited_s(self, entry: str, facts: Awaited, now_s: float) -> float:
        began_s, paused_then_s = self._since[entry]
        return now_s - began_s - max(0.0, facts.paused_s - paused_then_s)
