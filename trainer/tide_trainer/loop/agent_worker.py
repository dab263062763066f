"""`python -m tide_trainer.loop.agent_worker`: a process that plays many tasks with one agent.

    main --run--> worker --POST /start--> gateway          started {session, task_id} --> main
                    | agent: generate (router) and step (gateway), turn after turn
                    +------------------------------------- done {session, outcome, reward, turns, ...} --> main

| from main | payload |
| --- | --- |
| run (event) | {session, api_key, spec, router_url, model, footprint_token?}; spec has the fields of `TaskSpec` |
| abort (event) | {session}: the task is cancelled and ended at the gateway; no `done` follows |
| stats (request) | {} -> {tasks, num_done, num_abandoned, lag_max_s, cpu_s}; abandoned: threads of a plain agent |

Waits for: the engine (through the router's held calls) and environments. At most `--max-tasks` run at once, more wait
in order. The process ends with its channel, or on SIGTERM; all its tasks are then ended at the gateway, in parallel.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import uvloop

from tide_sdk import codec
from tide_sdk.agents import Agent, AgentResult, load_agent
from tide_sdk.client import GatewayClient
from tide_sdk.clocks import ClockName
from tide_sdk.collector import spare_collections
from tide_sdk.context import AgentContext
from tide_sdk.context_images import without_bytes
from tide_sdk.footprints import FootprintReporter
from tide_sdk.image_window import ImageWindow
from tide_sdk.model import ModelEndpoint
from tide_sdk.outcomes import TaskResult, TaskSpec
from tide_sdk.runner import run_task
from tide_sdk.wire import StartResponse
from tide_trainer.agent_modules import make_importable
from tide_trainer.channel import Channel, FrameTooLarge, Handler, connect_channel
from tide_trainer.loop_lag import BlockedLoop, LoopLag
from tide_trainer.settings import gateway_token

_LOG = logging.getLogger(__name__)
STOP_LIMIT_S = 8.0
"""Seconds in which the tasks are ended at the gateway when the process stops; what is left falls to the idle clocks."""
LAG_REPORTED_S = 1.0
WINDOW = ImageWindow()


@dataclass(slots=True)
class _Seen:
    """What the agent's context was, for the messages in the account."""

    context: AgentContext | None = None


