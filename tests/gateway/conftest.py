"""Fixtures: a migrated database, a service on the fake runtime and manual time, and a real gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from doctor_bench import Doctor
from fresh_databases import FreshDatabases, kind_params
from sqlalchemy import update

from tide_gateway.blobs import BlobStore
from tide_gateway.database import Database, open_database
from tide_gateway.models import ReplicaRow
from tide_gateway.repository import Repository
from tide_gateway.runtimes.fake import FakeRuntime, World
from tide_gateway.service.tasks import TaskService
from tide_gateway.specs import EnvironmentSpec
from tide_gateway.timekeeping import ManualTime
from tide_sdk.wire import EndRequest, EpochRequest, StartRequest

SERVER = str(Path(__file__).with_name("scripted_server.py"))
OWNER = "local"
LIMITS = {"start": 30.0, "idle": 20.0, "turn": 10.0, "active": 100.0, "end": 5.0}


@pytest.fixture(params=kind_params())
def database_url(request: pytest.FixtureRequest, fresh_databases: FreshDatabases) -> Iterator[str]:
    """An empty, migrated database: each test that uses it runs on SQLite and on PostgreSQL."""
    with fresh_databases.fresh(request.param, reuse=True) as url:
        yield url


@dataclass
class Bench:
    """One service with everything that a test moves by hand."""

    service: TaskService
    repository: Repository
    runtime: FakeRuntime
    time: ManualTime
    database: Database
    owner: str = OWNER

    async def start(self, key: str = "k", owner: str = OWNER, attempt: int | None = None, **script: Any) -> dict:
        limits = script.pop("limits", None)
        body: dict[str, Any] = {"environment": "scripted", "key": key, "task": script}
        if attempt is not None:
            body["attempt"] = attempt
        if limits is not None:
            body["limits"] = limits
        request = StartRequest.model_validate(body)
        return json.loads(await self.service.start(owner, request, body))

    async def act(self, task_id: str, turn: int, text: str = "go", owner: str = OWNER) -> dict:
        message = {"role": "assistant", "content": text}
        return json.loads(await self.service.observe(owner, task_id, turn, message))

    async def pause(self, task_id: str, epoch: int | None = None) -> dict:
        return json.loads(await self.service.pause(OWNER, EpochRequest(task_id=task_id, epoch=epoch)))

    async def resume(self, task_id: str, epoch: int | None = None) -> dict:
        return json.loads(await self.service.resume(OWNER, EpochRequest(task_id=task_id, epoch=epoch)))

    async def end(self, task_id: str, reason: str | None = None, owner: str = OWNER) -> dict:
        return json.loads(await self.service.end(owner, EndRequest(task_id=task_id, reason=reason)))

    async def state(self, task_id: str) -> str:
        return (await self.service.task(OWNER, task_id)).state.value

    async def taken(self) -> int:
        """Slots held in the environment, as every replica counts them."""
        return (await self.service.slots(OWNER))["scripted"].taken

    async def freed(self) -> bool:
        return await self.taken() == 0

    def effects(self) -> int:
        return sum(
            task.effects for environment in self.runtime.launched.values() for task in environment.tasks.values()
        )


@dataclass
class Benches:
    """Opens services on one database: a second one after a crash is a restart, beside a first one a replica.

    The scripted environment servers live in `world`, which outlives the services as containers would.
    """

    url: str
    folder: Path
    time: ManualTime = field(default_factory=ManualTime)
    world: World = field(default_factory=World)
    opened: list[Bench] = field(default_factory=list)

    async def open(self, **spec: Any) -> Bench:
        values = {"name": "scripted", "runtime": "fake", "capacity": 16, "limits": LIMITS} | spec
        environment = EnvironmentSpec.model_validate(values)
        database = open_database(self.url)
        repository = Repository(database, BlobStore(self.folder / "blobs"))
        runtime = FakeRuntime(self.world)
        service = TaskService({"scripted": environment}, {"fake": runtime}, repository, self.time, clock_sweeps=False)
        await service.open()
        bench = Bench(service, repository, runtime, self.time, database)
        self.opened.append(bench)
        return bench

    async def crash(self, bench: Bench, *, servers_too: bool = False) -> None:
        """Leave all rows as they are, as a killed process does; then free the tasks of this process.

        Its own row says that the process is dead, as `kill -9` leaves it.
        """
        self.opened.remove(bench)
        dead = update(ReplicaRow).where(ReplicaRow.name == bench.service.replica).values(ticks=-1)
        await bench.database.write(lambda connection: connection.execute(dead))
        await bench.database.close()
        await bench.service._registry.drain()
        await asyncio.gather(*(fleet.close(destroy=False) for fleet in bench.service.fleets.values()))
        if servers_too:
            for name in self.world.names():
                self.world.kill(name)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(90):  # longer than a stop may take
                for bench in self.opened:
                    await bench.service.stop(drain_s=0.0)
                    await bench.database.close()
        except TimeoutError:
            for task in asyncio.all_tasks():
                task.print_stack()
            raise


@pytest.fixture
async def benches(tmp_path: Path, database_url: str) -> AsyncIterator[Benches]:
    benches = Benches(database_url, tmp_path)
    yield benches
    await benches.close()


@pytest.fixture
async def bench(benches: Benches) -> Bench:
    return await benches.open()


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition that other tasks bring about; a bound, not a wait."""
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(0.005)
    raise AssertionError(what)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    return until


