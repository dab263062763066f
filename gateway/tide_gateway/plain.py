"""The common shapes of a turn's two bodies, known at a look: what is not plain goes to the models of `tide_sdk.wire`.

    parsed body -> plain? -> its values          what is taken here, the model takes too, with the same values;
                      |                          no error is made here, so that all errors are the model's
                      +---> pydantic, strict

The models cost a tenth of a turn, most of it for the five clocks in the environment's answer.
"""

from __future__ import annotations

from typing import Any

from tide_sdk.clocks import ClockName
from tide_sdk.wire import MAX_PARTS

MAX_BRACKETS = 190
"""A body with more may be nested more deeply than pydantic reads, also in what a second key of the same name hides."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_CLOCKS = frozenset(clock.value for clock in ClockName)
_NUMBERS = frozenset({int, float})
_CLOCK_FIELDS = ("limit_s", "consumed_s", "remaining_s")


def few_brackets(body: bytes) -> bool:
    """Whether a body cannot be nested too deeply for pydantic."""
    return body.count(b"[") + body.count(b"{") <= MAX_BRACKETS


def plain_action(data: dict[str, Any]) -> tuple[str, int, dict[str, Any]] | None:
    """Task, turn and message of a plain `ObservationRequest`.

    Args:
        data: as the codec read it, from a body of which `few_brackets` is true.

    Returns:
        None where the model has to look.
    """
    if len(data) != 3:
        return None
    task_id, turn, message = data.get("task_id"), data.get("turn"), data.get("message")
    if type(task_id) is not str or not 1 <= len(task_id) <= 128 or not task_id.isascii() or not task_id.isprintable():
        return None
    if type(turn) is not int or not 0 <= turn < 2**31:
        return None
    if type(message) is not dict or message.get("role") != "assistant" or not _is_message(message):
        return None
    return task_id, turn, message


def plain_answer(data: dict[str, Any]) -> tuple[int, bool, bool] | None:
    """Turn, terminated and truncated of a plain `ObservationResponse`; arguments and None as of `plain_action`."""
    if len(data) != 7:
        return None
    turn, messages, info, clocks = data.get("turn"), data.get("messages"), data.get("info"), data.get("clocks")
    terminated, truncated = data.get("terminated"), data.get("truncated")
    if type(turn) is not int or type(terminated) is not bool or type(truncated) is not bool:
        return None
    if "reward" not in data or (data["reward"] is not None and type(data["reward"]) not in _NUMBERS):
        return None
    if type(messages) is not list or len(messages) > MAX_PARTS or type(info) is not dict or len(info) > MAX_PARTS:
        return None
    for message in messages:
        if type(message) is not dict or not _is_message(message):
            return None
        if type(role := message.get("role")) is not str or role not in _ROLES:
            return None
    if type(clocks) is not dict or not clocks.keys() <= _CLOCKS:
        return None
    for clock in clocks.values():
        if type(clock) is not dict or len(clock) != 3:
            return None
        for name in _CLOCK_FIELDS:
            if type(clock.get(name)) not in _NUMBERS:
                return None
    return turn, terminated, truncated


def _is_message(message: dict[str, Any]) -> bool:
    """True for a message of words and tool calls; its role is known."""
    for name, value in message.items():
        if type(value) is str:
            if name == "tool_calls" or (name == "tool_call_id" and len(value) > 512):
                return False
        elif value is not None and (name != "tool_calls" or not _are_calls(value)):
            return False
    return True


def _are_calls(calls: Any) -> bool:
    if type(calls) is not list or len(calls) > MAX_PARTS:
        return False
    return all(type(call) is dict for call in calls)
