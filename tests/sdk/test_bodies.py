"""Bodies that come late, not at all, or only in part."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk import asgi
from tide_sdk.errors import TideError

SCOPE = {"headers": [(b"content-type", b"application/json"), (b"content-length", b"10")]}


def receiver(*events: dict):
    """Gives the events, then nothing for ever."""
    left = list(events)

    async def receive() -> dict:
        if left:
            return left.pop(0)
        return await asyncio.Event().wait()

    return receive


@pytest.mark.parametrize("events", [(), ({"type": "http.request", "body": b"{", "more_body": True},)])
async def test_a_body_that_does_not_come_is_refused_after_a_while(monkeypatch, events):
    monkeypatch.setattr(asgi, "BODY_LIMIT_S", 0.01)
    async with asyncio.timeout(10):
        with pytest.raises(TideError) as caught:
            await asgi.read_body(SCOPE, receiver(*events), 100)
    assert (caught.value.code, caught.value.extra["field"]) == ("invalid", "body")


async def test_a_body_that_comes_in_its_time_is_read_whole():
    parts = [b'{"a"', b":", b"1}"]

    async def receive() -> dict:
        for _ in range(2):
            await asyncio.sleep(0)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    assert await asgi.read_body(SCOPE, receive, 100) == b'{"a":1}'


async def test_a_cancelled_call_gives_up_what_it_waits_for():
    seen = []

    async def receive() -> dict:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    reading = asyncio.create_task(asgi.read_body(SCOPE, receive, 100))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert seen == ["cancelled"]


async def test_a_caller_that_goes_away_is_no_error_of_the_body(monkeypatch):
    part = {"type": "http.request", "body": b"{", "more_body": True}
    with pytest.raises(asgi.ClientGone):
        await asgi.read_body(SCOPE, receiver(part, {"type": "http.disconnect"}), 100)


def test_another_version_is_refused_by_the_headers_name():
    with pytest.raises(TideError) as caught:
        asgi.check_version({"headers": [(b"tide-contract", b"2")]})
    assert caught.value.extra["field"] == "Tide-Contract"
    asgi.check_version({"headers": [(b"tide-contract", b" 1 ")]})
