"""A stop at any moment: whoever waits gets an answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from tide_gateway.repository import StorageFailed, group
from tide_gateway.rows import Change
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError


class Gate:
    """Holds the writes that `holds` picks until it is opened."""

    def __init__(self, holds: Callable[[Change], bool]) -> None:
        self.holds = holds
        self.reached = threading.Event()
        self.open = threading.Event()


@pytest.fixture
def gate(monkeypatch) -> Iterator[Callable[..., Gate]]:
    honest = group.write_group
    gates: list[Gate] = []

    def install(holds: Callable[[Change], bool]) -> Gate:
        gate = Gate(holds)
        gates.append(gate)

        def write(connection, changes, blobs) -> None:
            if any(gate.holds(change) for change in changes):
                gate.reached.set()
                assert gate.open.wait(20)
            honest(connection, changes, blobs)

        monkeypatch.setattr(group, "write_group", write)
        return gate

    yield install
    for gate in gates:
        gate.open.set()


async def stop_while(bench, gate: Gate, call, eventually) -> Exception | dict:
    """The outcome of `call` when the gateway stops while the gate holds its write."""
    calling = asyncio.create_task(call)
    await eventually(gate.reached.is_set, "the write is held")
    stopping = asyncio.create_task(bench.service.stop(drain_s=0.0))
    await eventually(lambda: bench.service._registry.closed, "the stop has begun")
    await asyncio.sleep(0)
    gate.open.set()
    async with asyncio.timeout(10):
        await stopping
        return (await asyncio.gather(calling, return_exceptions=True))[0]


@pytest.mark.parametrize("part", ["intent", "result"])
async def test_a_turn_that_a_stop_cuts_short_is_answered(bench, gate, eventually, part):
    task_id = (await bench.start())["task_id"]
    held = gate(lambda change: getattr(change, part) is not None)
    outcome = await stop_while(bench, held, bench.act(task_id, 0), eventually)
    assert isinstance(outcome, TideError)
    assert outcome.code == "unavailable"


@pytest.mark.parametrize("state", [TaskState.STARTING, TaskState.WAITING])
async def test_a_start_that_a_stop_cuts_short_is_answered(bench, gate, eventually, state):
    held = gate(lambda change: change.after.state is state)
    outcome = await stop_while(bench, held, bench.start(), eventually)
    assert isinstance(outcome, TideError)
    assert outcome.code in ("unavailable", "environment_lost")


async def test_an_unforeseen_fault_in_a_turn_does_not_keep_its_caller_waiting(bench, monkeypatch):
    task_id = (await bench.start())["task_id"]

    async def broken(*_args, **_options):
        raise ZeroDivisionError

    with monkeypatch.context() as fault:
        fault.setattr("tide_gateway.upstream.observe", broken)
        with pytest.raises(TideError, match="did not finish"):
            async with asyncio.timeout(10):
                await bench.act(task_id, 0)
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_a_stop_goes_on_without_work_that_does_not_end(bench, monkeypatch, caplog):
    await bench.start()
    released = asyncio.Event()

    async def stubborn() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    bench.service._registry.spawn(stubborn(), "tide-stubborn")
    await asyncio.sleep(0)
    monkeypatch.setattr("tide_gateway.service.tasks.STOP_LIMIT_S", 0.2)
    async with asyncio.timeout(10):
        await bench.service.stop(drain_s=0.0)
    assert "tide-stubborn" in caplog.text
    released.set()


async def test_a_stop_that_cannot_be_written_down_keeps_no_server(bench, monkeypatch, caplog):
    await bench.start()
    fleets = list(bench.service.fleets.values())
    keepers = [keeper for fleet in fleets for keeper in fleet._keepers.values()]
    assert keepers

    async def fail(*_arguments) -> bool:
        raise StorageFailed("the database is away")

    monkeypatch.setattr(bench.service._repository.replicas, "leave", fail)
    async with asyncio.timeout(10):
        await bench.service.stop(drain_s=0.0, keep=True)
    assert "could not be written down" in caplog.text
    # A keeper that went on would find its server silent, as its client is closed, and end the server's tasks.
    assert all(keeper._task.done() for keeper in keepers)
    rows = await bench.service._repository.instances.all()
    assert [row.state.value for row in rows] == ["ready"]
