"""Transactions come in the order in which they were asked for, whole, and a failed one stops those behind it."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from tide_trainer.persistence.ordered_writes import OrderedWrites


@pytest.fixture
async def engine(tmp_path):
    made = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'x.sqlite3'}")
    async with made.begin() as connection:
        await connection.execute(text("CREATE TABLE t (n INTEGER UNIQUE)"))
    yield made
    await made.dispose()


def add(n: int):
    return text(f"INSERT INTO t VALUES ({n})")


async def stored(engine) -> list[int]:
    async with engine.connect() as connection:
        return [n for (n,) in await connection.execute(text("SELECT n FROM t ORDER BY rowid"))]


async def test_the_order_is_that_of_the_calls_not_of_the_awaits(engine):
    writes = OrderedWrites(engine)
    asked = [writes.write(add(n)) for n in range(50)]
    await asyncio.gather(*reversed(asked))
    assert await stored(engine) == list(range(50))


async def test_who_is_cancelled_while_waiting_has_written_nevertheless(engine):
    writes = OrderedWrites(engine)
    first, second = writes.write(add(1)), writes.write(add(2), add(3))
    first.cancel()
    assert await second == [1, 1]
    assert await stored(engine) == [1, 2, 3]


async def test_a_failed_transaction_stops_all_behind_it(engine):
    writes = OrderedWrites(engine)
    await writes.write(add(1))
    with pytest.raises(SQLAlchemyError):
        await writes.write(add(2), add(1))
    with pytest.raises(SQLAlchemyError):
        await writes.write(add(4))
    await writes.close()
    assert await stored(engine) == [1]
