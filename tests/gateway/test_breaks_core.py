"""What a fault at the wrong moment must not leave behind: calls that wait for nobody, servers and slots that nobody
keeps, promises broken by our own outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tide_gateway.blobs import BlobStore
from tide_gateway.database import OutcomeUnknown, StorageFailed, open_database
from tide_gateway.repository import Repository, group
from tide_gateway.rows import Change
from tide_gateway.runtimes.fake import FakeRuntime
from tide_gateway.service.tasks import TaskService
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.clocks import TaskState
from tide_sdk.errors import TideError

LIMITS = {"start": 30.0, "idle": 20.0, "turn": 10.0, "active": 100.0, "end": 5.0}


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

    async def admit(*args, **named):
        await honest(*args, **named)
        raise OutcomeUnknown("lost in the commit")

    with monkeypatch.context() as fault:
        fault.setattr(slots, "admit", admit)
        assert (await refused(bench.start())).code == "unavailable"
    async with asyncio.timeout(10):
        answer = await bench.start()
    assert await bench.state(answer["task_id"]) == "waiting"


async def test_a_replica_that_was_cut_off_breaks_no_owners_promise(bench):
    task_id = (await bench.start())["task_id"]
    await bench.service.heartbeat("local", "", 5.0)
    bench.time.advance(10.0)
    bench.service.members.wrote(asyncio.get_running_loop().time() - 60.0)
    await bench.service._sweeper.tend()
    assert await bench.state(task_id) == "waiting"
    bench.service.members.wrote(asyncio.get_running_loop().time())
    await bench.service._sweeper.tend()
    assert (await bench.service.task("local", task_id)).outcome.reason == "owner_lost"


async def test_a_gateway_that_opens_slowly_ends_nothing_for_that_time(benches, eventually, monkeypatch):
    before = await benches.open(limits=LIMITS)
    task_id = (await before.start())["task_id"]
    await before.service.heartbeat("local", "", 5.0)
    await benches.crash(before)
    engine_s = 60.0

    async def slow_survey(_runtime) -> set[str]:
        benches.time.advance(engine_s)
        members.wrote(asyncio.get_running_loop().time() - engine_s)
        return benches.world.names()

    monkeypatch.setattr(FakeRuntime, "survey", slow_survey)
    spec = EnvironmentSpec.model_validate({"name": "scripted", "runtime": "fake", "limits": LIMITS})
    database = open_database(benches.url)
    repository = Repository(database, BlobStore(benches.folder / "blobs"))
    service = TaskService({"scripted": spec}, {"fake": FakeRuntime(benches.world)}, repository, benches.time)
    members = service.members
    try:
        await service.open()
        monkeypatch.undo()
        await eventually(lambda: not members.lapsed(asyncio.get_running_loop().time()), "a heartbeat is written")
        await service.sweep()
        assert (await service.task("local", task_id)).state.value == "waiting"
    finally:
        await service.stop(drain_s=0.0)
        await database.close()


async def test_a_server_outlives_a_look_that_the_database_refused(benches, eventually, monkeypatch):
    bench = await benches.open(servers=1, capacity=1, freeze=True, probe_interval_s=0.1)
    task_id = (await bench.start())["task_id"]
    refusals: list[str] = []

    async def refuse(name: str) -> bool:
        refusals.append(name)
        raise StorageFailed("the database is away")

    with monkeypatch.context() as fault:
        fault.setattr(bench.repository.instances, "paused", refuse)
        await eventually(lambda: bool(refusals) and not bench.service.fleets["scripted"]._keepers, "the keeper is over")
    await bench.service.sweep()
    assert (await bench.act(task_id, 0))["info"]["effects"] == 1
    assert bench.service.fleets["scripted"]._keepers.keys() == bench.runtime.world.names() == {refusals[0]}


async def test_a_launch_that_could_not_be_written_down_is_made_good(benches, eventually, monkeypatch):
    bench = await benches.open(servers=1)
    rows, left = bench.repository.instances, [1, 1]
    honest = rows.keep

    async def keep(*args, **values):
        if left:
            left.pop()
            raise StorageFailed("the database is away")
        return await honest(*args, **values)

    monkeypatch.setattr(rows, "keep", keep)
    starting = asyncio.create_task(bench.start())
    await eventually(lambda: len(left) < 2, "the server is launched")

    async def started() -> bool:
        await bench.service.sweep()
        return starting.done()

    await eventually(started, "the task is placed on another server")
    assert (await bench.act((await starting)["task_id"], 0))["turn"] == 1
    await bench.service.sweep()
    assert {row.name for row, _, _ in await bench.service.servers()} == bench.runtime.world.names()


async def frozen(benches, eventually):
    """A bench with a paused task whose server is frozen."""
    bench = await benches.open(servers=1, capacity=1, freeze=True)
    task_id = (await bench.start())["task_id"]
    await bench.pause(task_id)
    await eventually(lambda: len(benches.world.frozen) == 1, "the server is frozen")
    return bench, task_id


def engine_away(runtime, times: int):
    """A runtime whose engine does not answer that many times."""
    honest, left = runtime.freeze, [0] * times

    async def freeze(server, frozen: bool) -> None:
        if left and not frozen:
            left.pop()
            raise OSError("the engine does not answer")
        await honest(server, frozen)

    return freeze


async def test_an_action_waits_for_a_thaw_that_the_engine_refused_at_first(benches, eventually, monkeypatch):
    bench, task_id = await frozen(benches, eventually)
    monkeypatch.setattr(bench.runtime, "freeze", engine_away(bench.runtime, 2))
    await bench.resume(task_id)
    async with asyncio.timeout(10):
        assert (await bench.act(task_id, 0))["info"]["effects"] == 1


async def test_an_end_waits_for_a_thaw_and_is_over_with_its_clock(benches, eventually, monkeypatch):
    bench, task_id = await frozen(benches, eventually)
    with monkeypatch.context() as fault:
        fault.setattr(bench.runtime, "freeze", engine_away(bench.runtime, 2))
        async with asyncio.timeout(10):
            assert (await bench.end(task_id))["outcome"]["kind"] == "aborted"
    await bench.service.sweep()
    body = {"key": "b", "limits": {"end": 0.5}}
    task_id = (await bench.start(**body))["task_id"]
    await bench.pause(task_id)
    await eventually(lambda: len(benches.world.frozen) == 1, "the server is frozen")
    with monkeypatch.context() as fault:
        fault.setattr(bench.runtime, "freeze", engine_away(bench.runtime, 10**6))
        async with asyncio.timeout(10):
            assert (await bench.end(task_id))["reward"] is None
    assert await bench.freed()


async def test_any_words_of_a_server_are_stored_with_its_row(bench, eventually):
    await bench.start()
    fleet = bench.service.fleets["scripted"]
    (name,) = fleet.servers
    fleet._keepers[name]._why = "it said \0 and died"
    bench.runtime.world.kill(name)

    async def gone() -> bool:
        return await bench.repository.instances.get(name) is None

    await eventually(gone, "the row of the dead server is removed")


async def test_a_task_whose_loss_could_not_be_written_is_lost_with_the_next_sweep(bench, eventually, failing_once):
    task_id = (await bench.start())["task_id"]
    await bench.pause(task_id)
    failing_once(lambda change: change.after.state is TaskState.ENDING)
    for name in bench.runtime.world.names():
        bench.runtime.world.kill(name)
    await eventually(lambda: not bench.service.fleets["scripted"]._keepers, "the keeper has done what it could")

    async def lost() -> bool:
        await bench.service.sweep()
        return await bench.state(task_id) == "ended"

    await eventually(lost, "the task is ended")
    assert not await bench.service.servers()


async def test_an_owners_prefix_is_meant_letter_by_letter(bench):
    other = (await bench.start("RUN_A/1"))["task_id"]
    mine = (await bench.start("run_a/1"))["task_id"]
    assert await bench.service.heartbeat("local", "run_a/", 5.0) == 1
    bench.time.advance(6.0)
    await bench.service.sweep()
    assert await bench.state(other) == "waiting"
    assert (await bench.service.task("local", mine)).outcome.reason == "owner_lost"


async def test_an_engine_that_does_not_answer_does_not_stop_the_sweep(benches, eventually, monkeypatch):
    bench = await benches.open()
    task_id = (await bench.start())["task_id"]
    asked = asyncio.Event()

    async def hang(_runtime) -> set[str]:
        asked.set()
        await asyncio.Event().wait()
        return set()

    monkeypatch.setattr(FakeRuntime, "survey", hang)
    sweeping = asyncio.create_task(bench.service._sweeper.run())
    await eventually(asked.is_set, "the engine is asked")
    bench.time.advance(30.0)

    async def expired() -> bool:
        return await bench.state(task_id) == "ended"

    async with asyncio.timeout(10):
        await eventually(expired, "the idle clock has run out")
    sweeping.cancel()


async def test_a_server_that_does_not_listen_holds_up_no_sweep(benches, eventually):
    bench = await benches.open()
    task_id = (await bench.start())["task_id"]
    for name in benches.world.names():
        benches.world.freeze(name, True)
    await bench.pause(task_id)
    await benches.crash(bench)
    async with asyncio.timeout(5):  # telling a pause takes as long as TELL_TIMEOUT_S
        after = await benches.open()
    assert await after.state(task_id) == "paused"
    for name in benches.world.names():
        benches.world.freeze(name, False)


async def test_no_start_waits_without_end_for_those_before_it(bench, monkeypatch):
    gate = bench.database._gates["starts/scripted"]
    await gate.acquire()  # calls that a database which hangs keeps for as long as each may take
    with monkeypatch.context() as hanging:
        hanging.setattr(bench.database._backend, "deadline_s", 0.2, raising=False)
        async with asyncio.timeout(10):
            assert (await refused(bench.start())).code == "unavailable"
    gate.release()
    assert (await bench.start())["turn"] == 0
