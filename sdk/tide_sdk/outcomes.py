"""What became of a task: pure classification of everything that can go wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

from tide_sdk.agents import AgentResult
from tide_sdk.clocks import ClockName
from tide_sdk.errors import StoppedEarly, TideError, told
from tide_sdk.foreign_errors import meanings
from tide_sdk.http_connection import TransportError
from tide_sdk.metrics import is_flag, plain_metrics, real_number
from tide_sdk.model_errors import ContextOverflow, ModelRefused, ModelStopped
from tide_sdk.wire import EndResponse

OutcomeName: TypeAlias = Literal[
    "completed",
    "truncated",
    "agent_error",
    "model_refused",
    "context_overflow",
    "environment_failed",
    "infrastructure",
    "aborted",
]
REWARDED: frozenset[OutcomeName] = frozenset({"completed", "truncated", "model_refused", "context_overflow"})
"""Outcomes that tell something about the model; the others carry no reward."""

MAX_ERROR_CHARS = 4000
"""Characters of a result's `error`."""

_GRAVITY: tuple[OutcomeName, ...] = (
    "agent_error",
    "aborted",
    "environment_failed",
    "infrastructure",
    "context_overflow",
    "model_refused",
    "truncated",
    "completed",
)
"""Which counts where a group of exceptions holds several: a bug first, and what has no reward before what has one."""

_BY_CODE: Mapping[str, OutcomeName] = {
    "environment_failed": "environment_failed",
    "turn_expired": "environment_failed",
    "ended": "aborted",
    "stale_attempt": "aborted",
    "turn_conflict": "agent_error",
    "turn_order": "agent_error",
    "invalid": "agent_error",
    "too_large": "agent_error",
}
_BY_CLOCK: Mapping[str, OutcomeName] = {"start": "environment_failed", "turn": "environment_failed"}


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task to run.

    Attributes:
        environment: its name at the gateway.
        key: unique per owner, for example run/step/group/member.
        task: the environment's parameters.
        seed: the episode's seed.
        split: the data split.
        kind: train or eval.
        limits: clock limits in seconds that replace the environment's.
        attempt: numbered upwards; a higher one ends the older.
        deadline_s: wall seconds for the whole task in this runner, pauses included.
        waits_for_place: the start waits for a place at the gateway; False: it fails with `TaskResult.retry_after_s`.
    """

    environment: str
    key: str
    task: Mapping[str, Any] | None = None
    seed: int | None = None
    split: str | None = None
    kind: Literal["train", "eval"] = "train"
    limits: Mapping[ClockName, float] | None = None
    attempt: int = 0
    deadline_s: float = 6 * 3600.0
    waits_for_place: bool = True


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a task went.

    Attributes:
        task_id: its id at the gateway, None if it never started.
        outcome: one of `OutcomeName`.
        reward: None where the outcome tells nothing about the model.
        turns: turns that were played.
        metrics: the environment's and, over them, the agent's: plain JSON data.
        error: what went wrong, None if nothing did.
        cleanup_errors: what the agent's clean-ups could not close; they change nothing else.
        retry_after_s: the gateway had no place: nothing was started, and the same attempt may be made again then.
    """

    task_id: str | None
    outcome: OutcomeName
    reward: float | None
    turns: int
    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None
    cleanup_errors: tuple[str, ...] = ()
    retry_after_s: float | None = None


class DeadlinePassed(StoppedEarly):
    """The runner's own deadline for the task is over."""


def classify(error: BaseException) -> OutcomeName:
    """The outcome that a failure stands for, also where another library's exception wraps it; see `foreign_errors`."""
    found = {_outcome_of(meaning) for meaning in meanings(error)}
    for outcome in _GRAVITY:
        if outcome in found:
            return outcome
    return "agent_error"


def _outcome_of(error: Exception | None) -> OutcomeName:
    if isinstance(error, TideError):
        if error.code == "expired":
            return _BY_CLOCK.get(str(error.extra.get("clock")), "truncated")
        shown = error.extra.get("outcome")
        kind = cast("Mapping[str, Any]", shown).get("kind") if isinstance(shown, Mapping) else None
        if error.code == "ended" and kind == "failed":
            return "environment_failed"
        return _BY_CODE.get(error.code, "infrastructure")
    if isinstance(error, ContextOverflow):
        return "context_overflow"
    if isinstance(error, ModelRefused):
        return "model_refused"
    if isinstance(error, ModelStopped):
        return "aborted"
    if isinstance(error, TransportError):
        return "infrastructure"
    if isinstance(error, StoppedEarly):
        return "truncated"
    return "agent_error"


def conclude(
    task_id: str,
    failure: BaseException | None,
    result: AgentResult,
    account: EndResponse | TideError | TransportError,
    *,
    turns: int,
    done: bool,
    limit: str | None = None,
) -> TaskResult:
    """Put together what the agent and the gateway say about a task.

    Args:
        task_id: the task.
        failure: what the agent's run raised.
        result: what the agent returned.
        account: the gateway's answer to `/end`, or why there is none.
        turns: turns that the agent has counted.
        done: True if the environment ended the task by itself.
        limit: the agent's limit that ended its play.
    """
    error = None if failure is None else told(failure, MAX_ERROR_CHARS)
    metrics, left_out = plain_metrics(result.metrics)
    reward = result.reward
    outcome: OutcomeName = "completed" if failure is None else classify(failure)
    if isinstance(account, EndResponse):
        turns, metrics = account.turns, {**account.metrics, **metrics}
        if reward is None:
            reward = account.reward
        early = account.outcome.kind == "truncated" or limit is not None or (result.reward is None and not done)
        if failure is None and account.outcome.kind == "failed":
            outcome, error = "environment_failed", account.outcome.reason
        elif failure is None and early:
            outcome = "truncated"
    elif failure is None:
        outcome, error = "infrastructure", f"the end was not answered: {account}"
    if reward is not None and not math.isfinite(reward):
        outcome, error = "agent_error", f"the reward is {reward}"
    notes = [note for note in (error, left_out) if note]
    words = "; ".join(notes)[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()
    return TaskResult(task_id, outcome, reward if outcome in REWARDED else None, turns, metrics, words or None)


def result_of(name: str, returned: Any) -> AgentResult:
    """What an agent returned, as a result; metrics are looked at in `conclude`.

    Args:
        name: the agent's, for the error.
        returned: None, a real number of any library, or an `AgentResult`.

    Raises:
        TypeError: something else. A bare bool is refused, because `return ctx.done` is no reward.
    """
    if returned is None:
        return AgentResult()
    if isinstance(returned, AgentResult):
        if not isinstance(returned.metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - an author's
            raise TypeError(f"{name} returned metrics that are a {type(returned.metrics).__name__}, not a mapping")
        reward = returned.reward
        return AgentResult(None if reward is None else _reward(name, reward), returned.metrics)
    if is_flag(returned):
        raise TypeError(f"{name} returned a bool: return float(...) for a reward, or an AgentResult")
    return AgentResult(_reward(name, returned))


def _reward(name: str, value: Any) -> float:
    try:
        return real_number(value)
    except TypeError as error:
        raise TypeError(f"{name} returned {error}: return None, a float or an AgentResult") from None
