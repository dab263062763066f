"""What the fake runtime shows beside the runtimes' contract, so that tests of the service can rely on it."""

from __future__ import annotations

import asyncio
import base64

import pytest

from tide_gateway import upstream
from tide_gateway.runtimes import LaunchFailed
from tide_gateway.runtimes.fake import FakeRuntime, World
from tide_gateway.specs import EnvironmentSpec
from tide_sdk.http import DeadlineExceeded

SPEC = EnvironmentSpec(name="scripted", runtime="fake", capacity=8)


async def start(server, **script):
    return (await upstream.start(server, {"environment": "scripted", "key": "k", "task": script}, 5.0))[0]


async def test_a_frozen_server_does_nothing_until_it_is_thawed():
    runtime = FakeRuntime()
    server = await runtime.launch("one", 0, SPEC, 5.0)
    task_id = (await start(server)).task_id
    await runtime.freeze(server, True)
    assert runtime.world.frozen == {"one"}
    acting = asyncio.create_task(upstream.observe(server, task_id, 0, b'{"role":"assistant"}', 5.0))
    with pytest.raises(DeadlineExceeded):
        await server.channel.request("GET", "/health", timeout_s=0.01)
    assert runtime.launched["one"].tasks[task_id].effects == 0
    await runtime.freeze(server, False)
    assert (await acting)[1]["info"]["effects"] == 1


async def test_a_killed_server_that_was_frozen_fails_its_calls():
    runtime = FakeRuntime()
    server = await runtime.launch("one", 0, SPEC, 5.0)
    await runtime.freeze(server, True)
    asking = asyncio.create_task(upstream.end(server, "t", "over", 5.0))
    await asyncio.sleep(0)
    runtime.world.kill("one")
    with pytest.raises(upstream.EnvironmentLost):
        await asking
    assert runtime.world.frozen == set()


async def test_a_server_that_is_destroyed_while_it_is_launched_does_not_come_to_life(eventually):
    world = World()
    runtime = FakeRuntime(world)
    runtime.launch_s = 60.0
    launching = asyncio.create_task(runtime.launch("one", 0, SPEC, 90.0))
    await eventually(lambda: world.names() == {"one"}, "it is being launched")
    await FakeRuntime(world).destroy("one", None, None, 0.0)
    with pytest.raises(LaunchFailed):
        await launching
    assert (world.names(), world.launched) == (set(), {})


async def test_launches_fail_as_often_as_told():
    runtime = FakeRuntime()
    runtime.num_failures = 1
    with pytest.raises(LaunchFailed):
        await runtime.launch("one", 0, SPEC, 5.0)
    await runtime.launch("two", 0, SPEC, 5.0)
    assert await runtime.survey() == {"two"}
    with pytest.raises(ValueError, match="used twice"):
        await runtime.launch("two", 0, SPEC, 5.0)


async def test_a_screenshot_has_the_size_that_was_asked_for():
    server = await FakeRuntime().launch("one", 0, SPEC, 5.0)
    first = await start(server, screenshot_bytes=1000, text_bytes=3)
    text, image = first.messages[0].content
    assert text["text"] == "ooo"
    assert len(base64.b64decode(image["image_url"]["url"].partition(",")[2])) == 1000


async def test_a_server_remembers_a_bounded_number_of_ended_tasks(monkeypatch):
    monkeypatch.setattr("tide_gateway.runtimes.scripted._MAX_REMEMBERED", 10)
    runtime = FakeRuntime()
    server = await runtime.launch("one", 0, SPEC, 5.0)
    for number in range(30):
        body = {"environment": "scripted", "key": f"k{number}", "task": {}}
        task_id = (await upstream.start(server, body, 5.0))[0].task_id
        await upstream.end(server, task_id, "over", 5.0)
    environment = runtime.launched["one"]
    assert (len(environment.keys), len(environment.accounts)) == (10, 10)
