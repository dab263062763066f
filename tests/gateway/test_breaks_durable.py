"""What a commit leaves behind: no caller without an answer, no row without its task, no body without its bytes."""

from __future__ import annotations

import asyncio
import os

import pytest
from sqlalchemy import text

from tide_gateway import lifecycle
from tide_gateway.blobs import BlobStore
from tide_gateway.committer import Committer
from tide_gateway.database import StorageFailed, open_database
from tide_gateway.repository import Conflict, Repository
from tide_gateway.repository.retention import RetentionRows
from tide_gateway.rows import Change, Event
from tide_gateway.specs import DEFAULT_LIMITS
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
    return lifecycle.new_task(
        task_id=f"{number:012x}", owner="o", environment="e", key=f"k{number}", attempt=0, kind="train",
        limits=DEFAULT_LIMITS, now_s=100.0,
    )  # fmt: skip


async def add(repository: Repository, count: int) -> list[lifecycle.Task]:
    tasks = [new(number) for number in range(count)]
    assert await repository.apply([Change(task, request=b"{}") for task in tasks]) == [None] * count
    return tasks


def next_of(task: lifecycle.Task) -> Change:
    return Change(lifecycle.bumped(lifecycle.started(task, "peer", 101.0)), events=(Event("started", 101.0),))


@pytest.mark.postgres
async def test_a_server_that_goes_away_between_a_groups_changes_is_not_asked_for_each(shared, server, monkeypatch):
    tasks = await add(shared, 12)
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
        while committer._running is None:
            await asyncio.sleep(0)
        await asyncio.wait(callers, timeout=0.01)

    asyncio.run(main())  # cancels what is left, and waits for it
    assert heard == ["told"] * 3


@pytest.mark.postgres
async def test_a_task_that_is_read_out_while_it_is_removed_leaves_no_row_without_it(shared, server):
    (task,) = await add(shared, 1)
    done = lifecycle.answered(lifecycle.started(task, "peer", 101.0), 102.0, terminated=True, truncated=False)
    done = lifecycle.bumped(lifecycle.released(done, (1.0, {}), 103.0, ""))
    assert await shared.apply([Change(done, events=(Event("released", 103.0),))]) == [None]
    rows = RetentionRows(shared._database)
    ended, may_commit = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def read_out(connection):
        connection.execute(text("UPDATE tasks SET state = 'ended', version = version + 1"))
        connection.execute(
            text(f"INSERT INTO task_events (task_id, at_s, kind, detail) VALUES ('{new(0).task_id}', 5000, 'ended', '')")
        )
        loop.call_soon_threadsafe(ended.set)
        asyncio.run_coroutine_threadsafe(may_commit.wait(), loop).result(20)

    async with asyncio.timeout(30):
        ending = asyncio.create_task(shared._database.write(read_out))
        await ended.wait()
        removing = asyncio.create_task(rows.remove_tasks(4000.0))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while not removing.done() and not (await asyncio.to_thread(server.execute, waits))[0][0]:
            await asyncio.sleep(0.01)
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
async def test_who_follows_a_task_that_is_removed_meanwhile_is_told(
    benches_class, fresh_databases, tmp_path, eventually, follows
):
    with fresh_databases.fresh("postgres") as url:
        benches = benches_class(url, tmp_path)
        acting, hung = await benches.open(), await benches.open()
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
        await benches.close()
