"""An engine that answers what no engine may answer is a failed engine, whatever was asked."""

from __future__ import annotations

import asyncio

import pytest

from tide_trainer import types
from tide_trainer.engine_client import EngineClient
from tide_trainer.errors import EngineFailed

GOOD = b'{"token_ids": [1, 2], "logprobs": [-1.0, -2], "cached_tokens": 0, "finish_reason": "stop", "version": 1}'


@pytest.fixture
async def answering():
    """Starts a server that answers every request with one body; returns a client of it."""
    open_things = []

    async def start(body):
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=5)
        open_things.append((server, client))
        return client

    yield start
    for server, client in open_things:
        await client.aclose()
        server.close()


@pytest.mark.parametrize("body", [b"{}", b'{"num_tensors": null, "version": [], "requests": 3}', b"[]", b"hello"])
async def test_every_call_says_that_the_engine_failed(answering, body):
    client = await answering(body)
    update = types.WeightUpdate(1, "file", {"w": "0"})
    calls = [
        lambda: client.update_weights(update),
        client.stats,
        client.snapshot,
        client.health,
        lambda: client.abort(["x"]),
        lambda: client.generate([1], types.Sampling()),
    ]
    for call in calls:
        with pytest.raises(EngineFailed, match=r"nonsense|no JSON object"):
            await call()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"[1, 2]", b'["a", "b"]'),
        (b"[1, 2]", b"[1, -2]"),
        (b"[1, 2]", b"[1]"),
        (b"[-1.0, -2]", b"[-1.0, null]"),
        (b'"version": 1', b'"version": "new"'),
    ],
)
async def test_a_generation_that_cannot_be_captured_is_refused(answering, before, after):
    assert (await (await answering(GOOD)).generate([1], types.Sampling())).token_ids == (1, 2)
    client = await answering(GOOD.replace(before, after))
    with pytest.raises(EngineFailed, match="nonsense"):
        await client.generate([1], types.Sampling())
