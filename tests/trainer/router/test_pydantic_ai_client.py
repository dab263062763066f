"""An agent framework from PyPI works unchanged over a session's URL: tools, streams, and no turn lost or doubled."""

from __future__ import annotations

import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "door"}}\n</tool_call>'


@pytest.fixture
def player(served):
    served.open(max_context_tokens=4000, max_new_tokens=64)
    provider = OpenAIProvider(base_url=served.base_url(), api_key="key-of-s")
    agent = Agent(OpenAIChatModel("policy", provider=provider), instructions="You play.")
    agent.seen = []

    @agent.tool_plain
    def look(place: str) -> str:
        """Look at a place."""
        agent.seen.append(place)
        return "a red ball"

    return agent


async def test_a_run_with_a_tool_is_one_segment(served, player):
    engine = served.says(CALL, "go left", "forward")
    result = await player.run("where is the ball")
    assert (result.output, player.seen) == ("go left", ["door"])
    assert result.usage.requests == 2
    result = await player.run("and now", message_history=result.all_messages())
    assert result.output == "forward"
    (segment,), account = served.captured()
    assert (account["num_calls"], account["num_breaks"]) == (3, 0)
    assert segment.token_ids == (*engine.sent[-1], *engine.sampled[-1])
    assert sum(segment.sampled) == sum(map(len, engine.sampled))


async def test_a_streamed_run_with_a_tool_is_one_segment_too(served, player):
    words = "see a red ball " * 100 + "yes"
    engine = served.says(CALL, words)
    async with player.run_stream("where is the ball") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 1
    assert "".join(pieces) == words
    assert player.seen == ["door"]
    (segment,), account = served.captured()
    assert (account["num_calls"], account["num_breaks"]) == (2, 0)
    assert sum(segment.sampled) == sum(map(len, engine.sampled))


async def test_its_errors_carry_ours(served, player):
    served.says("go left")
    with pytest.raises(ModelHTTPError) as caught:
        await player.run("you " * 5000)
    assert caught.value.status_code == 400
    assert caught.value.body["code"] == "context_length_exceeded"
