"""What the five endpoints do with bodies that do not come, and how they name what is wrong."""

from __future__ import annotations

import asyncio
import json

import pytest

from tide_gateway.auth import Owners
from tide_gateway.endpoints.calls import parse_body
from tide_gateway.endpoints.contract import ContractApp
from tide_sdk import asgi
from tide_sdk.errors import TideError


async def ask(bench, events: list[dict], headers: tuple = (), path: str = "/start") -> tuple[int, dict]:
    sent: list[dict] = []
    given = [(b"content-type", b"application/json"), *headers]
    scope = {"type": "http", "method": "POST", "path": path, "headers": given, "query_string": b""}

    async def receive() -> dict:
        return events.pop(0) if events else await asyncio.Event().wait()

    async def send(message: dict) -> None:
        sent.append(message)

    async with asyncio.timeout(10):
        await ContractApp(bench.service, Owners({}))(scope, receive, send)
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else (0, {})


async def test_a_call_without_its_body_does_not_wait_for_ever(bench, monkeypatch):
    monkeypatch.setattr(asgi, "BODY_LIMIT_S", 0.01)
    status, problem = await ask(bench, [])
    assert (status, problem["field"]) == (422, "body")


async def test_a_caller_that_goes_away_gets_no_answer(bench):
    assert await ask(bench, [{"type": "http.disconnect"}]) == (0, {})


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        (b"{}", ((b"tide-contract", b"2"),), "Tide-Contract"),
        (b"[]", (), "body"),
        (b'{"environment":"scripted","key":"k","limits":{"nap":1}}', (), "limits.nap"),
    ],
)
async def test_every_invalid_call_names_its_field(bench, body, headers, field):
    status, problem = await ask(bench, [{"type": "http.request", "body": body}], headers)
    assert (status, problem["code"], problem["field"]) == (422, "invalid", field)


def test_a_body_of_millions_of_small_objects_is_not_read():
    body = b'{"task":[' + b",".join([b"{}"] * 600_000) + b"]}"
    with pytest.raises(TideError) as caught:
        parse_body(body)
    assert caught.value.code == "too_large"
