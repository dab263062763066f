"""A worker plays what it is told, reports every task once, and ends its tasks at the gateway when it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from played_world import PlayedWorld

from tide_trainer.channel import Channel, serve_channel
from tide_trainer.cluster.local import LocalProcesses
from tide_trainer.loop_lag import BLOCKED_EXIT_CODE

AGENTS = textwrap.dedent("""
    import asyncio, time
    from tide_sdk import ImageWindow, agent, chat_agent

    @agent
    async def mixed(ctx):
        how = ctx.task.task.get("how")
        if how == "raise":
            raise ValueError("the agent is wrong")
        if how == "exit":
            raise SystemExit(3)
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "base":
            raise BaseException("odd")
        if how == "block":
            time.sleep(1.6)
        if how == "hang":
            time.sleep(600)
        if how == "odd":
            ctx.messages.append({"role": "user", "content": {1, 2}})
            return 0.5
        if how == "large":
            ctx.messages.append({"role": "user", "content": "x" * 70_000_000})
            return 0.5
        if how == "wait":
            await asyncio.sleep(600)
        await chat_agent.function(ctx)

    @agent
    async def windowed(ctx):
        if ctx.task.task.get("how") == "own":
            ctx.images.window = ImageWindow(3, 2)
        window = ctx.images.window
        ctx.messages.append({"role": "user", "content": str(window and (window.max_images, window.keep))})
        return 0.5

    @agent
    def plain(ctx):
        if ctx.task.task.get("how") == "hang":
            time.sleep(600)
        while not ctx.done:
            ctx.step("go")
            ctx.report(prompt_tokens=5, completion_tokens=1, growth_tokens=9)
""")


class Main:
    """The main process's side."""

    def __init__(self, tmp_path: Path) -> None:
        self.processes = LocalProcesses(tmp_path / "logs")
        self.world = PlayedWorld()
        self.folder = tmp_path
        self.connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self.started: dict[str, str] = {}
        self.lags: list[float] = []
        self.done: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def start(self, *more: str) -> None:
        (self.folder / "my_agents.py").write_text(AGENTS)
        self.url = await self.world.start()
        self.server = await serve_channel(self.folder / "c" / "w", self.on_connect)
        argv = [sys.executable, "-m", "tide_trainer.loop.agent_worker", "--control", str(self.server.path)]
        argv += ["--agent", "my_agents:mixed", "--gateway", self.url, *more]
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        self.child = await self.processes.spawn("worker", argv, env={"PYTHONPATH": path})
        self.channel = await asyncio.wait_for(self.connected, 20)

    def on_connect(self, channel: Channel) -> None:
        channel.handle("started", lambda event: self.started.update({event["session"]: event["task_id"]}))
        channel.handle("done", self.done.put_nowait)
        channel.handle("lag", lambda event: self.lags.append(event["max_s"]))
        self.connected.set_result(channel)

    def run(self, session: str, how: str | None = None, **spec: Any) -> None:
        """Order a task, with the reporters' token."""
        order = {"environment": "e", "key": f"k-{session}", "task": {"how": how}, "seed": 1, "kind": "train"} | spec
        more = {"api_key": f"key-{session}", "router_url": self.url, "model": "policy"}
        more["footprint_token"] = "reporters"
        self.channel.notify("run", {"session": session, "spec": order} | more)

    async def next_done(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.done.get(), 30)

    async def stop(self) -> None:
        await self.processes.stop_all(10.0)
        await self.server.close()
        await self.world.stop()


@pytest.fixture
async def main(tmp_path):
    main = Main(tmp_path)
    yield main
    await main.stop()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - set by another process
            await asyncio.sleep(0.01)


