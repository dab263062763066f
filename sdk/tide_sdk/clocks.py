"""The clocks of a task: pure code, `now` is always an argument.

A clock is consumed seconds plus the moment since which it runs; there is no deadline anywhere. Which clocks run
follows from the task's state alone (`RUNNING`), so a paused task has no running clock by construction.

Source: TideRL appendix B.1 (`/pause` halts the timeout counters until `/resume`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class ClockName(StrEnum):
    """The five clocks of a task."""

    START = "start"
    IDLE = "idle"
    TURN = "turn"
    ACTIVE = "active"
    END = "end"


class TaskState(StrEnum):
    """Where a task stands; `docs/contract.md` has the picture."""

    STARTING = "starting"
    WAITING = "waiting"
    ACTING = "acting"
    PAUSING = "pausing"
    PAUSED = "paused"
    DONE = "done"
    ENDING = "ending"
    ENDED = "ended"


RUNNING: Mapping[TaskState, frozenset[ClockName]] = {
    TaskState.STARTING: frozenset({ClockName.START}),
    TaskState.WAITING: frozenset({ClockName.IDLE, ClockName.ACTIVE}),
    TaskState.ACTING: frozenset({ClockName.TURN, ClockName.ACTIVE}),
    TaskState.PAUSING: frozenset({ClockName.TURN, ClockName.ACTIVE}),
    TaskState.PAUSED: frozenset(),
    TaskState.DONE: frozenset(),
    TaskState.ENDING: frozenset({ClockName.END}),
    TaskState.ENDED: frozenset(),
}
"""The clocks that run in each state; all others stand still."""
_OF_A_TURN = frozenset({ClockName.IDLE, ClockName.TURN})


@dataclass(frozen=True, slots=True)
class ClockState:
    """One clock.

    Attributes:
        limit_s: seconds after which the clock has expired; finite and above 0.
        consumed_s: seconds counted before `running_since_s`.
        running_since_s: the moment since which it runs, None while it stands still.
    """

    limit_s: float
    consumed_s: float = 0.0
    running_since_s: float | None = None

    def consumed(self, now_s: float) -> float:
        """Seconds counted until `now_s`; a clock that was set back counts as 0 seconds passed."""
        if self.running_since_s is None:
            return self.consumed_s
        return self.consumed_s + max(0.0, now_s - self.running_since_s)

    def remaining(self, now_s: float) -> float:
        """Seconds left at `now_s`, never below 0."""
        return max(0.0, self.limit_s - self.consumed(now_s))

    def expired(self, now_s: float) -> bool:
        """True if the limit is used up at `now_s`."""
        return self.consumed(now_s) >= self.limit_s

    def forgive(self, seconds: float) -> ClockState:
        """The same clock without `seconds` of its present run, for an outage that must charge nobody."""
        if self.running_since_s is None:
            return self
        return replace(self, running_since_s=self.running_since_s + max(0.0, seconds))


def new_clocks(limits: Mapping[ClockName, float]) -> dict[ClockName, ClockState]:
    """All five clocks at 0, none running."""
    return {name: ClockState(limit_s=limits[name]) for name in ClockName}


def enter(
    clocks: Mapping[ClockName, ClockState], state: TaskState, now_s: float, *, new_turn: bool = False
) -> dict[ClockName, ClockState]:
    """The clocks after the task enters `state` at `now_s`.

    Args:
        clocks: the clocks before.
        state: the state that the task enters.
        now_s: the moment of the change.
        new_turn: True when the agent's or the environment's turn begins anew (`idle` and `turn` restart at 0),
            False when the state is taken up again after a pause (they go on where they stood).
    """
    running = RUNNING[state]
    after: dict[ClockName, ClockState] = {}
    for name, clock in clocks.items():
        since_s = now_s if name in running else None
        restarts = new_turn and name in _OF_A_TURN
        if since_s is None and clock.running_since_s is None and not (restarts and clock.consumed_s):
            after[name] = clock
        else:
            # Made whole in one go: this happens for every clock, twice a turn.
            after[name] = ClockState(clock.limit_s, 0.0 if restarts else clock.consumed(now_s), since_s)
    return after


def first_expired(clocks: Mapping[ClockName, ClockState], now_s: float) -> ClockName | None:
    """The running clock that expired longest ago, None if no running clock has expired."""
    over = [
        (clock.consumed(now_s) - clock.limit_s, name)
        for name, clock in clocks.items()
        if clock.running_since_s is not None and clock.expired(now_s)
    ]
    return max(over)[1] if over else None
