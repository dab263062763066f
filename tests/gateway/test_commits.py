"""Grouped commits: one transaction for all, and a conflict that fails its own row only."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from sqlalchemy import text
from stored_tasks import add, new, next_of

from tide_gateway import lifecycle
from tide_gateway.blobs import BlobStore
from tide_gateway.committer import Committer
from tide_gateway.database import open_database
from tide_gateway.deadlines import due_s
from tide_gateway.members import this_replica
from tide_gateway.repository import Conflict, Repository, StorageFailed
from tide_gateway.rows import Change
from tide_gateway.specs import DEFAULT_LIMITS


@pytest.fixture
async def repository(tmp_path, database_url):
    database = open_database(database_url)
    yield Repository(database, BlobStore(tmp_path / "blobs"))
    await database.close()


async def test_a_stale_row_fails_alone_with_all_its_parts(repository):
    tasks = await add(repository, 5)
    stale = next_of(replace(tasks[2], version=7))
    changes = [next_of(tasks[0]), next_of(tasks[1]), stale, next_of(tasks[3]), next_of(tasks[4])]
    outcomes = await repository.apply(changes)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), Conflict, type(None), type(None)]
    assert (await repository.task("t001")).state == "waiting"
    assert (await repository.task("t002")).state == "starting"
    assert await repository.turn_of("t002", 0) is None
    assert await repository.events_of("t002") == []
    assert (await repository.turn_of("t003", 0)).action == b'{"a":1}'


async def test_a_row_that_cannot_be_written_fails_alone(repository):
    tasks = await add(repository, 2)
    outcomes = await repository.apply([Change(tasks[0], request=b"{}"), next_of(tasks[1])])
    assert outcomes[0] is not None
    assert outcomes[1] is None
    assert (await repository.task("t001")).state == "waiting"


async def test_the_same_change_twice_is_committed_once(repository):
    (task,) = await add(repository, 1)
    change = next_of(task)
    assert await repository.apply([change]) == [None]
    (again,) = await repository.apply([change])
    assert isinstance(again, Conflict)


async def test_what_waits_together_is_committed_together(repository):
    tasks = await add(repository, 64)
    committer = Committer(repository)
    await asyncio.gather(*(committer.commit(next_of(task)) for task in tasks))
    assert committer.num_changes == 64
    assert committer.num_groups <= 2
    await committer.close()


async def test_a_change_that_waited_for_too_long_is_not_written(monkeypatch):
    groups, begun, goes_on = [], asyncio.Event(), asyncio.Event()

    class SlowSink:
        async def apply(self, changes):
            groups.append(changes)
            begun.set()
            await goes_on.wait()
            return [None] * len(changes)

    committer = Committer(SlowSink())
    first = committer.commit(next_of(new(0)))
    async with asyncio.timeout(10):
        await begun.wait()
        late = committer.commit(next_of(new(1)))
        monkeypatch.setattr("tide_gateway.committer.MAX_WAIT_S", -1.0)  # as if the first group had taken so long
        goes_on.set()
        with pytest.raises(StorageFailed, match="waited"):
            await late
        await first
        await committer.close()
    assert [len(changes) for changes in groups] == [1]


async def test_a_caller_that_goes_away_does_not_lose_its_change(repository):
    (task,) = await add(repository, 1)
    committer = Committer(repository)
    heard = []

    async def call():
        outcome = committer.commit(next_of(task))
        try:
            await outcome
        finally:
            heard.append(outcome.exception())

    caller = asyncio.create_task(call())
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert heard == [None]
    assert (await repository.task("t000")).state == "waiting"
    await committer.close()


async def test_the_sweeps_query_uses_the_index(repository):
    if repository.shared:
        pytest.skip("PostgreSQL plans by statistics, which an empty table has none of")

    def plan(connection):
        statement = "EXPLAIN QUERY PLAN SELECT task_id FROM tasks WHERE due_s <= 5 ORDER BY due_s LIMIT 10"
        return " ".join(str(row) for row in connection.execute(text(statement)))

    assert "ix_tasks_due_s" in await repository._database.read(plan)


async def test_forgiving_an_outage_moves_running_clocks_only(repository):
    tasks = await add(repository, 2)
    waiting = next_of(tasks[0])
    paused = Change(replace(lifecycle.pause(lifecycle.started(tasks[1], "p", 101.0), 1, 102.0), version=1))
    assert await repository.apply([waiting, paused]) == [None, None]
    one = this_replica("one", 102.0)
    await repository.replicas.enter(one, lambda _row: False)
    assert await repository.replicas.enter(replace(one, name="two", seen_s=1102.0), lambda _row: False) == 1000.0
    running, still = await repository.task("t000"), await repository.task("t001")
    assert running.clocks["idle"].consumed(1103.0) == pytest.approx(2.0)
    assert due_s(running) == 1101.0 + DEFAULT_LIMITS["idle"]
    assert await repository.overdue(1101.0, limit=9) == []
    assert still.clocks["idle"].consumed(9999.0) == 1.0


async def test_a_replica_that_joins_a_living_one_forgives_nothing(repository):
    (task,) = await add(repository, 1)
    assert await repository.apply([next_of(task)]) == [None]
    one = this_replica("one", 102.0)
    await repository.replicas.enter(one, lambda _row: False)
    assert await repository.replicas.enter(replace(one, name="two", seen_s=1102.0), lambda _row: True) == 0.0
    assert (await repository.task("t000")).clocks["idle"].consumed(1103.0) == pytest.approx(1002.0)


def test_blobs_are_named_by_content_and_kept_once(tmp_path):
    store = BlobStore(tmp_path)
    body = b'{"x":"' + b"y" * 9000 + b'"}'
    stored = store.put(body)
    assert store.put(body) == stored
    assert stored.startswith(b"blob:")
    assert store.get(stored) == body
    assert store.put(b"{}") == b"{}"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
