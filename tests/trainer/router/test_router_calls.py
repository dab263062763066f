"""A call is held until it is granted, answered once, and every announced call ends with one event."""

from __future__ import annotations

import asyncio

import pytest

from tide_trainer import types
from tide_trainer.channel import PeerError
from tide_trainer.errors import EngineFailed, EngineRefused
from tide_trainer.router.state import Limits

OPEN_EVENTS = {"turn", "call_failed", "call_cancelled"}


def go(router):
    ids = [*router.renderer.encode("go left"), *router.renderer.stop_token_ids]
    return lambda _: ids


def fails(error: Exception):
    def say(_):
        raise error

    return say


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the router sets no event for a test
            await asyncio.sleep(0)


def every_call_ended_once(router) -> bool:
    calls = [event["call"] for name, event in router.events if name == "call"]
    ended = [event["call"] for name, event in router.events if name in OPEN_EVENTS]
    return sorted(calls) == sorted(ended)


async def test_a_call_is_held_granted_and_answered(router, user):
    engine = router.engine(go(router))
    router.open()
    router.auto_rank = None
    request = asyncio.create_task(router.chat([user("you")]))
    await until(lambda: router.events)
    name, event = router.events[0]
    assert name == "call"
    assert event["session"] == "s"
    assert (event["turn"], event["attempt"], event["max_new_tokens"]) == (0, 0, 16)
    assert engine.sent == []
    router.grant(event["call"], "r0")
    status, answer = await request
    assert status == 200
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "go left"}, "finish_reason": "stop"}
    ]
    assert answer["usage"]["prompt_tokens"] == event["prompt_tokens"] == len(engine.sent[0])
    name, turn = router.events[1]
    assert name == "turn"
    assert turn["footprint"]["context_tokens"] == len(engine.sent[0]) + len(engine.sampled[0])
    assert (turn["rank"], turn["version"], turn["finish_reason"]) == ("r0", 5, "stop")
    with pytest.raises(PeerError, match="unknown_call"):
        router.grant(event["call"], "r0")


async def test_close_hands_over_what_was_captured(router, user):
    engine = router.engine(go(router))
    router.open()
    talk = [user("you")]
    for _ in range(3):
        _, answer = await router.chat(talk)
        talk = [*talk, answer["choices"][0]["message"], user("yes")]
    account = router.control.close({"session": "s"})
    (segment,) = account["segments"]
    assert list(segment["token_ids"]) == [*engine.sent[-1], *engine.sampled[-1]]
    assert sum(segment["sampled"]) == account["completion_tokens"] == sum(map(len, engine.sampled))
    assert account["prompt_tokens"] == sum(map(len, engine.sent))
    assert (account["num_calls"], account["num_breaks"]) == (3, 0)
    with pytest.raises(PeerError, match="unknown_session"):
        router.control.close({"session": "s"})


async def test_a_lost_rank_is_asked_for_again_at_most_twice(router, user):
    router.engine(fails(EngineFailed("gone")), "bad")
    router.engine(go(router), "good")
    router.open()
    router.auto_rank = None
    request = asyncio.create_task(router.chat([user("you")]))
    for attempt, rank in enumerate(["bad", "never heard of", "good"]):
        await until(lambda: router.calls.num_held)
        name, event = router.events[-1]
        assert (name, event["attempt"]) == ("call", attempt)
        router.grant(event["call"], rank)
        await until(lambda call=event: router.events[-1][1] is not call)
    status, answer = await request
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "go left")
    assert router.names() == ["call", "call_failed", "call", "call_failed", "call", "turn"]
    assert [e["retrying"] for n, e in router.events if n == "call_failed"] == [True, True]
    assert every_call_ended_once(router)
    assert router.control.close({"session": "s"})["num_calls"] == 1


