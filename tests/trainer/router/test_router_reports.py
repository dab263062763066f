"""Footprints at the router: who may report, what is taken, and how a held report waits."""

from __future__ import annotations

import asyncio
import json

import pytest

REPORT = {"task": "s", "sequence": 1, "turn": 0, "prompt_tokens": 5, "completion_tokens": 2, "context_tokens": 7}
TOKEN = "the-reporters"


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def live(router):
    ids = [*router.renderer.encode("go left"), *router.renderer.stop_token_ids]
    router.engine(lambda _: ids)
    router.open()
    router.open("u")
    router.control.reporters({"token": TOKEN})
    return router


async def post(live, *reports, key=TOKEN, **options):
    status, data = await live.call("POST", "/footprints", [REPORT | report for report in reports], key=key, **options)
    return status, None if data is None else json.loads(data)


def told(live):
    return [event["footprint"] for name, event in live.events if name == "footprint"]


async def test_late_and_doubled_reports_change_nothing(live):
    reports = [{}, {"sequence": 3, "turn": 1, "context_tokens": 9}, {"sequence": 2}]
    assert await post(live, *reports) == (200, {"accepted": 2, "stale": 1, "superseded": 0, "refused": []})
    assert (await post(live, *reports))[1]["stale"] == 3
    assert (await post(live, {"task": "u"}))[1]["accepted"] == 1
    assert [(one["task"], one["sequence"]) for one in told(live)] == [("s", 1), ("s", 3), ("u", 1)]
    assert live.control.stats(None)["reports"] == {"accepted": 3, "stale": 4, "superseded": 0, "refused": 0}


@pytest.mark.parametrize(
    ("report", "status", "field"),
    [
        ({"turn": -1}, 422, "turn"),
        ({"prompt_tokens": -5}, 422, "prompt_tokens"),
        ({"cached_tokens": 6}, 422, "cached_tokens"),
        ({"image_tokens": 6}, 422, "image_tokens"),
        ({"sequence": 2**63}, 422, "sequence"),
    ],
)
async def test_numbers_that_cannot_be_are_refused_and_named(report, status, field, live):
    got, answer = await post(live, report)
    assert got == status
    assert field in json.dumps(answer)
    assert told(live) == []


async def test_reports_of_no_open_session_and_beyond_the_context_are_refused_one_by_one(live):
    live.control.close({"session": "u"})
    status, answer = await post(live, {"task": "x"}, {"task": "u"}, {"context_tokens": 2001}, {"sequence": 2})
    assert (status, answer["accepted"]) == (200, 1)
    assert [(one["task"], one["reason"]) for one in answer["refused"]] == [
        ("x", "no such session"), ("u", "the session has ended"), ("s", "more tokens than the context's 2000"),
    ]  # fmt: skip


async def test_a_sessions_own_key_reports_for_that_session_alone(live):
    assert (await post(live, {}, key="key-of-s"))[0] == 200
    status, answer = await post(live, {"task": "u"}, key="key-of-s")
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    live.control.close({"session": "s"})
    assert (await post(live, {"sequence": 2}, key="key-of-s"))[0] == 401


async def test_what_the_router_measures_itself_is_not_counted_twice(live, user):
    assert (await live.chat([user("go")]))[0] == 200
    status, answer = await post(live, {"growth_tokens": 5000})
    assert (status, answer["accepted"], answer["superseded"]) == (200, 0, 1)
    assert next(e for n, e in live.events if n == "footprint")["superseded"]
    assert told(live)[0]["growth_tokens"] == 2000 - 7, "a context cannot grow beyond its limit"
    assert (await post(live, {"sequence": 2, "hold": True}))[0] == 200, "its own calls are held, not its reports"
    assert live.names().count("call") == 1


