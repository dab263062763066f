"""An environment that is not in every gateway's file: its tasks end only where no gateway is left that knows it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tide_gateway.blobs import BlobStore
from tide_gateway.database import open_database
from tide_gateway.hosting import make_runtimes
from tide_gateway.repository import Repository
from tide_gateway.runtimes.fake import FakeRuntime, World
from tide_gateway.service.tasks import TaskService
from tide_gateway.settings import GatewaySettings
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


class Elsewhere(FakeRuntime):
    """Another runtime: nobody may ask it for what it never launched."""

    async def attach(self, name, spec, place, timeout_s):
        raise AssertionError(f"asked for {name}")


class Placed(FakeRuntime):
    """Remembers with which place it was told to destroy."""

    async def destroy(self, name, spec, place, grace_s):
        self.places = [*getattr(self, "places", []), place]
        await super().destroy(name, spec, place, grace_s)


async def test_a_server_of_an_older_files_runtime_is_removed_by_that_runtime_and_place(benches, eventually, tmp_path):
    bench = await benches.open()
    task_id = (await bench.start())["task_id"]
    (server,) = benches.world.names()
    await benches.crash(bench)
    remote = {"urls": ["http://127.0.0.1:9"]}
    spec = EnvironmentSpec(name="scripted", runtime="remote", capacity=16, remote=remote)  # pyright: ignore[reportArgumentType]
    database = open_database(benches.url)
    repository = Repository(database, BlobStore(tmp_path / "blobs"))
    old, new = Placed(benches.world), Elsewhere(World())
    service = TaskService(
        {"scripted": spec}, {"fake": old, "remote": new}, repository, benches.time, clock_sweeps=False
    )
    try:
        await service.open()

        async def over() -> bool:
            outcome = (await service.task("local", task_id)).outcome
            return outcome is not None and outcome.reason == "environment_lost"

        await eventually(over, "its task has ended")
        assert server not in benches.world.names()
        assert [place.url for place in old.places if place is not None] == [f"fake:{server}"]
        assert await repository.instances.all() == []
    finally:
        await service.stop(drain_s=0.0)
        await database.close()


async def test_runtimes_of_stored_servers_are_made_although_no_environment_asks_for_them(tmp_path):
    pytest.importorskip("docker")
    settings = GatewaySettings(environments={"other": EnvironmentSpec(name="other", runtime="fake")})
    runtimes = await make_runtimes(settings, "tide", tmp_path, 0.0, {"docker", "process"})
    assert "docker" in runtimes
    for runtime in runtimes.values():
        await runtime.close()


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
