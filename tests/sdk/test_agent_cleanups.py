"""What an agent opens is closed at the end of its task, in whatever way that comes, and hides no outcome."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager

import pytest
from agent_bench import Bench

import tide_sdk.cleanup
from tide_sdk.agents import agent


@pytest.fixture
def place(asgi, guess_class):
    return Bench(asgi, guess_class, "3")


@pytest.fixture
def resources():
    """(log, an async manager, a plain one): each logs how it was left."""
    log = []

    @asynccontextmanager
    async def asynchronous(name):
        try:
            yield name
            log.append(f"{name} left")
        except BaseException as error:
            log.append(f"{name} left on {type(error).__name__}")
            raise

    @contextmanager
    def plain(name):
        try:
            yield name
        finally:
            log.append(f"{name} left")

    return log, asynchronous, plain


async def test_they_are_closed_in_reverse_order_also_after_a_failure(place, resources):
    log, asynchronous, plain = resources

    @agent
    async def play(ctx):
        assert await ctx.enter(asynchronous("a")) == "a"
        ctx.on_end(lambda: log.append("callable"))
        assert await ctx.enter(plain("b")) == "b"

        async def closes():
            await asyncio.sleep(0)
            log.append("async callable")

        ctx.on_end(closes)
        if ctx.task.seed == 1:
            raise ValueError("bug")

    result = await place.play(play)
    assert log == ["async callable", "b left", "callable", "a left on ValueError"]
    assert (result.outcome, result.error) == ("agent_error", "ValueError: bug")
    assert result.cleanup_errors == ()


async def test_a_manager_is_left_in_the_task_that_entered_it(place):
    @agent
    async def play(ctx):
        group = await ctx.enter(asyncio.TaskGroup())
        group.create_task(asyncio.sleep(0))
        await ctx.step(await ctx.generate())

    result = await place.play(play)
    assert (result.outcome, result.reward, result.cleanup_errors) == ("completed", 1.0, ())


async def test_one_that_fails_or_never_ends_is_told_and_keeps_no_other(place, monkeypatch):
    monkeypatch.setattr(tide_sdk.cleanup, "CLEANUP_LIMIT_S", 0.05)
    log = []

    @agent
    async def play(ctx):
        async def hangs():
            await asyncio.Event().wait()

        def fails():
            raise OSError("no disk")

        def exits():
            raise SystemExit(1)

        for function in (lambda: log.append("first"), hangs, fails, exits):
            ctx.on_end(function)
        await ctx.step(await ctx.generate())

    result = await place.play(play)
    assert (result.outcome, result.reward, result.error) == ("completed", 1.0, None)
    assert log == ["first"]
    fails, hangs = sorted(words for words in result.cleanup_errors if "exits" not in words)
    assert len(result.cleanup_errors) == 3
    assert "OSError: no disk" in fails
    assert "not done within 0.05 s" in hangs


async def test_they_are_closed_when_the_task_is_cancelled_and_when_its_time_is_over(place, resources):
    log, asynchronous, _ = resources
    playing = asyncio.Event()

    @agent
    async def waits(ctx):
        await ctx.enter(asynchronous("a"))
        playing.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(place.play(waits))
    await playing.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log == ["a left on CancelledError"]
    assert await place.num_tasks() == 0
    log.clear()
    result = await place.play(waits, deadline_s=0.02)
    assert log == ["a left on DeadlinePassed"]
    assert result.outcome == "truncated"


async def test_a_second_cancellation_skips_one_clean_up_and_the_rest_still_runs(place):
    log, stuck, playing = [], asyncio.Event(), asyncio.Event()

    @agent
    async def waits(ctx):
        async def hangs():
            stuck.set()
            await asyncio.Event().wait()

        ctx.on_end(lambda: log.append("first"))
        ctx.on_end(hangs)
        playing.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(place.play(waits))
    await playing.wait()
    running.cancel()
    await stuck.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert log == ["first"]
    assert await place.num_tasks() == 0


async def test_what_cannot_be_closed_is_refused_at_once(place):
    @agent
    async def wrong(ctx):
        with pytest.raises(TypeError, match="context manager"):
            await ctx.enter("a string")
        with pytest.raises(TypeError, match="callable"):
            ctx.on_end("a string")

    assert (await place.play(wrong)).outcome == "truncated"
