"""One contract for all runtimes: what the gateway may rely on, whatever hosts the environment servers."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from runtime_bench import RuntimeBench

from tide_gateway import upstream
from tide_gateway.runtimes import Gone, LaunchFailed, Place, Runtime, Server
from tide_sdk.http import TransportError

KINDS = {"fake": "", "process": "", "docker": "docker", "remote": "", "ray": "ray"}
"""Each kind and the marker of the engine that it needs."""
LAUNCH_S = 60.0
BOUND_S = 30.0


def kinds() -> list:
    return [
        pytest.param(kind, marks=[getattr(pytest.mark, KINDS[kind])] if KINDS[kind] else [], id=kind) for kind in KINDS
    ]


@pytest.fixture(params=kinds())
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RuntimeBench]:
    module = importlib.import_module(f"runtime_bench_{request.param}")
    async with module.bench(tmp_path) as made:
        yield made


def name_of(bench: RuntimeBench, number: int = 0) -> str:
    # Unique for ever, also on an engine that keeps the names of an earlier run.
    return f"contract-{id(bench):x}-{number}"


async def launch(bench: RuntimeBench, number: int = 0) -> Server:
    return await bench.runtime.launch(name_of(bench, number), number, bench.spec(), LAUNCH_S)


async def attach(bench: RuntimeBench, runtime: Runtime, server: Server) -> Server:
    # Through text, as the row has it.
    place = Place.loads(server.place.dumps())
    return await runtime.attach(server.name, bench.spec(), place, LAUNCH_S)


async def start(server: Server, **script: object) -> str:
    body = {"environment": "scripted", "key": "k", "task": script}
    return (await upstream.start(server, body, BOUND_S))[0].task_id


async def act(server: Server, task_id: str, turn: int) -> dict[str, Any]:
    """The answer, but for the clocks, which go on."""
    _, raw = await upstream.observe(server, task_id, turn, b'{"role":"assistant","content":"go"}', BOUND_S)
    return {name: value for name, value in raw.items() if name != "clocks"}


async def exits(*servers: Server) -> None:
    async with asyncio.timeout(BOUND_S):
        for server in servers:
            await server.exited.wait()


async def test_a_launched_server_is_healthy_and_serves_a_whole_task(bench):
    server = await launch(bench)
    health = await upstream.probe(server)
    assert (health.incarnation, health.capacity) == (server.health.incarnation, 8)
    task_id = await start(server, turns=2)
    assert not (await act(server, task_id, 0))["terminated"]
    assert (await act(server, task_id, 1))["terminated"]
    assert (await upstream.end(server, task_id, "over", BOUND_S))[0] == 1.0


async def test_two_servers_are_two_incarnations(bench):
    first, second = await asyncio.gather(launch(bench, 0), launch(bench, 1))
    assert first.health.incarnation != second.health.incarnation


async def test_another_gateway_attaches_to_the_same_server_and_goes_on_with_its_task(bench):
    first = await launch(bench)
    task_id = await start(first)
    answer = await act(first, task_id, 0)
    second = await attach(bench, bench.again(), first)
    assert second.health.incarnation == first.health.incarnation
    assert second.place.dumps() == first.place.dumps()
    assert await act(second, task_id, 0) == answer, "a repeated turn is answered from the record"
    assert (await act(second, task_id, 1))["info"]["effects"] == 2
    assert (await act(first, task_id, 1))["info"]["effects"] == 2


async def test_attaching_twice_gives_two_servers_that_both_work(bench):
    first = await launch(bench)
    second = await attach(bench, bench.runtime, first)
    for server in (first, second):
        assert (await upstream.probe(server)).incarnation == first.health.incarnation


async def test_servers_outlive_the_runtime_that_launched_them(bench):
    if not bench.survives:
        pytest.skip("servers of this kind end with their runtime")
    first = await launch(bench)
    task_id = await start(first)
    await act(first, task_id, 0)
    await bench.runtime.close()
    await bench.runtime.close()
    second = await attach(bench, bench.again(), first)
    assert second.health.incarnation == first.health.incarnation
    assert (await act(second, task_id, 1))["info"]["effects"] == 2


async def test_a_destroyed_server_answers_nobody_and_is_named_by_no_survey(bench):
    if not bench.owned:
        pytest.skip("servers of this kind are somebody else's")
    server, kept = await launch(bench, 0), await launch(bench, 1)
    assert {server.name, kept.name} <= await bench.runtime.survey()
    await bench.runtime.destroy(server.name, bench.spec(), server.place, 1.0)
    await exits(server)
    with pytest.raises(TransportError):
        await upstream.probe(server)
    with pytest.raises(upstream.EnvironmentLost):
        await upstream.end(server, "t", "over", 5.0)
    names = await bench.runtime.survey()
    assert server.name not in names
    assert kept.name in names
    with pytest.raises(Gone):
        await attach(bench, bench.again(), server)
    await upstream.probe(kept)


async def test_destroying_twice_or_what_never_was_is_no_fault(bench):
    server = await launch(bench)
    for _ in range(2):
        await bench.runtime.destroy(server.name, bench.spec(), server.place, 1.0)
    await bench.runtime.destroy(server.name, None, None, 0.0)
    await bench.runtime.destroy(name_of(bench, 99), bench.spec(), None, 1.0)


@pytest.mark.parametrize("knows_place", [True, False], ids=["place", "no-place"])
async def test_a_gateway_destroys_what_another_launched(bench, knows_place):
    if not bench.owned:
        pytest.skip("servers of this kind are somebody else's")
    server = await launch(bench)
    other = bench.again()
    await other.destroy(server.name, bench.spec(), server.place if knows_place else None, 1.0)
    await exits(server)
    assert server.name not in await other.survey()
    with pytest.raises(TransportError):
        await upstream.probe(server)


async def test_a_server_killed_from_outside_is_noticed_by_all_gateways(bench):
    first = await launch(bench)
    second = await attach(bench, bench.again(), first)
    await bench.kill(first)
    await exits(first, second)
    with pytest.raises(Gone):
        await attach(bench, bench.again(), first)


async def test_attaching_to_nothing_says_so(bench):
    server = await launch(bench)
    await bench.kill(server)
    await exits(server)
    await bench.runtime.destroy(server.name, bench.spec(), server.place, 0.0)
    with pytest.raises(Gone):
        await bench.runtime.attach(server.name, bench.spec(), server.place, 5.0)


async def test_a_server_that_never_becomes_healthy_fails_its_launch_and_leaves_nothing(bench):
    name = name_of(bench)
    with pytest.raises(LaunchFailed):
        await bench.runtime.launch(name, 0, bench.spec(healthy=False), 3.0)
    assert name not in await bench.runtime.survey()


async def test_a_cancelled_launch_leaves_nothing(bench, eventually):
    name = name_of(bench)
    launching = asyncio.create_task(bench.runtime.launch(name, 0, bench.spec(healthy=False), LAUNCH_S))
    if bench.owned:

        async def exists() -> bool:
            return name in await bench.runtime.survey()

        await eventually(exists, "it exists")
    else:
        await asyncio.sleep(0)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    assert name not in await bench.runtime.survey()


async def test_a_frozen_server_is_the_same_when_it_is_thawed(bench):
    if not bench.freezes:
        pytest.skip("servers of this kind cannot be frozen")
    server = await launch(bench)
    task_id = await start(server)
    for _ in range(2):
        await bench.runtime.freeze(server, True)
    with pytest.raises(TransportError):
        await server.channel.request("GET", "/health", timeout_s=0.5)
    acting = asyncio.create_task(act(server, task_id, 0))
    for _ in range(2):
        await bench.runtime.freeze(server, False)
    assert (await acting)["info"]["effects"] == 1
    assert (await upstream.probe(server)).incarnation == server.health.incarnation
    assert not server.exited.is_set()


async def test_a_frozen_server_is_thawed_by_whoever_attaches(bench):
    if not bench.freezes:
        pytest.skip("servers of this kind cannot be frozen")
    server = await launch(bench)
    await bench.runtime.freeze(server, True)
    spec = bench.spec().model_copy(update={"freeze": True})
    found = await bench.again().attach(server.name, spec, server.place, 20.0)
    assert found.health.incarnation == server.health.incarnation
    assert (await upstream.probe(server)).incarnation == server.health.incarnation


async def test_a_server_that_is_gone_cannot_be_frozen(bench):
    if not bench.freezes:
        pytest.skip("servers of this kind cannot be frozen")
    server = await launch(bench)
    await bench.runtime.destroy(server.name, bench.spec(), server.place, 0.0)
    with pytest.raises(Gone):
        await bench.runtime.freeze(server, True)


async def test_many_parallel_launches_give_as_many_servers(bench):
    servers = await asyncio.gather(*(launch(bench, number) for number in range(bench.num_servers)))
    assert len({server.health.incarnation for server in servers}) == bench.num_servers
    if bench.owned:
        assert {server.name for server in servers} <= await bench.runtime.survey()
    await asyncio.gather(*(bench.runtime.destroy(server.name, bench.spec(), server.place, 1.0) for server in servers))
    assert not await bench.runtime.survey() & {server.name for server in servers}
