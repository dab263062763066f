"""Tasks that a gateway of an earlier version left open."""

from __future__ import annotations

import asyncio

from alembic import command
from sqlalchemy import create_engine, text

from tide_gateway.database import database_url as database_url_of
from tide_sdk.migrations import make_config, migrate


async def test_no_task_of_a_gateway_before_the_migration_keeps_its_slot(benches, eventually):
    bench = await benches.open()
    tasks = {name: (await bench.start(name, turns=1))["task_id"] for name in ("waiting", "paused", "done", "ending")}
    await bench.pause(tasks["paused"])
    await benches.crash(bench, servers_too=True)
    url = database_url_of(benches.url)
    engine = create_engine(url)
    with engine.begin() as connection:
        for name in ("done", "ending"):
            connection.execute(text("UPDATE tasks SET state = :s WHERE task_id = :t"), {"s": name, "t": tasks[name]})
    engine.dispose()
    await asyncio.to_thread(command.downgrade, make_config("gateway", url), "gateway_0001")
    await asyncio.to_thread(migrate, "gateway", url)
    after = await benches.open()

    async def freed() -> bool:
        await after.service.sweep()
        return await after.freed()

    await eventually(freed, "every task has let go of its slot")
