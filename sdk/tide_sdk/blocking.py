"""Plain (`def`) agents: each task's function runs in a thread of its own, with a context whose calls block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from tide_sdk.agents import AgentThreads
from tide_sdk.cleanup import closing, entered_plain
from tide_sdk.context import AgentContext
from tide_sdk.context_images import ContextImages
from tide_sdk.environment import StartInfo
from tide_sdk.instance_thread import InstanceThread
from tide_sdk.wire import ObservationResponse

_log = logging.getLogger("tide_sdk.blocking")
T = TypeVar("T")
MAX_THREADS = 1024
"""Threads of a plain agent that may be in its function, abandoned ones included; a task beyond them fails."""


class BlockingContext:
    """One task, from a plain agent's side: `AgentContext` with calls that block its thread.

    Once the task is cancelled or its deadline has passed, the next call raises `asyncio.CancelledError`, which is no
    `Exception`: let it pass. Use it in the agent's own thread only.

    Attributes: see `AgentContext`.
    """

    def __init__(
        self, ctx: AgentContext, loop: asyncio.AbstractEventLoop, call: Callable[..., Coroutine[Any, Any, Any]]
    ) -> None:
        self._ctx = ctx
        self._loop = loop
        self._call = call
        self._waiting: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    @property
    def task(self) -> StartInfo:
        """What was asked for."""
        return self._ctx.task

    @property
    def task_id(self) -> str:
        """The task's id at the gateway."""
        return self._ctx.task_id

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far; may be changed before `generate`."""
        return self._ctx.messages

    @messages.setter
    def messages(self, messages: list[dict[str, Any]]) -> None:
        self._ctx.messages = messages

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tool definitions that the model is offered."""
        return self._ctx.tools

    @tools.setter
    def tools(self, tools: list[dict[str, Any]]) -> None:
        self._ctx.tools = tools

    @property
    def turn(self) -> int:
        """The number of the next turn."""
        return self._ctx.turn

    @property
    def done(self) -> bool:
        """True once the environment or a limit has ended the task."""
        return self._ctx.done

    @property
    def limit(self) -> str | None:
        """The agent's limit that has ended its play."""
        return self._ctx.limit

    @property
    def reward(self) -> float:
        """The sum of the turns' rewards so far."""
        return self._ctx.reward

    @property
    def observation(self) -> ObservationResponse | None:
        """The environment's latest answer."""
        return self._ctx.observation

    @property
    def completion(self) -> dict[str, Any] | None:
        """The latest completion as the server gave it."""
        return self._ctx.completion

    @property
    def openai_base_url(self) -> str:
        """For agents built on an OpenAI client."""
        return self._ctx.openai_base_url

    @property
    def api_key(self) -> str:
        """The key that goes with it."""
        return self._ctx.api_key

    @property
    def model(self) -> str:
        """The model's name there."""
        return self._ctx.model

    def generate(self, **sampling: Any) -> dict[str, Any]:
        """See `AgentContext.generate`."""
        return self._wait(self._ctx.generate(**sampling))

    def step(self, reply: Mapping[str, Any] | str) -> ObservationResponse:
        """See `AgentContext.step`."""
        return self._wait(self._ctx.step(reply))

    @property
    def images(self) -> ContextImages:
        """Has the window that prunes images; `read_image` reads one."""
        return self._ctx.images

    def sendable_messages(self) -> list[dict[str, Any]]:
        """See `AgentContext.sendable_messages`."""
        return self._wait(self._ctx.sendable_messages())

    def read_image(self, part: Mapping[str, Any]) -> bytes:
        """See `ContextImages.read`."""
        return self._wait(self._ctx.images.read(part))

    def report(self, **tokens: Any) -> bool:
        """See `AgentContext.report`."""
        return self._wait(self._ctx.report(**tokens))

    def add_tool(self, function: Callable[..., Any], **about: Any) -> None:
        """See `AgentContext.add_tool`; a plain function is run in the agent's thread."""
        self._ctx.add_tool(function, **about)

    def run_tools(self, reply: Mapping[str, Any]) -> bool:
        """See `AgentContext.run_tools`."""
        if self._stopped:
            raise _stopped()
        answers: list[tuple[str, Any]] = []
        for call_id, run in self._ctx.local_tools.plan(reply):
            result = run()
            answers.append((call_id, self._wait(_awaited(result)) if inspect.isawaitable(result) else result))
        return self._ctx.tools_ran(reply, answers)

    def on_end(self, function: Callable[[], Any]) -> None:
        """See `AgentContext.on_end`; a plain callable is called in the agent's thread."""
        self._ctx.cleanups.push(*closing(function, self._call))

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a plain context manager and have it left in the agent's thread when the task ends."""
        value, name, close = entered_plain(manager)
        self._ctx.cleanups.push(name, lambda failure: self._call(close, failure))
        return value

    def stop(self) -> None:
        """Let the call that waits, and every later one, raise; called on the event loop."""
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._stopped or self._loop.is_closed():
            coroutine.close()
            raise _stopped()
        if _running_loop() is self._loop:
            coroutine.close()
            raise RuntimeError(
                "a plain agent's context blocks, and this code runs on the event loop: let tools and clean-ups that "
                "use it be plain functions too"
            )
        waiting = self._waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            if self._stopped:  # between the look above and now
                waiting.cancel()
            return waiting.result()
        except concurrent.futures.CancelledError:
            raise _stopped() from None
        finally:
            self._waiting = None


async def play_in_thread(
    name: str, function: Callable[[BlockingContext], Any], ctx: AgentContext, threads: AgentThreads
) -> Any:
    """Run a plain agent's function in a thread of the task; its clean-ups run there too.

    When this is cancelled the thread is told, and waited for as the first of the task's clean-ups; one that does not
    return in that time is abandoned, counted and named in the log.

    Raises:
        RuntimeError: `MAX_THREADS` threads are in the function already.
    """
    if threads.num_running >= MAX_THREADS:
        raise RuntimeError(
            f"{threads.num_running} threads of {name} have not returned, {threads.num_abandoned} are abandoned: run "
            "fewer tasks at once, give the agent's blocking calls a timeout, or write it with async def"
        )
    thread = InstanceThread(f"agent {name} {ctx.task_id}")
    abandoned = False

    async def call(function: Callable[..., Any], *args: Any) -> Any:
        if abandoned:
            raise RuntimeError("not run: the agent's thread is abandoned")
        return await thread.call(function, *args)

    async def leave(_: BaseException | None) -> None:
        thread.stop()

    async def come_back(_: BaseException | None) -> None:
        nonlocal abandoned
        try:
            await thread.call(lambda: None)
        except asyncio.CancelledError:
            abandoned = True
            threads.num_abandoned += 1
            _log.error("the thread of %s (task %s) did not return and is abandoned", name, ctx.task_id)
            raise

    def body() -> Any:
        try:
            return function(blocking)
        finally:
            threads.left()

    blocking = BlockingContext(ctx, asyncio.get_running_loop(), call)
    ctx.cleanups.push("the agent's thread", leave)  # pushed first: it goes last
    threads.entered()
    try:
        return await thread.call(body)
    except asyncio.CancelledError:
        blocking.stop()
        ctx.cleanups.push("the agent's thread", come_back)
        raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _stopped() -> asyncio.CancelledError:
    return asyncio.CancelledError("the task was cancelled or its time is over")


async def _awaited(result: Awaitable[T]) -> T:
    return await result
