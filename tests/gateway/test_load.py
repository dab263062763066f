"""What callers may hold together: fair shares, room for what is small, and 429 before anything is read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_gateway.app import GatewayApp
from tide_gateway.auth import Owners
from tide_gateway.endpoints.sending import PIECE_BYTES, UNCOUNTED_BYTES, HeldSend
from tide_gateway.load import SMALL_BYTES, Held, Load, LoadLimits, Room
from tide_gateway.repository import StorageFailed
from tide_gateway.roles import Caller
from tide_sdk.errors import TideError

ANN, BOB = "a" * 16, "b" * 16
OWNERS = {ANN: Caller("ann", "agent"), BOB: Caller("bob", "agent")}


def filled(room: Room, owner: str, *, small: bool) -> int:
    """Takes one by one until no more fits."""
    num = 0
    while room.fits(owner, 1, small=small):
        room.take(owner, 1)
        num += 1
    return num


def test_floods_get_equal_shares_and_leave_room_for_an_owner_that_comes_new():
    room = Room(120)
    assert filled(room, "ann", small=True) == 60
    assert filled(room, "bob", small=True) == 30
    assert room.fits("cid", 15, small=True)
    room.give_back("ann", 60)
    assert filled(room, "bob", small=True) == 30  # alone it has half of the room too


def test_what_is_large_leaves_room_for_what_is_small():
    room = Room(100, 20)
    assert filled(room, "ann", small=False) == 40
    assert filled(room, "ann", small=True) == 10


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.booleans(), st.booleans()), max_size=60))
def test_no_order_of_takes_and_returns_fills_a_room_beyond_its_total(steps):
    room, taken = Room(100, 25), []
    for owner, amount, small, gives_back in steps:
        if gives_back and taken:
            room.give_back(*taken.pop())
        elif room.fits(owner, amount, small=small):
            room.take(owner, amount)
            taken.append((owner, amount))
        assert room.taken == sum(amount for _, amount in taken)
        assert room.taken < 100, "an owner that comes new finds nothing"


def test_a_body_is_refused_by_its_length_before_it_comes_and_by_its_bytes_as_they_come():
    load = Load(LoadLimits(max_bytes=10 * SMALL_BYTES, small_bytes=4 * SMALL_BYTES))
    first, second = Held(load), Held(load)
    first.enter("ann", "waiting")
    second.enter("ann", "waiting")
    with pytest.raises(TideError) as caught:
        first.expect(7 * SMALL_BYTES)
    assert (caught.value.code, caught.value.extra["reason"]) == ("capacity", "memory")
    assert load.memory.taken == 0
    first.expect(3 * SMALL_BYTES)
    for _ in range(3):
        first.hold(SMALL_BYTES)
    with pytest.raises(TideError):
        second.hold(SMALL_BYTES + 1)
    second.leave()
    assert load.memory.taken == 3 * SMALL_BYTES
    first.leave()
    first.leave()
    assert (load.memory.taken, load.calls.taken) == (0, 0)


async def test_a_large_answer_goes_out_in_pieces_that_each_wait_for_the_one_before():
    load, sent = Load(), []

    async def send(message: Any) -> None:
        sent.append(message)
        assert load.memory.taken == (len(body) if len(body) > UNCOUNTED_BYTES else 0)

    for body in (b"x" * UNCOUNTED_BYTES, b"x" * (3 * PIECE_BYTES + 1)):
        sent.clear()
        held = Held(load)
        sending = HeldSend(send, held)
        await sending({"type": "http.response.start", "status": 200, "headers": []})
        await sending({"type": "http.response.body", "body": body})
        held.leave()
        assert b"".join(bytes(message["body"]) for message in sent[1:]) == body
        assert max(len(message["body"]) for message in sent[1:]) <= PIECE_BYTES
        assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert len(sent) == 1 + 4 + 1


async def call(app: GatewayApp, method: str, path: str, body: dict, token: str = ANN) -> tuple[int, dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    data = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data}

    async def send(message) -> None:
        sent.append(message)

    headers = [(b"authorization", b"Bearer " + token.encode()), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(data)).encode()))
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await app(scope | {"raw_path": path.encode(), "http_version": "1.1"}, receive, send)
    return sent[0]["status"], json.loads(b"".join(bytes(message.get("body", b"")) for message in sent[1:]))


async def test_an_owner_with_too_many_turns_in_flight_can_still_end_them_and_keeps_nobody_out(bench, eventually):
    app = GatewayApp(bench.service, Owners(OWNERS), limits=LoadLimits(max_calls=20, quick_calls=4))
    begun = [await call(app, "POST", "/start", start(str(number), hang_turn=0)) for number in range(10)]
    tasks = [answer["task_id"] for _, answer in begun]
    turns = [asyncio.create_task(call(app, "POST", "/observation", act(task_id))) for task_id in tasks]
    await eventually(lambda: sum(turn.done() for turn in turns) == 2, "two of ten are refused")
    refused = [turn.result() for turn in turns if turn.done()]
    assert {(status, problem["reason"]) for status, problem in refused} == {(429, "calls")}
    assert (await call(app, "POST", "/start", start("more")))[0] == 429
    status, other = await call(app, "POST", "/start", start("bob's"), BOB)
    assert status == 201
    assert (await call(app, "POST", "/observation", act(other["task_id"]), BOB))[0] == 200
    for task_id in tasks:
        assert (await call(app, "POST", "/end", {"task_id": task_id}))[0] == 200
    assert {(await turn)[0] for turn in turns} == {410, 429}
    assert app.load.calls.taken == 0


async def test_views_beyond_their_number_are_429(bench, monkeypatch):
    app = GatewayApp(bench.service, Owners(OWNERS), limits=LoadLimits(max_views=4))
    gate, slots = asyncio.Event(), bench.service.slots

    async def slow(owner: str) -> Any:
        await gate.wait()
        return await slots(owner)

    monkeypatch.setattr(bench.service, "slots", slow)
    asked = [asyncio.create_task(call(app, "GET", "/capacity", {})) for _ in range(3)]
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result()[0] for task in done] == [429]
    gate.set()
    assert sorted([(await task)[0] for task in asked]) == [200, 200, 429]
    assert app.load.views.taken == 0


@pytest.mark.parametrize("path", ["/tasks", "/tasks/t", "/capacity", "/observation"])
async def test_a_database_that_does_not_answer_is_503_at_every_call(bench, monkeypatch, path):
    async def away(*_args: Any, **_named: Any) -> Any:
        raise StorageFailed("the server is away")

    monkeypatch.setattr(bench.database._reads, "run", away)
    app = GatewayApp(bench.service, Owners(OWNERS))
    body = act("t") if path == "/observation" else {}
    status, problem = await call(app, "POST" if body else "GET", path, body)
    assert (status, problem["code"], problem["retry_after_s"]) == (503, "unavailable", 1)


def start(key: str, **script: Any) -> dict[str, Any]:
    return {"environment": "scripted", "key": key, "task": script}


def act(task_id: str) -> dict[str, Any]:
    return {"task_id": task_id, "turn": 0, "message": {"role": "assistant", "content": "go"}}
