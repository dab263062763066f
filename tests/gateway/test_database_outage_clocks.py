"""While the database is away nobody's clock counts: not the tasks', not the owners'."""

from __future__ import annotations

import asyncio
import json

import pytest

from tide_gateway.blobs import BlobStore
from tide_gateway.database import open_database
from tide_gateway.repository import Repository
from tide_gateway.runtimes.fake import FakeRuntime
from tide_gateway.service.tasks import TaskService
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import DatabaseTime
from tide_sdk.wire import StartRequest

LEASE_S = 1.0
AWAY_S = 4.0
IDLE_S = 3.0
"""Shorter than the outage, and longer than all else that the test does."""


async def open_service(url: str, folder):
    spec = EnvironmentSpec.model_validate({"name": "scripted", "runtime": "fake", "limits": {"idle": IDLE_S}})
    database = open_database(url)
    time = DatabaseTime()
    await time.sync(database)
    repository = Repository(database, BlobStore(folder / "blobs"))
    service = TaskService({"scripted": spec}, {"fake": FakeRuntime()}, repository, time, lease_s=LEASE_S)
    await service.open()
    return service, database


@pytest.mark.postgres
async def test_an_outage_of_the_database_ends_no_task_and_breaks_no_promise(tmp_path, fresh_databases, eventually):
    with fresh_databases.fresh("postgres") as url:
        service, database = await open_service(url, tmp_path)
        try:
            body = {"environment": "scripted", "key": "k"}
            task_id = json.loads(await service.start("ann", StartRequest.model_validate(body), body))["task_id"]
            await service.heartbeat("ann", "", IDLE_S)
            fresh_databases.server.stop()
            await asyncio.sleep(AWAY_S)
            assert fresh_databases.server  # runs again
            loop = asyncio.get_running_loop()
            await eventually(
                lambda: not service.members.lapsed(loop.time()), "the replica's heartbeat is written again"
            )
            await service.sweep()
            task = await service.task("ann", task_id)
            assert (task.state.value, task.outcome) == ("waiting", None)
            # And it is a clock again: nobody acts, so it runs out.
            await service.heartbeat("ann", "", 60.0)

            async def expired() -> bool:
                return (await service.task("ann", task_id)).state.value == "ended"

            await eventually(expired, "the idle clock runs on after the outage")
            ended = (await service.task("ann", task_id)).outcome
            assert ended is not None
            assert (ended.kind, ended.clock) == ("expired", "idle")
        finally:
            await service.stop(drain_s=0.0)
            await database.close()
