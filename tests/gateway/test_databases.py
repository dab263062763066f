"""One behaviour on SQLite and PostgreSQL: transactions, grouped commits, conflicts, full disks."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from fresh_databases import kind_params
from sqlalchemy import bindparam, insert, select, update
from stored_tasks import add, next_of

from tide_gateway import lifecycle
from tide_gateway.blobs import BlobStore
from tide_gateway.committer import Committer
from tide_gateway.database import Database, StorageFailed, database_url, open_database
from tide_gateway.models import OwnerRow, TurnRow
from tide_gateway.repository import Conflict, Repository
from tide_gateway.rows import Change, Intent
from tide_sdk.migrations import migrate

OWNERS = OwnerRow.__table__


@pytest.fixture(params=kind_params())
def url(request, fresh_databases):
    with fresh_databases.fresh(request.param) as made:
        yield made


@pytest.fixture
async def database(url):
    database = open_database(url)
    yield database
    await database.close()


@pytest.fixture
async def other(url):
    """A second process on the same database, as far as the database can tell."""
    database = open_database(url)
    yield database
    await database.close()


def put(name: str, number: int = 0):
    return lambda connection: connection.execute(insert(OWNERS).values(owner=name, max_tasks=number, created_s=0.0))


def names(connection) -> list[str]:
    return list(connection.execute(select(OWNERS.c.owner).order_by(OWNERS.c.owner)).scalars())


async def test_a_write_is_committed_whole_or_not_at_all(database, other):
    def half(connection):
        put("half")(connection)
        raise KeyError("half")

    await database.write(put("whole"))
    with pytest.raises(KeyError, match="half"):
        await database.write(half)
    await database.write(put("after"))
    assert await other.read(names) == ["after", "whole"]


async def test_a_read_of_several_statements_sees_one_state(database):
    first, written = threading.Event(), threading.Event()

    def twice(connection):
        before = names(connection)
        first.set()
        assert written.wait(20)
        return before, names(connection)

    reading = asyncio.create_task(database.read(twice))
    await asyncio.to_thread(first.wait, 20)
    await database.write(put("later"))
    written.set()
    assert await reading == ([], [])
    assert await database.read(names) == ["later"]


async def test_the_changed_rows_of_many_updates_are_counted_exactly(database):
    """What tells a conflict in a group: a driver that counts only the last row, or none, would hide it."""
    many = [{"b_owner": f"o{number:03}", "max_tasks": 5} for number in range(256)]
    await database.write(
        lambda c: c.execute(insert(OWNERS), [{"owner": m["b_owner"], "max_tasks": 0, "created_s": 0.0} for m in many])
    )
    change = update(OWNERS).where(OWNERS.c.owner == bindparam("b_owner")).values(max_tasks=bindparam("max_tasks"))
    assert await database.write(lambda c: c.execute(change, many).rowcount) == 256
    many[3]["b_owner"] = many[200]["b_owner"] = many[255]["b_owner"] = "nobody"
    assert await database.write(lambda c: c.execute(change, many).rowcount) == 253
    assert await database.write(lambda c: c.execute(change, many[255:]).rowcount) == 0


async def test_a_named_lock_lets_one_writer_at_a_time_through(database, other):
    await database.write(put("counter"))

    def count(which: Database, name: str):
        def add(connection):
            which.lock(connection, name)
            value = connection.execute(select(OWNERS.c.max_tasks).where(OWNERS.c.owner == "counter")).scalar_one()
            connection.execute(update(OWNERS).where(OWNERS.c.owner == "counter").values(max_tasks=value + 1))

        return which.write(add)

    await asyncio.gather(*(count(which, "environment:e") for _ in range(20) for which in (database, other)))
    found = await database.read(lambda c: c.execute(select(OWNERS.c.max_tasks)).scalar_one())
    assert found == 40


async def test_a_cancelled_callers_transaction_is_committed(database):
    begun, go = threading.Event(), threading.Event()

    def slow(connection):
        put("slow")(connection)
        begun.set()
        assert go.wait(20)

    caller = asyncio.create_task(database.write(slow))
    await asyncio.to_thread(begun.wait, 20)
    caller.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await database.close()
    again = Database(database.url)
    assert await again.read(names) == ["slow"]
    await again.close()


async def test_calls_beyond_those_that_may_wait_fail_at_once_and_are_served_again_later(database, monkeypatch):
    monkeypatch.setattr("tide_gateway.database.side.MAX_WAITING", 8)
    gate = threading.Event()
    held = [asyncio.create_task(database.read(lambda _: gate.wait(20))) for _ in range(8)]
    await asyncio.sleep(0)  # all are asked for
    with pytest.raises(StorageFailed, match="too many calls wait"):
        await database.read(lambda _: None)
    await database.write(lambda _: None)
    gate.set()
    assert await asyncio.gather(*held) == [True] * 8
    assert await database.read(lambda _: 1) == 1


async def test_only_postgresql_is_shared(database):
    assert database.shared == (database.url.get_backend_name() == "postgresql")


async def test_a_full_disk_fails_the_write_and_the_next_one_works(database):
    if database.shared:
        await database.write(
            lambda c: c.exec_driver_sql(
                "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$;"
                " CREATE TRIGGER full_disk BEFORE INSERT ON turns EXECUTE FUNCTION full_disk()"
            )
        )

    def large(connection):
        put("large")(connection)
        if not database.shared:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 2}")
        row = {"task_id": "t", "turn": 0, "action": bytes(1_000_000), "acted_s": 0.0}
        connection.execute(insert(TurnRow.__table__), row)

    with pytest.raises(StorageFailed, match=r"could not extend file|full"):
        await database.write(large)
    await database.write(put("next"))
    assert await database.read(names) == ["next"]


# Grouped commits, through the repository.


@pytest.fixture
def repository(database, tmp_path):
    return Repository(database, BlobStore(tmp_path / "blobs"))


async def test_a_conflict_fails_its_own_row_with_all_its_parts(repository):
    tasks = await add(repository, 5)
    changes = [next_of(task) for task in tasks]
    changes[2] = next_of(replace(tasks[2], version=7))
    outcomes = await repository.apply(changes)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), Conflict, type(None), type(None)]
    assert (await repository.task("t001")).state == "waiting"
    assert (await repository.task("t002")).state == "starting"
    assert await repository.turn_of("t002", 0) is None
    assert await repository.events_of("t002") == []
    assert (await repository.turn_of("t003", 0)).action == b'{"a":1}'


async def test_an_intent_that_comes_too_late_is_a_conflict_though_its_turn_is_stored(repository):
    tasks = await add(repository, 2)
    assert await repository.apply([next_of(tasks[0])]) == [None]
    # Of a group, and alone: what counts is the row, not the turn that the faster one has written.
    late, other = await repository.apply([next_of(tasks[0]), next_of(tasks[1])])
    assert (type(late), other) == (Conflict, None)
    assert (await repository.turn_of("t000", 0)).action == b'{"a":1}'


async def test_a_turn_that_is_stored_already_is_never_overwritten(repository):
    (task,) = await add(repository, 1)
    first = next_of(task)
    assert await repository.apply([first]) == [None]
    again = first._replace(after=lifecycle.bumped(first.after), intent=Intent(0, b'{"a":2}', 102.0))
    (outcome,) = await repository.apply([again])
    assert isinstance(outcome, ValueError)
    assert (await repository.turn_of("t000", 0)).action == b'{"a":1}'
    assert (await repository.task("t000")).version == first.after.version


async def test_a_row_that_exists_fails_alone(repository):
    tasks = await add(repository, 2)
    outcomes = await repository.apply([Change(tasks[0], request=b"{}"), next_of(tasks[1])])
    assert outcomes[0] is not None
    assert outcomes[1] is None
    assert (await repository.task("t001")).state == "waiting"


async def test_what_waits_together_is_committed_together(repository):
    tasks = await add(repository, 64)
    committer = Committer(repository)
    await asyncio.gather(*(committer.commit(next_of(task)) for task in tasks))
    assert committer.num_changes == 64
    assert committer.num_groups <= 2
    await committer.close()


@pytest.mark.parametrize(("option", "level"), [("", 1), ("?synchronous=normal", 1), ("?synchronous=full", 2)])
@pytest.mark.filterwarnings("error")
async def test_a_sqlite_file_waits_for_the_disk_at_each_commit_where_it_is_told_to(tmp_path, option, level):
    url = f"sqlite:///{tmp_path / 'gateway.db'}{option}"
    migrate("gateway", database_url(url))
    database = open_database(url)
    await database.write(put("ann"))
    assert (
        await database.write(lambda connection: connection.exec_driver_sql("PRAGMA synchronous").scalar_one()) == level
    )
    assert await database.read(names) == ["ann"]
    await database.close()
    assert (tmp_path / "gateway.db").exists(), "the option is no part of the file's name"
