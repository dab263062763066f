"""The clocks of a task: pure code, `now` is always an argument.

A clock is consumed seconds plus the moment since which it runs; there is no deadline anywhere. Which clocks run
follows from the task's state alone (`RUNNING`), so a paused task has no running clock by construction.

Source: TideRL appendix B.1 (`/pause` halts the timeout counters until `/resume`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


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


class ClockState(NamedTuple):
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
        since_s = self.running_since_s
        return self.consumed_s if since_s is None or now_s <= since_s else self.consumed_s + (now_s - since_s)

    def remaining(self, now_s: float) -> float:
        """Seconds left at `now_s`, never below 0."""
        return max(0.0, self.limit_s - self.consumed(now_s))

    def expired(self, now_s: float) -> bool:
        """True if the limit is used up at `now_s`."""
        return self.consumed(now_s) >= self.limit_s


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
        limit_s, consumed_s, ran_since_s = clock  # no method is called: this is done twice a turn
        restarts = new_turn and name in _OF_A_TURN
        runs = name in running
        if ran_since_s is None and not runs and not (restarts and consumed_s):
            after[name] = clock
            continue
        if restarts:
            consumed_s = 0.0
        elif ran_since_s is not None and now_s > ran_since_s:
            consumed_s += now_s - ran_since_s
        after[name] = ClockState(limit_s, consumed_s, now_s if runs else None)
    return after


def first_expired(clocks: Mapping[ClockName, ClockState], now_s: float) -> ClockName | None:
    """The running clock that expired longest ago, None if no running clock has expired."""
    over: tuple[float, ClockName] | None = None
    for name, (limit_s, consumed_s, since_s) in clocks.items():
        if since_s is None:
            continue
        if now_s > since_s:
            consumed_s += now_s - since_s
        if consumed_s >= limit_s and (over is None or (consumed_s - limit_s, name) > over):
            over = consumed_s - limit_s, name
    return None if over is None else over[1]
