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

    async def two(ctx, other):
        pass

    with pytest.raises(TypeError, match="one argument"):
        agent(two)

    def yields(ctx):
        yield

    for wrong, words in [(yields, "yields"), ("name", "a function"), (chat_agent, "a function")]:
        with pytest.raises(TypeError, match=words):
            agent(wrong)
    for options in ({"max_turns": 0}, {"max_turns": True}, {"deadline_s": 0}, {"deadline_s": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(options))):
            agent(**options)


def test_the_decorator_takes_plain_and_async_functions_with_and_without_options():
    @agent
    def plain(ctx):
        return None

    @agent(max_turns=3, deadline_s=9, sampling={"temperature": 0.5}, name="mine")
    async def limited(ctx):
        return None

    class Callable:
        async def __call__(self, ctx):
            return None

    assert (plain.blocking, limited.blocking, agent(Callable()).blocking) == (True, False, False)
    assert plain.name.startswith(f"{__name__}:")
    assert (limited.name, limited.max_turns, limited.deadline_s, limited.sampling) == (
        "mine", 3, 9, {"temperature": 0.5},
    )  # fmt: skip


def test_a_message_is_taken_without_its_empty_fields():
    message = {"role": "assistant", "content": None, "tool_calls": [], "reasoning": None}
    assert first_message({"choices": [{"message": message}]}) == {"role": "assistant", "content": ""}