class AgentWorker:
    """Plays tasks with one agent.

    Args:
        agent: who plays.
        gateway: where; closed by the caller.
        max_tasks: tasks at once.
        window: what stays of the images in what the model gets, unless the agent sets another; None: all.
    """

    def __init__(
        self, agent: Agent, gateway: GatewayClient, *, max_tasks: int = 512, window: ImageWindow | None = WINDOW
    ) -> None:
        self._agent = agent
        self._window = window
        self._gateway = gateway
        self._attached: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        self._slots = asyncio.Semaphore(max_tasks)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endpoints: dict[tuple[str, str], ModelEndpoint] = {}
        self._reporters: dict[tuple[str, str], FootprintReporter] = {}
        self.lag = LoopLag()
        self.num_done = 0

    def handlers(self) -> dict[str, Handler]:
        """What the main process may ask; given to the channel before it opens, so that no order is missed."""
        return {"run": self.run, "abort": self.abort, "stats": self.stats}

    def attach(self, channel: Channel) -> None:
        """Set the channel to the main process; tasks that were ordered already begin."""
        self._attached.set_result(channel)

    def run(self, order: Mapping[str, Any]) -> None:
        """Begin a task; a session that runs already is left as it is."""
        session = str(order["session"])
        if session in self._tasks:
            _LOG.warning("session %s runs already", session)
            return
        task = asyncio.create_task(self._play(session, order), name=f"task {session}")
        self._tasks[session] = task
        task.add_done_callback(lambda _: self._tasks.pop(session, None))

    def abort(self, order: Mapping[str, Any]) -> None:
        """Cancel a task; it is ended at the gateway. Unknown sessions are over already."""
        task = self._tasks.get(str(order["session"]))
        if task is not None:
            task.cancel()

    def stats(self, _: Any) -> dict[str, Any]:
        """The worker's own numbers; the largest event-loop lag is that since the last call."""
        return {
            "tasks": len(self._tasks),
            "num_done": self.num_done,
            "num_abandoned": self._agent.threads.num_abandoned,
            "lag_max_s": self.lag.take_max_s(),
            "cpu_s": time.process_time(),
        }

    async def close(self) -> int:
        """Cancel all tasks and wait at most `STOP_LIMIT_S` until they are ended at the gateway; how many are not."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        late: set[asyncio.Task[None]] = set()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_LIMIT_S)
        if late:
            _LOG.error("%d tasks were not ended at the gateway within %s s", len(late), STOP_LIMIT_S)
        for endpoint in self._endpoints.values():
            await endpoint.aclose()
        return len(late)

    async def _play(self, session: str, order: Mapping[str, Any]) -> None:
        seen = _Seen()
        channel = await asyncio.shield(self._attached)
        try:
            async with self._slots:
                result = await run_task(
                    self._watched(seen),
                    _spec(order["spec"]),
                    self._gateway,
                    self._endpoint(session, order),
                    on_started=lambda started: _started(channel, session, started),
                    reporter=self._reporter(order),
                    report_as=session,
                )
        except Exception as error:  # noqa: BLE001 - the boundary: a bad order or rollout is data, not a crash
            _LOG.exception("task %s could not be run", session)
            result = TaskResult(None, "infrastructure", None, 0, error=f"{type(error).__name__}: {error}")
        self.num_done += 1
        _done(channel, session, result, seen.context)

    def _watched(self, seen: _Seen) -> Agent:
        async def play(ctx: AgentContext) -> AgentResult:
            seen.context, ctx.images.window = ctx, self._window
            return await self._agent(ctx)

        return replace(self._agent, function=play)

    def _endpoint(self, session: str, order: Mapping[str, Any]) -> ModelEndpoint:
        router_url, model = str(order["router_url"]).rstrip("/"), str(order["model"])
        url = f"{router_url}/sessions/{quote(session, safe='')}/v1"
        shared = self._endpoints.get((router_url, model))
        if shared is None:
            shared = self._endpoints[router_url, model] = ModelEndpoint(url, model=model, image_references=True)
        return shared.at(base_url=url, api_key=str(order["api_key"]))

    def _reporter(self, order: Mapping[str, Any]) -> FootprintReporter | None:
        token = order.get("footprint_token")
        if token is None:
            return None
        key = (str(order["router_url"]), str(token))
        if key not in self._reporters:
            self._reporters[key] = FootprintReporter(key[0], token=key[1])
        return self._reporters[key]


def _started(channel: Channel, session: str, started: StartResponse) -> None:
    if not channel.closed:
        channel.notify("started", {"session": session, "task_id": started.task_id})


def _done(channel: Channel, session: str, result: TaskResult, context: AgentContext | None) -> None:
    if channel.closed:
        return
    account: dict[str, Any] = {
        "session": session,
        "task_id": result.task_id,
        "outcome": result.outcome,
        "reward": result.reward,
        "turns": result.turns,
        "metrics": dict(result.metrics),
        "error": result.error,
        "cleanup_errors": list(result.cleanup_errors),
        "retry_after_s": result.retry_after_s,
        "messages": without_bytes(context.messages) if context is not None else [],
        "rewards": context.rewards if context is not None else [],
    }
    try:
        channel.notify("done", account)
    except (codec.CodecError, FrameTooLarge) as error:
        # The agent put something into its messages or metrics that is not JSON, or too much: its result still counts.
        note = f"messages and metrics are left out: {error}"
        told = f"{result.error}; {note}" if result.error else note
        channel.notify("done", account | {"metrics": {}, "messages": [], "error": told})


def _spec(data: Mapping[str, Any]) -> TaskSpec:
    limits = data.get("limits")
    clocks = None if limits is None else {ClockName(name): float(value) for name, value in limits.items()}
    return TaskSpec(**{**data, "limits": clocks})


async def _report_lag(worker: AgentWorker, channel: Channel) -> None:
    reported_s = 0.0
    while True:
        await asyncio.sleep(1.0)
        if worker.lag.max_s > max(LAG_REPORTED_S, reported_s):
            reported_s = worker.lag.max_s
            _LOG.warning("the event loop was blocked for %.1f s: the agent must not block, use await", reported_s)
            channel.notify("lag", {"max_s": reported_s})


async def work(arguments: argparse.Namespace) -> None:
    """Play tasks until SIGTERM or until the main process is gone."""
    make_importable(arguments.folder)
    agent = load_agent(arguments.agent)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = GatewayClient(arguments.gateway, token=gateway_token(), references=True)
    window = ImageWindow(arguments.max_images, arguments.keep_images) if arguments.max_images else None
    worker = AgentWorker(agent, gateway, max_tasks=arguments.max_tasks, window=window)
    channel = await connect_channel(arguments.control, worker.handlers(), name=arguments.name)
    channel.on_close(lambda _: stop.set())
    worker.attach(channel)
    watch = BlockedLoop(loop, arguments.max_block_s)
    watch.start()
    spare_collections()
    background = [asyncio.create_task(worker.lag.run()), asyncio.create_task(_report_lag(worker, channel))]
    try:
        await stop.wait()
        if await worker.close():
            logging.shutdown()
            os._exit(1)  # what cannot end its task would keep the loop, and so the process, for half a minute more
    finally:
        watch.stop()
        for task in background:
            task.cancel()
        await gateway.aclose()
        channel.close()


def main() -> None:
    """Parse the command line and play."""
    parser = argparse.ArgumentParser(prog="python -m tide_trainer.loop.agent_worker")
    parser.add_argument("--control", required=True, metavar="SOCKET", help="channel of the main process")
    parser.add_argument("--agent", required=True, metavar="MODULE:FUNCTION", help="an @agent function")
    parser.add_argument("--folder", default="", metavar="DIR", help="its modules can be imported too")
    parser.add_argument("--gateway", required=True, metavar="URL", help="its token is taken from TIDE_GATEWAY_TOKEN")
    parser.add_argument("--name", default="agent-worker", help="what the main process calls it")
    parser.add_argument("--max-tasks", type=int, default=512, help="tasks at once; more wait in order")
    parser.add_argument("--max-images", type=int, default=10, help="images at which older ones go; 0: all stay")
    parser.add_argument("--keep-images", type=int, default=5, help="images that stay then")
    parser.add_argument("--max-block-s", type=float, default=300.0, help="end if the agent blocks the loop for longer")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for client in ("httpx", "httpx2"):  # below agents' frameworks; they log a line for each call
        logging.getLogger(client).setLevel(logging.WARNING)
    uvloop.run(work(parser.parse_args()))


if __name__ == "__main__":
    main()
