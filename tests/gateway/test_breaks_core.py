"""What a fault at the wrong moment must not leave behind: calls that wait for nobody, servers and slots that nobody
keeps, promises broken by our own outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tide_gateway.database import OutcomeUnknown, StorageFailed
from tide_gateway.repository import group
from tide_gateway.rows import Change
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError


async def refused(call) -> TideError:
    with pytest.raises(TideError) as caught:
        await call
    return caught.value


@pytest.fixture
def failing_once(monkeypatch) -> Callable[[Callable[[Change], bool]], None]:
    """The first write that the given function picks fails."""
    honest = group.write_group

    def install(picks: Callable[[Change], bool]) -> None:
        left = [True]

        def write(connection, changes, blobs) -> None:
            if left and any(picks(change) for change in changes):
                left.clear()
                raise StorageFailed("the database is away")
            honest(connection, changes, blobs)

        monkeypatch.setattr(group, "write_group", write)

    return install


async def test_a_start_whose_end_could_not_be_written_goes_on_when_it_is_repeated(bench, failing_once):
    failing_once(lambda change: change.after.state is TaskState.WAITING)
    assert (await refused(bench.start())).code == "unavailable"
    async with asyncio.timeout(10):  # nothing sweeps here: nobody else would go on with it
        answer = await bench.start()
    assert await bench.state(answer["task_id"]) == "waiting"


async def test_a_start_that_may_have_been_admitted_goes_on_when_it_is_repeated(bench, monkeypatch):
    slots, honest = bench.repository.slots, bench.repository.slots.admit

    async def admit(*args):
        await honest(*args)
        raise OutcomeUnknown("lost in the commit")

    with monkeypatch.context() as fault:
        fault.setattr(slots, "admit", admit)
        assert (await refused(bench.start())).code == "unavailable"
    async with asyncio.timeout(10):
        answer = await bench.start()
    assert await bench.state(answer["task_id"]) == "waiting"
