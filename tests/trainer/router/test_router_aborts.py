"""A granted call that the main process takes back: dropped at the engine, never failed to the agent, held again."""

from __future__ import annotations

import asyncio

import pytest

from tide_trainer import types
from tide_trainer.errors import EngineFailed

GO = "go left"


@pytest.fixture
def answers(router):
    """What the engine says, call by call, when the test says so."""
    return asyncio.Queue()


@pytest.fixture
def engine(router, answers):
    engine = router.engine(lambda _: answers.get())
    router.open()
    router.auto_rank = None
    return engine


def whole(router):
    return types.Completion(tuple(go(router)), (-0.5,) * len(go(router)), 0, "stop", 5)


def go(router):
    return [*router.renderer.encode(GO), *router.renderer.stop_token_ids]


def cut(num_tokens):
    return types.Completion((9,) * num_tokens, (-0.5,) * num_tokens, 0, "abort", 5)


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the router sets no event for a test
            await asyncio.sleep(0)


async def granted(router, engine, user, number=1):
    """A call of the agent that is at the engine; the request, and the call's number."""
    request = asyncio.create_task(router.chat([user("you")]))
    await until(lambda: router.names().count("call") == number)
    return request, await grant(router, engine)


async def grant(router, engine):
    num_sent, call = len(engine.sent), router.events[-1][1]["call"]
    router.grant(call, "r0")
    await until(lambda: len(engine.sent) > num_sent)
    return call


async def test_an_aborted_call_is_held_again_and_the_agent_only_waits(router, engine, answers, user):
    request, call = await granted(router, engine, user)
    engine.on_abort = lambda _: answers.put_nowait(cut(3))
    assert router.control.handlers()["abort"]({"call": call}) == {"aborting": True}
    await until(lambda: router.names() == ["call", "call_failed", "call"])
    failed, again = router.events[1][1], router.events[2][1]
    assert (failed["code"], failed["retrying"], failed["dropped_tokens"], failed["rank"]) == ("aborted", True, 3, "r0")
    assert again["call"] != call
    assert again["attempt"] == 0
    assert not request.done()
    answers.put_nowait(whole(router))
    await grant(router, engine)
    status, answer = await request
    assert (status, answer["choices"][0]["message"]["content"]) == (200, GO)
    account = router.control.close({"session": "s"})
    assert account["completion_tokens"] == len(go(router)), "what was dropped must not be captured"
    assert account["num_calls"] == 1


async def test_aborts_are_no_failures_of_ranks_however_many(router, engine, answers, user):
    request, call = await granted(router, engine, user)
    engine.on_abort = lambda _: answers.put_nowait(cut(0))
    for number in range(2, 8):
        router.calls.generations.abort(call)
        await until(lambda number=number: router.names().count("call") == number)
        call = await grant(router, engine)
    answers.put_nowait(whole(router))
    assert (await request)[0] == 200


async def test_t6_an_abort_while_the_answer_is_under_way_comes_too_late(router, engine, answers, user):
    request, call = await granted(router, engine, user)
    engine.on_abort = lambda _: None
    answers.put_nowait(whole(router))
    assert router.calls.generations.abort(call)
    status, _ = await request
    assert status == 200
    assert router.names() == ["call", "turn"]


async def test_t6_an_abort_twice_and_after_the_end_changes_nothing(router, engine, answers, user):
    request, call = await granted(router, engine, user)
    assert router.calls.generations.abort(call)
    assert router.calls.generations.abort(call)
    answers.put_nowait(cut(1))
    await until(lambda: router.names() == ["call", "call_failed", "call"])
    assert not router.calls.generations.abort(call)
    assert engine.aborted == [f"c{call}"]
    held = router.events[-1][1]["call"]
    assert not router.calls.generations.abort(held), "a held call is at no engine"
    answers.put_nowait(whole(router))
    await grant(router, engine)
    assert (await request)[0] == 200
    assert not router.calls.generations.abort(held)
    assert not router.calls.generations.abort("never heard of")


async def test_t6_an_abort_that_meets_its_call_on_the_way_is_repeated(router, engine, answers, user, monkeypatch):
    monkeypatch.setattr("tide_trainer.router.generations._REPEATED_AFTER_S", (0.001,) * 100)
    _, call = await granted(router, engine, user)
    tries = []

    def at_the_third(request_id):
        tries.append(request_id)
        if len(tries) == 2:
            raise EngineFailed("a hiccup")
        if len(tries) == 3:
            answers.put_nowait(cut(0))

    engine.on_abort = at_the_third
    router.calls.generations.abort(call)
    await until(lambda: router.names() == ["call", "call_failed", "call"])
    assert tries == [f"c{call}"] * 3


async def test_a_session_that_closes_while_its_call_is_aborted_ends_the_call_once(router, engine, answers, user):
    request, call = await granted(router, engine, user)
    router.calls.generations.abort(call)
    router.control.close({"session": "s"})
    status, _ = await request
    assert status == 410
    assert router.names() == ["call", "call_cancelled"]
    assert not router.calls.generations.abort(call)
    await router.calls.close()


async def test_a_session_of_the_same_name_may_be_opened_again(router, engine, answers, user):
    router.control.close({"session": "s"})
    router.open()
    assert not router.control.ended("s")
    request, _ = await granted(router, engine, user)
    answers.put_nowait(whole(router))
    assert (await request)[0] == 200