async def test_a_task_is_played_and_reported_once(main):
    await main.start()
    main.run("run.g.0")
    account = await main.next_done()
    assert (account["session"], account["task_id"]) == ("run.g.0", "t-k-run.g.0")
    assert (account["outcome"], account["reward"], account["turns"], account["error"]) == ("completed", 1.0, 3, None)
    assert account["metrics"] == {"steps": 3}
    assert [m["content"] for m in account["messages"]] == ["you", "go", "yes", "go", "yes", "go", "yes"]
    assert main.started == {"run.g.0": "t-k-run.g.0"}
    assert set(main.world.generated) == {("/sessions/run.g.0/v1/chat/completions", "Bearer key-run.g.0")}
    assert main.world.started[0]["seed"] == 1


async def test_a_plain_agent_plays_and_reports_under_its_sessions_name(main):
    await main.start("--agent", "my_agents:plain")
    main.run("run.g.0")
    account = await main.next_done()
    assert (account["outcome"], account["turns"], account["error"]) == ("completed", 3, None)
    keys, reports = zip(*main.world.reports, strict=True)
    assert set(keys) == {"Bearer reporters"}
    assert [(one["task"], one["turn"], one["growth_tokens"], one["hold"]) for one in reports] == [
        ("run.g.0", turn, 9, True) for turn in (1, 2, 3)
    ]
    sequences = [one["sequence"] for one in reports]
    assert sequences == sorted(set(sequences))


async def test_a_plain_agent_that_blocks_for_ever_keeps_neither_its_loop_nor_the_worker(main):
    await main.start("--agent", "my_agents:plain", "--max-block-s", "6")
    main.run("hang", "hang")
    await until(lambda: main.started)
    main.run("next")
    assert (await main.next_done())["session"] == "next"
    os.kill(main.child.pid, signal.SIGTERM)
    assert await asyncio.wait_for(main.child.wait_dead(), 20) == 1
    assert [body["task_id"] for body in main.world.ended] == ["t-k-next", "t-k-hang"]


async def test_bad_agents_are_data_and_harm_no_other(main):
    await main.start()
    for how in ("raise", "exit", "odd", None):
        main.run(str(how), how)
    main.run("bad order", no_such_field=1)
    accounts = {account["session"]: account for account in [await main.next_done() for _ in range(5)]}
    assert accounts["raise"]["outcome"] == "agent_error"
    assert "the agent is wrong" in accounts["raise"]["error"]
    assert accounts["raise"]["reward"] is None
    assert accounts["exit"]["outcome"] == "agent_error"
    assert "SystemExit" in accounts["exit"]["error"]
    assert (accounts["odd"]["messages"], accounts["odd"]["reward"]) == ([], 0.5)
    assert "left out" in accounts["odd"]["error"]
    assert accounts["None"]["outcome"] == "completed"
    assert accounts["bad order"]["outcome"] == "infrastructure"
    assert "no_such_field" in accounts["bad order"]["error"]
    assert len(main.world.ended) == 4


@pytest.mark.parametrize(("how", "name"), [("cancelled", "CancelledError"), ("base", "BaseException: odd")])
async def test_an_agent_that_raises_what_is_no_exception_is_still_reported(how, name, main):
    await main.start()
    main.run(how, how)
    account = await main.next_done()
    assert (account["outcome"], account["reward"]) == ("agent_error", None)
    assert name in account["error"]
    assert len(main.world.ended) == 1


async def test_messages_larger_than_the_channel_takes_are_left_out_and_harm_no_other(main):
    await main.start()
    main.run("large", "large")
    main.run("wait", "wait")
    account = await main.next_done()
    assert (account["session"], account["messages"], account["reward"]) == ("large", [], 0.5)
    assert "left out" in account["error"]
    main.run("next")
    assert (await main.next_done())["session"] == "next"


async def test_a_blocking_agent_is_seen_as_lag(main):
    await main.start()
    main.run("block", "block")
    assert (await main.next_done())["outcome"] == "completed"
    await until(lambda: main.lags)
    assert main.lags[0] > 1.0
    stats = await main.channel.request("stats", timeout_s=5)
    assert stats["lag_max_s"] > 1.0
    assert (stats["num_done"], stats["tasks"]) == (1, 0)
    assert (await main.channel.request("stats", timeout_s=5))["lag_max_s"] < 1.0


