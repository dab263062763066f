"""Agents that misuse their own task, hold on to their context, or raise and return what cannot even be named."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from agent_bench import Bench

import tide_sdk.playing
from tide_sdk.agents import AgentResult, agent


@pytest.fixture
def bench(asgi, guess_class):
    return lambda *script: Bench(asgi, guess_class, *script)


class Nameless(Exception):
    def __str__(self):
        raise OSError("no words")


@pytest.mark.parametrize(
    "raised", [Nameless(), ValueError("x" * 3_000_000), ValueError("\ud800"), ValueError("a\x00b")]
)
async def test_whatever_an_agent_raises_its_task_is_ended_and_told_in_bounded_words(raised, bench):
    @agent
    async def play(ctx):
        ctx.on_end(fails)
        raise raised

    def fails():
        raise Nameless

    place = bench()
    result = await place.play(play)
    assert result.outcome == "agent_error"
    assert result.error.startswith(type(raised).__name__)
    assert len(result.error.encode()) <= 4000
    assert "Nameless" in result.cleanup_errors[0]
    assert await place.num_tasks() == 0


class Odd:
    def __float__(self):
        raise ZeroDivisionError


class Unreadable(dict):
    def items(self):
        raise OSError("gone")


@pytest.mark.parametrize("metrics", [{"odd": Odd()}, {"\ud800": 1}, Unreadable(a=1)])
async def test_metrics_that_cannot_be_read_are_left_out(metrics, bench):
    @agent
    async def play(ctx):
        return AgentResult(1.0, metrics)

    result = await bench().play(play)
    assert (result.outcome, result.reward, result.metrics) == ("completed", 1.0, {})
    assert "left out" in result.error


async def test_an_agent_that_cancels_its_own_task_harms_only_itself(bench):
    log = []

    @agent
    async def cancels(ctx):
        async def closes():
            await asyncio.sleep(0)
            log.append("closed")

        ctx.on_end(closes)
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    result = await bench().play(cancels)
    assert (result.outcome, log) == ("agent_error", ["closed"])

    @agent
    async def cancels_and_returns(ctx):
        asyncio.current_task().cancel()
        ctx.on_end(lambda: asyncio.current_task().cancel())
        return 1.0

    result = await bench().play(cancels_and_returns)
    assert (result.outcome, result.reward) == ("completed", 1.0)


async def test_an_agent_that_swallows_a_cancellation_does_not_swallow_the_runners(bench):
    begun = asyncio.Event()

    @agent
    async def swallows(ctx):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0

    place = bench()
    playing = asyncio.create_task(place.play(swallows))
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    late = await place.play(swallows, deadline_s=0.02)
    assert late.outcome == "truncated"
    assert "longer than" in late.error


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_an_agent_that_never_stops_is_abandoned_and_its_task_ended(how, bench, monkeypatch, caplog):
    monkeypatch.setattr(tide_sdk.playing, "STOP_LIMIT_S", 0.05)
    begun, own = asyncio.Event(), []

    @agent
    async def deaf(ctx):
        own.append(asyncio.current_task())
        begun.set()
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    place = bench()
    playing = asyncio.create_task(place.play(deaf, deadline_s=0.02 if how == "deadline" else 60))
    await begun.wait()
    if how == "cancelled":
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
    else:
        result = await playing
        assert result.outcome == "truncated"
        assert "abandoned" in result.cleanup_errors[-1]
    assert "abandoned" in caplog.text
    assert await place.num_tasks() == 0
    await asyncio.wait(own, timeout=5)
    assert own[0].done(), "it would keep the process"


async def test_what_an_agent_leaves_running_can_ask_for_nothing_any_more(bench):
    goes_on, left = asyncio.Event(), []

    @agent
    async def leaves(ctx):
        async def later():
            await goes_on.wait()
            return await asyncio.gather(ctx.generate(), ctx.step("1"), return_exceptions=True)

        left.append(asyncio.create_task(later()))
        return 0.5

    place = bench("1")
    assert (await place.play(leaves)).reward == 0.5
    goes_on.set()
    assert ["has returned" in str(error) for error in await left[0]] == [True, True]
    assert place.model.bodies == []


async def test_a_plain_agents_context_refuses_to_block_the_event_loop(bench):
    @agent
    def play(ctx):
        async def asks():
            ctx.generate()

        ctx.on_end(asks)
        return 1.0

    result = await bench().play(play)
    assert result.reward == 1.0
    assert "runs on the event loop" in result.cleanup_errors[0]
