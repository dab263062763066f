"""Libraries that are bound to one thread, and code that blocks: each task has a thread, and disturbs nobody."""

from __future__ import annotations

import asyncio
import threading

from tide_sdk.environment import Environment, Start, Step
from tide_sdk.server import EnvironmentServer

OBSERVE = {"turn": 0, "message": {"role": "assistant", "content": "x"}}


class Bound:
    """As Playwright's own objects: good in the thread that made it, nowhere else."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def use(self) -> None:
        assert threading.get_ident() == self.thread, "used in another thread"


class Browser(Environment):
    """Notes each call with the thread in which it ran."""

    log: list[tuple[int, str, int]]

    def __init__(self):
        self.bound = Bound()
        self.note("__init__")

    def note(self, name):
        self.bound.use()
        self.log.append((id(self), name, threading.get_ident()))

    def start(self, task):
        self.note("start")
        return Start("go")

    def step(self, message):
        self.note("step")
        return Step("ok")

    def pause(self):
        self.note("pause")

    def resume(self):
        self.note("resume")

    def end(self, reason):
        self.note("end")


async def begin(client, key="k", **more):
    return (await client.call("POST", "/start", {"environment": "e", "key": key, **more}))[1]["task_id"]


async def test_all_of_a_task_runs_in_one_thread_and_each_task_has_its_own(asgi):
    Browser.log = []
    client = asgi(EnvironmentServer(Browser))

    async def play(key):
        task_id = await begin(client, key)
        assert (await client.call("POST", "/observation", OBSERVE | {"task_id": task_id}))[0] == 200
        await client.call("POST", "/pause", {"task_id": task_id, "epoch": 1})
        await client.call("POST", "/resume", {"task_id": task_id, "epoch": 2})
        assert (await client.call("POST", "/end", {"task_id": task_id}))[1]["outcome"]["kind"] == "aborted"

    await asyncio.gather(*(play(f"k{number}") for number in range(4)))
    threads = {}
    for instance, name, thread in Browser.log:
        threads.setdefault(thread, []).append((instance, name))
    assert len(threads) == 4
    for calls in threads.values():
        assert len({instance for instance, _ in calls}) == 1
        assert [name for _, name in calls] == ["__init__", "start", "step", "pause", "resume", "end"]
    assert threading.get_ident() not in threads


class Blocking(Environment):
    """The method named by the task blocks until the test lets it go."""

    gate: threading.Event
    began: threading.Event
    log: list[str]

    def __init__(self, blocks=""):
        self.blocks = blocks
        self.log.append("__init__")
        self.maybe("__init__")

    def maybe(self, name):
        if self.blocks == name:
            self.began.set()
            self.gate.wait(60)

    def start(self, task):
        self.blocks = self.blocks or task.task.get("blocks", "")
        self.maybe("start")
        self.log.append("start")
        return Start("go")

    def step(self, message):
        self.maybe("step")
        self.log.append("step")
        return Step("ok")

    def end(self, reason):
        self.log.append("end")
        self.maybe("end")


def blocking():
    return type("MyBlocking", (Blocking,), {"gate": threading.Event(), "began": threading.Event(), "log": []})


async def until(condition):
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def test_a_blocking_task_holds_up_neither_another_task_nor_the_health(asgi):
    environment = blocking()
    client = asgi(EnvironmentServer(environment))
    stuck = await begin(client, "stuck", task={"blocks": "step"})
    acting = asyncio.create_task(client.call("POST", "/observation", OBSERVE | {"task_id": stuck}))
    await until(environment.began.is_set)
    other = await begin(client, "other")
    assert (await client.call("POST", "/observation", OBSERVE | {"task_id": other}))[0] == 200
    assert (await client.call("GET", "/health"))[1]["tasks"] == 2
    assert not acting.done()
    environment.gate.set()
    assert (await acting)[0] == 200


async def test_the_end_follows_in_the_same_thread_also_where_a_step_returns_after_everybody_left(asgi):
    environment = blocking()
    client = asgi(EnvironmentServer(environment, limits={"end": 0.05}))
    task_id = await begin(client, task={"blocks": "step"})
    acting = asyncio.create_task(client.call("POST", "/observation", OBSERVE | {"task_id": task_id}))
    await until(environment.began.is_set)
    account = (await client.call("POST", "/end", {"task_id": task_id}))[1]
    assert account["metrics"] == {"end_expired": True}
    assert (await acting)[1]["code"] == "ended"
    assert "end" not in environment.log
    environment.gate.set()
    await until(lambda: "end" in environment.log)
    assert environment.log == ["__init__", "start", "step", "end"]


async def test_an_object_that_was_made_too_late_is_ended_and_never_started(asgi):
    environment = blocking()
    client = asgi(EnvironmentServer(environment, options={"blocks": "__init__"}, limits={"start": 0.05, "end": 0.05}))
    status, problem = await client.call("POST", "/start", {"environment": "e", "key": "k"})
    assert (status, problem["code"]) == (410, "expired")
    environment.gate.set()
    await until(lambda: "end" in environment.log)
    assert environment.log == ["__init__", "end"]


async def test_the_thread_ends_with_its_task(asgi):
    environment = blocking()
    client = asgi(EnvironmentServer(environment))
    before = set(threading.enumerate())
    task_id = await begin(client)
    (own,) = set(threading.enumerate()) - before
    assert own.name == "tide-MyBlocking"
    await client.call("POST", "/end", {"task_id": task_id})
    await until(lambda: not own.is_alive())


async def test_async_code_runs_plain_functions_in_the_instances_thread(asgi):
    seen = []

    class Mixed(Environment):
        def __init__(self):
            seen.append(threading.get_ident())

        async def start(self, task):
            seen.append(await self.in_thread(threading.get_ident))
            return Start(str(await self.in_thread(max, 1, 2)))

    client = asgi(EnvironmentServer(Mixed))
    _, started = await client.call("POST", "/start", {"environment": "e", "key": "k"})
    assert started["messages"][0]["content"] == "2"
    assert seen[0] == seen[1] != threading.get_ident()