async def test_an_agent_that_blocks_for_ever_ends_the_worker_and_says_where(main):
    await main.start("--max-block-s", "6")
    main.run("hang", "hang")
    assert await asyncio.wait_for(main.child.wait_dead(), 30) == BLOCKED_EXIT_CODE
    assert "my_agents.py" in main.child.tail()
    await asyncio.wait_for(main.channel.wait_closed(), 5)


async def test_abort_ends_the_task_and_reports_nothing(main):
    await main.start()
    main.run("wait", "wait")
    await until(lambda: main.started)
    main.channel.notify("abort", {"session": "wait"})
    main.channel.notify("abort", {"session": "unknown"})
    await until(lambda: main.world.ended)
    main.run("next")
    assert (await main.next_done())["session"] == "next"
    assert (await main.channel.request("stats", timeout_s=5))["tasks"] == 0


async def test_tasks_beyond_the_bound_wait(main):
    await main.start("--max-tasks", "2")
    for number in range(5):
        main.run(str(number), "wait")
    await until(lambda: len(main.started) == 2)
    main.channel.notify("abort", {"session": "0"})
    main.channel.notify("abort", {"session": "4"})
    await until(lambda: len(main.started) == 3)
    assert sorted(main.started) == ["0", "1", "2"]


@pytest.mark.parametrize("end", ["SIGTERM", "channel"])
async def test_stopping_ends_every_task_at_the_gateway(end, main):
    await main.start()
    for number in range(20):
        main.run(str(number), "wait")
    await until(lambda: len(main.started) == 20)
    if end == "SIGTERM":
        os.kill(main.child.pid, signal.SIGTERM)
    else:
        main.channel.close()
    assert await asyncio.wait_for(main.child.wait_dead(), 10) == 0
    assert sorted(body["task_id"] for body in main.world.ended) == sorted(f"t-k-{n}" for n in range(20))


async def test_a_gateway_that_does_not_answer_does_not_keep_the_worker(main):
    await main.start()
    main.run("wait", "wait")
    await until(lambda: main.started)
    main.world.silent = asyncio.Event()
    os.kill(main.child.pid, signal.SIGTERM)
    assert await asyncio.wait_for(main.child.wait_dead(), 15) == 1
    main.world.silent.set()


async def test_a_killed_worker_is_noticed(main):
    await main.start()
    reasons: list[str] = []
    main.channel.on_close(reasons.append)
    os.kill(main.child.pid, signal.SIGKILL)
    await asyncio.wait_for(main.channel.wait_closed(), 5)
    await asyncio.sleep(0)
    assert len(reasons) == 1


async def test_a_wrong_agent_is_told_at_once(tmp_path):
    processes = LocalProcesses(tmp_path / "logs")
    argv = [sys.executable, "-m", "tide_trainer.loop.agent_worker", "--control", "/none", "--gateway", "http://h:1"]
    child = await processes.spawn("worker", [*argv, "--agent", "tide_sdk.agents:nobody"])
    assert await asyncio.wait_for(child.wait_dead(), 20) != 0
    assert "nobody" in child.tail()
    await processes.stop_all(2.0)


@pytest.mark.parametrize(
    ("options", "how", "window"),
    [
        ((), None, "(10, 5)"),
        (("--max-images", "6", "--keep-images", "2"), None, "(6, 2)"),
        (("--max-images", "0"), None, "None"),
        (("--max-images", "0"), "own", "(3, 2)"),
    ],
)
async def test_the_configured_window_is_that_of_agents_that_set_none(main, options, how, window):
    await main.start("--agent", "my_agents:windowed", *options)
    main.run("run.g.0", how)
    assert (await main.next_done())["messages"][-1]["content"] == window
