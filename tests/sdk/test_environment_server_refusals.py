"""What the environment server refuses, and how it says so: as strictly, and in the same words, as a gateway does."""

from __future__ import annotations

import asyncio
import json

import pytest

from tide_sdk.environment import Environment
from tide_sdk.server import EnvironmentServer

START = {"environment": "any", "key": "k", "seed": 1}
ACTION = {"task_id": "t", "turn": 0, "message": {"role": "assistant", "content": "hello"}}


@pytest.fixture
def guess(asgi, guess_class, clock):
    return asgi(EnvironmentServer(guess_class, now=clock))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/start", START | {"seed": 1.0}, "seed"),
        ("/start", START | {"seed": True}, "seed"),
        ("/start", START | {"attempt": "1"}, "attempt"),
        ("/start", START | {"attempt": None}, "attempt"),
        ("/start", START | {"kind": None}, "kind"),
        ("/start", START | {"limits": {"idle": "60"}}, "limits.idle"),
        ("/observation", ACTION | {"turn": 0.0}, "turn"),
        ("/observation", ACTION | {"message": {"role": "assistant", "content": 5}}, "message.content"),
        ("/observation", ACTION | {"message": {"role": "assistant", "content": [{}, 5]}}, "message.content.1"),
        ("/observation", ACTION | {"message": {"role": "assistant", "content": [{}] * 1025}}, "message.content"),
        ("/observation", ACTION | {"message": {"role": "assistant", "tool_calls": [5]}}, "message.tool_calls.0"),
        ("/pause", {"task_id": "t", "epoch": 1.0}, "epoch"),
        ("/end", [], "body"),
    ],
)
async def test_a_wrong_value_is_refused_with_its_path(guess, path, body, field):
    status, problem = await guess.call("POST", path, body)
    assert (status, problem["code"], problem["field"]) == (422, "invalid", field)
    assert problem["detail"].startswith(f"{field}: ")


async def test_small_calls_take_small_bodies(guess):
    body = json.dumps({"task_id": "t", "reason": "x"}).encode().ljust(64 * 1024 + 1)
    for path in ("/pause", "/resume", "/end"):
        answer = await guess.request("POST", path, body)
        assert (answer.status, json.loads(answer.body)["field"]) == (413, "body")
    status, problem = await guess.call("POST", "/end", {"task_id": "t"})
    assert (status, problem["code"]) == (404, "not_found")


async def test_a_server_that_stops_takes_no_more_tasks(guess):
    status, started = await guess.call("POST", "/start", START)
    await guess.app.aclose()
    status, problem = await guess.call("POST", "/start", START | {"key": "other"})
    assert (status, problem["code"]) == (503, "unavailable")
    assert (await guess.call("POST", "/start", START))[1] == started


async def test_a_read_of_a_task_that_starts_is_refused(asgi):
    begun = asyncio.Event()

    class Hangs(Environment):
        async def start(self, task):
            begun.set()
            await asyncio.Event().wait()

    client = asgi(EnvironmentServer(Hangs))
    starting = asyncio.create_task(client.call("POST", "/start", START))
    await begun.wait()
    [task_id] = client.app._tasks  # no caller knows it yet
    status, problem = await client.call("GET", f"/observation?task_id={task_id}")
    assert (status, problem["code"]) == (409, "state_conflict")
    await client.call("POST", "/end", {"task_id": task_id})
    assert (await starting)[1]["code"] == "ended"
