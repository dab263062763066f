"""How long tasks have stood still, and how long an environment's episodes run when they do not.

    submitted ..stands.. admitted --runs--> call ..stands.. granted --runs--> call ..stands.. granted --runs--> end

A task stands still while it waits for its admission, and from the arrival of its call until that is granted (held, then
perhaps paused at the gateway). That is the scheduler's doing, never the environment's or the agent's.
Source: StaleFlow section 4.3 (Abort of what is Stuck); TideRL section 4.2 (a paused task's time does not count).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NUM_AVERAGED = 64
"""Episodes over which an environment's mean goes; older ones fade."""


@dataclass(slots=True)
class _Clock:
    group: str
    environment: str
    began_s: float
    stood_s: float = 0.0
    since_s: float | None = None

    def stands_s(self, now_s: float) -> float:
        return self.stood_s + (0.0 if self.since_s is None else now_s - self.since_s)


class EpisodeClocks:
    """One clock for each live task.

    Args:
        now: a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._clocks: dict[str, _Clock] = {}
        self._groups: dict[str, set[str]] = {}
        self._means: dict[str, tuple[int, float]] = {}

    def begin(self, session: str, group: str, environment: str) -> None:
        """A task was submitted; it stands until it is admitted."""
        now_s = self._now()
        self._clocks[session] = _Clock(group, environment, now_s, since_s=now_s)
        self._groups.setdefault(group, set()).add(session)

    def stand(self, session: str) -> None:
        """The task waits for the scheduler from now on; idempotent, and unknown tasks are over already."""
        clock = self._clocks.get(session)
        if clock is not None and clock.since_s is None:
            clock.since_s = self._now()

    def go(self, session: str) -> None:
        """The task runs from now on; idempotent, and unknown tasks are over already."""
        clock = self._clocks.get(session)
        if clock is not None and clock.since_s is not None:
            clock.stood_s, clock.since_s = clock.stands_s(self._now()), None

    def end(self, session: str, *, completed: bool) -> None:
        """The task is over; only where it was `completed` its environment's mean learns of it."""
        clock = self._clocks.pop(session)
        members = self._groups[clock.group]
        members.discard(session)
        if not members:
            del self._groups[clock.group]
        if completed:
            now_s = self._now()
            ran_s = max(0.0, now_s - clock.began_s - clock.stands_s(now_s))
            num, mean_s = self._means.get(clock.environment, (0, 0.0))
            num = min(num + 1, NUM_AVERAGED)
            self._means[clock.environment] = (num, mean_s + (ran_s - mean_s) / num)

    def paused_s(self, group: str) -> float:
        """Seconds that the group's live members have stood still, of the one that stood longest; 0 without any.

        A group is as late as its last member, so the longest is what its time may be discounted by.
        """
        now_s = self._now()
        return max((self._clocks[one].stands_s(now_s) for one in self._groups.get(group, ())), default=0.0)

    def episode_s(self, environment: str) -> float | None:
        """Mean seconds that a completed episode ran; None before the first."""
        found = self._means.get(environment)
        return None if found is None else found[1]