async def test_three_failures_are_a_503(router, user):
    router.engine(fails(EngineFailed("gone")))
    router.open()
    status, answer = await router.chat([user("you")])
    assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
    assert [e["retrying"] for n, e in router.events if n == "call_failed"] == [True, True, False]
    assert every_call_ended_once(router)
    assert router.control.close({"session": "s"})["segments"] == []


@pytest.mark.parametrize("aborted", [True, False])
async def test_an_aborted_or_refused_generation_is_asked_again(aborted, router, user):
    good = go(router)(None)
    outcomes = [types.Completion((9,), (0.0,), 0, "abort") if aborted else None, good]

    def say(_):
        outcome = outcomes.pop(0)
        if outcome is None:
            raise EngineRefused("updating", reason="updating")
        return outcome

    router.engine(say)
    router.open()
    status, _ = await router.chat([user("you")])
    assert status == 200
    assert router.names() == ["call", "call_failed", "call", "turn"]


async def test_a_call_that_the_engine_finds_invalid_is_not_repeated(router, user):
    router.engine(fails(EngineRefused("bad prompt", reason="invalid")))
    router.open()
    status, answer = await router.chat([user("you")])
    assert (status, answer["error"]["code"]) == (503, "engine_refused")
    assert router.names() == ["call", "call_failed"]


@pytest.mark.parametrize("ids", [(), (9,)])
async def test_a_completion_that_cannot_be_captured_is_the_engine_s_failure_and_asked_again(ids, router, user):
    answers = [types.Completion(ids, (-1.0,) * (1 - len(ids)), 0, "stop"), [router.renderer.stop_token_ids[0]]]
    router.engine(lambda _: answers.pop(0))
    router.open()
    status, _ = await router.chat([user("you")])
    assert status == 200
    assert router.names() == ["call", "call_failed", "call", "turn"]