@dataclass
class Gateway:
    """A gateway process, as an operator starts it."""

    folder: Path
    process: subprocess.Popen[bytes]
    url: str

    def client(self, token: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30)

    def log(self) -> str:
        return (self.folder / "gateway.log").read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=15)


def write_environments(folder: Path, **options: Any) -> Path:
    command = [sys.executable, SERVER, "--uds", "{uds}", "--capacity", "{capacity}"]
    values = {"command": command, "capacity": 16, "servers": 1, "probe_interval_s": 0.5} | options
    limits = LIMITS | values.pop("limits", {})
    lines = ["[environments.scripted]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    lines += ["[environments.scripted.limits]", *(f"{name} = {value}" for name, value in limits.items())]
    path = folder / "environments.toml"
    path.write_text("\n".join(lines))
    return path


def start_gateway(
    folder: Path, environ: dict[str, str] | None = None, *, serve: Sequence[str] = (), **options: Any
) -> Gateway:
    config = write_environments(folder, **options)
    announce = folder / "announce.json"
    announce.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "tide_gateway", "serve", "--config", str(config), "--port", "0"]
    argv += ["--database", f"sqlite:///{folder / 'gateway.db'}", "--announce", str(announce), *serve]
    with (folder / "gateway.log").open("ab") as log:
        process = subprocess.Popen(argv, stderr=log, stdout=log, env=os.environ | (environ or {}))
    deadline = time.monotonic() + 30
    while not announce.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError((folder / "gateway.log").read_text())
        time.sleep(0.02)
    return Gateway(folder, process, json.loads(announce.read_text())["url"])


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Starts gateways in the test's folder; a second one takes over the first one's database."""
    started: list[Gateway] = []

    def start(environ: dict[str, str] | None = None, *, serve: Sequence[str] = (), **options: Any) -> Gateway:
        gateway = start_gateway(tmp_path, environ, serve=serve, **options)
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        with contextlib.suppress(ProcessLookupError):
            gateway.process.kill()
        gateway.process.wait(timeout=10)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway for all tests of a module that leave it well."""
    running = start_gateway(tmp_path_factory.mktemp("gateway"))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def benches_class() -> type[Benches]:
    """For a test that runs its own event loop."""
    return Benches


@pytest.fixture
async def replicated(fresh_databases: FreshDatabases, tmp_path: Path) -> AsyncIterator[Benches]:
    """Opens replicas on PostgreSQL."""
    with fresh_databases.fresh("postgres") as url:
        benches = Benches(url, tmp_path)
        yield benches
        await benches.close()


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """`tide-gateway doctor` in the test's folder."""
    monkeypatch.delenv("TIDE_GATEWAY_TOKENS", raising=False)
    return Doctor(tmp_path, capsys)
