"""An environment that is not in every gateway's file: its tasks end only where no gateway is left that knows it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tide_gateway.blobs import BlobStore
from tide_gateway.database import open_database
from tide_gateway.repository import Repository
from tide_gateway.runtimes.fake import FakeRuntime
from tide_gateway.service.tasks import TaskService
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.errors import TideError


async def test_a_start_in_flight_ends_where_its_environment_is_registered_no_more(benches, eventually, tmp_path):
    bench = await benches.open()
    starting = asyncio.create_task(bench.start(start_s=3600.0))

    async def placed() -> bool:
        return any(num_tasks for _, _, num_tasks in await bench.service.servers())

    await eventually(placed, "the start is under way")
    await benches.crash(bench)
    await asyncio.gather(starting, return_exceptions=True)
    async with without_it(benches, tmp_path) as after:

        async def ended() -> bool:
            tasks = await after.tasks("local", limit=1, after=None, state=None, environment=None)
            return tasks[0].outcome is not None and tasks[0].outcome.reason == "environment_lost"

        await eventually(ended, "the start has failed")


@contextlib.asynccontextmanager
async def without_it(benches, folder):
    """A service on the same database that registers another environment only."""
    database = open_database(benches.url)
    repository = Repository(database, BlobStore(folder / "blobs"))
    other = {"other": EnvironmentSpec(name="other", runtime="fake")}
    service = TaskService(other, {"fake": FakeRuntime(benches.world)}, repository, benches.time, clock_sweeps=False)
    try:
        await service.open()
        yield service
    finally:
        await service.stop(drain_s=0.0)
        await database.close()


@pytest.mark.postgres
async def test_a_replica_that_does_not_know_the_environment_leaves_its_tasks_alone(
    benches_class, fresh_databases, tmp_path
):
    with fresh_databases.fresh("postgres") as url:
        benches = benches_class(url, tmp_path)
        bench = await benches.open()
        task_id = (await bench.start())["task_id"]
        async with without_it(benches, tmp_path) as stranger:
            with pytest.raises(TideError, match="call another one"):
                await stranger.observe("local", task_id, 0, {"role": "assistant", "content": "go"})
            benches.time.advance(30.0)  # the idle clock runs out
            await bench.service._sweeper.beat_once()
            await stranger._sweeper.expire()
            assert await bench.state(task_id) == "waiting"
        await bench.service.sweep()
        task = await bench.service.task("local", task_id)
        assert task.outcome is not None
        assert (task.outcome.kind, task.outcome.clock) == ("expired", "idle")
        await benches.close()
