"""The run's heartbeats: sent while it goes on, withdrawn at its end, and never a reason to fail."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.errors import TideError
from tide_sdk.http import ConnectFailed
from tide_sdk.wire import HeartbeatResponse
from tide_trainer.loop.heartbeats import Heartbeats


class Gateway:
    """Takes heartbeats as scripted: an exception, or how many tasks are open; the last one for ever."""

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.taken: list[tuple[str, float | None]] = []
        self.deadlines: list[float] = []
        self.arrived = asyncio.Condition()

    async def heartbeat(self, prefix, timeout_s, *, deadline_s=None):
        async with self.arrived:
            self.taken.append((prefix, timeout_s))
            self.deadlines.append(deadline_s)
            self.arrived.notify_all()
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, BaseException):
            raise answer
        return HeartbeatResponse(owner_tasks=answer, timeout_s=timeout_s)

    async def saw(self, number):
        async with asyncio.timeout(20), self.arrived:
            await self.arrived.wait_for(lambda: len(self.taken) >= number)


async def stop(running: asyncio.Task) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()


async def test_heartbeats_go_on_through_failures_and_are_withdrawn():
    gateway = Gateway(ConnectFailed("x"), TideError("unavailable", "x"), TimeoutError(), 2, 0)
    beats = Heartbeats(gateway, "run.1/", 0.08)
    running = asyncio.create_task(beats.run())
    await gateway.saw(6)
    await stop(running)
    assert beats.num_failed == 3
    assert set(gateway.taken) == {("run.1/", 0.08)}
    assert set(gateway.deadlines) == {0.02}
    num_sent = len(gateway.taken)
    await beats.withdraw()
    assert gateway.taken[num_sent:] == [("run.1/", None)]


async def test_they_come_four_times_within_the_timeout(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("tide_trainer.loop.heartbeats.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await Heartbeats(Gateway(0), "run/", 4000.0).run()
    # From the begin of one to the begin of the next, however long an answer takes.
    assert all(900 < seconds <= 1000 for seconds in waits)


async def test_the_promise_stands_where_tasks_are_left():
    gateway = Gateway(3)
    await Heartbeats(gateway, "run/", 60.0).withdraw()
    assert gateway.taken == [("run/", None), ("run/", 60.0)]


async def test_a_gateway_that_is_gone_does_not_hold_up_the_end():
    gateway = Gateway(ConnectFailed("gone"))
    beats = Heartbeats(gateway, "run/", 60.0)
    await beats.withdraw()
    assert gateway.taken == [("run/", None)]
    assert beats.num_failed == 1
    assert gateway.deadlines[0] <= 5
