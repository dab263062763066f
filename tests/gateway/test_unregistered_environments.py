"""An environment that was taken out of the file: what an earlier gateway had in flight for it ends at once."""

from __future__ import annotations

import asyncio

from tide_gateway.blobs import BlobStore
from tide_gateway.database import open_database
from tide_gateway.repository import Repository
from tide_gateway.runtimes.fake import FakeRuntime
from tide_gateway.service.tasks import TaskService
from tide_gateway.specs import EnvironmentSpec


async def test_a_start_in_flight_ends_where_its_environment_is_registered_no_more(benches, eventually, tmp_path):
    bench = await benches.open()
    starting = asyncio.create_task(bench.start(start_s=3600.0))

    async def placed() -> bool:
        return any(num_tasks for _, _, num_tasks in await bench.service.servers())

    await eventually(placed, "the start is under way")
    await benches.crash(bench)
    await asyncio.gather(starting, return_exceptions=True)
    database = open_database(benches.url)
    other = EnvironmentSpec(name="other", runtime="fake")
    repository = Repository(database, BlobStore(tmp_path / "blobs"))
    after = TaskService(
        {"other": other}, {"fake": FakeRuntime(benches.world)}, repository, benches.time, clock_sweeps=False
    )
    try:
        await after.open()

        async def ended() -> bool:
            tasks = await after.tasks("local", limit=1, after=None, state=None, environment=None)
            return tasks[0].outcome is not None and tasks[0].outcome.reason == "environment_lost"

        await eventually(ended, "the start has failed")
    finally:
        await after.stop(drain_s=0.0)
        await database.close()
