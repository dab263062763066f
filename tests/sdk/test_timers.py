"""A deadline holds once something is waited for, and costs no timer before."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.timers import within


async def gives(result, *, waits=0):
    for _ in range(waits):
        await asyncio.sleep(0)
    if isinstance(result, Exception):
        raise result
    return result


async def noting(seen):
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise


@pytest.mark.parametrize("waits", [0, 1, 3])
async def test_the_result_or_the_error_comes_through(waits):
    assert await within(10, gives("result", waits=waits)) == "result"
    with pytest.raises(ValueError, match="odd"):
        await within(10, gives(ValueError("odd"), waits=waits))


async def test_only_a_wait_sets_a_timer(monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args, **named: timers.append(args) or call_at(*args, **named))
    await within(10, gives("result"))
    assert timers == []
    await within(10, gives("result", waits=1))
    assert len(timers) == 1


async def test_work_that_takes_longer_is_cancelled():
    seen = []
    with pytest.raises(TimeoutError):
        await within(0.01, noting(seen))
    assert seen == ["cancelled"]


async def test_a_cancelled_caller_cancels_the_work_at_its_first_wait_and_later():
    async def later(seen):
        await asyncio.sleep(0)
        await noting(seen)

    for work in (noting, later):
        seen = []
        caller = asyncio.create_task(within(10, work(seen)))
        for _ in range(3):
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert seen == ["cancelled"]


async def test_work_that_takes_no_cancellation_for_an_answer_goes_on():
    async def stubborn():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "late"

    caller = asyncio.create_task(within(10, stubborn()))
    await asyncio.sleep(0)
    caller.cancel()
    assert await caller == "late"