async def test_the_routers_own_report_carries_the_schedulers_prediction(live, user):
    live.auto_rank = None
    asking = asyncio.create_task(live.chat([user("go")]))
    await settle()
    live.control.grant({"call": live.events[-1][1]["call"], "rank": "r0", "final_tokens": 100})
    await asking
    (footprint,) = [event["footprint"] for name, event in live.events if name == "turn"]
    assert footprint["growth_tokens"] == 100 - footprint["context_tokens"]


async def test_a_held_report_waits_like_a_call_and_its_repetition_joins_it(live):
    live.auto_rank = None
    first = asyncio.create_task(post(live, {"hold": True}))
    await settle()
    again = asyncio.create_task(post(live, {"hold": True}))
    other = await post(live, {"task": "u"})
    assert other[1]["accepted"] == 1, "nobody else waits"
    await settle()
    assert live.names() == ["footprint", "call", "footprint"]
    assert live.events[1][1]["prompt_tokens"] == 7
    assert not first.done()
    assert not again.done()
    live.grant(live.events[1][1]["call"], "r0")
    assert (await first)[0] == (await again)[0] == 200
    assert live.events[-1] == ("passed", {"session": "s", "call": live.events[1][1]["call"], "context_tokens": 7})
    assert (await post(live, {"hold": True}))[1]["stale"] == 1, "what has passed is not held again"


async def test_a_held_report_whose_client_is_gone_is_cancelled_and_its_repetition_waits_anew(live):
    live.auto_rank = None
    gone = asyncio.Event()
    waiting = asyncio.create_task(post(live, {"hold": True}, gone=gone))
    await settle()
    gone.set()
    assert await waiting == (None, None)
    await settle()
    assert live.names() == ["footprint", "call", "call_cancelled"]
    assert live.events[-1][1]["context_tokens"] == 7
    again = asyncio.create_task(post(live, {"hold": True}))
    await settle()
    assert live.names()[-1] == "call"
    live.grant(live.events[-1][1]["call"], "r0")
    assert (await again)[0] == 200


async def test_a_held_report_is_told_what_a_call_would_be(live):
    live.auto_rank = None
    refused = asyncio.create_task(post(live, {"hold": True}))
    await settle()
    live.calls.refuse(live.events[-1][1]["call"], "context_length_exceeded", "too long")
    status, answer = await refused
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    ended = asyncio.create_task(post(live, {"sequence": 2, "hold": True}))
    await settle()
    live.control.close({"session": "s"})
    assert (await ended)[0] == 410
    assert (await post(live, {"sequence": 3, "hold": True}))[0] == 410


async def test_held_reports_go_alone_and_their_number_is_bounded(live):
    status, answer = await post(live, {"hold": True}, {"task": "u", "hold": True})
    assert (status, answer["error"]["param"]) == (400, "hold")
    live.auto_rank = None
    waiting = [asyncio.create_task(post(live, {"sequence": n + 1, "hold": True})) for n in range(8)]
    await settle()
    assert (await post(live, {"sequence": 9, "hold": True}))[0] == 429
    live.control.close({"session": "s"})
    assert {status for status, _ in await asyncio.gather(*waiting)} == {410}


async def test_a_held_report_that_is_repeated_after_a_newer_report_still_waits(live):
    live.auto_rank = None
    gone = asyncio.Event()
    waiting = asyncio.create_task(post(live, {"sequence": 2, "hold": True}, gone=gone))
    await settle()
    gone.set()
    assert await waiting == (None, None)
    assert (await post(live, {"sequence": 3, "context_tokens": 9}))[1]["accepted"] == 1
    again = asyncio.create_task(post(live, {"sequence": 2, "hold": True}))
    await settle()
    assert not again.done(), "nobody has let it go on"
    live.grant(live.events[-1][1]["call"], "r0")
    assert (await again)[1]["stale"] == 1
    assert live.events[-1][1]["context_tokens"] == 9
    assert (await post(live, {"sequence": 4, "context_tokens": 2001, "hold": True}))[1]["refused"]
