"""PostgreSQL stops, is killed, hangs, deadlocks: callers are told, no half is stored, the next call works."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest
from sqlalchemy import insert, select, text, update

from tide_gateway.database import Database, OutcomeUnknown, StorageFailed, Timeouts, database_url, open_database
from tide_gateway.models import OwnerRow

pytestmark = pytest.mark.postgres

OWNERS = OwnerRow.__table__
SHORT = Timeouts(connect_s=2, lock_s=0.3, statement_s=0.6, idle_s=0.3, total_s=2.0)


@pytest.fixture
def url(fresh_databases):
    with fresh_databases.fresh("postgres") as made:
        yield made
        assert fresh_databases.server  # runs again, whatever the test did to it


@pytest.fixture
def server(url, fresh_databases):
    return fresh_databases.server


@pytest.fixture
async def database(url):
    database = open_database(url)
    yield database
    await database.close()


@pytest.fixture
async def impatient(url):
    """With so short timeouts that they run out in a test."""
    database = Database(database_url(url), timeouts=SHORT)
    yield database
    await database.close()


def put(name: str):
    return lambda connection: connection.execute(insert(OWNERS).values(owner=name, max_tasks=0, created_s=0.0))


def names(connection) -> list[str]:
    return list(connection.execute(select(OWNERS.c.owner).order_by(OWNERS.c.owner)).scalars())


async def warm(database: Database) -> None:
    """Open a connection in every thread."""
    barrier = threading.Barrier(4)

    def together(connection):
        connection.execute(text("SELECT 1"))
        barrier.wait(20)

    await asyncio.gather(*(database.write(together) for _ in range(4)))
    await asyncio.gather(*(database.read(together) for _ in range(4)))


async def test_after_a_restart_the_first_calls_work(database, server):
    await warm(database)
    server.restart()
    await database.write(put("first"))
    assert await asyncio.gather(*(database.read(names) for _ in range(8))) == [["first"]] * 8


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
async def test_while_the_server_is_away_calls_fail_and_then_work_again(database, server, how):
    await warm(database)
    await database.write(put("before"))
    if how == signal.SIGKILL:
        server.kill()
    else:
        server.stop(how)
    with pytest.raises(StorageFailed):
        await database.write(put("lost"))
    with pytest.raises(StorageFailed):
        await database.read(names)
    server.start()
    await database.write(put("after"))
    assert await database.read(names) == ["after", "before"]


async def test_a_server_killed_in_a_transaction_stores_none_of_it(database, server):
    begun, go = threading.Event(), threading.Event()

    def halves(connection):
        put("one")(connection)
        begun.set()
        assert go.wait(30)
        put("two")(connection)

    writing = asyncio.create_task(database.write(halves))
    await asyncio.to_thread(begun.wait, 20)
    server.kill()
    go.set()
    with pytest.raises(StorageFailed):
        await writing
    server.start()
    assert await database.read(names) == []


async def test_a_connection_that_dies_before_the_commit_is_replaced_and_the_transaction_runs_again(database, server):
    num_runs = 0

    def cut_off(connection):
        nonlocal num_runs
        num_runs += 1
        put("once")(connection)
        if num_runs == 1:
            pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            server.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        connection.execute(text("SELECT 1"))

    await database.write(cut_off)
    assert num_runs == 2
    assert await database.read(names) == ["once"]


async def test_a_session_that_takes_no_writes_is_left_for_a_new_one(database):
    """As after a failover, when the server that we are connected to is no longer the primary."""
    await database.write(lambda c: c.exec_driver_sql("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
    await database.write(put("written"))
    assert await database.read(names) == ["written"]


SLOW_COMMIT = """
CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(CASE WHEN NEW.owner = 'slow' THEN 60 ELSE 0 END); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON owners DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION slow_commit()
"""


async def test_a_connection_lost_in_the_commit_is_not_retried_and_told_apart(database, server, eventually):
    await database.write(lambda c: c.exec_driver_sql(SLOW_COMMIT))
    num_runs = 0

    def slow(connection):
        nonlocal num_runs
        num_runs += 1
        put("slow")(connection)

    writing = asyncio.create_task(database.write(slow))
    sleeps = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND query = 'COMMIT'"
    await eventually(lambda: bool(server.execute(sleeps)), "the commit sleeps")
    server.execute("SELECT pg_terminate_backend(%s)", [server.execute(sleeps)[0][0]])
    with pytest.raises(OutcomeUnknown, match="lost in the commit"):
        await writing
    assert num_runs == 1
    await database.write(put("next"))
    assert await database.read(names) == ["next"]


async def test_writers_in_opposite_orders_both_commit(database):
    await database.write(lambda c: [put(name)(c) for name in ("a", "b")])
    barrier, num_runs = threading.Barrier(2), 0

    def both(*order: str):
        def run(connection):
            nonlocal num_runs
            num_runs += 1
            again = num_runs > 2
            for name in order:
                change = update(OWNERS).where(OWNERS.c.owner == name)
                connection.execute(change.values(max_tasks=OWNERS.c.max_tasks + 1))
                if not again and name == order[0]:
                    barrier.wait(20)

        return database.write(run)

    await asyncio.gather(both("a", "b"), both("b", "a"))
    assert num_runs == 3  # a deadlock, and one of them again
    found = await database.read(lambda c: c.execute(select(OWNERS.c.max_tasks)).scalars().all())
    assert found == [2, 2]


async def test_a_statement_that_takes_too_long_is_ended(impatient):
    with pytest.raises(StorageFailed, match="statement timeout"):
        await impatient.write(lambda c: c.execute(text("SELECT pg_sleep(60)")))
    with pytest.raises(StorageFailed, match="statement timeout"):
        await impatient.read(lambda c: c.execute(text("SELECT pg_sleep(60)")))
    await impatient.write(put("next"))


async def test_a_lock_that_is_not_freed_is_given_up(database, impatient):
    held, free = threading.Event(), threading.Event()

    def hold(connection):
        database.lock(connection, "environment:e")
        held.set()
        assert free.wait(30)

    holding = asyncio.create_task(database.write(hold))
    await asyncio.to_thread(held.wait, 20)
    with pytest.raises(StorageFailed, match="lock timeout"):
        await impatient.write(lambda c: impatient.lock(c, "environment:e"))
    await impatient.write(lambda c: impatient.lock(c, "environment:f"))
    free.set()
    await holding
    await impatient.write(lambda c: impatient.lock(c, "environment:e"))


async def test_a_transaction_that_is_forgotten_is_rolled_back(impatient, server):
    """Its locks would stop everybody else."""

    def forgotten(connection):
        put("forgotten")(connection)
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        while server.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [pid]):
            pass
        put("never")(connection)

    with pytest.raises(StorageFailed):
        await impatient.write(forgotten)
    assert await impatient.read(names) == []


async def test_a_server_that_hangs_costs_a_call_its_deadline_and_no_more(impatient, server):
    await warm(impatient)
    with server.frozen():
        # More calls than threads: those that wait for a thread have the same deadline.
        calls = [impatient.write(put(f"w{number}")) for number in range(12)]
        calls += [impatient.read(names) for _ in range(12)]
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if type(outcome) is not OutcomeUnknown] == [StorageFailed] * 24
    async with asyncio.timeout(20):
        await impatient.write(put("after"))
    assert await impatient.read(names) == ["after"]