async def test_an_unexpected_error_is_a_500_and_ends_the_call(router, user):
    router.engine(lambda _: 1 // 0)
    router.open()
    status, answer = await router.chat([user("you")])
    assert (status, answer["error"]["code"]) == (500, "internal")
    assert every_call_ended_once(router)
    assert len(router.calls.generations) == 0


@pytest.mark.parametrize(("code", "status"), [("context_length_exceeded", 400), ("session_ended", 410), ("other", 503)])
async def test_the_main_process_can_refuse(code, status, router, user):
    router.open()
    router.auto_rank = None
    request = asyncio.create_task(router.chat([user("you")]))
    await until(lambda: router.events)
    router.control.handlers()["refuse"]({"call": router.events[0][1]["call"], "code": code, "message": "no"})
    got, answer = await request
    assert (got, answer["error"]["code"], answer["error"]["message"]) == (status, code, "no")
    assert router.names() == ["call"]


async def test_a_call_is_not_held_for_ever(router, user):
    router.calls._limits = Limits(hold_timeout_s=0.02)
    router.open()
    router.auto_rank = None
    status, answer = await router.chat([user("you")])
    assert (status, answer["error"]["code"]) == (503, "hold_timeout")
    assert router.names() == ["call", "call_failed"]
    assert router.calls.num_held == 0


@pytest.mark.parametrize("granted", [False, True])
async def test_an_agent_that_goes_away_cancels_its_call(granted, router, user):
    generating = asyncio.Event()

    async def slow():
        generating.set()
        await asyncio.Event().wait()

    router.engine(lambda _: slow())
    router.open()
    router.auto_rank = "r0" if granted else None
    gone = asyncio.Event()
    request = asyncio.create_task(router.chat([user("you")], gone=gone))
    await (generating.wait() if granted else until(lambda: router.events))
    gone.set()
    assert await request == (None, None)
    await until(lambda: len(router.events) == 2)
    name, event = router.events[-1]
    assert (name, event["rank"]) == ("call_cancelled", "r0" if granted else None)
    assert (router.calls.num_held, len(router.calls.generations)) == (0, 0)
    account = router.control.close({"session": "s"})
    assert (account["segments"], account["num_calls"]) == ([], 0)


async def test_closing_a_session_answers_its_waiting_call_with_410(router, user):
    router.open()
    router.auto_rank = None
    request = asyncio.create_task(router.chat([user("you")]))
    await until(lambda: router.events)
    router.control.close({"session": "s"})
    status, answer = await request
    assert (status, answer["error"]["code"]) == (410, "session_ended")
    assert every_call_ended_once(router)
    assert (await router.chat([user("you")]))[0] == 410


async def test_the_same_call_twice_in_flight_is_one_call(router, user):
    engine = router.engine(go(router))
    router.open()
    first, second = await asyncio.gather(router.chat([user("you")]), router.chat([user("you")]))
    assert first == second
    assert len(engine.sent) == 1
    assert router.control.close({"session": "s"})["num_calls"] == 1


async def test_one_of_two_joined_clients_may_go(router, user):
    router.engine(go(router))
    router.open()
    router.auto_rank = None
    gone = asyncio.Event()
    first = asyncio.create_task(router.chat([user("you")], gone=gone))
    second = asyncio.create_task(router.chat([user("you")]))
    await until(lambda: router.events)
    gone.set()
    assert await first == (None, None)
    router.grant(router.events[0][1]["call"], "r0")
    assert (await second)[0] == 200


async def test_a_repeated_call_gets_the_same_answer_and_is_captured_once(router, user):
    engine = router.engine(go(router))
    router.open()
    answers = [
        await router.chat([user("you")]),
        await router.chat([user("you")], headers={"x_stainless_retry_count": "1"}),
    ]
    assert answers[0] == answers[1]
    assert len(engine.sent) == 1


async def test_a_client_that_says_it_is_no_retry_gets_a_second_sample(router, user):
    engine = router.engine(go(router))
    router.open()
    fresh = {"x_stainless_retry_count": "0"}
    await router.chat([user("you")], headers=fresh)
    await router.chat([user("you")], headers=fresh)
    await asyncio.gather(*(router.chat([user("you")], headers=fresh) for _ in range(3)))
    assert len(engine.sent) == 5
    assert len(router.control.close({"session": "s"})["segments"]) == 5


async def test_calls_of_one_session_run_one_after_the_other_and_are_bounded(router, user):
    router.engine(go(router))
    router.open()
    router.auto_rank = None
    requests = [asyncio.create_task(router.chat([user(f"you {i}")])) for i in range(9)]
    await until(lambda: any(request.done() for request in requests))
    assert [request.result()[0] for request in requests if request.done()] == [429]
    for number in range(8):
        await until(lambda: router.calls.num_held)
        assert len([name for name in router.names() if name == "call"]) == number + 1
        router.grant(router.events[-1][1]["call"], "r0")
        await until(lambda count=number: router.names().count("turn") == count + 1)
    await asyncio.gather(*requests)


async def test_context_overflow_and_the_cut_of_the_default(router, user):
    engine = router.engine(go(router))
    router.open(max_context_tokens=30, max_new_tokens=100)
    status, _ = await router.chat([user("you")])
    assert status == 200
    assert engine.samplings[0].max_new_tokens == 30 - len(engine.sent[0])
    for options in ({"max_tokens": 29}, {"messages": [user("you see " * 50)]}):
        messages = options.pop("messages", [user("yes")])
        status, answer = await router.chat(messages, **options)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert router.names().count("call") == 1


async def test_options_of_the_call_reach_the_engine(router, user):
    engine = router.engine(go(router))
    router.open()
    await router.chat([user("you")], temperature=1, max_completion_tokens=3, stop=["<|im_start|>", "left"])
    sampling = engine.samplings[0]
    assert (sampling.temperature, sampling.max_new_tokens) == (1.0, 3)
    assert set(sampling.stop_token_ids) >= {*router.renderer.stop_token_ids, *router.renderer.encode("<|im_start|>")}
