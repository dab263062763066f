"""Plain (`def`) agents: a thread of their own, a context that blocks, and a cancellation that reaches them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from agent_bench import Bench

import tide_sdk.blocking
import tide_sdk.cleanup
from tide_sdk.agents import AgentResult, agent
from tide_sdk.blocking import BlockingContext


@pytest.fixture
def bench(asgi, guess_class):
    return lambda *script: Bench(asgi, guess_class, *script)


async def test_a_plain_agent_plays_in_its_own_thread(bench):
    threads = []

    @agent(sampling={"temperature": 0.25})
    def play(ctx: BlockingContext):
        threads.append(threading.current_thread())
        ctx.messages.insert(0, {"role": "system", "content": "Play."})
        while not ctx.done:
            reply = ctx.generate(max_tokens=2)
            assert ctx.completion is not None
            ctx.step(reply)
            assert ctx.observation is not None
        assert ctx.report(prompt_tokens=1, completion_tokens=1) is False
        assert (ctx.task.seed, ctx.turn, ctx.reward, ctx.model) == (1, 2, 1.0, "m")
        assert ctx.openai_base_url == "http://m/v1"
        return AgentResult(metrics={"thread": threading.current_thread().name})

    place = bench("0", "3")
    result = await place.play(play)
    assert (result.outcome, result.reward, result.turns, result.error) == ("completed", 1.0, 2, None)
    assert threads[0] is not threading.main_thread()
    assert play.name in result.metrics["thread"]
    assert place.model.bodies[0]["messages"][0]["role"] == "system"
    assert (place.model.bodies[0]["temperature"], place.model.bodies[0]["max_tokens"]) == (0.25, 2)
    threads[0].join(5)
    assert not threads[0].is_alive()
    assert play.threads.num_running == 0


@pytest.mark.parametrize("raised", [ValueError("wrong"), SystemExit(3), asyncio.CancelledError(), StopIteration()])
async def test_what_it_raises_is_its_own_fault_and_nobody_elses(raised, bench):
    @agent
    def bad(ctx):
        raise raised

    result = await bench().play(bad)
    assert (result.outcome, result.reward) == ("agent_error", None)
    assert type(raised).__name__ in result.error


async def test_a_deadline_reaches_the_thread_at_its_next_call(bench):
    waits, seen = threading.Event(), []

    @agent(deadline_s=0.05)
    def slow(ctx):
        waits.wait(10)
        try:
            ctx.generate()
        except BaseException as error:
            seen.append(type(error))
            raise

    place = bench()
    playing = asyncio.create_task(place.play(slow))
    while not place.http.calls or not place.ended():  # noqa: ASYNC110 (the server sets no event)
        await asyncio.sleep(0.01)
    waits.set()
    result = await playing
    assert (result.outcome, result.reward, result.cleanup_errors) == ("truncated", 0.0, ())
    assert seen == [asyncio.CancelledError]
    assert place.model.bodies == []


async def test_a_cancellation_ends_the_call_that_waits(bench, asgi, gated_class):
    place = Bench(asgi, gated_class)
    seen = []

    @agent
    def plays(ctx):
        try:
            ctx.step("go")
        except BaseException as error:
            seen.append(type(error))
            raise

    playing = asyncio.create_task(place.play(plays))
    while "step go" not in gated_class.log:  # noqa: ASYNC110 (the environment sets no event)
        await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert seen == [asyncio.CancelledError]
    assert await place.num_tasks() == 0
    assert plays.threads.num_running == 0


async def test_a_thread_that_never_returns_is_abandoned_counted_and_named(bench, monkeypatch, caplog):
    monkeypatch.setattr(tide_sdk.cleanup, "CLEANUP_LIMIT_S", 0.05)
    release, closed = threading.Event(), []

    @agent(deadline_s=0.05, name="the stuck one")
    def stuck(ctx):
        ctx.on_end(lambda: closed.append("never"))
        release.wait(30)

    place = bench()
    result = await place.play(stuck)
    try:
        assert (result.outcome, result.reward) == ("truncated", 0.0)
        assert (stuck.threads.num_abandoned, stuck.threads.num_running) == (1, 1)
        assert "the stuck one" in caplog.text
        assert result.task_id in caplog.text
        assert ["thread" in words for words in result.cleanup_errors] == [True, True]
        assert "abandoned" in result.cleanup_errors[1]
        assert closed == []
        assert await place.num_tasks() == 0
        monkeypatch.setattr(tide_sdk.blocking, "MAX_THREADS", 1)
        refused = await bench().play(stuck)
        assert refused.outcome == "agent_error"
        assert "1 are abandoned" in refused.error
    finally:
        release.set()


async def test_clean_ups_and_tools_of_a_plain_agent_run_in_its_thread(bench):
    seen = []

    class Resource:
        def __enter__(self):
            seen.append(("enter", threading.get_ident()))
            return "value"

        def __exit__(self, kind, error, trace):
            seen.append((kind.__name__, threading.get_ident()))

    async def asynchronous(x: int) -> int:
        seen.append(("async tool", 0))
        return x + 1

    @agent
    def play(ctx):
        def add(a: int, b: int = 1) -> int:
            """Add two numbers."""
            seen.append(("tool", threading.get_ident()))
            return a + b

        ctx.add_tool(add)
        ctx.add_tool(asynchronous)
        assert ctx.enter(Resource()) == "value"
        ctx.on_end(lambda: seen.append(("closed", threading.get_ident())))
        calls = [("add", '{"a": 2}'), ("asynchronous", '{"x": 1}')]
        assert ctx.run_tools(call_of(*calls))
        assert [message.get("content") for message in ctx.messages[-2:]] == ["3", "2"]
        assert not ctx.run_tools({"role": "assistant", "content": "x"})
        seen.append(("agent", threading.get_ident()))
        raise KeyError("x")

    result = await bench().play(play)
    assert (result.outcome, result.cleanup_errors) == ("agent_error", ())
    assert [name for name, _ in seen] == ["enter", "tool", "async tool", "agent", "closed", "KeyError"]
    assert len({ident for name, ident in seen if name != "async tool"}) == 1
    assert seen[0][1] != threading.get_ident()


def call_of(*calls):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ],
    }
