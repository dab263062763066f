"""OpenAI's own client works unchanged: its types accept every answer, and whatever it does captures each turn once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

USER: dict[str, Any] = {"role": "user", "content": "you see a door"}
ACT: Any = {
    "type": "function",
    "function": {"name": "act", "parameters": {"type": "object", "properties": {"action": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "act", "arguments": {"action": "left"}}\n</tool_call>'


@pytest.fixture
async def client(served):
    served.says("go left")
    served.open("a.task/with-slash", max_context_tokens=4000, max_new_tokens=64)
    url, key = served.base_url("a.task/with-slash"), "key-of-a.task/with-slash"
    async with openai.AsyncOpenAI(base_url=url, api_key=key, timeout=20) as client:
        yield client


def sampled(segment) -> int:
    return sum(segment.sampled)


async def test_a_conversation_is_one_segment_of_exactly_what_was_sampled(served, client):
    engine = served.engines["r0"]
    talk: list[Any] = [{"role": "developer", "content": "You play."}, USER]
    for _ in range(3):
        raw = await client.chat.completions.with_raw_response.create(
            model="policy", messages=talk, logprobs=True, seed=1, user="me", store=False, metadata={"a": "b"}, n=1
        )
        assert raw.headers["tide-ignored"] == "metadata, seed, store, user"
        answer = ChatCompletion.model_validate_json(raw.content, strict=True)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("go left", "stop")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.system_fingerprint == "version-5"
        assert choice.logprobs is not None
        assert [item.logprob for item in choice.logprobs.content or []] == [-0.25] * len(engine.sampled[0])
        talk += [choice.message, {"role": "user", "content": [{"type": "text", "text": "yes"}]}]
    (segment,), account = served.captured("a.task/with-slash")
    assert account["num_breaks"] == 0
    assert segment.token_ids == (*engine.sent[-1], *engine.sampled[-1])
    assert sampled(segment) == 3 * len(engine.sampled[0])
    assert {v for v, s in zip(segment.versions, segment.sampled, strict=True) if s} == {5}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_go_round_without_a_break(stream, served, client):
    engine = served.says(f"go\n{CALL}\n{CALL}", "yes")
    talk: list[Any] = [USER]
    if stream:
        async with client.chat.completions.stream(model="policy", messages=talk, tools=[ACT]) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await client.chat.completions.create(
            model="policy", messages=talk, tools=[ACT], tool_choice="auto", parallel_tool_calls=True
        )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"action": "left"}] * 2
    talk.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    talk += [{"role": "tool", "tool_call_id": call.id, "content": "you see"} for call in choice.message.tool_calls]
    answer = await client.chat.completions.create(model="policy", messages=talk, tools=[ACT])
    assert answer.choices[0].message.content == "yes"
    segments, account = served.captured("a.task/with-slash")
    assert (len(segments), account["num_calls"], account["num_breaks"]) == (1, 2, 0)
    assert sampled(segments[0]) == sum(map(len, engine.sampled))


async def test_a_stream_put_together_is_the_whole_answer(served, client):
    words = "see a red ball " * 80
    engine = served.says(words)
    messages: list[Any] = [USER]
    stream = await client.chat.completions.create(
        model="policy", messages=messages, stream=True, logprobs=True, stream_options={"include_usage": True}
    )
    chunks = [ChatCompletionChunk.model_validate(chunk.model_dump()) async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert sum(bool(choice.delta.content) for choice in choices) > 2
    assert "".join(choice.delta.content or "" for choice in choices) == words
    tokens = [item for choice in choices if choice.logprobs for item in choice.logprobs.content or []]
    assert len(tokens) == len(engine.sampled[0])
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_held_stream_outlives_the_client_s_read_timeout(served, client):
    served.auto_rank = None
    patient = client.with_options(timeout=openai.Timeout(20, read=0.5), max_retries=0)
    messages: list[Any] = [USER]

    async def ask() -> list[Any]:
        stream = await patient.chat.completions.create(model="policy", messages=messages, stream=True)
        return [chunk async for chunk in stream]

    request = asyncio.create_task(ask())
    await served.until("call")
    await asyncio.sleep(1.2)  # longer than the read timeout: without keep-alives it has failed by now
    assert not request.done()
    served.grant_all()
    assert (await request)[-1].choices[0].finish_reason == "stop"


async def test_an_error_after_the_head_comes_as_an_event(served, client):
    served.auto_rank = None
    messages: list[Any] = [USER]
    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)  # the head is out
    call = served.events[0][1]["call"]
    served.calls.refuse(call, "context_length_exceeded", "too long")
    with pytest.raises(openai.APIError, match="too long") as caught:
        _ = [chunk async for chunk in stream]
    assert caught.value.code == "context_length_exceeded"


async def test_completions_in_text_and_ids_extend_what_they_continue(served, client):
    engine = served.engines["r0"]
    first = await client.completions.create(model="policy", prompt="you see", logprobs=0)
    first = Completion.model_validate(first.model_dump())
    choice = first.choices[0]
    assert (choice.text, choice.finish_reason) == ("go left", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == "go left<|im_end|>"
    assert choice.logprobs.token_logprobs == [-0.25] * len(engine.sampled[0])
    text = f"you see{choice.text}<|im_end|>yes"
    stream = await client.completions.create(model="policy", prompt=text, stream=True, extra_body={"store": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "go left"
    third: Any = await client.completions.create(
        model="policy",
        prompt=[*engine.sent[-1], *engine.sampled[-1], *engine.sent[0]],
        extra_body={"return_token_ids": True},
    )
    assert third.choices[0].token_ids == list(engine.sampled[-1])
    assert third.choices[0].prompt_token_ids == engine.sent[-1]
    await client.completions.create(model="policy", prompt="something else")
    segments, account = served.captured("a.task/with-slash")
    assert [sampled(segment) for segment in segments] == [3 * len(engine.sampled[0]), len(engine.sampled[0])]
    assert account["num_breaks"] == 1


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["policy"]
    assert (await client.models.retrieve("policy")).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt/5")
    assert caught.value.code == "model_not_found"


async def test_errors_are_the_client_s_own(served, client):
    messages: list[Any] = [USER]
    long: list[Any] = [{"role": "user", "content": "you " * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="policy", messages=long, stream=stream)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="policy", prompt="you " * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").chat.completions.create(model="policy", messages=messages)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.embeddings.create(model="policy", input="you")
    assert gone.value.code == "not_found"
    assert served.events == []


async def test_a_timeout_and_its_retries_capture_one_turn(served, client):
    served.auto_rank = None
    hasty = client.with_options(timeout=0.4, max_retries=5)
    messages: list[Any] = [USER]
    request = asyncio.create_task(hasty.chat.completions.create(model="policy", messages=messages))
    await served.until("call", 2)  # timed out once, and asked again
    served.grant_all()
    assert (await request).choices[0].message.content == "go left"
    _, account = served.captured("a.task/with-slash")
    assert account["num_calls"] == 1


async def test_the_blocking_client_works_too(served):
    served.says("go left")
    served.open()

    def play() -> tuple[str | None, str]:
        messages: list[Any] = [USER]
        with openai.OpenAI(base_url=served.base_url(), api_key="key-of-s") as client:
            whole = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
            stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(play) == ("go left", "go left")
