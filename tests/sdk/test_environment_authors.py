"""What authors may rely on, and what a stubborn author's code cannot do."""

from __future__ import annotations

import asyncio

import pytest

from tide_sdk.environment import Environment, Start, Step
from tide_sdk.server import EnvironmentServer


def say(task_id, turn=0):
    return {"task_id": task_id, "turn": turn, "message": {"role": "assistant", "content": "x"}}


async def start(client):
    return (await client.call("POST", "/start", {"environment": "e", "key": "k"}))[1]["task_id"]


class Stubborn(Environment):
    """Takes no cancellation for an answer."""

    def __init__(self, fail=False):
        self.fail = fail

    def start(self, task):
        return Start("go")

    async def step(self, message):
        Stubborn.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.fail:
                raise ValueError("late") from None
        return Step("late", reward=5.0)


@pytest.mark.parametrize("fail", [False, True])
async def test_a_result_that_comes_after_the_cut_changes_nothing(asgi, fail):
    Stubborn.began = asyncio.Event()
    client = asgi(EnvironmentServer(Stubborn, options={"fail": fail}))
    task_id = await start(client)
    acting = asyncio.create_task(client.call("POST", "/observation", say(task_id)))
    await Stubborn.began.wait()
    account = (await client.call("POST", "/end", {"task_id": task_id}))[1]
    assert (account["reward"], account["turns"], account["outcome"]["kind"]) == (0.0, 0, "aborted")
    assert (await acting)[1]["code"] == "ended"
    assert (await client.call("POST", "/observation", say(task_id)))[1]["code"] == "ended"
    assert (await client.call("POST", "/end", {"task_id": task_id}))[1] == account


class Overlapping(Environment):
    """Notes when its methods begin and end; each gives up the loop in between."""

    log: list[str]

    async def _note(self, name):
        self.log.append(f"{name} begins")
        for _ in range(3):
            await asyncio.sleep(0)
        self.log.append(f"{name} ends")

    async def start(self, task):
        await self._note("start")
        return Start("go")

    async def step(self, message):
        await self._note("step")
        return Step("ok")

    async def pause(self):
        await self._note("pause")

    async def resume(self):
        await self._note("resume")


async def test_the_calls_of_one_instance_never_overlap(asgi):
    Overlapping.log = []
    client = asgi(EnvironmentServer(Overlapping))
    task_id = await start(client)
    await asyncio.gather(
        client.call("POST", "/pause", {"task_id": task_id, "epoch": 1}),
        client.call("POST", "/resume", {"task_id": task_id, "epoch": 2}),
        client.call("POST", "/observation", say(task_id)),
    )
    expected = [f"{name} {edge}" for name in ("start", "pause", "resume", "step") for edge in ("begins", "ends")]
    assert Overlapping.log == expected
