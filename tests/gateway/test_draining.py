"""The beginning of a stop: what is in flight finishes, a start is refused at once, a turn a little later."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk import codec
from tide_sdk.errors import TideError


class Held:
    """Environment servers that hold their answers to the turns of some tasks."""

    def __init__(self, monkeypatch) -> None:
        from tide_gateway import upstream

        self.gates: dict[str, asyncio.Event] = {}
        self.acting: set[str] = set()
        honest = upstream.observe

        async def observe(server, peer_task, turn, action, limit_s):
            word = codec.loads(action)["content"]
            if word in self.gates:
                self.acting.add(word)
                await self.gates[word].wait()
            return await honest(server, peer_task, turn, action, limit_s)

        monkeypatch.setattr(upstream, "observe", observe)

    async def act(self, bench, key: str, eventually) -> asyncio.Task:
        self.gates[key] = asyncio.Event()
        task_id = (await bench.start(key))["task_id"]
        acting = asyncio.create_task(bench.act(task_id, 0, key))
        await eventually(lambda: key in self.acting, "it acts")
        return acting


@pytest.fixture
def held(monkeypatch) -> Held:
    return Held(monkeypatch)


async def refused(call) -> TideError:
    with pytest.raises(TideError) as error:
        await call
    assert error.value.code == "unavailable"
    return error.value


async def test_turns_in_flight_finish_and_a_start_is_refused_meanwhile(bench, held, eventually):
    acting = await held.act(bench, "a", eventually)
    waiting = (await bench.start("waits"))["task_id"]
    assert not bench.service.stopping
    stopping = asyncio.create_task(bench.service.stop(drain_s=30.0))
    await eventually(lambda: bench.service.stopping, "the stop has begun")
    assert (await refused(bench.start("late"))).extra["retry_after_s"] == 1
    assert (await bench.act(waiting, 0))["turn"] == 1, "who was not told of the stop yet is served"
    assert not stopping.done()
    held.gates["a"].set()
    assert (await acting)["turn"] == 1
    async with asyncio.timeout(20):
        await stopping


async def test_a_turn_that_came_during_the_drain_is_waited_for_and_no_further_one_is_taken(bench, held, eventually):
    first = await held.act(bench, "a", eventually)
    late = (await bench.start("late"))["task_id"]
    held.gates["b"] = asyncio.Event()
    further = (await bench.start("further"))["task_id"]
    stopping = asyncio.create_task(bench.service.stop(drain_s=30.0))
    await eventually(lambda: bench.service.stopping, "the stop has begun")
    second = asyncio.create_task(bench.act(late, 0, "b"))
    await eventually(lambda: "b" in held.acting, "it was taken")
    held.gates["a"].set()
    assert (await first)["turn"] == 1
    await eventually(lambda: bench.service._registry.draining, "what ran at first is over")
    await refused(bench.act(further, 0))
    assert not stopping.done()
    held.gates["b"].set()
    assert (await second)["turn"] == 1
    async with asyncio.timeout(20):
        await stopping


async def test_a_start_in_flight_finishes(benches, eventually, monkeypatch):
    bench = await benches.open()
    gate = asyncio.Event()
    honest = bench.runtime.launch

    async def launch(*args):
        await gate.wait()
        return await honest(*args)

    monkeypatch.setattr(bench.runtime, "launch", launch)
    starting = asyncio.create_task(bench.start("k"))
    await eventually(lambda: any(live.starting for live in bench.service._registry.lives.values()), "it starts")
    stopping = asyncio.create_task(bench.service.stop(drain_s=30.0, keep=True))
    await eventually(lambda: bench.service.stopping, "the stop has begun")
    gate.set()
    assert (await starting)["turn"] == 0
    async with asyncio.timeout(20):
        await stopping


async def test_what_does_not_finish_in_time_is_cut_off_and_answered(bench, held, eventually, caplog):
    acting = await held.act(bench, "a", eventually)
    async with asyncio.timeout(20):
        await bench.service.stop(drain_s=0.05, keep=True)
        await refused(acting)
    assert "1 turns, starts and ends are cut off after 0.05 s" in caplog.text


async def test_what_an_opening_that_is_broken_off_has_begun_is_left_to_the_next_gateway(
    benches, monkeypatch, eventually
):
    """A survey that hangs, as one of an engine that does not answer does."""
    bench = await benches.open()
    kept = (await bench.start("k"))["task_id"]
    await benches.crash(bench)
    reached = asyncio.Event()

    async def survey(self):
        reached.set()
        await asyncio.sleep(3600)

    monkeypatch.setattr("tide_gateway.runtimes.fake.FakeRuntime.survey", survey)
    opening = asyncio.create_task(benches.open())
    await asyncio.wait_for(reached.wait(), 20)
    opening.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait({opening})
    monkeypatch.undo()
    after = await benches.open()
    assert (await after.act(kept, 0))["info"]["effects"] == 1
