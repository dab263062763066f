"""The rules of turns and pauses of an environment server: pure decisions, no I/O and no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from tide_sdk.clocks import ClockName, ClockState, TaskState
from tide_sdk.environment import EndInfo
from tide_sdk.errors import TideError
from tide_sdk.wire import Outcome

DEFAULT_LIMITS: dict[ClockName, float] = {
    ClockName.START: 300.0,
    ClockName.IDLE: 3600.0,
    ClockName.TURN: 600.0,
    ClockName.ACTIVE: 86_400.0,
    ClockName.END: 30.0,
}
"""Seconds of each clock where the start names none."""
_WORDS = {name: name.value for name in ClockName}


class TurnDecision(Enum):
    """What a server does with an action that it accepts."""

    ACT = "act"
    REPEAT = "repeat"


class TurnView(NamedTuple):
    """What decides about an action.

    Attributes:
        state: the task's state.
        next_turn: the turn that a new action must carry.
        last_turn: the turn that runs now or was the last one to run, None before the first.
        superseded: True if a higher attempt of the same key exists.
        expired: the clock that ended the task, None otherwise.
    """

    state: TaskState
    next_turn: int
    last_turn: int | None
    superseded: bool = False
    expired: ClockName | None = None


def decide_turn(view: TurnView, turn: int) -> TurnDecision:
    """Decide about the action of `turn`: act on it, or answer it as the last turn was answered (same body only).

    Raises:
        TideError: 409, 410 or 423; the action must not run.
    """
    if view.last_turn is not None and turn == view.last_turn:
        return TurnDecision.REPEAT
    if view.superseded:
        raise TideError("stale_attempt", "a higher attempt of this task's key has started; drop this one")
    check_not_over(view.state, view.expired)
    if view.state is TaskState.DONE:
        raise TideError("state_conflict", "the task is done; call /end", state=view.state.value)
    if turn != view.next_turn or view.state in (TaskState.ACTING, TaskState.PAUSING):
        raise TideError(
            "turn_order", f"got turn {turn}, the next one is turn {view.next_turn}", next_turn=view.next_turn
        )
    if view.state is TaskState.PAUSED:
        raise TideError("paused", "the task is paused; wait until it is resumed", retry_after_s=0.5)
    if view.state is not TaskState.WAITING:
        raise TideError("state_conflict", f"the task is {view.state.value}", state=view.state.value)
    return TurnDecision.ACT


def check_not_over(state: TaskState, expired: ClockName | None) -> None:
    """Raise the 410 that belongs to a task which is ending or has ended.

    Raises:
        TideError: `expired` with its clock, or `ended`.
    """
    if expired is not None:
        raise TideError("expired", f"the {expired.value} clock expired", clock=expired.value)
    if state in (TaskState.ENDING, TaskState.ENDED):
        raise TideError("ended", "the task has ended")


@dataclass(frozen=True, slots=True)
class PauseDecision:
    """The state and the epoch after a pause or a resume."""

    state: TaskState
    epoch: int


_PAUSED: dict[TaskState, TaskState] = {
    TaskState.WAITING: TaskState.PAUSED,
    TaskState.ACTING: TaskState.PAUSING,
}
_RESUMED: dict[TaskState, TaskState] = {
    TaskState.PAUSED: TaskState.WAITING,
    TaskState.PAUSING: TaskState.ACTING,
}


def decide_pause(state: TaskState, epoch: int, asked: int | None, *, pause: bool) -> PauseDecision:
    """Decide about a pause (or a resume): a given epoch that is not newer changes nothing.

    Args:
        state: the present state.
        epoch: the present epoch, 0 before the first.
        asked: the caller's epoch; None applies to the present state and keeps the epoch.
        pause: True for a pause, False for a resume.
    """
    if asked is not None and asked <= epoch:
        return PauseDecision(state, epoch)
    table = _PAUSED if pause else _RESUMED
    return PauseDecision(table.get(state, state), epoch if asked is None else asked)


def final_account(outcome: Outcome, reward_sum: float, info: EndInfo, num_turns: int) -> dict[str, Any]:
    """The answer of `/end` without its clocks.

    The reward is the environment's final score, else the sum of the turns' rewards. It is None where the environment
    did not do its part: it failed, or its start or turn clock expired; nor can a sum beyond a double be told.
    """
    no_answer = outcome.kind == "failed" or outcome.clock in (ClockName.START, ClockName.TURN)
    score = reward_sum if info.reward is None else float(info.reward)
    return {
        "reward": score if math.isfinite(score) and not no_answer else None,
        "metrics": dict(info.metrics),
        "turns": num_turns,
        "outcome": outcome.model_dump(mode="json"),
    }


def clock_view(clocks: Mapping[ClockName, ClockState], now_s: float) -> dict[str, dict[str, float]]:
    """The clocks as they go over the wire, to a tenth of a millisecond."""
    view: dict[str, dict[str, float]] = {}
    for name, clock in clocks.items():
        consumed_s = clock.consumed(now_s)
        remaining_s = clock.limit_s - consumed_s
        view[_WORDS[name]] = {
            "limit_s": clock.limit_s,
            "consumed_s": round(consumed_s, 4),
            "remaining_s": round(remaining_s, 4) if remaining_s > 0 else 0.0,
        }
    return view
