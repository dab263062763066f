"""Agents by name, messages out of completions, and what each failure means."""

from __future__ import annotations

import pytest

from tide_sdk.agents import agent, chat_agent, load_agent
from tide_sdk.errors import TideError
from tide_sdk.http import TransportError
from tide_sdk.model import first_message
from tide_sdk.outcomes import classify


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TideError("expired", "x", clock="idle"), "truncated"),
        (TideError("expired", "x", clock="turn"), "environment_failed"),
        (TideError("environment_lost", "x"), "infrastructure"),
        (TideError("stale_attempt", "x"), "aborted"),
        (TideError("invalid", "x"), "agent_error"),
        (TransportError("x"), "infrastructure"),
        (ZeroDivisionError(), "agent_error"),
    ],
)
def test_failures_are_classified(error, outcome):
    assert classify(error) == outcome


def test_an_agent_is_checked_and_found_by_name():
    assert load_agent("tide_sdk.agents:chat_agent") is chat_agent
    for target, words in [
        ("x", "module:function"),
        ("nope.nope:f", "cannot import"),
        ("tide_sdk.agents:agent", "not a function with"),
    ]:
        with pytest.raises(ValueError, match=words):
            load_agent(target)
    with pytest.raises(TypeError, match="async def"):
        agent(lambda ctx: None)

    async def two(ctx, other):
        pass

    with pytest.raises(TypeError, match="one argument"):
        agent(two)


def test_a_message_is_taken_without_its_empty_fields():
    message = {"role": "assistant", "content": None, "tool_calls": [], "reasoning": None}
    assert first_message({"choices": [{"message": message}]}) == {"role": "assistant", "content": ""}
