"""What a commit leaves behind: no caller without an answer, no row without its task, no body without its bytes."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace

import pytest
import stored_tasks
from sqlalchemy import text

from tide_gateway import lifecycle
from tide_gateway.admission import Rules
from tide_gateway.blobs import BlobStore
from tide_gateway.committer import Committer
from tide_gateway.database import StorageFailed, open_database
from tide_gateway.repository import Conflict, Repository, group
from tide_gateway.repository.retention import RetentionRows
from tide_gateway.repository.slots import Releases
from tide_gateway.rows import Change, Event
from tide_sdk.errors import TideError

BIG = b"{" + b"x" * 20_000 + b"}"


@pytest.fixture
def server(fresh_databases):
    yield fresh_databases.server
    assert fresh_databases.server  # runs again, whatever the test did to it


@pytest.fixture
async def shared(server, fresh_databases, tmp_path):
    """A repository on PostgreSQL."""
    with fresh_databases.fresh("postgres") as url:
        database = open_database(url)
        yield Repository(database, BlobStore(tmp_path / "blobs"))
        server.start()
        await database.close()


def new(number: int) -> lifecycle.Task:
    return stored_tasks.new(number, task_id=f"{number:012x}")  # as a gateway names them: by their moment


def next_of(task: lifecycle.Task) -> Change:
    return Change(lifecycle.bumped(lifecycle.started(task, "peer", 101.0)), events=(Event("started", 101.0),))


@pytest.mark.postgres
async def test_a_server_that_goes_away_between_a_groups_changes_is_not_asked_for_each(shared, server, monkeypatch):
    tasks = await stored_tasks.add(shared, 12, new)
    stale = next_of(lifecycle.bumped(tasks[3]))
    honest, num_asked = shared._database.write, 0

    async def write(fn, **options):
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:  # the group, then its first change alone
            await asyncio.to_thread(server.stop)
        return await honest(fn, **options)

    monkeypatch.setattr(shared._database, "write", write)
    changes = [next_of(tasks[0]), stale, *(next_of(task) for task in tasks[4:])]
    outcomes = await shared.apply(changes)
    assert num_asked == 3
    assert outcomes[0] is None
    assert all(isinstance(outcome, StorageFailed) for outcome in outcomes[1:])
    server.start()
    again = await shared.apply(changes[1:])
    assert [type(outcome) for outcome in again] == [Conflict] + [type(None)] * 8


def test_an_event_loop_that_ends_in_the_middle_of_a_commit_ends():
    heard = []

    class StuckSink:
        async def apply(self, changes):
            await asyncio.get_running_loop().create_future()

    async def call(committer: Committer) -> None:
        try:
            await committer.commit(next_of(new(0)))
        finally:
            heard.append("told")

    async def main() -> None:
        committer = Committer(StuckSink())
        callers = [asyncio.create_task(call(committer)) for _ in range(3)]
        await asyncio.wait(callers, timeout=0.01)

    asyncio.run(main())  # cancels what is left, and waits for it
    assert heard == ["told"] * 3


@pytest.mark.postgres
async def test_a_task_that_is_read_out_while_it_is_removed_leaves_no_row_without_it(shared, server, eventually):
    (task,) = await stored_tasks.add(shared, 1, new)
    done = lifecycle.answered(lifecycle.started(task, "peer", 101.0), 102.0, terminated=True, truncated=False)
    done = lifecycle.bumped(lifecycle.released(done, (1.0, {}), 103.0, ""))
    assert await shared.apply([Change(done, events=(Event("released", 103.0),))]) == [None]
    rows = RetentionRows(shared._database)
    ended, may_commit = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def read_out(connection):
        connection.execute(text("UPDATE tasks SET state = 'ended', version = version + 1"))
        connection.execute(
            text(
                f"INSERT INTO task_events (task_id, at_s, kind, detail) VALUES ('{new(0).task_id}', 5000, 'ended', '')"
            )
        )
        loop.call_soon_threadsafe(ended.set)
        asyncio.run_coroutine_threadsafe(may_commit.wait(), loop).result(20)

    async with asyncio.timeout(30):
        ending = asyncio.create_task(shared._database.write(read_out))
        await ended.wait()
        removing = asyncio.create_task(rows.remove_tasks(4000.0))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"

        async def waits_or_ends() -> bool:
            return removing.done() or (await asyncio.to_thread(server.execute, waits))[0][0] > 0

        await eventually(waits_or_ends, "the removal meets the end")
        may_commit.set()
        await ending
        removed = await removing
    assert removed.task_ids == ()
    assert (await shared.task(new(0).task_id)).state == "ended"
    assert [kind for kind, _, _ in await shared.events_of(new(0).task_id)] == ["released", "ended"]
    assert (await rows.remove_tasks(6000.0)).task_ids == (new(0).task_id,)


@pytest.mark.parametrize("durable", [True, False])
def test_a_body_is_on_the_disk_before_a_row_may_name_it(tmp_path, monkeypatch, durable):
    happened = []
    honest_sync, honest_replace = os.fsync, os.replace

    def sync(opened):
        happened.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{opened}"))[:2]))
        honest_sync(opened)

    def replace(source, target):
        happened.append(("name", os.path.basename(target)[:2]))
        honest_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    store = BlobStore(tmp_path / "blobs", durable=durable)
    name = store.put(BIG)[5:7].decode()
    assert store.get(store.put(BIG)) == BIG
    named = [("name", name)]
    folders = [("sync", name), ("sync", "bl")]
    assert happened == ([("sync", name), *named, *folders, *folders] if durable else named)


@pytest.mark.parametrize(("options", "durable"), [("", False), ("?synchronous=full", True)])
async def test_bodies_are_as_durable_as_rows(tmp_path, options, durable):
    database = open_database(f"sqlite:///{tmp_path / 'gateway.db'}{options}")
    assert database.durable is durable
    await database.close()


@pytest.mark.postgres
@pytest.mark.parametrize("follows", ["a start", "a turn"])
async def test_who_follows_a_task_that_is_removed_meanwhile_is_told(replicated, eventually, follows):
    acting, hung = await replicated.open(), await replicated.open()
    if follows == "a turn":
        task_id = (await acting.start("k", hang_turn=0))["task_id"]
        first = asyncio.create_task(acting.act(task_id, 0))
        await eventually(lambda: acting.service._registry.lives[task_id].running is not None, "it acts")
        second = asyncio.create_task(hung.act(task_id, 0))
        lives = hung.service._registry.lives
        await eventually(lambda: task_id in lives and lives[task_id].running is not None, "it is followed")
    else:
        first = asyncio.create_task(acting.start("k", start_s=3600.0))
        await eventually(lambda: bool(acting.service._registry.lives), "it starts")
        (task_id,) = acting.service._registry.lives
        second = asyncio.create_task(hung.start("k", start_s=3600.0))
        lives = hung.service._registry.lives
        await eventually(lambda: task_id in lives and lives[task_id].follows, "it is followed")
    # One transaction of the test's, for a process that hung while the task ended and was pruned.
    tables = ("turns", "task_starts", "task_events", "tasks")
    await acting.database.write(lambda c: [c.execute(text(f"DELETE FROM {table}")) for table in tables])
    async with asyncio.timeout(20):
        with pytest.raises(TideError) as told:
            await second
    assert told.value.code == "not_found"
    first.cancel()


@pytest.mark.postgres
async def test_an_attempt_that_another_replica_lets_in_meanwhile_is_ended_too(replicated, monkeypatch):
    older, newer = await replicated.open(), await replicated.open()
    begun = []
    honest = newer.repository.slots.admit

    async def admit(*args, **options):
        # This replica has found no attempt of the key; now there is one.
        if not begun:
            begun.append((await older.start("k", attempt=0))["task_id"])
        return await honest(*args, **options)

    monkeypatch.setattr(newer.repository.slots, "admit", admit)
    second = (await newer.start("k", attempt=1))["task_id"]
    (first,) = begun
    with pytest.raises(TideError) as told:
        await older.act(first, 0)
    assert told.value.code == "stale_attempt"
    assert (await older.act(second, 0))["turn"] == 1
    with pytest.raises(TideError) as told:
        await older.start("k", attempt=0)
    assert told.value.code == "stale_attempt"


@pytest.mark.postgres
async def test_one_key_for_two_environments_at_once_is_one_start(shared, monkeypatch):
    both = threading.Barrier(2)
    honest = group.write_group

    def write_group(*args, **options):
        both.wait(20)
        honest(*args, **options)

    monkeypatch.setattr(group, "write_group", write_group)
    tasks = [replace(new(number), key="same", environment=f"e{number}") for number in range(2)]
    rules = Rules(capacity=9)
    admits = [shared.slots.admit(Change(t, request=b"{}"), rules, Releases(0, 0.0), 100.0) for t in tasks]
    outcomes = await asyncio.gather(*admits, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["KeyTaken", "Task"]


@pytest.mark.parametrize("part", ["leave", "all"])
async def test_a_stop_that_cannot_be_written_down_leaves_servers_and_tasks_alone(bench, benches, monkeypatch, part):
    task_id = (await bench.start("k"))["task_id"]

    async def refused(*_args):
        raise StorageFailed("the server is away")

    rows = bench.repository.replicas if part == "leave" else bench.repository.instances
    with monkeypatch.context() as away:
        away.setattr(rows, part, refused)
        await bench.service.stop(drain_s=0.0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("tide-keep")]
    assert len(benches.world.names()) == 1
    benches.opened.remove(bench)
    await bench.database.close()
    after = await benches.open()
    await after.service.sweep()
    assert (await after.act(task_id, 0))["turn"] == 1
