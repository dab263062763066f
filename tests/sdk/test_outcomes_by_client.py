"""The same trouble has the same outcome whichever client an agent plays with: ours, OpenAI's, or a framework on it."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from agent_bench import Bench
from pydantic_ai import Agent as Framework
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tide_sdk.agents import agent
from tide_sdk.environment import Environment, Start, Step
from tide_sdk.model import ModelEndpoint


class Breaks(Environment):
    name = "guess"
    blocking = False

    def start(self, task):
        return Start("Say something.")

    def step(self, message):
        if message.text == "break":
            raise RuntimeError("broken")
        return Step("Done.", reward=1.0, terminated=True)


def said(message, finish="stop", **more):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more}


def refusal(message, code, **more):
    return {"error": {"message": message, "code": code, "type": "x", **more}}


@agent
async def ours(ctx):
    while not ctx.done:
        await ctx.step(await ctx.generate())


@agent
async def official(ctx):
    async with openai.AsyncOpenAI(base_url=ctx.openai_base_url, api_key="k", max_retries=0, timeout=0.5) as client:
        answer = await client.chat.completions.create(model="m", messages=ctx.messages)
        await ctx.step(answer.choices[0].message.content)


@agent
async def framework(ctx):
    async with openai.AsyncOpenAI(base_url=ctx.openai_base_url, api_key="k", max_retries=0, timeout=0.5) as client:
        model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))
        await ctx.step((await Framework(model).run("Say something.")).output)


def with_a_bug(player):
    @agent
    async def buggy(ctx):
        await player(ctx)
        raise KeyError("mine")

    return buggy


CUT = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{"id": "c", "cho'
TROUBLES = {
    "none": (200, said({"content": "hi"}), "completed"),
    "agent bug": (200, said({"content": "hi"}), "agent_error"),
    "refusal": (400, refusal("filtered", "content_filter"), "model_refused"),
    "overflow": (400, refusal("This model's maximum context length is 9 tokens.", None), "context_overflow"),
    "environment": (200, said({"content": "break"}), "environment_failed"),
    "server failed": (503, "<html>Bad gateway</html>", "infrastructure"),
    "no such model": (404, refusal("no model", "model_not_found"), "infrastructure"),
    "never answers": ("silent", None, "infrastructure"),
    "closes midway": ("cut", None, "infrastructure"),
    "wrong request": (400, refusal("temperature", "invalid_value"), "agent_error"),
}


@pytest.fixture
async def server():
    """(base URL, what it answers: [status, body])."""
    told: list = [200, None]

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(row[15:]) for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:"))
        await reader.readexactly(length)
        status, body = told
        if status == "silent":
            await reader.read()
        elif status == "cut":
            writer.write(CUT)
        else:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            kind = "text/html" if isinstance(body, str) else "application/json"
            head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1", told
    listener.close()


async def outcome(asgi, server, player, status, body):
    url, told = server
    told[:] = [status, body]
    place = Bench(asgi, Breaks)
    async with ModelEndpoint(url, model="m", timeout_s=0.5) as place.endpoint:
        result = await place.play(player)
    assert await place.num_tasks() == 0
    assert (result.reward is None) == (result.outcome not in ("completed", "model_refused", "context_overflow"))
    return result.outcome, result.error


@pytest.mark.parametrize("player", [ours, official, framework], ids=["ours", "openai", "pydantic-ai"])
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_each_trouble_has_its_outcome(trouble, player, asgi, server):
    status, body, expected = TROUBLES[trouble]
    player = with_a_bug(player) if trouble == "agent bug" else player
    found, error = await outcome(asgi, server, player, status, body)
    assert found == expected, error


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("<html>Welcome</html>", "infrastructure"),
        ("", "infrastructure"),
        ([1], "infrastructure"),
        ({}, "infrastructure"),
        ({"choices": []}, "infrastructure"),
        ({"choices": "abc"}, "infrastructure"),
        ({"choices": [{"message": "hi"}]}, "infrastructure"),
        (said({"content": 5}), "infrastructure"),
        (said({"content": {"text": "hi"}}), "infrastructure"),
        (said({"tool_calls": "abc"}), "infrastructure"),
        (said({"tool_calls": [5]}), "infrastructure"),
        (said({"role": "user", "content": "hi"}), "completed"),
        (said({"content": None}, "content_filter"), "model_refused"),
        (said({"content": None, "refusal": "no"}), "model_refused"),
        (refusal("upstream failed", 502), "infrastructure"),
        (refusal("long", "context_length_exceeded"), "context_overflow"),
        (refusal("This model's maximum context length is 9 tokens.", 400), "context_overflow"),
        (refusal("filtered", "content_filter"), "model_refused"),
        (refusal("temperature", 422), "agent_error"),
        ({"error": "something"}, "infrastructure"),
    ],
)
async def test_what_a_server_answers_with_200_but_no_completion(body, expected, asgi, server):
    found, error = await outcome(asgi, server, ours, 200, body)
    assert found == expected, error
