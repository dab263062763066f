"""`tide_sdk.run` over real HTTP: an environment server and an OpenAI-like server; and the httpx side of the clients."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk import EnvironmentServer, ModelEndpoint, chat_agent, codec, run
from tide_sdk.http import ProtocolFailed
from tide_sdk.https import HttpsClient


async def counting_model(scope, receive, send):
    """Answers each conversation with how many answers it has had, from 1."""
    event = await receive()
    messages = codec.loads(event["body"])["messages"]
    number = 1 + sum(message["role"] == "assistant" for message in messages)
    message = {"role": "assistant", "content": str(number)}
    body = codec.dumps({"choices": [{"message": message, "finish_reason": "stop"}]})
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def test_run_plays_every_task_with_every_seed(uvicorn_server, guess_class):
    environment = EnvironmentServer(guess_class)
    async with uvicorn_server(environment) as gateway, uvicorn_server(counting_model, lifespan="off") as model:
        results = await asyncio.to_thread(
            run,
            chat_agent,
            environment="guess",
            gateway=gateway,
            model=ModelEndpoint(f"{model}/v1"),
            tasks=[{}, {"again": True}],
            seeds=range(8),
            concurrency=4,
        )
    assert len(results) == 16
    assert [result.reward for result in results[:8]] == [result.reward for result in results[8:]]
    assert {result.outcome for result in results} == {"completed", "truncated"}
    for result in results:
        assert result.error is None
        assert result.reward == (1.0 if result.outcome == "completed" else 0.0)


async def test_the_httpx_client_answers_as_the_lean_one(uvicorn_server):
    body = codec.dumps({"messages": []})
    async with uvicorn_server(counting_model, lifespan="off") as url:
        client = HttpsClient(url)
        response = await client.request("POST", "/v1/chat/completions", body)
        assert response.status == 200
        assert codec.loads(response.body)["choices"][0]["message"]["content"] == "1"
        small = HttpsClient(url, max_body_bytes=10)
        with pytest.raises(ProtocolFailed, match="larger than 10 bytes"):
            await small.request("POST", "/", body)
        await client.aclose()
        await small.aclose()
